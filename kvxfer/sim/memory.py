"""Decode's simulated memory: what lies in every chunk and who wrote it, and whose every page is (S1, S2, S5).

The books are kept from what the core *tells* its engine, apart from the core's own tables and from the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvxfer.sim.pools import Place
from kvxfer.sim.violation import Violation

PageId = tuple[int, int]
"""A group of decode's pool and a page in it."""


class Cell(NamedTuple):
    """One chunk's bytes and where they came from. ``logical`` is part of ``number``, see ``pools.Place``."""

    content: int
    epoch: bytes
    reservation: int
    leg: int
    number: int


class Claim:
    """A reservation's pages, from ``reserve`` until READY or ``released``."""

    __slots__ = ("failed", "pages", "reservation")

    def __init__(self, reservation: int, pages: tuple[PageId, ...]) -> None:
        self.reservation = reservation
        self.pages = pages
        self.failed = False


class DecodeMemory:
    """All pages of one decode process. It dies with the process: what is still under way to it lands nowhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells: dict[int, Cell] = {}
        self.claims: dict[int, Claim] = {}
        self.holder: dict[PageId, int] = {}  # pages that a reservation holds, while peers may write them
        self.read: dict[PageId, int] = {}  # pages that the engine reads after READY, and of which reservation
        self.zeroed: set[int] = set()  # live reservations whose last page has been zeroed past the last token
        self.reserved_pages = 0  # as the ledger must count them
        self.quarantined_pages = 0

    # ---- what the engine is told -------------------------------------------------------------------------------------

    def claim(self, reservation: int, pages: Iterable[PageId]) -> None:
        claim = Claim(reservation, tuple(pages))
        for page in claim.pages:
            owner = self.holder.get(page)
            if owner is not None:
                raise Violation("S5-owner", f"{self.name}: page {page} of {owner:x} was given to {reservation:x}")
            self.holder[page] = reservation
            self.read.pop(page, None)
        self.claims[reservation] = claim
        self.reserved_pages += len(claim.pages)

    def failed(self, reservation: int) -> None:
        claim = self.claims.get(reservation)
        if claim is None or claim.failed:
            raise Violation("S8-twice", f"{self.name}: {reservation:x} fails, which is over already")
        claim.failed = True
        self.reserved_pages -= len(claim.pages)
        self.quarantined_pages += len(claim.pages)

    def ready(self, reservation: int) -> None:
        claim = self._end(reservation, failed=False)
        for page in claim.pages:
            self.read[page] = reservation

    def released(self, reservation: int) -> None:
        self._end(reservation, failed=True)

    def _end(self, reservation: int, failed: bool) -> Claim:
        claim = self.claims.pop(reservation, None)
        if claim is None or claim.failed is not failed:
            raise Violation(
                "S8-twice", f"{self.name}: {reservation:x} ends without being {'failed' if failed else 'live'}"
            )
        if failed:
            self.quarantined_pages -= len(claim.pages)
        else:
            self.reserved_pages -= len(claim.pages)
        self.zeroed.discard(reservation)
        for page in claim.pages:
            if self.holder.pop(page, None) != reservation:
                raise Violation("S5-lost", f"{self.name}: page {page} was not {reservation:x}'s when it ended")
        return claim

    def given_back(self, pages: Iterable[PageId]) -> None:
        """The engine has read them."""
        for page in pages:
            self.read.pop(page, None)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def land(self, place: Place, content: int, epoch: bytes, reservation: int, leg: int) -> None:
        """Bytes arrive in a page. S2: whoever they are for must still hold it."""
        owner = self.holder.get(place.page)
        if owner != reservation:
            reader = self.read.get(place.page)
            whose = (
                f"{owner:x}" if owner is not None else f"the reader of {reader:x}" if reader is not None else "nobody"
            )
            raise Violation(
                "S2-late-write",
                f"{self.name}: bytes of {reservation:x} leg {leg} land in page {place.page}, which is of {whose}",
            )
        self.cells[place.cell] = Cell(content, epoch, reservation, leg, place.number)

    def check_readable(
        self, reservation: int, leg: int, epoch: bytes, places: Sequence[Place], truths: Sequence[int]
    ) -> None:
        """S1: every chunk holds what was written for this reservation, in its place, from an unchanged source."""
        for place, truth in zip(places, truths, strict=True):
            cell = self.cells.get(place.cell)
            if cell is None:
                raise Violation(
                    "S1-unconfirmed", f"{self.name}: {reservation:x} is READY, and page {place.page} was never written"
                )
            whose = (cell.reservation, cell.leg, cell.epoch, cell.number)
            if whose != (reservation, leg, epoch, place.number):
                kind = "S1-unconfirmed" if cell.reservation != reservation else "S1-foreign"
                raise Violation(
                    kind,
                    f"{self.name}: {reservation:x} is READY, and page {place.page} holds bytes of "
                    f"{cell.reservation:x} leg {cell.leg}",
                )
            if cell.content != truth:
                raise Violation(
                    "S1-foreign", f"{self.name}: {reservation:x} is READY, and page {place.page} holds other bytes"
                )
