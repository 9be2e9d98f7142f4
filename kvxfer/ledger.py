"""S5: who owns each page of a pool, and in which state it is. Shared by all endpoints of a pool.

An *owner* is a reservation id; 0 is nobody. A *pin* is a prefill grant's: the page is being sent, so it must neither be
written by a peer nor handed out again. Pages are named by id space, because overlaid groups share page numbers and
bytes. Every call costs time by the pages it names, never by the size of the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import GeometryError, OwnershipError

U64 = npt.NDArray[np.uint64]


class PageState(IntEnum):
    """What may be done with a page.

    FREE: the engine's own. RESERVED: peers may write it, nobody may read it. READY: verified, the engine's to read and
    to offer again. QUARANTINED: the handoff failed and a writer is not yet proven silent.
    """

    FREE = 0
    RESERVED = 1
    READY = 2
    QUARANTINED = 3


# Plain integers: NumPy takes many times longer to store an enum member.
_FREE, _RESERVED, _READY, _QUARANTINED = map(int, PageState)
_MAY_BE_WRITTEN = 1  # the bit that RESERVED and QUARANTINED have in common

_LEGAL = {
    _RESERVED: (_RESERVED, _READY, _QUARANTINED),
    _READY: (_READY,),
    # A page whose writer is not proven silent never becomes readable by a change of mind.
    _QUARANTINED: (_QUARANTINED,),
}


class _Holding:
    __slots__ = ("pages", "remaining", "state", "total")

    def __init__(self, pages: dict[int, U64], total: int) -> None:
        self.pages = pages
        self.total = total
        self.remaining = total  # falls when the engine offers READY pages to a later owner
        self.state = _RESERVED


def _twice(array: U64) -> int | None:
    """A page that is named more than once, or None."""
    if len(array) < 2:
        return None
    ordered = np.sort(array)
    same = ordered[1:] == ordered[:-1]
    return int(ordered[int(np.argmax(same))]) if same.any() else None


def _times(array: U64) -> tuple[U64, npt.NDArray[np.uint32] | int]:
    """Distinct pages, and how often each is named."""
    if _twice(array) is None:
        return array, 1
    distinct, times = np.unique(array, return_counts=True)
    return distinct, times.astype(np.uint32)


def _tally(owners: U64) -> Iterable[tuple[int, int]]:
    """Each owner and how often it occurs."""
    first = int(owners[0])
    if (owners == first).all():  # pages mostly come back as they were handed over
        return [(first, len(owners))]
    distinct, numbers = np.unique(owners, return_counts=True)
    return zip(distinct.tolist(), numbers.tolist(), strict=True)


def _as_pages(pages: Any) -> U64:
    array = np.asarray(pages)
    if array.dtype != np.uint64:
        if array.size and (array.dtype.kind not in "iu" or (array.dtype.kind == "i" and int(array.min()) < 0)):
            raise GeometryError(f"page numbers must be non-negative integers, got {array.dtype}")
        array = array.astype(np.uint64)
    return array.reshape(-1)


class PageLedger:
    """Owner, state and pins of every page. Thread-safe.

    Args:
        sizes: number of pages of each id space.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._owner: list[U64] = [np.zeros(n, np.uint64) for n in sizes]
        self._state: list[npt.NDArray[np.uint8]] = [np.zeros(n, np.uint8) for n in sizes]
        # The same memory, for single pages: an element takes a fraction of an array operation.
        self._one_owner = [owners.data for owners in self._owner]
        self._one_state = [states.data for states in self._state]
        self._pins: list[npt.NDArray[np.uint32]] = [np.zeros(n, np.uint32) for n in sizes]
        self._one_pins = [pins.data for pins in self._pins]
        self._n_pins = 0  # over all pages: a pool that only receives need not look at the arrays
        self._held: dict[int, _Holding] = {}
        self._counts = [sum(sizes), 0, 0, 0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pages of each id space."""
        return tuple(len(states) for states in self._state)

    def claim(self, owner: int, pages: Mapping[int, Any]) -> None:
        """Makes ``owner`` the RESERVED owner of ``pages`` (id space → page numbers), all of them or none.

        FREE and READY pages can be claimed: a READY page was handed to the engine, which offers it again.

        Raises:
            OwnershipError: a page is RESERVED, QUARANTINED or pinned, is named twice, or ``owner`` already holds pages.
            GeometryError: an id space or page that the pool does not have.
        """
        if not 0 < owner < 1 << 64:
            raise OwnershipError("a reservation id is a non-zero 64-bit number", owner=owner)
        wanted = {space: _as_pages(array) for space, array in pages.items()}
        with self._lock:
            if owner in self._held:
                raise OwnershipError(
                    "this reservation already owns pages; reservation ids are never reused", reservation=owner
                )
            for space, array in wanted.items():
                self._check_claim(owner, space, array)
            total = 0
            for space, array in wanted.items():
                self._take_over(space, array)
                self._put(space, array, owner, _RESERVED)
                total += len(array)
            self._counts[_RESERVED] += total
            self._held[owner] = _Holding({space: array.copy() for space, array in wanted.items()}, total)

    def mark(self, owner: int, state: PageState) -> None:
        """Moves the pages that ``owner`` still holds to ``state``; FREE is the same as ``release``.

        Raises:
            OwnershipError: ``owner`` holds nothing, or the step is not one of RESERVED → READY, RESERVED → QUARANTINED,
                any → FREE.
        """
        to = int(state)
        if to == _FREE:
            self.release(owner)
            return
        with self._lock:
            holding = self._held.get(owner)
            if holding is None:
                raise OwnershipError("this reservation owns no pages", reservation=owner, to=PageState(to).name)
            if to not in _LEGAL[holding.state]:
                raise OwnershipError(
                    f"pages cannot go from {PageState(holding.state).name} to {PageState(to).name}; release them first",
                    reservation=owner,
                )
            for space, array in self._still_held(owner, holding).items():
                self._put(space, array, owner, to)
            self._counts[holding.state] -= holding.remaining
            self._counts[to] += holding.remaining
            holding.state = to
            if to == _READY and holding.remaining == 0:
                # A handoff of zero pages leaves nothing to reclaim, so nothing would drop the entry later.
                del self._held[owner]

    def release(self, owner: int) -> None:
        """Frees the pages that ``owner`` still holds. Of an owner that holds none: nothing."""
        with self._lock:
            holding = self._held.pop(owner, None)
            if holding is None:
                return
            for space, array in self._still_held(owner, holding).items():
                self._owner[space][array] = 0
                self._state[space][array] = _FREE
            self._counts[holding.state] -= holding.remaining
            self._counts[_FREE] += holding.remaining

    def free_ready(self, space: int, pages: Any) -> None:
        """The engine gives back pages it got at READY: READY → FREE. FREE pages stay so.

        Raises:
            OwnershipError: one of them is RESERVED or QUARANTINED (S2), or pinned; nothing has changed.
            GeometryError: a page or id space that the pool does not have.
        """
        array = _as_pages(pages)
        with self._lock:
            self._check_free(space, array, "cannot be given back")
            self._check_unpinned(space, array, "cannot be given back")
            if _twice(array) is not None:
                array = np.unique(array)
            self._take_over(space, array)
            self._owner[space][array] = 0
            self._state[space][array] = _FREE
            self._counts[_FREE] += len(array)

    def pin(self, pages: Mapping[int, Any]) -> None:
        """Holds ``pages`` (id space → page numbers) as the source of a transfer, all of them or none.

        A pinned page cannot be claimed, given back or taken. Pins count: a page is free of them after as many unpins,
        and a page that one call names twice is pinned twice.

        Raises:
            OwnershipError: S1: a page is RESERVED or QUARANTINED, so its bytes are unconfirmed and not to be sent on.
            GeometryError: an id space or page that the pool does not have.
        """
        wanted = {space: _as_pages(array) for space, array in pages.items()}
        with self._lock:
            for space, array in wanted.items():
                self._check_free(space, array, "cannot be sent")
            for space, array in wanted.items():
                if len(array) == 1:
                    self._one_pins[space][int(array[0])] += 1
                else:
                    distinct, times = _times(array)
                    self._pins[space][distinct] += times
                self._n_pins += len(array)

    def unpin(self, pages: Mapping[int, Any]) -> None:
        """Takes back one pin for each time a page is named, all of them or none.

        Raises:
            OwnershipError: a page has fewer pins.
            GeometryError: an id space or page that the pool does not have.
        """
        wanted = {space: _as_pages(array) for space, array in pages.items()}
        with self._lock:
            counted = []
            for space, array in wanted.items():
                self._check_bounds(space, array)
                distinct, times = _times(array)
                missing = self._pins[space][distinct] < times
                if missing.any():
                    page = int(distinct[int(np.argmax(missing))])
                    raise OwnershipError(
                        f"page {page} is unpinned more often than it was pinned; unpin what pin was given, once",
                        id_space=space,
                        page=page,
                        pins=int(self._pins[space][page]),
                    )
                counted.append((space, distinct, times, len(array)))
            for space, distinct, times, number in counted:
                self._pins[space][distinct] -= times
                self._n_pins -= number

    def may_be_taken(self, space: int, pages: Any) -> npt.NDArray[np.bool_]:
        """Which of ``pages`` an allocator may hand out: FREE or READY, and not pinned. Raises GeometryError."""
        array = _as_pages(pages)
        with self._lock:
            self._check_bounds(space, array)
            usable: npt.NDArray[np.bool_] = (self._state[space][array] & _MAY_BE_WRITTEN) == 0
            if self._n_pins:
                usable &= self._pins[space][array] == 0
            return usable

    def pages_of(self, owner: int) -> dict[int, U64]:
        """The pages that ``owner`` still holds, by id space, in the order of the claim. Empty if it holds none."""
        with self._lock:
            holding = self._held.get(owner)
            if holding is None:
                return {}
            return {space: array.copy() for space, array in self._still_held(owner, holding).items()}

    def owner_of(self, space: int, page: int) -> int:
        """Reservation id of the page's owner, 0 for nobody. Raises GeometryError."""
        with self._lock:
            self._check_page(space, page)
            return int(self._owner[space][page])

    def state_of(self, space: int, page: int) -> PageState:
        """Raises GeometryError for a page or id space that the pool does not have."""
        with self._lock:
            self._check_page(space, page)
            return PageState(int(self._state[space][page]))

    def states_of(self, space: int, pages: Any) -> npt.NDArray[np.uint8]:
        """PageState of each of ``pages``. Raises GeometryError."""
        array = _as_pages(pages)
        with self._lock:
            self._check_bounds(space, array)
            return self._state[space][array]

    def states(self, space: int) -> npt.NDArray[np.uint8]:
        """A copy of all states of an id space: for maps and tests, O(pool)."""
        with self._lock:
            return self._state[space].copy()

    def counts(self) -> dict[PageState, int]:
        """Pages in each state over all id spaces, O(1)."""
        with self._lock:
            return {state: self._counts[state] for state in PageState}

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _still_held(self, owner: int, holding: _Holding) -> dict[int, U64]:
        if holding.remaining == holding.total:
            return holding.pages
        return {space: array[self._owner[space][array] == owner] for space, array in holding.pages.items()}

    def _take_over(self, space: int, array: U64) -> None:
        """Strikes FREE and READY pages off the counts and off their former owners."""
        if len(array) == 1:
            page = int(array[0])
            if self._one_state[space][page] == _READY:
                self._counts[_READY] -= 1
                self._give_up(self._one_owner[space][page], 1)
            else:
                self._counts[_FREE] -= 1
            return
        ready = self._state[space][array] == _READY
        n_ready = int(np.count_nonzero(ready))
        self._counts[_FREE] -= len(array) - n_ready
        if not n_ready:
            return
        self._counts[_READY] -= n_ready
        owners = self._owner[space][array if n_ready == len(array) else array[ready]]
        for former, number in _tally(owners):
            self._give_up(former, number)

    def _give_up(self, former: int, number: int) -> None:
        holding = self._held[former]
        holding.remaining -= number
        if holding.remaining == 0:
            del self._held[former]

    def _put(self, space: int, array: U64, owner: int, state: int) -> None:
        if len(array) == 1:
            page = int(array[0])
            self._one_owner[space][page] = owner
            self._one_state[space][page] = state
        else:
            self._owner[space][array] = owner
            self._state[space][array] = state

    def _check_claim(self, owner: int, space: int, array: U64) -> None:
        self._check_free(space, array, "cannot be reserved", owner)
        self._check_unpinned(space, array, "cannot be reserved", owner)
        twice = _twice(array)
        if twice is not None:
            raise OwnershipError(
                f"page {twice} is named twice in one reservation", reservation=owner, id_space=space, page=twice
            )

    def _check_free(self, space: int, array: U64, verb: str, owner: int | None = None) -> None:
        self._check_bounds(space, array)
        if len(array) == 1 and not self._one_state[space][int(array[0])] & _MAY_BE_WRITTEN:
            return
        states = self._state[space][array]
        taken = states & _MAY_BE_WRITTEN
        if not taken.any():
            return
        first = int(np.argmax(taken))
        page, state = int(array[first]), PageState(int(states[first]))
        holder = int(self._owner[space][page])
        raise OwnershipError(
            f"page {page} {verb}: reservation {holder:016x} holds it and it is {state.name}; wait until that "
            "reservation is released or use other pages",
            reservation=owner,
            id_space=space,
            page=page,
            holder=f"{holder:016x}",
            state=state.name,
        )

    def _check_unpinned(self, space: int, array: U64, verb: str, owner: int | None = None) -> None:
        """Of pages within bounds."""
        if not self._n_pins or (len(array) == 1 and not self._one_pins[space][int(array[0])]):
            return
        pins = self._pins[space][array]
        if not pins.any():
            return
        first = int(np.argmax(pins != 0))
        page = int(array[first])
        raise OwnershipError(
            f"page {page} {verb}: it is being sent by a prefill grant of this pool; wait for its release",
            reservation=owner,
            id_space=space,
            page=page,
            pins=int(pins[first]),
        )

    def _check_bounds(self, space: int, array: U64) -> None:
        if not 0 <= space < len(self._state):
            raise GeometryError(f"the pool has no id space {space}", id_spaces=len(self._state))
        size = len(self._state[space])
        if len(array) and int(array[0] if len(array) == 1 else array.max()) >= size:
            raise GeometryError(f"page {int(array.max())} lies outside the pool", id_space=space, pages=size)

    def _check_page(self, space: int, page: int) -> None:
        if not 0 <= space < len(self._state) or not 0 <= page < len(self._state[space]):
            raise GeometryError(f"the pool has no page {page} in id space {space}", sizes=str(list(self.sizes)))
