"""A page that is being sent is pinned: no peer may be let in to write it, and nobody gets it anew."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import CapacityError, GeometryError, OwnershipError
from kvxfer.ledger import PageLedger, PageState
from kvxfer.page_allocator import PageAllocator

A, B = 0xA, 0xB


@pytest.mark.parametrize("wanted", [[4], [3, 4, 5]], ids=["single", "several"])
def test_a_pinned_page_cannot_be_claimed_and_nothing_else_is_claimed_with_it(wanted: list[int]) -> None:
    ledger = PageLedger([8, 8])
    ledger.pin({0: [4]})
    with pytest.raises(
        OwnershipError, match="being sent by a prefill grant of this pool; wait for its release"
    ) as caught:
        ledger.claim(A, {1: [0], 0: wanted})
    assert caught.value.reservation == A
    assert (caught.value.details["id_space"], caught.value.details["page"]) == (0, 4)
    assert ledger.counts()[PageState.RESERVED] == 0
    ledger.claim(B, {0: [3, 5], 1: [4]})


@pytest.mark.parametrize("returned", [[4], [3, 4, 5]], ids=["single", "several"])
@pytest.mark.parametrize("ready", [False, True], ids=["free", "ready"])
def test_a_pinned_page_cannot_be_given_back(ready: bool, returned: list[int]) -> None:
    ledger = PageLedger([8])
    if ready:
        ledger.claim(A, {0: [3, 4, 5]})
        ledger.mark(A, PageState.READY)
    before = ledger.states(0).tolist()
    ledger.pin({0: [4]})
    with pytest.raises(OwnershipError, match="page 4 cannot be given back: it is being sent"):
        ledger.free_ready(0, returned)
    assert ledger.states(0).tolist() == before, "a refused return must change nothing"
    ledger.unpin({0: [4]})
    ledger.free_ready(0, returned)
    assert ledger.state_of(0, 4) == PageState.FREE


def test_an_unpinned_page_can_be_claimed_again() -> None:
    ledger = PageLedger([8])
    ledger.pin({0: np.array([2, 3], np.uint64)})
    ledger.unpin({0: [2, 3]})
    ledger.claim(A, {0: [2, 3]})
    assert ledger.owner_of(0, 3) == A


@pytest.mark.parametrize("pages", [[4], [4, 6], [4, 4]], ids=["single", "several", "twice in a call"])
def test_pins_are_counted(pages: list[int]) -> None:
    ledger = PageLedger([8])
    ledger.pin({0: pages})
    ledger.pin({0: [4]})
    ledger.unpin({0: pages})
    with pytest.raises(OwnershipError, match="page 4 cannot be reserved"):
        ledger.claim(A, {0: [4]})
    ledger.unpin({0: [4]})
    ledger.claim(A, {0: [4]})


@pytest.mark.parametrize("sent", [[4], [3, 4]], ids=["single", "several"])
@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.QUARANTINED])
def test_unconfirmed_bytes_are_never_pinned_to_be_sent(state: PageState, sent: list[int]) -> None:
    ledger = PageLedger([8, 8])
    ledger.claim(A, {0: [4]})
    ledger.mark(A, state)
    with pytest.raises(OwnershipError, match=f"page 4 cannot be sent.*{A:016x}.*{state.name}") as caught:
        ledger.pin({1: [0], 0: sent})
    assert caught.value.details["holder"] == f"{A:016x}"
    assert caught.value.details["state"] == state.name
    ledger.claim(B, {0: [3], 1: [0]})


def test_a_ready_page_may_be_sent_on() -> None:
    ledger = PageLedger([8])
    ledger.claim(A, {0: [4]})
    ledger.mark(A, PageState.READY)
    ledger.pin({0: [4]})
    ledger.release(A)
    with pytest.raises(OwnershipError, match="being sent"):
        ledger.claim(B, {0: [4]})


def test_a_pin_is_of_one_id_space() -> None:
    ledger = PageLedger([8, 8])
    ledger.pin({0: [4]})
    ledger.claim(A, {1: [4]})
    with pytest.raises(OwnershipError):
        ledger.claim(B, {0: [4]})


@pytest.mark.parametrize("pages", [{0: [4, 5]}, {0: [4, 4]}, {0: [4], 1: [0]}], ids=["other", "twice", "space"])
def test_what_was_not_pinned_cannot_be_unpinned_and_the_rest_stays_pinned(pages: dict[int, list[int]]) -> None:
    ledger = PageLedger([8, 8])
    ledger.pin({0: [4]})
    with pytest.raises(OwnershipError, match="more often than it was pinned"):
        ledger.unpin(pages)
    with pytest.raises(OwnershipError, match="being sent"):
        ledger.claim(A, {0: [4]})
    ledger.unpin({0: [4]})
    ledger.claim(A, {0: [4]})


@pytest.mark.parametrize("pages", [{0: [3, 8]}, {0: [8]}, {0: [3], 2: [0]}, {0: [-1]}])
def test_pages_the_pool_does_not_have_are_not_pinned_and_the_rest_neither(pages: dict[int, list[int]]) -> None:
    ledger = PageLedger([8, 8])
    with pytest.raises(GeometryError):
        ledger.pin(pages)
    ledger.claim(A, {0: [3]})


@pytest.mark.parametrize("pages", [{0: [3, 8]}, {0: [8]}, {0: [3], 2: [0]}])
def test_pages_the_pool_does_not_have_are_not_unpinned_and_the_rest_neither(pages: dict[int, list[int]]) -> None:
    ledger = PageLedger([8, 8])
    ledger.pin({0: [3]})
    with pytest.raises(GeometryError):
        ledger.unpin(pages)
    with pytest.raises(OwnershipError, match="being sent"):
        ledger.claim(A, {0: [3]})


def test_no_pages_are_pinned_and_unpinned_without_ado() -> None:
    ledger = PageLedger([8])
    for nothing in ({}, {0: []}):
        ledger.pin(nothing)
        ledger.unpin(nothing)
    ledger.claim(A, {0: range(8)})


@pytest.mark.parametrize("order", ["lifo", "random"])
def test_a_page_that_is_being_sent_is_not_handed_out(order: str) -> None:
    ledger = PageLedger([4])
    allocator = PageAllocator(ledger, 0)
    ledger.pin({0: [1]})
    assert sorted(allocator.take(3, order).tolist()) == [0, 2, 3]  # type: ignore[arg-type]
    with pytest.raises(CapacityError):
        allocator.take(1, order)  # type: ignore[arg-type]
    ledger.unpin({0: [1]})
    assert allocator.take(1, order).tolist() == [1]  # type: ignore[arg-type]


def test_a_page_that_is_being_sent_cannot_be_given_back_to_the_allocator() -> None:
    ledger = PageLedger([4])
    allocator = PageAllocator(ledger, 0)
    pages = allocator.take(2)
    ledger.pin({0: pages[:1]})
    with pytest.raises(OwnershipError, match="being sent"):
        allocator.give_back(pages)
    assert allocator.n_free == 2, "all of them or none"
    ledger.unpin({0: pages[:1]})
    allocator.give_back(pages)
    assert allocator.n_free == 4
