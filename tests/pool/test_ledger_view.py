"""S1: whoever has a pool can look at its ledger, and cannot open a page with it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from kvxfer.ledger import PageLedger, PageState
from kvxfer.ledger_view import LedgerView

A = 0xA


@pytest.fixture
def ledger() -> PageLedger:
    ledger = PageLedger([8, 4])
    ledger.claim(A, {0: [1, 5]})
    return ledger


def test_the_view_shows_what_the_ledger_holds_as_it_changes(ledger: PageLedger) -> None:
    view = LedgerView(ledger)
    assert view.sizes == (8, 4)
    assert view.owner_of(0, 5) == A
    assert view.state_of(0, 5) == PageState.RESERVED
    assert view.states(0).tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert view.pages_of(A)[0].tolist() == [1, 5]
    ledger.mark(A, PageState.READY)
    assert view.states_of(0, [4, 5]).tolist() == [PageState.FREE, PageState.READY]
    assert view.counts() == {
        PageState.FREE: 10,
        PageState.RESERVED: 0,
        PageState.READY: 2,
        PageState.QUARANTINED: 0,
    }


def test_the_view_has_no_way_to_change_a_page(ledger: PageLedger) -> None:
    public = {name for name in dir(LedgerView(ledger)) if not name.startswith("_")}
    assert public == {"counts", "owner_of", "pages_of", "sizes", "state_of", "states", "states_of"}


def test_no_public_name_of_the_view_leads_to_the_ledger(ledger: PageLedger) -> None:
    view = LedgerView(ledger)
    reached: list[Any] = [view]
    for name in dir(view):
        if not name.startswith("_"):
            value = getattr(view, name)
            reached += [value, getattr(value, "__self__", None)]
            assert not inspect.ismethod(value) or value.__self__ is view
    assert not any(isinstance(thing, PageLedger) for thing in reached)


def test_what_the_view_returns_is_a_copy(ledger: PageLedger) -> None:
    view = LedgerView(ledger)
    view.states(0)[:] = PageState.READY
    view.states_of(0, np.arange(8, dtype=np.uint64))[:] = PageState.READY
    view.states_of(0, [1])[:] = PageState.READY
    view.pages_of(A)[0][:] = 7
    view.pages_of(A).clear()
    view.counts().clear()
    assert view.states(0).tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert view.pages_of(A)[0].tolist() == [1, 5]
    assert view.counts()[PageState.RESERVED] == 2


def test_the_view_takes_no_other_methods(ledger: PageLedger) -> None:
    view: Any = LedgerView(ledger)
    with pytest.raises(AttributeError):
        view.state_of = lambda *_: PageState.READY
    with pytest.raises(AttributeError):
        view.mark = ledger.mark
    with pytest.raises(TypeError, match="subclassed"):
        type("Leaky", (LedgerView,), {})
