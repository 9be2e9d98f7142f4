"""What engines that poll are told, and programs that wait: each event at most once, with its tag."""

from __future__ import annotations

import asyncio
import select
import threading
from typing import Any

import pytest

from kvxfer import Pages
from kvxfer.errors import Aborted, KvxferError

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
FULL = {"kv": Pages(range(4), SOURCE)}


def _collect(endpoint: Any, n: int) -> list[Any]:
    """The next ``n`` events, by the descriptor alone."""
    events: list[Any] = []
    while len(events) < n:
        readable, _, _ = select.select([endpoint], [], [], 10)
        assert readable, f"only {[event.kind for event in events]} came"
        events += endpoint.poll()
    return events


def _assert_quiet(endpoint: Any) -> None:
    assert endpoint.poll() == []
    assert select.select([endpoint], [], [], 0) == ([], [], [])


def test_a_handoff_that_succeeds_tells_decode_ready_and_prefill_offered_ready_released(pair: Any) -> None:
    pair.reserve("r", TARGET, N_TOKENS, tag="decode's")
    pair.send("r", SOURCE, N_TOKENS, tag="prefill's")
    told = _collect(pair.prefill, 3)
    assert sorted(event.kind for event in told) == ["offered", "ready", "released"]
    assert {(event.tag, event.request_id, event.error) for event in told} == {("prefill's", "r", None)}
    (ready,) = _collect(pair.decode, 1)
    assert (ready.kind, ready.tag, ready.request_id, ready.error) == ("ready", "decode's", "r", None)
    pair.hand_over("another", [0], [0], 16)  # whatever else the first had to say would have come by now
    _assert_quiet(pair.decode)


def test_a_handoff_that_fails_tells_failed_before_released_and_never_ready(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS, tag=object())
    grant = pair.prefill.accept("r", timeout_s=10, tag=17)
    grant.write(FULL)
    pair.wait_offered(grant)
    handoff.abort("no more wanted")
    failed, released = _collect(pair.decode, 2)
    assert (failed.kind, released.kind) == ("failed", "released")
    assert isinstance(failed.error, Aborted) and released.error is None
    assert failed.tag is released.tag is handoff.tag
    kinds = [event.kind for event in _collect(pair.prefill, 3)]
    assert kinds == ["offered", "failed", "released"]
    _assert_quiet(pair.decode)
    _assert_quiet(pair.prefill)


def test_a_tag_is_given_back_as_it_is_and_not_looked_at(pair: Any) -> None:
    class Unfriendly:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    tag = Unfriendly()
    handoff = pair.reserve("r", TARGET, N_TOKENS, tag=tag)
    pair.send("r", SOURCE, N_TOKENS)
    (event,) = _collect(pair.decode, 1)
    assert event.tag is tag and handoff.tag is tag


def test_a_wait_takes_the_events_that_it_reports(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    assert grant.wait_released(10)
    _assert_quiet(pair.decode)
    refused = pair.reserve("refused", TARGET, N_TOKENS)
    refused.abort()
    assert refused.wait_released(10)
    _assert_quiet(pair.decode)


def test_a_wait_leaves_the_events_of_others(pair: Any) -> None:
    polled = pair.reserve("polled", TARGET[:1], 16)
    waited = pair.reserve("waited", TARGET[1:2], 16)
    for request, page in (("polled", SOURCE[0]), ("waited", SOURCE[1])):
        pair.send(request, [page], 16)
    waited.wait(10)
    (event,) = _collect(pair.decode, 1)
    assert event.request_id == polled.request_id
    _assert_quiet(pair.decode)


def test_the_descriptor_works_with_epoll_and_is_readable_only_while_events_wait(pair: Any) -> None:
    poller = select.epoll()
    poller.register(pair.decode.fileno(), select.EPOLLIN)
    assert poller.poll(0) == []
    pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS)
    assert [fd for fd, _ in poller.poll(10)] == [pair.decode.fileno()]
    assert [event.kind for event in pair.decode.poll()] == ["ready"]
    assert poller.poll(0) == []
    poller.close()


def test_a_wait_that_takes_the_last_event_makes_the_descriptor_quiet(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS)
    assert select.select([pair.decode], [], [], 10)[0]
    handoff.wait(10)
    _assert_quiet(pair.decode)


def test_an_event_loop_can_watch_the_descriptor(pair: Any) -> None:
    async def engine() -> list[str]:
        arrived: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(
            pair.decode.fileno(), lambda: arrived.set_result([event.kind for event in pair.decode.poll()])
        )
        pair.reserve("r", TARGET, N_TOKENS)
        pair.send("r", SOURCE, N_TOKENS)
        try:
            return await asyncio.wait_for(arrived, 10)
        finally:
            asyncio.get_running_loop().remove_reader(pair.decode.fileno())

    assert asyncio.run(engine()) == ["ready"]


def test_a_handoff_can_be_awaited(pair: Any) -> None:
    async def engine() -> int:
        handoff = pair.reserve("r", TARGET, N_TOKENS)
        pair.send("r", SOURCE, N_TOKENS)
        ready = await asyncio.wait_for(_awaited(handoff), 10)
        return int((await handoff).n_tokens + ready.n_tokens)  # it may be awaited again

    assert asyncio.run(engine()) == 2 * N_TOKENS
    _assert_quiet(pair.decode)


def test_many_handoffs_can_be_awaited_at_once(pair: Any) -> None:
    async def engine() -> list[int]:
        handoffs = [pair.reserve(f"r{number}", [number], 16) for number in range(16)]
        waiting = asyncio.gather(*(_awaited(handoff) for handoff in handoffs))
        for number in reversed(range(16)):
            pair.send(f"r{number}", [number], 16)
        return [ready.n_tokens for ready in await asyncio.wait_for(waiting, 10)]

    assert asyncio.run(engine()) == [16] * 16


def test_awaiting_a_handoff_that_fails_raises_its_error(pair: Any) -> None:
    async def engine() -> None:
        handoff = pair.reserve("r", TARGET, N_TOKENS)
        asyncio.get_running_loop().call_later(0.01, handoff.abort, "gone")
        with pytest.raises(Aborted, match="gone"):
            await asyncio.wait_for(_awaited(handoff), 10)
        with pytest.raises(Aborted, match="gone"):
            await handoff

    asyncio.run(engine())


def test_a_cancelled_await_leaves_the_handoff_under_way(pair: Any) -> None:
    async def engine() -> int:
        handoff = pair.reserve("r", TARGET, N_TOKENS)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(handoff), 0.05)
        pair.send("r", SOURCE, N_TOKENS)
        ready = await asyncio.wait_for(_awaited(handoff), 10)
        return int(ready.n_tokens)

    assert asyncio.run(engine()) == N_TOKENS


def test_an_await_ends_when_the_endpoint_closes(pair: Any) -> None:
    async def engine() -> None:
        handoff = pair.reserve("r", TARGET, N_TOKENS)
        closing = threading.Thread(target=pair.decode.close)
        asyncio.get_running_loop().call_later(0.02, closing.start)
        with pytest.raises(KvxferError):
            await asyncio.wait_for(_awaited(handoff), 10)
        closing.join(10)

    asyncio.run(engine())


def test_a_loop_that_was_closed_meanwhile_harms_nobody(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)

    async def impatient() -> None:
        task = asyncio.ensure_future(_awaited(handoff))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(impatient())
    pair.send("r", SOURCE, N_TOKENS)
    assert handoff.wait(10).n_tokens == N_TOKENS


async def _awaited(handoff: Any) -> Any:
    return await handoff
