"""One leg in the simulated sender's core: what it has to post, what it has posted, and whether a lane can still read
its
sources (S3)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvxfer.protocol.messages import Reserve
from kvxfer.protocol.record import TokenRange, build
from kvxfer.sim.content import bound, chunk_content
from kvxfer.sim.pools import LegPlaces
from kvxfer.sim.violation import Violation

if TYPE_CHECKING:
    from kvxfer.sim.lane_group import LaneGroup
    from kvxfer.sim.sources import SourceGrant

AUX = b"aux"
DUE, SENT, CONFIRMED = range(3)


class SenderLeg:
    """Mirrors what native/lanes/leg_out.hpp keeps. ``end``: "" while it takes writes, else drain or fail."""

    def __init__(self, grant: SourceGrant, group: LaneGroup, reserve: Reserve, places: LegPlaces) -> None:
        self.grant = grant
        self.group = group
        self.reserve = reserve
        self.places = places
        self.queue: deque[int] = deque()  # ordinals that no lane has taken yet
        self.queued = 0  # bitmap: a chunk is queued once
        self.posted = dict.fromkeys(reserve.lanes, 0)
        self.content: dict[int, int] = {}  # by ordinal, as it was when write() was called
        self.records = dict.fromkeys(reserve.lanes, DUE)
        self.unfinished = 0  # verbs: posted and not yet completed
        self.unread = 0  # frames on their way whose bytes are read only when they land
        self.end = ""
        self.cause = ""
        self.reported = False
        self.slot_valid = True  # local: the generation slot still vouches for the sources
        self.by_source: dict[tuple[int, int, int], list[int]] = {}
        for ordinal, place in enumerate(places.places):
            self.by_source.setdefault(place.source, []).append(ordinal)

    @property
    def may_read(self) -> bool:
        """A lane reads the sources, or will."""
        if self.group.destroyed:
            return False
        return (bool(self.queue) and not self.end) or (self.unread > 0 and self.slot_valid)

    @property
    def may_write(self) -> bool:
        """The sender's end may still post bytes of this leg."""
        if self.end or self.reported or not self.group.prefill.alive:
            return False
        return bool(self.queue) or self.grant.commit is None or DUE in self.records.values()

    # ---- what is posted ----------------------------------------------------------------------------------------------

    def publish(self, source: tuple[int, int, int]) -> None:
        """A page of a region was written: its chunks of this leg are queued."""
        if self.end:
            return
        value = self.grant.written[source][1]
        for ordinal in self.by_source.get(source, ()):
            if self.queued >> ordinal & 1:
                continue
            self.queued |= 1 << ordinal
            place = self.places.places[ordinal]
            self.content[ordinal] = chunk_content(value, place.unit, place.units)
            self.queue.append(ordinal)

    def read(self, ordinal: int) -> int:
        """A lane reads the chunk's bytes now. S3: its page must still be the grant's."""
        place = self.places.places[ordinal]
        grant = self.grant
        if grant.freed:
            raise Violation(
                "S3-read",
                f"{self.group.prefill.name}: a lane reads grant {grant.id} for {self.reserve.reservation:x} after the "
                "engine was told that it is released",
            )
        group, region, logical = place.source
        page = grant.written[group, region, logical][0]
        return chunk_content(self.group.prefill.sources.cells[group, region, page], place.unit, place.units)

    def record(self, lane: int) -> bytes:
        """The commit record that this lane carries, from what was posted."""
        assert self.grant.commit is not None
        reserve, layout = self.reserve, self.places.layout
        n_tokens, aux = self.grant.commit
        self.group.world.committed[reserve.reservation, reserve.leg] = n_tokens
        first = lane == reserve.lanes[0]
        folds = None
        if first and reserve.verify == "digest":
            folds = self.places.folds(self.bound_digests())
        return build(
            reservation=reserve.reservation,
            epoch=self.group.epoch,
            generation=reserve.generation,
            leg=reserve.leg,
            lane=lane,
            n_lanes=len(reserve.lanes),
            ranges=[
                TokenRange(group.group, group.first_token, max(0, n_tokens - group.first_token))
                for group in reserve.groups
            ],
            n_chunks=layout.n_chunks,
            bitmap=self.posted[lane],
            n_tokens=n_tokens,
            folds=folds,
            aux=aux if first and reserve.carries_aux else None,
        )

    def bound_digests(self) -> list[int]:
        posted = 0
        for bitmap in self.posted.values():
            posted |= bitmap
        epoch = int.from_bytes(self.group.epoch, "little")
        return [
            bound(self.content[k], self.reserve.reservation, epoch, self.reserve.leg, place.number)
            if posted >> k & 1
            else 0
            for k, place in enumerate(self.places.places)
        ]

    # ---- its end -----------------------------------------------------------------------------------------------------

    def close(self, end: str, cause: str = "") -> None:
        """``end``: drain (admission was closed) or fail (an error). A failure after an abort still makes it one."""
        if self.reported or self.end == "fail" or self.end == end:
            return
        self.end = end
        self.cause = cause
        self.queue.clear()
        if self.group.kind == "local":
            self.slot_valid = False
        self.settle()

    def settle(self) -> None:
        """Reports the leg once, when nothing of it is under way any more, or when it has failed."""
        if self.reported:
            return
        if not self.end:
            if self.grant.commit is None or self.queue:
                return
            wanted = CONFIRMED if self.group.kind == "local" else SENT
            if any(state != wanted for state in self.records.values()):
                return
        if self.end != "fail" and self.group.kind == "verbs" and self.unfinished:
            return
        self.reported = True
        self.group.prefill.leg_reported(self)
