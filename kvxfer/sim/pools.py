"""Geometries of the simulated pools, and each leg's chunks as places in both sides' memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvxfer.geometry import Group, PoolGeometry, Region
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import ReserveGroup
from kvxfer.sim.scenario import TOKENS_PER_PAGE, Scenario

LAYERS = 2
KV = 0
STATE = 1
UNIT_BYTES = 16
STATE_PAGES_PART = 3
"""A pool has one page of recurrent state for so many pages of tokens."""


def decode_geometry(plan: Scenario) -> PoolGeometry:
    return _geometry(plan, plan.decode_pages, range(LAYERS), (0, plan.ranks))


def prefill_geometry(plan: Scenario, rank: int) -> PoolGeometry:
    """What one rank of an instance holds. ``layers``: every ranks-th layer; ``heads``: one unit of every page;
    ``replicated``: everything, so that one rank is elected and the others have nothing to write."""
    if plan.sharding == "heads":
        return _geometry(plan, plan.prefill_pages, range(LAYERS), (rank, rank + 1))
    if plan.sharding == "layers" and plan.ranks > 1:
        # With more ranks than layers the last one holds a state only, of which it is not the elected writer.
        return _geometry(plan, plan.prefill_pages, range(rank, LAYERS, plan.ranks), (0, 1))
    return _geometry(plan, plan.prefill_pages, range(LAYERS), (0, 1))


def _geometry(plan: Scenario, pages: int, layers: Sequence[int], units: tuple[int, int]) -> PoolGeometry:
    start, stop = units if plan.sharding == "heads" else (0, 1)
    total = plan.ranks if plan.sharding == "heads" else 1
    held = stop - start
    row = held * UNIT_BYTES
    regions = tuple(
        Region(f"layer{n}", "u8", row, row, units=held, unit_bytes=UNIT_BYTES, token_rows=held, token_bytes=1)
        for n in layers
    )
    groups = []
    if regions:
        replicated = plan.sharding == "replicated"
        groups.append(Group("kv", TOKENS_PER_PAGE, pages, regions, 0, "", replicated, None, start, stop, total))
    state = Region("state", "u8", UNIT_BYTES, UNIT_BYTES, units=1, unit_bytes=UNIT_BYTES)
    groups.append(Group("state", 0, max(2, pages // STATE_PAGES_PART), (state,), len(groups), "", True))
    return PoolGeometry(tuple(groups), pages * TOKENS_PER_PAGE if regions else 0)


class Place(NamedTuple):
    """One chunk of a leg. ``number`` is what its digest is bound to; ``cell`` names decode's memory, ``source``
    prefill's (group, region, logical page); ``truth`` is what the page must contain, in content.page_content's
    words."""

    number: int
    cell: int
    page: tuple[int, int]  # decode's group and pool page
    source: tuple[int, int, int]
    unit: int  # in units of the whole axis
    units: int
    truth: tuple[int, int, int]


class LegPlaces:
    """A leg's layout with the place of every chunk."""

    __slots__ = ("layout", "places")

    def __init__(self, decode: PoolGeometry, slices: bytes, groups: Sequence[ReserveGroup]) -> None:
        self.layout = LegLayout.of(decode.groups, slices, groups)
        self.places: list[Place] = []
        for group in self.layout.groups:
            geometry = decode.groups[group.group]
            rows = self.layout.table.slices[group.first_slice : group.first_slice + group.n_slices].tolist()
            for logical, pool_page in zip(group.logical.tolist(), group.pool_pages.tolist(), strict=True):
                for row in rows:
                    region, unit, units = row[1], row[2], row[5] * row[6] // UNIT_BYTES
                    layer = LAYERS if geometry.name == "state" else int(geometry.regions[region].layer[5:])
                    at = ((group.group * 8 + region) * 8 + unit) * 4096
                    self.places.append(
                        Place(
                            at + logical,
                            at + pool_page,
                            (group.group, pool_page),
                            (row[3], row[4], logical),
                            geometry.shard_start + unit,
                            units,
                            (group.group, layer, logical),
                        )
                    )

    def folds(self, digests: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Folds over bound digests by chunk ordinal."""
        from kvxfer.sim.content import fold

        layout = self.layout
        found = []
        for number in range(layout.n_folds):
            chunks = layout.fold_chunks(number)
            found.append(fold(digests[chunks.start : chunks.stop]))
        return np.array(found, np.uint64)
