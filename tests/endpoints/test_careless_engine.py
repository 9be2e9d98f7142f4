"""Arguments that no engine should give: refused at the call, and never at the cost of other requests."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from kvxfer import PrefillEndpoint
from kvxfer.errors import AdmissionClosed, GeometryError

from .conftest import Side, at


def test_a_deadline_of_a_month_does_not_end_the_thread_that_serves_everybody(pair: Any) -> None:
    grant = pair.prefill.accept("patient", timeout_s=3e6)
    grant.write(at([1]))
    grant.commit(16)
    pair.hand_over("r", [5, 3], [2, 4], 32)


def test_a_commit_of_half_a_token_is_refused_and_the_grant_is_as_it_was(pair: Any) -> None:
    handoff = pair.reserve("r", [2], 16)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(at([5]))
    with pytest.raises(GeometryError):
        grant.commit(15.5)
    grant.commit(16)
    handoff.wait(10)


def test_an_event_that_fails_ends_its_own_grant_and_no_other(pair: Any) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the stream is gone")

    class Fine:
        def synchronize(self) -> None:
            pass

    broken = pair.prefill.accept("broken", timeout_s=10)
    broken.write(at([5]), after=Broken())
    assert broken.wait_released(10)
    with pytest.raises(AdmissionClosed):
        broken.commit(16)
    handoff = pair.reserve("fine", [2], 16)
    fine = pair.prefill.accept("fine", timeout_s=10)
    fine.write(at([5]), after=Fine())
    fine.commit(16)
    handoff.wait(10)


@pytest.mark.parametrize("wrong", [{"local_lanes": "1"}, {"advertise_host": 5}])
def test_an_endpoint_that_could_not_be_made_does_not_hold_up_the_garbage_collector(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        PrefillEndpoint(Side().pool, bind="127.0.0.1:0", **wrong)
    collected = threading.Event()
    threading.Thread(target=lambda: (gc.collect(), collected.set()), daemon=True).start()
    assert collected.wait(10)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_an_endless_wait_ends_with_what_it_waits_for(pair: Any, timeout_s: float) -> None:
    grant = pair.send("r", [5], 16)
    pair.reserve("r", [2], 16).wait(10)
    assert grant.wait_released(timeout_s)
    pair.decode.close(timeout_s)


def test_waiting_for_no_number_of_seconds_returns_at_once(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    assert not grant.wait_released(float("nan"))
