"""Decode's simulated receiving core: tables of legs, what landed on which lane, and the reports that Verify asks
for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.protocol.actions import LegReport, LegSpec, Verify
from kvxfer.sim.content import bound
from kvxfer.sim.pools import LegPlaces

if TYPE_CHECKING:
    from kvxfer.sim.decode_node import DecodeNode
    from kvxfer.sim.lane_group import Frame, LaneGroup


class ReceiverLeg:
    """What decode's core knows of one leg. ``landed``: bitmap by lane, by its own sight (verbs: by what the records
    behind whose completion the writes are visible say)."""

    __slots__ = ("claimed", "group", "landed", "live", "places", "source_failed", "spec", "violations")

    def __init__(self, group: LaneGroup, spec: LegSpec, places: LegPlaces) -> None:
        self.group = group
        self.spec = spec
        self.places = places
        self.live = True
        self.landed: dict[int, int] = {}
        self.claimed = 0
        self.violations = 0
        self.source_failed = False


class Receiver:
    """All legs of one decode process, by (session, reservation, leg)."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self.recent: deque[bytes] = deque(maxlen=16)  # records as they came, to be replayed
        self.legs: dict[tuple[int, int, int], ReceiverLeg] = {}

    def can_be_written(self, session: int, reservation: int, leg: int) -> bool:
        """S2, seen from outside: bytes of this leg may still land."""
        found = self.legs.get((session, reservation, leg))
        if found is None:
            return False
        return (found.live or found.group.kind == "verbs") and found.group.can_still_be_written(reservation)

    # ---- frames ------------------------------------------------------------------------------------------------------

    def chunk(self, group: LaneGroup, lane: int, frame: Frame) -> None:
        """Bytes of one chunk arrive. On tcp and local decode's own tables say where they go, on verbs the sender's."""
        node, reserve = self._node, frame.leg.reserve
        content = frame.content
        if content is not None and node.flips(group):
            content ^= 1
        if group.kind == "verbs":
            assert content is not None
            place = frame.leg.places.places[frame.ordinal]
            node.memory.land(place, content, group.epoch, reserve.reservation, reserve.leg)
            return
        leg = self.legs.get((group.decode_session, reserve.reservation, reserve.leg))
        if leg is None or not leg.live or leg.group is not group:
            node.world.counts["chunks sunk"] += 1
            return
        if content is None:
            leg.violations += 1
            if not leg.source_failed:
                leg.source_failed = True
                node.violation(group, lane, reserve.reservation, reserve.leg, "source: withdrawn")
            return
        bit = 1 << frame.ordinal
        if leg.claimed & bit:
            leg.violations += 1
            node.violation(group, lane, reserve.reservation, reserve.leg, "twice: the chunk came before")
            return
        leg.claimed |= bit
        node.memory.land(leg.places.places[frame.ordinal], content, group.epoch, reserve.reservation, reserve.leg)
        leg.landed[lane] = leg.landed.get(lane, 0) | bit

    def record(self, group: LaneGroup, lane: int, frame: Frame) -> None:
        node, reserve = self._node, frame.leg.reserve
        leg = self.legs.get((group.decode_session, reserve.reservation, reserve.leg))
        data = frame.record
        if node.flips(group):
            at = group.world.chance("flip").randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        if group.kind == "verbs":
            if leg is not None:
                leg.landed[lane] = frame.bitmap
        elif leg is None or not leg.live or leg.group is not group:
            node.violation(group, lane, reserve.reservation, reserve.leg, "record: of a revoked leg")
            return
        self.recent.append(data)
        node.record(group, lane, data, reserve.reservation)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def reports(self, action: Verify) -> dict[tuple[int, int], LegReport]:
        found = {}
        for session, number in action.legs:
            leg = self.legs.get((session, action.reservation, number))
            if leg is not None:
                found[session, number] = self._report(leg, action.with_digests)
        return found

    def _report(self, leg: ReceiverLeg, with_digests: bool) -> LegReport:
        spec, places = leg.spec, leg.places
        nbytes = (places.layout.n_chunks + 7) // 8
        present = 0
        for bitmap in leg.landed.values():
            present |= bitmap
        cells = self._node.memory.cells
        contents = []
        for ordinal, place in enumerate(places.places):
            cell = cells.get(place.cell)
            contents.append(cell.content if cell is not None and present >> ordinal & 1 else 0)
        folds = np.zeros(0, np.uint64)
        if spec.verify == "digest":
            epoch = int.from_bytes(leg.group.epoch, "little")
            digests = [
                bound(content, spec.reservation, epoch, spec.leg, place.number) if present >> ordinal & 1 else 0
                for ordinal, (content, place) in enumerate(zip(contents, places.places, strict=True))
            ]
            folds = places.folds(digests)
        return LegReport(
            {lane: bitmap.to_bytes(nbytes, "little") for lane, bitmap in leg.landed.items()},
            folds,
            leg.violations,
            present.bit_count(),
            np.array(contents, np.uint64) if with_digests else None,
        )
