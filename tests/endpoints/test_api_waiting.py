"""A caller that waits handles what arrives itself, and nobody else may notice: neither other callers nor the engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer import Pages
from kvxfer.errors import Aborted, Closed, DeadlineExceeded, KvxferError

N_TOKENS = 32
SOURCES = [[0, 1], [2, 3], [4, 5]]
TARGETS = [[7, 6], [9, 8], [11, 10]]


@pytest.fixture
def lane() -> str:
    return "local"  # who waits does not depend on the lane


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _until_led(endpoint: Any) -> None:
    deadline = time.monotonic() + 10
    while not endpoint._reactor.led:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.001)


def _waits(pair: Any, threads: ThreadPoolExecutor, handoff: Any) -> Future[Any]:
    """A wait call in a thread of its own, which handles arrivals by now."""
    call = threads.submit(handoff.wait, 10)
    _until_led(pair.decode)
    return call


def test_when_the_first_who_waits_is_done_the_others_still_get_theirs(pair: Any, threads: Any) -> None:
    handoffs = [pair.reserve(f"r{k}", TARGETS[k], N_TOKENS) for k in range(3)]
    first = _waits(pair, threads, handoffs[0])
    others = [threads.submit(handoff.wait, 10) for handoff in handoffs[1:]]
    for k in range(3):
        pair.send(f"r{k}", SOURCES[k], N_TOKENS)
        (first, *others)[k].result(10)
        pair.assert_delivered(SOURCES[k], TARGETS[k], N_TOKENS)


def test_the_first_who_waits_may_be_the_last_to_end(pair: Any, threads: Any) -> None:
    handoffs = [pair.reserve(f"r{k}", TARGETS[k], N_TOKENS) for k in range(3)]
    first = _waits(pair, threads, handoffs[0])
    others = [threads.submit(handoff.wait, 10) for handoff in handoffs[1:]]
    for k in (2, 1):
        pair.send(f"r{k}", SOURCES[k], N_TOKENS)
        others[k - 1].result(10)
    assert not first.done()
    pair.send("r0", SOURCES[0], N_TOKENS)
    first.result(10)


def test_many_threads_that_wait_for_one_handoff_are_all_told(pair: Any, threads: Any) -> None:
    handoff = pair.reserve("r", TARGETS[0], N_TOKENS)
    calls = [threads.submit(handoff.wait, 10) for _ in range(4)]
    pair.send("r", SOURCES[0], N_TOKENS)
    assert len({id(call.result(10)) for call in calls}) == 1


def test_an_abort_from_another_thread_ends_the_wait_at_once(pair: Any, threads: Any) -> None:
    handoff = pair.reserve("r", TARGETS[0], N_TOKENS, timeout_s=60)
    call = _waits(pair, threads, handoff)
    began = time.monotonic()
    handoff.abort("no more wanted")
    with pytest.raises(Aborted):
        call.result(10)
    assert time.monotonic() - began < 5


def test_the_handoffs_own_deadline_ends_the_wait(pair: Any, threads: Any) -> None:
    handoff = pair.reserve("r", TARGETS[0], N_TOKENS, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        _waits(pair, threads, handoff).result(10)
    assert handoff.error is not None, "it is the handoff that ended, not the wait"


def test_a_wait_that_times_out_leaves_arrivals_to_the_endpoint_and_the_event_to_poll(pair: Any) -> None:
    handoff = pair.reserve("r", TARGETS[0], N_TOKENS)
    with pytest.raises(DeadlineExceeded):
        handoff.wait(0.05)
    assert handoff.error is None and not pair.decode._reactor.led
    pair.send("r", SOURCES[0], N_TOKENS)
    deadline = time.monotonic() + 10
    while not (events := pair.decode.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [(event.kind, event.request_id) for event in events] == [("ready", "r")]


def test_events_of_other_handoffs_come_by_poll_while_somebody_waits(pair: Any, threads: Any) -> None:
    waited, polled = (pair.reserve(f"r{k}", TARGETS[k], N_TOKENS) for k in range(2))
    call = _waits(pair, threads, waited)
    pair.send("r1", SOURCES[1], N_TOKENS)
    deadline = time.monotonic() + 10
    while not (events := pair.decode.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [(event.kind, event.request_id) for event in events] == [("ready", "r1")]
    assert polled.wait(0).n_tokens == N_TOKENS
    pair.send("r0", SOURCES[0], N_TOKENS)
    call.result(10)
    assert pair.decode.poll() == [], "the wait has reported it"


def test_closing_ends_a_wait_and_waits_for_it(pair: Any, threads: Any) -> None:
    handoff = pair.reserve("r", TARGETS[0], N_TOKENS, timeout_s=60)
    call = _waits(pair, threads, handoff)
    pair.decode.close()
    with pytest.raises(Closed):
        call.result(10)
    assert not pair.decode._reactor.led


def test_a_thread_that_waits_again_and_again_among_others_that_abort_loses_nothing(pair: Any, threads: Any) -> None:
    outcomes: list[str] = []
    lock = threading.Lock()

    def one(number: int, turn: int) -> None:
        request_id, pages = f"t{number}-{turn}", TARGETS[number]
        handoff = pair.reserve(request_id, pages, N_TOKENS)
        grant = pair.prefill.accept(request_id, timeout_s=10)
        if turn % 3 == number:
            handoff.abort("not this one")
        else:
            grant.write({"kv": Pages(range(2), SOURCES[number])})
            grant.commit(N_TOKENS)
        try:
            handoff.wait(10)
            end = "ready"
        except KvxferError as error:
            end = type(error).__name__
            assert handoff.wait_released(10)
        with lock:
            outcomes.append(end)

    def many(number: int) -> None:
        for turn in range(15):
            one(number, turn)

    for call in [threads.submit(many, number) for number in range(3)]:
        call.result(60)
    assert outcomes.count("ready") == 30 and outcomes.count("Aborted") == 15
