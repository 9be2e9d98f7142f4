"""S2 and S3 with a process that stops, wakes later, or dies: pages and sources come back by proof, never by time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from kvxfer import DecodeEndpoint, Pages
from kvxfer.errors import Aborted, KvxferError, LaneFailed, PeerLost, PeerRestarted

from .conftest import PAGE_SHAPE, Side
from .waiting import until

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
MANY = list(range(2000))
MANY_TOKENS = 16 * len(MANY)


def wanted(pages: list[int], n_tokens: int) -> dict[str, Pages]:
    return {"kv": Pages(range(len(pages)), pages, first_token=0, n_tokens=n_tokens)}


@pytest.fixture
def big_decode(lane: str, request: pytest.FixtureRequest) -> Any:
    side = request.getfixturevalue("big_target")
    endpoint = DecodeEndpoint(side.pool, lane_kinds=("tcp" if lane == "tcp" else "local",), heartbeat_s=1.0)
    yield endpoint
    endpoint.close()


def test_a_paused_prefill_that_wakes_never_changes_the_pages_of_their_next_owner(
    start_worker: Any, big_decode: Any, big_target: Any
) -> None:
    prefill = start_worker("prefill", pages=2000)
    other = start_worker("prefill", pages=2000, seed=2)
    handoff = big_decode.reserve("r", wanted(MANY, MANY_TOKENS), prefill=prefill.hello["address"], timeout_s=30)
    prefill.call("accept", "r")
    prefill.call("offered", "r")
    for page in range(1000):
        prefill.post("write", "r", [page], page)
    prefill.stop()  # in the middle of those thousand writes, wherever it is
    started = time.monotonic()
    handoff.abort("the client went away")
    with pytest.raises(Aborted):
        handoff.wait(5)
    assert handoff.wait_released(5)
    assert time.monotonic() - started < 5.0, "released by the fence of the leg, before any time-out of the protocol"
    second = big_decode.reserve("r2", wanted(MANY, MANY_TOKENS), prefill=other.hello["address"], timeout_s=30)
    other.call("send", "r2", MANY, MANY_TOKENS)
    second.wait(10)
    before = big_target.copy(MANY)
    prefill.resume()
    for _ in range(1000):
        with contextlib.suppress(RuntimeError):  # a write to the grant that was aborted meanwhile
            prefill.answer()
    assert prefill.call("released", "r")
    for old, new in zip(before, big_target.copy(MANY), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("stage", ["reserved", "accepted", "writing", "written"])
def test_a_killed_prefill_gives_decode_its_pages_back_at_every_stage(
    start_worker: Any, decode: Any, target: Any, stage: str
) -> None:
    prefill = start_worker("prefill")
    handoff = decode.reserve("r", wanted(TARGET, N_TOKENS), prefill=prefill.hello["address"], timeout_s=30)
    until(lambda: decode.counters().get("lane_up", 0) > 0)
    if stage != "reserved":
        prefill.call("accept", "r")
        prefill.call("offered", "r")
    if stage in ("writing", "written"):
        prefill.call("write", "r", SOURCE[:2])
    if stage == "written":
        prefill.call("write", "r", SOURCE[2:], 2)
    prefill.kill()
    with pytest.raises((PeerLost, KvxferError)) as caught:
        handoff.wait(10)
    assert caught.value.retryable
    assert handoff.wait_released(10)
    assert set(target.pool.ledger.states(0)) == {0}


@pytest.mark.parametrize("stage", ["accepting", "writing", "committing", "committed"])
def test_a_prefill_killed_around_its_commit_leaves_a_whole_handoff_or_a_clean_refusal(
    start_worker: Any, decode: Any, target: Any, stage: str
) -> None:
    """``stage``: how far prefill has certainly come when it is killed; what follows is under way."""
    prefill = start_worker("prefill")
    handoff = decode.reserve("r", wanted(TARGET, N_TOKENS), prefill=prefill.hello["address"], timeout_s=30)
    until(lambda: decode.counters().get("lane_up", 0) > 0)
    if stage == "accepting":
        prefill.post("send", "r", SOURCE, N_TOKENS)
    else:
        prefill.call("accept", "r")
        prefill.call("offered", "r")
        steps = (("write", "r", SOURCE), ("commit", "r", N_TOKENS))
        done = {"writing": 0, "committing": 1, "committed": 2}[stage]
        for step in steps[:done]:
            prefill.call(*step)
        for step in steps[done:]:
            prefill.post(*step)
    prefill.kill()
    try:
        ready = handoff.wait(10)
    except KvxferError as error:
        assert error.retryable
        assert handoff.wait_released(10)
        assert set(target.pool.ledger.states(0)) == {0}
    else:
        assert ready.n_tokens == N_TOKENS
        source = Side(seed=1)  # what the worker filled its pool with
        for sent, landed in zip(source.copy(SOURCE), target.copy(TARGET), strict=True):
            slots = (-1, *PAGE_SHAPE[1:])
            np.testing.assert_array_equal(landed.reshape(slots)[:N_TOKENS], sent.reshape(slots)[:N_TOKENS])


@pytest.mark.parametrize("stage", ["reserved", "writing", "written", "committed"])
def test_a_killed_decode_gives_prefill_its_source_pages_back_at_every_stage(
    start_worker: Any, make_pair: Any, stage: str
) -> None:
    pair = make_pair(prefill={"heartbeat_timeout_s": 2.0, "heartbeat_s": 0.3})
    decode = start_worker("decode")
    decode.call("reserve", "r", TARGET, N_TOKENS, pair.prefill.address, 30)
    grant = pair.prefill.accept("r", timeout_s=30)
    until(lambda: grant.first_token is not None)
    if stage != "reserved":
        # Stopped, so that it cannot complete the handoff before it is killed.
        decode.stop()
        grant.write({"kv": Pages(range(2), SOURCE[:2])})
    if stage in ("written", "committed"):
        grant.write({"kv": Pages(range(2, 4), SOURCE[2:])})
    if stage == "committed":
        grant.commit(N_TOKENS)
    decode.kill()
    assert grant.wait_released(10)
    until(lambda: grant.error is not None)  # a committed grant's sources may be drained before decode is found dead
    assert grant.error is not None and grant.error.retryable
    second = pair.reserve("r2", TARGET, N_TOKENS)
    pair.send("r2", SOURCE, N_TOKENS)
    second.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_paused_decode_does_not_keep_prefill_from_its_blocks(start_worker: Any, make_pair: Any) -> None:
    pair = make_pair()
    decode = start_worker("decode")
    decode.call("reserve", "r", TARGET, N_TOKENS, pair.prefill.address, 30)
    grant = pair.prefill.accept("r", timeout_s=30)
    until(lambda: grant.first_token is not None)
    decode.stop()
    grant.write({"kv": Pages(range(4), SOURCE)})
    assert grant.abort("preempted", drain_timeout_s=5.0)
    for layer in pair.source.layers:
        layer[SOURCE] = 99.0  # the engine's next request writes here at once
    decode.resume()
    with pytest.raises(RuntimeError, match="Aborted|PeerLost|LaneFailed|VerificationFailed"):
        decode.call("wait", "r")


@pytest.mark.parametrize("verify", ["digest", "coverage"])
def test_a_source_that_prefill_reuses_under_a_stopped_decode_is_never_accepted(
    start_worker: Any, make_pair: Any, verify: str
) -> None:
    pair = make_pair(prefill={"verify": verify})
    decode = start_worker("decode", verify=verify)
    for number in range(5):
        decode.call("reserve", f"r{number}", TARGET, N_TOKENS, pair.prefill.address, 30)
        grant = pair.prefill.accept(f"r{number}", timeout_s=30)
        until(lambda grant=grant: grant.first_token is not None)
        decode.stop()
        grant.write({"kv": Pages(range(4), SOURCE)})
        assert grant.abort("preempted", drain_timeout_s=5.0)
        for layer in pair.source.layers:
            layer[SOURCE] = float(number)
        decode.resume()
        with pytest.raises(RuntimeError):
            decode.call("wait", f"r{number}")
        assert decode.call("released", f"r{number}")


def test_a_restarted_prefill_on_the_same_port_serves_the_first_handoff(
    start_worker: Any, decode: Any, target: Any
) -> None:
    first = start_worker("prefill", seed=1)
    address, port = first.hello["address"], first.hello["port"]
    handoff = decode.reserve("r", wanted(TARGET, N_TOKENS), prefill=address, timeout_s=10)
    first.call("send", "r", SOURCE, N_TOKENS)
    handoff.wait(10)
    before = target.copy(TARGET)
    first.kill()
    second = start_worker("prefill", seed=2, bind=f"127.0.0.1:{port}")
    assert second.hello["incarnation"] != first.hello["incarnation"]
    handoff = _reserve_until_alive(decode, "r2", address, second.hello["incarnation"])
    second.call("send", "r2", SOURCE, N_TOKENS)
    handoff.wait(10)
    assert not np.array_equal(before[0], target.copy(TARGET)[0])


def test_a_reservation_for_the_prefill_that_died_fails_and_is_never_served_by_its_successor(
    start_worker: Any, decode: Any
) -> None:
    first = start_worker("prefill", seed=1)
    address, port = first.hello["address"], first.hello["port"]
    handoff = decode.reserve("r", wanted(TARGET, N_TOKENS), prefill=address, timeout_s=30)
    first.call("accept", "r")
    first.call("offered", "r")
    first.kill()
    second = start_worker("prefill", seed=2, bind=f"127.0.0.1:{port}")
    second.call("send", "r", SOURCE, N_TOKENS)
    with pytest.raises((LaneFailed, PeerLost, PeerRestarted)) as caught:
        handoff.wait(10)
    assert caught.value.retryable
    assert handoff.wait_released(10)


def test_close_returns_and_the_pool_is_free_while_prefill_is_stopped(start_worker: Any, lane: str, target: Any) -> None:
    prefill = start_worker("prefill")
    decode = DecodeEndpoint(target.pool, lane_kinds=("tcp" if lane == "tcp" else "local",))
    handoff = decode.reserve("r", wanted(TARGET, N_TOKENS), prefill=prefill.hello["address"], timeout_s=30)
    prefill.call("accept", "r")
    prefill.call("write", "r", SOURCE[:2])
    os.kill(prefill.pid, signal.SIGSTOP)
    decode.close(5.0)
    assert handoff.released
    assert set(target.pool.ledger.states(0)) == {0}


def _reserve_until_alive(decode: Any, request_id: str, address: str, incarnation: str) -> Any:
    """An engine's retry: the old session may not have been found dead yet."""
    deadline = time.monotonic() + 10
    for attempt in range(1000):
        assert time.monotonic() < deadline
        try:
            handoff = decode.reserve(
                f"{request_id}", wanted(TARGET, N_TOKENS), prefill=address, incarnation=incarnation, timeout_s=10
            )
        except PeerRestarted:
            time.sleep(0.02)
            continue
        deadline_s = time.monotonic() + 1.0
        while handoff.state == "reserved" and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if handoff.state == "reserved":
            return handoff
        assert handoff.error is not None and handoff.error.retryable, attempt
        assert handoff.wait_released(5)
    raise AssertionError("never alive")
