"""Prefill's simulated memory: source pages, and the grants that pin them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.geometry import PoolGeometry

if TYPE_CHECKING:
    from kvxfer.sim.sender_leg import SenderLeg


class SourceGrant:
    """A grant in the sender's core. ``written``: (group, region, logical page) to its pool page and to what was in it
    when write() was called."""

    def __init__(self, grant: int, request_id: str) -> None:
        self.id = grant
        self.request_id = request_id
        self.written: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.commit: tuple[int, bytes] | None = None
        self.legs: dict[tuple[int, int], SenderLeg] = {}  # attached ones, by session and reservation
        self.ever: list[SenderLeg] = []  # all that were: a lane may read for one that was detached
        self.told: set[str] = set()  # kinds of events that the engine has had
        self.doubles = False  # a fault of the sender: one chunk is queued twice
        self.freed = False  # the engine was told that the sources are its own again


class Sources:
    """All source pages of one prefill process. ``cells``: (group, region, pool page) to its content."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self.cells: dict[tuple[int, int, int], int] = {}
        self.free = [list(range(group.n_pages)) for group in geometry.groups]

    def take(self, counts: list[int]) -> list[list[int]] | None:
        """The pages that were freed last, of each group, or None where there are too few."""
        if any(len(free) < count for free, count in zip(self.free, counts, strict=True)):
            return None
        return [[free.pop() for _ in range(count)] for free, count in zip(self.free, counts, strict=True)]

    def give_back(self, pages: list[list[int]]) -> None:
        for free, own in zip(self.free, pages, strict=True):
            free.extend(own)
