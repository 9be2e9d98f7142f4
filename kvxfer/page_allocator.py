"""A plain page allocator for programs that bring none of their own."""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvxfer.errors import CapacityError, GeometryError
from kvxfer.ledger import PageLedger

U64 = npt.NDArray[np.uint64]


class PageAllocator:
    """Hands out the pages of one id space. Thread-safe.

    A page that a handoff may still write (S2), or that is still being sent, never comes back.
    """

    def __init__(self, ledger: PageLedger, space: int) -> None:
        self._ledger = ledger
        self._space = space
        self._lock = threading.Lock()
        n_pages = ledger.sizes[space]
        self._free: U64 = np.arange(n_pages - 1, -1, -1, dtype=np.uint64)  # a stack; its top is at _n_free
        self._n_free = n_pages
        self._taken = np.zeros(n_pages, np.bool_)

    @property
    def n_free(self) -> int:
        """Pages that are not taken."""
        return self._n_free

    def take(self, n: int, order: Literal["lifo", "random"] = "lifo", seed: int | None = None) -> U64:
        """Raises CapacityError if fewer than ``n`` pages are free."""
        if n < 0:
            raise GeometryError("cannot take a negative number of pages", pages=n)
        with self._lock:
            chosen = self._top(n) if order == "lifo" else None
            if chosen is None:
                chosen = self._any(n, order, seed)
            pages: U64 = self._free[chosen].copy()
            self._close_gaps(chosen)
            self._taken[pages] = True
            return pages

    def give_back(self, pages: Any) -> None:
        """All of them or none.

        Raises:
            OwnershipError: a page is RESERVED or QUARANTINED, or is being sent by a prefill grant.
            GeometryError: a page that was not taken, or is named twice.
        """
        array = np.asarray(pages)
        if array.size and array.dtype.kind not in "iu":
            raise GeometryError("page numbers must be integers", dtype=str(array.dtype))
        if array.size and (int(array.min()) < 0 or int(array.max()) >= len(self._taken)):
            raise GeometryError("a page lies outside the pool", pages=len(self._taken))
        array = array.astype(np.uint64).reshape(-1)
        with self._lock:
            ordered = np.sort(array)
            if (ordered[1:] == ordered[:-1]).any():
                raise GeometryError("a page is given back twice in one call")
            strange = array[~self._taken[array]]
            if len(strange):
                raise GeometryError(f"page {int(strange[0])} was not taken from this pool", page=int(strange[0]))
            self._ledger.free_ready(self._space, array)
            self._taken[array] = False
            self._free[self._n_free : self._n_free + len(array)] = array[::-1]
            self._n_free += len(array)

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _usable(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Pages reserved or sent without having been taken stay where they are until they are free again."""
        return self._ledger.may_be_taken(self._space, self._free[at])

    def _top(self, n: int) -> npt.NDArray[np.int64] | None:
        """The ``n`` topmost places of the stack, if all of them can be taken."""
        if n > self._n_free:
            return None
        at = np.arange(self._n_free - 1, self._n_free - 1 - n, -1)
        return at if self._usable(at).all() else None

    def _close_gaps(self, chosen: npt.NDArray[np.int64]) -> None:
        lowest = int(chosen.min(initial=self._n_free))
        rest = np.delete(self._free[lowest : self._n_free], chosen - lowest)
        self._free[lowest : lowest + len(rest)] = rest
        self._n_free = lowest + len(rest)

    def _any(self, n: int, order: str, seed: int | None) -> npt.NDArray[np.int64]:
        at: npt.NDArray[np.int64] = np.arange(self._n_free - 1, -1, -1, dtype=np.int64)
        at = at[self._usable(at)]
        if n > len(at):
            raise CapacityError(
                f"{n} pages wanted, {len(at)} free; give pages back or wait for a release",
                needed=n,
                available=len(at),
                id_space=self._space,
            )
        return np.random.default_rng(seed).permutation(at)[:n] if order == "random" else at[:n]
