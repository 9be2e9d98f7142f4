"""S2 where one writer falls silent and another does not, and where a fence does not come: pages stay quarantined until
every writer is proven silent, and close() says so."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import DecodeEndpoint, GroupSpec, PagePool, Pages, _native, decode_executor
from kvxfer import pool as pool_module
from kvxfer.errors import Aborted, OwnershipError, PagesQuarantined
from kvxfer.geometry import Shard
from kvxfer.ledger import PageState

from .fake_prefill import FakePrefill

TARGET = [2, 11, 4, 30]
N_TOKENS = 64
HEADS = 4


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.002)


def wanted() -> dict[str, Pages]:
    return {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=N_TOKENS)}


def heads(start: int, stop: int) -> PagePool:
    """Heads ``[start, stop)`` of four."""
    shard = Shard(axis=2, start=start, stop=stop, total=HEADS)
    return PagePool.allocate([GroupSpec("kv", 2, (16, stop - start, 8), "float32", 16, shard=shard)], pages=32)


# ---- two legs --------------------------------------------------------------------------------------------------------


class TwoLegs:
    """Two prefills of two heads each, by hand, and one decode of all four. ``whole``: only the whole lane can be taken
    away, as on lanes where decode is not the writer, so that an aborted leg must quiesce or be fenced."""

    def __init__(self, lane: str, ends: Any, monkeypatch: pytest.MonkeyPatch, *, whole: bool, **config: Any) -> None:
        kind = "tcp" if lane == "tcp" else "local"
        self.prefills = [FakePrefill(ends.fill(heads(2 * n, 2 * n + 2), seed=n), kind) for n in range(2)]
        self.pool = heads(0, HEADS)
        self.decode: DecodeEndpoint = ends.decode(self.pool, abort_repeat_s=0.02, **config)
        if whole:
            lane_up = self.decode._core.lane_up
            monkeypatch.setattr(self.decode._core, "lane_up", lambda *args: lane_up(*args, revocable=False))
        addresses = [prefill.address for prefill in self.prefills]
        self.handoff = self.decode.reserve("r", wanted(), prefill=addresses, timeout_s=30)
        self.legs = [prefill.reserved("r") for prefill in self.prefills]
        for prefill, leg in zip(self.prefills, self.legs, strict=True):
            prefill.put(*leg.writes(0, 2))

    def aborts_heard(self, leg: int) -> int:
        return sum(type(message).__name__ == "Abort" for message in self.prefills[leg].heard)

    def wait_record(self, leg: int) -> None:
        """Until decode has the leg's commit record: nothing of it is on its way any more."""
        until(lambda: bool(self.decode._core._reservations[self.handoff.reservation].legs[leg].records))

    def states(self) -> set[int]:
        return {int(state) for state in self.pool.ledger.states(0)[TARGET]}

    def how_released(self) -> dict[str, str]:
        (line,) = [line for line in self.decode.audit_lines() if line["event"] == "released"]
        return dict(line["legs"])

    def close(self) -> None:
        for prefill in self.prefills:
            prefill.close()


@pytest.fixture
def two_legs(lane: str, ends: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TwoLegs]]:
    made: list[TwoLegs] = []

    def make(**options: Any) -> TwoLegs:
        made.append(TwoLegs(lane, ends, monkeypatch, **options))
        return made[-1]

    yield make
    for legs in made:
        legs.close()


def test_two_legs_by_hand_make_one_handoff(two_legs: Callable[..., TwoLegs]) -> None:
    legs = two_legs(whole=False)
    for prefill, leg in zip(legs.prefills, legs.legs, strict=True):
        # Only the designated leg carries aux.
        prefill.put(*leg.writes(2, 2), leg.record(aux=b"" if leg.reserve.carries_aux else None))
    assert legs.handoff.wait(10).stats["legs"] == 2


def test_with_one_leg_quiesced_and_one_paused_the_pages_stay_until_the_paused_one_is_fenced(
    two_legs: Callable[..., TwoLegs],
) -> None:
    legs = two_legs(whole=True, quiesce_timeout_s=0.3, fence_hard_limit_s=0.6)
    legs.prefills[0].put(*legs.legs[0].writes(2, 2), legs.legs[0].record())
    legs.wait_record(0)
    legs.prefills[1].answers = False  # paused: it answers nothing, and its lane stays open
    legs.handoff.abort("the client went away")
    with pytest.raises(Aborted):
        legs.handoff.wait(10)
    until(lambda: legs.aborts_heard(1) > 2)  # the other one was asked as often, and has said QUIESCED
    assert legs.aborts_heard(0) == 1
    assert not legs.handoff.released and legs.states() == {PageState.QUARANTINED}
    with pytest.raises(OwnershipError):
        legs.decode.reserve("next", wanted(), prefill=legs.prefills[0].address, timeout_s=1)
    assert legs.handoff.wait_released(10)
    assert legs.how_released() == {"0": "quiesced", "1": "fenced"}
    assert legs.decode.counters()["fence"] >= 1
    assert legs.states() == {PageState.FREE}


