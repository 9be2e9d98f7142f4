"""S5: two live or quarantined reservations never share a page."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import GeometryError, OwnershipError
from kvxfer.ledger import PageLedger, PageState

A, B, C = 0xA, 0xB, 0xC


def test_claimed_pages_are_reserved_for_their_owner() -> None:
    ledger = PageLedger([8, 4])
    ledger.claim(A, {0: [1, 5], 1: np.array([3], np.uint64)})
    assert ledger.state_of(0, 5) == PageState.RESERVED
    assert ledger.owner_of(1, 3) == A
    assert ledger.owner_of(1, 2) == 0
    assert {space: pages.tolist() for space, pages in ledger.pages_of(A).items()} == {0: [1, 5], 1: [3]}


@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.QUARANTINED])
def test_a_page_that_may_still_be_written_cannot_be_claimed_again(state: PageState) -> None:
    ledger = PageLedger([8])
    ledger.claim(A, {0: [4]})
    ledger.mark(A, state)
    with pytest.raises(OwnershipError) as caught:
        ledger.claim(B, {0: [3, 4]})
    assert caught.value.details["page"] == 4
    assert caught.value.details["holder"] == f"{A:016x}"
    assert caught.value.details["state"] == state.name
    assert ledger.state_of(0, 3) == PageState.FREE, "a refused claim must leave nothing behind"


def test_a_claim_that_fails_in_one_id_space_takes_nothing_in_the_others() -> None:
    ledger = PageLedger([4, 4])
    ledger.claim(A, {1: [0]})
    with pytest.raises(OwnershipError):
        ledger.claim(B, {0: [1, 2], 1: [0]})
    assert ledger.counts()[PageState.RESERVED] == 1
    ledger.claim(C, {0: [1, 2]})


def test_the_engine_offers_ready_pages_again_and_the_former_owner_loses_them() -> None:
    ledger = PageLedger([8])
    ledger.claim(A, {0: [1, 2, 3]})
    ledger.mark(A, PageState.READY)
    ledger.claim(B, {0: [2]})
    assert ledger.pages_of(A)[0].tolist() == [1, 3]
    ledger.release(A)
    assert ledger.state_of(0, 2) == PageState.RESERVED, "A no longer owns page 2 and must not free it"
    assert ledger.owner_of(0, 2) == B
    assert ledger.state_of(0, 1) == PageState.FREE


def test_an_owner_whose_ready_pages_are_all_reoffered_is_forgotten() -> None:
    ledger = PageLedger([2])
    for owner in range(1, 200):
        ledger.claim(owner, {0: [0, 1]})
        ledger.mark(owner, PageState.READY)
    assert len(ledger._held) == 1


def test_a_handoff_of_zero_pages_can_become_ready_and_leaves_nothing() -> None:
    ledger = PageLedger([2])
    ledger.claim(A, {0: []})
    ledger.mark(A, PageState.READY)
    assert not ledger._held


def test_a_page_named_twice_in_one_claim_is_refused() -> None:
    ledger = PageLedger([8])
    with pytest.raises(OwnershipError, match="twice"):
        ledger.claim(A, {0: [3, 1, 3]})
    assert ledger.counts()[PageState.FREE] == 8


@pytest.mark.parametrize("step", [PageState.READY, PageState.RESERVED])
def test_a_quarantined_page_never_becomes_readable_without_release(step: PageState) -> None:
    ledger = PageLedger([1])
    ledger.claim(A, {0: [0]})
    ledger.mark(A, PageState.QUARANTINED)
    with pytest.raises(OwnershipError, match="cannot go"):
        ledger.mark(A, step)
    assert ledger.state_of(0, 0) == PageState.QUARANTINED


def test_an_owner_claims_once() -> None:
    ledger = PageLedger([4])
    ledger.claim(A, {0: [0]})
    with pytest.raises(OwnershipError, match="already owns"):
        ledger.claim(A, {0: [1]})


@pytest.mark.parametrize("owner", [0, -1, 1 << 64])
def test_an_owner_is_a_non_zero_64_bit_number(owner: int) -> None:
    with pytest.raises(OwnershipError):
        PageLedger([1]).claim(owner, {0: [0]})


@pytest.mark.parametrize("pages", [{0: [8]}, {1: [0]}, {-1: [0]}, {0: [-1]}, {0: [0.5]}])
def test_pages_that_the_pool_does_not_have_are_refused(pages: dict[int, list[int]]) -> None:
    ledger = PageLedger([8])
    with pytest.raises(GeometryError):
        ledger.claim(A, pages)
    assert ledger.counts()[PageState.FREE] == 8


@pytest.mark.parametrize("page", [8, -1])
def test_asking_for_a_page_that_is_not_there_is_an_error(page: int) -> None:
    ledger = PageLedger([8])
    with pytest.raises(GeometryError):
        ledger.state_of(0, page)
    with pytest.raises(GeometryError):
        ledger.owner_of(0, page)


def test_marking_without_owning_is_an_error_but_releasing_is_not() -> None:
    ledger = PageLedger([8])
    with pytest.raises(OwnershipError, match="owns no pages"):
        ledger.mark(A, PageState.READY)
    ledger.release(A)
    assert ledger.pages_of(A) == {}


def test_given_back_ready_pages_are_free_and_reserved_ones_are_refused() -> None:
    ledger = PageLedger([8])
    ledger.claim(A, {0: [0, 1]})
    ledger.mark(A, PageState.READY)
    ledger.claim(B, {0: [2]})
    with pytest.raises(OwnershipError, match="given back"):
        ledger.free_ready(0, [0, 2])
    assert ledger.state_of(0, 0) == PageState.READY, "a refused return must change nothing"
    ledger.free_ready(0, [0, 1])
    assert ledger.state_of(0, 1) == PageState.FREE
    assert ledger.pages_of(A) == {}


def test_states_are_copies() -> None:
    ledger = PageLedger([2])
    ledger.states(0)[0] = PageState.READY
    assert ledger.state_of(0, 0) == PageState.FREE


def test_of_many_threads_that_want_one_page_exactly_one_gets_it() -> None:
    ledger = PageLedger([64])
    won: list[int] = []

    def claim(owner: int) -> None:
        for page in range(64):
            try:
                ledger.claim(owner * 100 + page, {0: [page]})
            except OwnershipError:
                continue
            won.append(page)

    threads = [threading.Thread(target=claim, args=(owner,)) for owner in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(64))


class LedgerModel(RuleBasedStateMachine):
    """Against a dictionary: page → (owner, state)."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger([6, 3])
        self.model: dict[tuple[int, int], tuple[int, PageState]] = {}
        self.live: set[int] = set()
        self.next_owner = 1

    @rule(first=st.lists(st.integers(0, 5), max_size=4), second=st.lists(st.integers(0, 2), max_size=2))
    def claim(self, first: list[int], second: list[int]) -> None:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        wanted = [(0, page) for page in first] + [(1, page) for page in second]
        free = all(self.model.get(key, (0, PageState.FREE))[1] in (PageState.FREE, PageState.READY) for key in wanted)
        if free and len(set(wanted)) == len(wanted):
            self.ledger.claim(owner, {0: first, 1: second})
            self.model.update(dict.fromkeys(wanted, (owner, PageState.RESERVED)))
            self.live.add(owner)
        else:
            with pytest.raises(OwnershipError):
                self.ledger.claim(owner, {0: first, 1: second})

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from(list(PageState)))
    def mark(self, data: st.DataObject, state: PageState) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        mine = [key for key, (holder, _) in self.model.items() if holder == owner]
        if state == PageState.FREE:
            self.ledger.mark(owner, state)
            for key in mine:
                del self.model[key]
            self.live.discard(owner)
            return
        try:
            self.ledger.mark(owner, state)
        except OwnershipError:
            states = {self.model[key][1] for key in mine}
            assert states != {PageState.RESERVED}, "every step from RESERVED is legal"
            return
        for key in mine:
            assert self.model[key][1] in (PageState.RESERVED, state)
            self.model[key] = (owner, state)

    @rule(pages=st.lists(st.integers(0, 5), max_size=3))
    def give_back(self, pages: list[int]) -> None:
        states = [self.model.get((0, page), (0, PageState.FREE))[1] for page in pages]
        if PageState.RESERVED in states or PageState.QUARANTINED in states:
            with pytest.raises(OwnershipError):
                self.ledger.free_ready(0, pages)
            return
        self.ledger.free_ready(0, pages)
        for page in pages:
            self.model.pop((0, page), None)

    @invariant()
    def every_page_is_as_the_model_says(self) -> None:
        for space, size in enumerate((6, 3)):
            states = self.ledger.states(space)
            for page in range(size):
                owner, state = self.model.get((space, page), (0, PageState.FREE))
                assert self.ledger.owner_of(space, page) == owner
                assert states[page] == state

    @invariant()
    def the_counts_add_up(self) -> None:
        states = np.concatenate([self.ledger.states(0), self.ledger.states(1)])
        assert self.ledger.counts() == {state: int((states == state).sum()) for state in PageState}


LedgerModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerAgainstModel = LedgerModel.TestCase
