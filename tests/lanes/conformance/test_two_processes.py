"""Prefill is a process of its own, paused or killed in mid-write: its pages come back by revoke and fence alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import VerificationFailed

MARK = 0x5A
QUIET_S = 0.1
SLOWLY_S = 0.03  # between eight batches: long enough to be stopped among them


def test_a_handoff_between_two_processes_is_whole(make_remote: Callable[..., Any]) -> None:
    rig, remote = make_remote(n_pages=32, page_bytes=4096)
    leg = rig.offer(1)
    remote.start(leg)
    assert rig.delivered(leg).aux == b"aux"
    assert rig.landed(leg)
    remote.wait("LEG_DRAINED")


def wait_until_something_landed(rig: Any, leg: Any) -> None:
    until = time.monotonic() + 5
    while rig.untouched(leg.pool):
        assert time.monotonic() < until
        time.sleep(0.0005)


@pytest.mark.parametrize("take_away", ["revoke", "fence"])
def test_prefill_paused_in_mid_write_never_touches_the_next_owners_pages(
    make_remote: Callable[..., Any], take_away: str
) -> None:
    rig, remote = make_remote()
    leg = rig.offer(1, 128)
    remote.start(leg, pause_s=SLOWLY_S)
    wait_until_something_landed(rig, leg)
    remote.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    if take_away == "revoke":
        rig.receiver.revoke(leg.reservation, 0)
    else:
        rig.receiver.fence()
    assert time.monotonic() - started < 1  # by taking the means away, not by waiting
    assert not rig.landed(leg)
    rig.pool[:] = MARK
    remote.send_signal(signal.SIGCONT)
    if take_away == "revoke":
        remote.wait("WRITTEN")
        # The lane goes on: another leg is served behind what was left of the old one.
        other = rig.offer(2, 4)
        remote.start(other)
        rig.delivered(other)
        kept = [page for page in range(rig.n_pages) if page not in set(other.pool.tolist())]
    else:
        remote.wait("LEG_FAILED")
        kept = list(range(rig.n_pages))
    time.sleep(QUIET_S)
    assert (rig.pool[:, kept] == MARK).all()


def test_prefill_killed_in_mid_write_is_heard_of_and_its_pages_come_back_as_they_are(
    make_remote: Callable[..., Any],
) -> None:
    rig, remote = make_remote()
    leg = rig.offer(1, 128)
    remote.start(leg, commit=False, pause_s=SLOWLY_S)
    wait_until_something_landed(rig, leg)
    remote.send_signal(signal.SIGKILL)
    rig.decode.wait(_native.LANE_DOWN, rig.n_lanes)
    started = time.monotonic()
    rig.receiver.fence()
    assert time.monotonic() - started < 1
    before = rig.pool.copy()
    with pytest.raises(VerificationFailed):
        rig.judge(leg)
    time.sleep(QUIET_S)
    assert np.array_equal(rig.pool, before)


def test_prefill_killed_after_its_records_came_changes_nothing_about_them(make_remote: Callable[..., Any]) -> None:
    rig, remote = make_remote(n_pages=32, page_bytes=4096)
    leg = rig.offer(1)
    remote.start(leg)
    rig.decode.wait(_native.RECORD, rig.n_lanes)
    remote.send_signal(signal.SIGKILL)
    rig.decode.wait(_native.LANE_DOWN, rig.n_lanes)
    rig.receiver.fence()
    rig.judge(leg)
    assert rig.landed(leg)
