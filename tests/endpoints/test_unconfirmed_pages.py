"""S1 through the public API: nobody gets at a page that was not confirmed for that very request."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
from typing import Any

import pytest

from kvxfer import Handoff, PagePool, Ready
from kvxfer.errors import Aborted, AdmissionClosed, Closed, KvxferError, NotReady, VerificationFailed

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


def test_a_handoff_has_nothing_to_read_before_ready(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(TimeoutError):
        handoff.wait(0.05)
    assert not any(hasattr(handoff, name) for name in ("pages", "page", "ready", "aux"))


def test_the_pool_refuses_reserved_pages_before_ready(pair: Any) -> None:
    pair.reserve("r", TARGET, N_TOKENS)
    for page in TARGET:
        with pytest.raises(NotReady):
            pair.target.pool.page("kv", "0", page)


def test_nothing_can_be_read_after_an_abort(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    handoff.abort()
    with contextlib.suppress(AdmissionClosed):  # the abort may reach prefill before the write does
        pair.send("r", SOURCE, N_TOKENS)
    with pytest.raises(Aborted):
        handoff.wait(10)
    assert handoff.state in ("quarantined", "released")


def test_nothing_can_be_read_after_an_error(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE[:1], 1)
    for _ in range(2):
        with pytest.raises(VerificationFailed):
            handoff.wait(10)


def test_a_ready_page_is_not_read_after_close(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    assert ready.page("kv", "0", 0).any()
    pair.decode.close()
    with pytest.raises(Closed):
        ready.page("kv", "0", 0)


def test_waiting_after_close_gives_no_pages(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.decode.close()
    with pytest.raises(KvxferError):
        handoff.wait(1)


def test_one_handoff_does_not_open_the_pages_of_another(pair: Any) -> None:
    ready = pair.hand_over("first", SOURCE[:2], TARGET[:2], 32)
    pair.reserve("second", TARGET[2:], 32)
    with pytest.raises(NotReady):
        ready.page("kv", "0", 2)


def test_a_page_that_was_reserved_anew_is_closed_to_its_former_handoff(pair: Any) -> None:
    ready = pair.hand_over("first", SOURCE, TARGET, N_TOKENS)
    pair.reserve("second", TARGET, N_TOKENS)
    with pytest.raises(NotReady):
        ready.page("kv", "0", 0)


def test_a_page_is_closed_to_its_former_handoff_also_once_the_next_one_is_ready(pair: Any) -> None:
    first = pair.hand_over("first", SOURCE, TARGET, N_TOKENS)
    second = pair.hand_over("second", SOURCE, TARGET, N_TOKENS)
    with pytest.raises(NotReady):
        first.page("kv", "0", 0)
    assert second.page("kv", "0", 0).any()


def test_ready_pages_are_read_only_and_exactly_what_was_sent(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, 64)
    for layer in range(2):
        for logical, page in enumerate(SOURCE):
            view = ready.page("kv", str(layer), logical)
            assert view.tobytes() == pair.source.layers[layer][page].tobytes()
            with pytest.raises(ValueError):
                view[0] = 1


def test_the_mapping_of_ready_pages_cannot_be_extended(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    with pytest.raises(TypeError):
        ready.pages["kv"] = None
    with pytest.raises(ValueError):
        ready.pages["kv"].pool[0] = 1


def test_subclassing_opens_nothing() -> None:
    for sealed in (Handoff, Ready, PagePool):
        with pytest.raises(TypeError):
            type("Mine", (sealed,), {"__module__": sealed.__module__})


def test_a_ready_cannot_be_made_by_hand(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(NotReady):
        Ready(object(), pair.decode, handoff.reservation, "r", {}, N_TOKENS, b"", {})


def test_neither_copies_nor_pickles_leave_the_process(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    handoff = pair.reserve("other", [1], 16)
    for one in (ready, handoff, pair.decode, pair.prefill):
        with pytest.raises(TypeError):
            pickle.dumps(one)
        with pytest.raises(TypeError):
            copy.deepcopy(one)


def test_another_thread_sees_no_page_earlier_than_the_first(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    outcomes: list[BaseException | None] = []
    stop = threading.Event()

    def peek() -> None:
        while not stop.is_set():
            for page in TARGET:
                try:
                    view = pair.target.pool.page("kv", "0", page)
                except NotReady:
                    continue
                # The pool gave it: then the handoff is READY and every page of it is what was sent.
                if not view.any():
                    outcomes.append(AssertionError(f"page {page} was open and empty"))
                    return

    threads = [threading.Thread(target=peek) for _ in range(3)]
    for thread in threads:
        thread.start()
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert outcomes == []


def test_a_forked_child_is_refused(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ready.page("kv", "0", 0)
            os.write(writer, b"read")
        except Closed:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"refused"
    os.close(reader)
