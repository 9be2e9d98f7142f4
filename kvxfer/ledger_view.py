"""What a pool shows of its ledger: who owns which page, and nothing that could change it."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvxfer.ledger import U64, PageLedger, PageState


@final
class LedgerView:
    """A PageLedger to look at. Thread-safe; arrays are copies.

    S1: only the endpoints move pages from state to state. A program that could do so would open unconfirmed pages.
    """

    __slots__ = ("_ledger",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("LedgerView cannot be subclassed")

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pages of each id space."""
        return self._ledger.sizes

    def owner_of(self, space: int, page: int) -> int:
        """Reservation id of the page's owner, 0 for nobody. Raises GeometryError."""
        return self._ledger.owner_of(space, page)

    def state_of(self, space: int, page: int) -> PageState:
        """Raises GeometryError for a page or id space that the pool does not have."""
        return self._ledger.state_of(space, page)

    def states_of(self, space: int, pages: Any) -> npt.NDArray[np.uint8]:
        """PageState of each of ``pages``. Raises GeometryError."""
        return self._ledger.states_of(space, pages)

    def states(self, space: int) -> npt.NDArray[np.uint8]:
        """A copy of all states of an id space: for maps and tests, O(pool)."""
        return self._ledger.states(space)

    def counts(self) -> dict[PageState, int]:
        """Pages in each state over all id spaces, O(1)."""
        return self._ledger.counts()

    def pages_of(self, owner: int) -> dict[int, U64]:
        """The pages that ``owner`` still holds, by id space, in the order of the claim. Empty if it holds none."""
        return self._ledger.pages_of(owner)
