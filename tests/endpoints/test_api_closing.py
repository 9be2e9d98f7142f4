"""Closing: idempotent, in time, with work under way, from any thread; and nothing works afterwards but asking why."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer import DecodeEndpoint, Pages, PrefillEndpoint
from kvxfer.errors import Closed, KvxferError

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
FULL = {"kv": Pages(range(4), SOURCE)}


def test_endpoints_are_context_managers(pair: Any) -> None:
    with PrefillEndpoint(pair.source.pool, bind="127.0.0.1:0") as prefill, DecodeEndpoint(pair.target.pool) as decode:
        handoff = decode.reserve("r", {"kv": Pages([0], [0], n_tokens=16)}, prefill=prefill.address, timeout_s=10)
        grant = prefill.accept("r", timeout_s=10)
        grant.write({"kv": Pages([0], [1])})
        grant.commit(16)
        handoff.wait(10)
    for endpoint in (prefill, decode):
        with pytest.raises(Closed):
            _use(endpoint)


def test_a_context_is_closed_also_when_its_body_raises(pair: Any) -> None:
    with pytest.raises(ZeroDivisionError), DecodeEndpoint(pair.target.pool) as decode:
        raise ZeroDivisionError
    with pytest.raises(Closed):
        decode.decline("r", prefill=pair.prefill.address)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_close_is_idempotent(pair: Any, side: str) -> None:
    endpoint = getattr(pair, side)
    for _ in range(3):
        endpoint.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_everything_that_starts_work_says_closed_afterwards(pair: Any, side: str) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    plan = pair.prefill.plan([(grant, FULL)])
    getattr(pair, side).close()
    if side == "prefill":
        calls: list[Callable[[], Any]] = [
            lambda: pair.prefill.accept("other", timeout_s=10),
            lambda: pair.prefill.reject("other", "no", "no"),
            lambda: pair.prefill.plan([(grant, FULL)]),
            lambda: plan.write(0),
            lambda: grant.write(FULL),
            lambda: grant.commit(N_TOKENS),
        ]
    else:
        calls = [
            lambda: pair.reserve("other", [20], 16),
            lambda: pair.decode.decline("other", prefill=pair.prefill.address),
            lambda: handoff.extend(1),
        ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_what_ends_work_or_asks_about_it_is_harmless_afterwards(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    pair.decode.close()
    pair.prefill.close()
    handoff.abort()
    assert handoff.wait_released(0) and handoff.released
    assert isinstance(handoff.error, Closed)
    assert grant.abort() and grant.released and grant.wait_released(0)
    assert grant.first_token is None or grant.first_token == 0
    assert pair.decode.poll() == [] == pair.prefill.poll()
    assert isinstance(pair.decode.counters(), dict) and isinstance(pair.prefill.audit_lines(), list)


def test_closing_decode_gives_every_page_back_and_lets_prefill_go(pair: Any) -> None:
    handoffs = [pair.reserve(f"r{n}", [TARGET[n]], 16) for n in range(4)]
    grants = [pair.prefill.accept(f"r{n}", timeout_s=10) for n in range(4)]
    grants[0].write({"kv": Pages([0], [SOURCE[0]])})
    pair.wait_offered(grants[3])
    pair.decode.close()
    assert not pair.target.pool.ledger.states(0).any()
    for handoff in handoffs:
        with pytest.raises(Closed):
            handoff.wait(1)
    for grant in grants:
        assert grant.wait_released(10)
        assert grant.error is not None


def test_closing_prefill_ends_what_waits_at_decode_and_gives_the_pages_back(pair: Any) -> None:
    waiting = pair.reserve("waiting", TARGET[:2], 32)
    writing = pair.reserve("writing", TARGET[2:], 32)
    grant = pair.prefill.accept("writing", timeout_s=10)
    grant.write({"kv": Pages([0], [SOURCE[0]])})
    pair.wait_offered(grant)
    pair.prefill.close()
    assert grant.released
    with pytest.raises(KvxferError):
        grant.write(FULL)
    for handoff in (waiting, writing):
        with pytest.raises(KvxferError):
            handoff.wait(10)
        assert handoff.wait_released(10)
    assert not pair.target.pool.ledger.states(0).any()


def test_closing_prefill_lets_a_committed_handoff_arrive(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    pair.wait_offered(grant)
    grant.write(FULL)
    grant.commit(N_TOKENS)
    pair.prefill.close()
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_close_ends_in_time_with_many_handoffs_under_way(pair: Any, first: str) -> None:
    for number in range(24):
        pair.reserve(f"r{number}", [number], 16)
        grant = pair.prefill.accept(f"r{number}", timeout_s=10)
        grant.write({"kv": Pages([0], [number])})
        if number % 2:
            grant.commit(16)
    began = time.monotonic()
    for side in (first, {"prefill": "decode", "decode": "prefill"}[first]):
        getattr(pair, side).close(timeout_s=8)
    assert time.monotonic() - began < 8
    assert not (pair.target.pool.ledger.states(0) % 2).any()  # nothing reserved, nothing quarantined


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_several_threads_may_close_at_once(pair: Any, side: str) -> None:
    pair.reserve("r", TARGET, N_TOKENS)
    errors = _in_threads(6, lambda _: getattr(pair, side).close())
    assert errors == []
    with pytest.raises(Closed):
        _use(getattr(pair, side))


def test_a_wait_under_way_ends_when_another_thread_closes(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    outcomes: list[Any] = []

    def wait(number: int) -> None:
        try:
            outcomes.append(handoff.wait(20) if number else grant.wait_released(20))
        except KvxferError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    pair.decode.close()
    pair.prefill.close()
    for thread in threads:
        thread.join(10)
    assert len(outcomes) == 2
    assert any(isinstance(outcome, Closed) for outcome in outcomes) and True in outcomes


def test_many_threads_reserve_write_and_wait_at_once(pair: Any) -> None:
    def engine(number: int) -> None:
        for turn in range(5):
            request, page = f"r{number}.{turn}", number
            handoff = pair.reserve(request, [page], 16)
            grant = pair.send(request, [page], 16)
            ready = handoff.wait(20)
            assert (ready.page("kv", 0, 0) == pair.source.pool.page("kv", 0, page)).all()
            assert grant.wait_released(20)

    assert _in_threads(8, engine) == []


def test_aborts_from_both_sides_and_several_threads_end_each_handoff_once(pair: Any) -> None:
    handoffs = [pair.reserve(f"r{n}", [n], 16) for n in range(8)]
    grants = [pair.prefill.accept(f"r{n}", timeout_s=10) for n in range(8)]
    for number, grant in enumerate(grants):
        grant.write({"kv": Pages([0], [number])})
        pair.wait_offered(grant)

    def abort(number: int) -> None:
        for handoff, grant in zip(handoffs, grants, strict=True):
            if number % 2:
                handoff.abort()
            else:
                grant.abort()

    assert _in_threads(4, abort) == []
    events: dict[str, list[str]] = {}
    for endpoint, side in ((pair.decode, "decode"), (pair.prefill, "prefill")):
        told: list[Any] = []
        deadline = time.monotonic() + 10
        while sum(event.kind == "released" for event in told) < 8:
            assert time.monotonic() < deadline
            told += endpoint.poll()
        for event in told:
            events.setdefault(f"{side} {event.request_id}", []).append(event.kind)
    for number in range(8):
        assert events[f"decode r{number}"] == ["failed", "released"]
        assert sorted(events[f"prefill r{number}"]) == ["failed", "offered", "released"]
    assert not pair.target.pool.ledger.states(0).any()


def test_an_endpoint_that_could_not_be_made_leaves_no_descriptor_behind(pair: Any) -> None:
    def attempts() -> int:
        for make in (
            lambda: PrefillEndpoint(pair.source.pool, bind=f"127.0.0.1:{pair.prefill.port}"),
            lambda: DecodeEndpoint(pair.target.pool, max_context_tokens=1 << 30),
        ):
            with pytest.raises(KvxferError):
                make()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert attempts() == attempts()


def _use(endpoint: Any) -> None:
    if isinstance(endpoint, PrefillEndpoint):
        endpoint.accept("another", timeout_s=10)
    else:
        endpoint.decline("another", prefill="127.0.0.1:5000")


def _in_threads(n: int, target: Callable[[int], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            target(number)
        except BaseException as error:  # whatever it is, the test shows it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors
