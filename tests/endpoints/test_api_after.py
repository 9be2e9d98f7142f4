"""Writes that wait for the event that produces their bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvxfer import Pages
from kvxfer.errors import AdmissionClosed, GeometryError, KvxferError

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
FULL = {"kv": Pages(range(4), SOURCE)}


class Gate:
    """Stands for a CUDA event: ``synchronize`` returns once ``open`` was called."""

    def __init__(self, error: Exception | None = None) -> None:
        self._opened = threading.Event()
        self._error = error
        self.reached = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def synchronize(self) -> None:
        self.reached.set()
        if not self._opened.wait(20):
            raise TimeoutError("the gate was never opened")
        if self._error is not None:
            raise self._error


@pytest.fixture
def gates() -> Any:
    """``gates()`` makes one; all are opened in the end, so that nothing waits for them."""
    made: list[Gate] = []

    def make(error: Exception | None = None) -> Gate:
        made.append(Gate(error))
        return made[-1]

    yield make
    for gate in made:
        gate.open()


def test_the_bytes_that_arrive_are_those_after_the_event(pair: Any, gates: Any) -> None:
    gate = gates()
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL, after=gate)
    grant.commit(N_TOKENS)
    gate.reached.wait(10)
    pair.source.fill(99)
    gate.open()
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_write_and_commit_return_while_the_event_is_pending(pair: Any, gates: Any) -> None:
    gate = gates()
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL, after=gate)
    grant.commit(N_TOKENS)
    with pytest.raises(TimeoutError):
        handoff.wait(0.1)
    assert not grant.released
    gate.open()
    handoff.wait(10)


def test_a_commit_queues_behind_every_pending_event(pair: Any, gates: Any) -> None:
    first, second = gates(), gates()
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL, layers=0, after=first)
    grant.write(FULL, layers=1, after=second)
    grant.commit(N_TOKENS, b"queued")
    second.open()
    with pytest.raises(TimeoutError):
        handoff.wait(0.1)
    first.open()
    assert handoff.wait(10).aux == b"queued"
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_nothing_can_be_written_behind_a_queued_commit(pair: Any, gates: Any) -> None:
    gate = gates()
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL, layers=0, after=gate)
    grant.commit(N_TOKENS)
    for after in (None, gate):
        with pytest.raises(AdmissionClosed):
            grant.write(FULL, layers=1, after=after)
    with pytest.raises(AdmissionClosed):
        grant.commit(N_TOKENS)


def test_an_event_that_fails_fails_the_grant_and_both_sides_hear_of_it(pair: Any, gates: Any) -> None:
    gate = gates(RuntimeError("illegal address"))
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    pair.wait_offered(grant)
    grant.write(FULL, after=gate)
    grant.commit(N_TOKENS)
    gate.open()
    with pytest.raises(KvxferError, match="illegal address"):
        handoff.wait(10)
    assert grant.wait_released(10)
    assert "illegal address" in str(grant.error)


def test_a_failed_event_fails_its_own_grant_only(pair: Any, gates: Any) -> None:
    bad = gates(RuntimeError("broken"))
    bad.open()
    broken = pair.prefill.accept("broken", timeout_s=10)
    broken.write({"kv": Pages([0], [1])}, after=bad)
    pair.hand_over("whole", SOURCE, TARGET, N_TOKENS)
    assert broken.wait_released(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_an_abort_while_the_event_is_pending_ends_the_grant_and_nothing_is_written(pair: Any, gates: Any) -> None:
    gate = gates()
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    pair.wait_offered(grant)
    grant.write(FULL, after=gate)
    gate.reached.wait(10)
    assert grant.abort(drain_timeout_s=10)
    with pytest.raises(KvxferError):
        handoff.wait(10)
    assert handoff.wait_released(10)
    before = pair.target.copy(TARGET)
    gate.open()
    pair.hand_over("behind it in the queue", [0], [0], 16)
    for was, now in zip(before, pair.target.copy(TARGET), strict=True):
        assert (was == now).all()


def test_a_plan_waits_for_one_event_for_the_whole_batch(pair: Any, gates: Any) -> None:
    gate = gates()
    handoffs = [pair.reserve(f"r{n}", [TARGET[n]], 16) for n in range(4)]
    grants = [pair.prefill.accept(f"r{n}", timeout_s=10) for n in range(4)]
    plan = pair.prefill.plan([(grant, {"kv": Pages([0], [SOURCE[n]])}) for n, grant in enumerate(grants)])
    for layer in range(2):
        plan.write(layer, after=gate, progress=True)
    for grant in grants:
        grant.commit(16)
    gate.open()
    for handoff in handoffs:
        handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_wrong_write_is_refused_at_the_call_and_not_after_the_event(pair: Any, gates: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    with pytest.raises(GeometryError):
        grant.write({"kv": Pages([0], [99])}, after=gates())
    grant.write(FULL)
    grant.commit(N_TOKENS)
    with pytest.raises(AdmissionClosed):
        grant.write(FULL, after=gates())


def test_a_duplicate_that_shows_only_after_the_event_fails_the_grant(pair: Any, gates: Any) -> None:
    gate = gates()
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    pair.wait_offered(grant)
    grant.write(FULL, after=gate)
    grant.write(FULL, layers=1, after=gate)
    grant.commit(N_TOKENS)
    gate.open()
    with pytest.raises(KvxferError, match="duplicate"):
        handoff.wait(10)
    assert grant.wait_released(10)


def test_close_does_not_hang_on_a_pending_event(pair: Any, gates: Any) -> None:
    gate = gates()
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL, after=gate)
    grant.commit(N_TOKENS)
    gate.reached.wait(10)
    pair.prefill.close(timeout_s=5)
    assert grant.released
    gate.open()