def test_time_alone_never_releases_a_leg_that_is_neither_quiesced_nor_fenced(
    two_legs: Callable[..., TwoLegs], monkeypatch: pytest.MonkeyPatch
) -> None:
    legs = two_legs(whole=True, quiesce_timeout_s=0.05, fence_hard_limit_s=0.1)
    asked: list[Any] = []
    monkeypatch.setitem(legs.decode._handlers, decode_executor.act.Fence, asked.append)
    legs.prefills[1].answers = False
    legs.handoff.abort("the client went away")
    until(lambda: bool(asked) and legs.aborts_heard(1) > 10)  # long after every time-out of the protocol
    assert not legs.handoff.released and legs.states() == {PageState.QUARANTINED}
    monkeypatch.undo()
    for action in asked:
        with legs.decode._lock:
            legs.decode._drive([action])
    assert legs.handoff.wait_released(10)


def test_where_legs_can_be_revoked_a_paused_one_costs_no_time(two_legs: Callable[..., TwoLegs]) -> None:
    legs = two_legs(whole=False)
    legs.prefills[1].answers = False
    legs.handoff.abort("the client went away")
    assert legs.handoff.wait_released(10)
    assert set(legs.how_released().values()) == {"revoked"}
    assert "fence" not in legs.decode.counters()
    before = [legs.pool.tensor("kv", layer)[TARGET].copy() for layer in range(2)]
    legs.prefills[1].put(*legs.legs[1].writes(2, 2))  # it wakes, and goes on
    for layer, old in enumerate(before):
        np.testing.assert_array_equal(legs.pool.tensor("kv", layer)[TARGET], old)


def test_of_two_real_prefills_one_stopped_the_pages_come_back_and_stay_as_they_are(
    start_worker: Any, ends: Any, target: Any
) -> None:
    running, stopped = start_worker("prefill"), start_worker("prefill", seed=2)
    decode = ends.decode(target.pool)
    first = decode.reserve("a", wanted(), prefill=running.hello["address"], timeout_s=10)
    second = decode.reserve(
        "b", {"kv": Pages(range(2), [20, 21], n_tokens=32)}, prefill=stopped.hello["address"], timeout_s=30
    )
    stopped.call("accept", "b")
    stopped.call("offered", "b")
    stopped.stop()
    running.call("send", "a", [5, 3, 9, 7], N_TOKENS)
    first.wait(10)  # the stopped one holds nobody else up
    second.abort("the client went away")
    assert second.wait_released(10)
    before = target.copy([20, 21])
    stopped.resume()
    with pytest.raises(RuntimeError):
        stopped.call("write", "b", [1, 2])
        stopped.call("commit", "b", 32)
    for old, new in zip(before, target.copy([20, 21]), strict=True):
        np.testing.assert_array_equal(old, new)


# ---- close with a quarantined page -----------------------------------------------------------------------------------


class Stubborn:
    """A receiver whose legs cannot be revoked, and whose fence fails or does not return until ``willing`` is set."""

    willing = threading.Event()
    fails = False

    def __init__(self, *args: Any) -> None:
        self._real = _native.Receiver(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def revoke(self, reservation: int, leg: int) -> None:
        if not self.willing.is_set():
            raise RuntimeError("the leg cannot be revoked")
        self._real.revoke(reservation, leg)

    def fence(self) -> None:
        if self.fails and not self.willing.is_set():
            raise RuntimeError("the queue pair cannot be destroyed")
        assert self.willing.wait(30)
        self._real.fence()


class _Native:
    """The native core with another Receiver."""

    def __init__(self, receiver: type) -> None:
        self.Receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(_native, name)


@pytest.fixture(params=["the fence fails", "the fence does not return"])
def stubborn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stubborn]]:
    kind = type("Receiver", (Stubborn,), {"willing": threading.Event(), "fails": request.param == "the fence fails"})
    monkeypatch.setattr(decode_executor, "_native", _Native(kind))
    monkeypatch.setattr(decode_executor, "FENCE_RETRY_S", 0.05)
    yield kind
    kind.willing.set()


def test_close_with_a_quarantined_page_names_it_and_keeps_it_until_the_fence_has_returned(
    lane: str, pair: Any, stubborn: type[Stubborn]
) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    pair.wait_offered(grant)
    with pytest.raises(PagesQuarantined) as caught:
        pair.decode.close(0.3)
    assert caught.value.details["outstanding"] == {f"{handoff.reservation:016x}": 4}
    assert not handoff.released
    assert {int(state) for state in pair.target.pool.ledger.states(0)[TARGET]} == {PageState.QUARANTINED}
    assert (pair.decode.counters().get("fence_failed", 0) > 1) == stubborn.fails  # tried again, and said each time
    with pytest.raises(PagesQuarantined):  # and it says so again
        pair.decode.close(0.05)
    stubborn.willing.set()
    pair.decode.close()
    assert handoff.released
    assert not pair.target.pool.ledger.states(0).any()


def test_the_memory_of_a_pool_is_kept_while_a_page_of_it_is_quarantined(
    lane: str, ends: Any, stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(pool_module, "_KEPT", kept)
    source = PagePool.allocate([GroupSpec("kv", 2, (16, 2, 8), "float32", 16)], pages=32)
    prefill = ends.prefill(source)
    pool = PagePool.allocate([GroupSpec("kv", 2, (16, 2, 8), "float32", 16)], pages=32)
    decode = DecodeEndpoint(pool, lane_kinds=("tcp" if lane == "tcp" else "local",))
    decode.reserve("r", wanted(), prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    until(lambda: grant.first_token is not None)
    with pytest.raises(PagesQuarantined):
        decode.close(0.2)
    dropped = weakref.ref(pool)
    del pool
    gc.collect()
    memory = dropped()
    assert memory is not None or kept  # the endpoint holds it, or it was put where nothing is freed
    stubborn.willing.set()
    decode.close()
