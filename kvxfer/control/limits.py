"""S7: bounds on everything a peer may send, fixed before the first byte of it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.geometry import SLICE_DTYPE, PoolGeometry

_FRAME_OVERHEAD = 64 * 1024
MAX_REQUEST_ID_BYTES = 512
MAX_TEXT_BYTES = 1024
MAX_DIGESTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What one control frame may contain. Immutable; derived from the pool with ``for_pool``.

    Attributes:
        max_pages: pages in one RESERVE, over all its groups.
        max_slices: slices of one leg.
        max_groups: groups of a pool, and of a reservation.
        max_regions: regions of a pool, over all groups.
        max_lanes: lanes of a leg or session.
    """

    max_pages: int = 1 << 16
    max_slices: int = 1 << 14
    max_groups: int = 64
    max_regions: int = 1 << 14
    max_lanes: int = 64
    max_frame_bytes: int = field(init=False)
    max_bin_bytes: int = field(init=False)
    max_array: int = field(init=False)
    max_geometry_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        geometry = 4096 * self.max_groups + 512 * self.max_regions
        slices = SLICE_DTYPE.itemsize * self.max_slices
        reserve = 16 * self.max_pages + slices
        set_derived = object.__setattr__
        set_derived(self, "max_geometry_bytes", geometry)
        set_derived(self, "max_bin_bytes", max(8 * self.max_pages, slices, 8 * MAX_DIGESTS, geometry))
        set_derived(self, "max_frame_bytes", _FRAME_OVERHEAD + max(reserve, geometry, 8 * MAX_DIGESTS))
        set_derived(self, "max_array", max(32, self.max_groups, self.max_lanes))

    @classmethod
    def for_pool(cls, geometry: PoolGeometry) -> Limits:
        """Room for a reservation of any pages of ``geometry``, and for a somewhat larger one.

        The head-room lets the core refuse a reservation that is too large with both numbers (S4), where the codec could
        only drop it.
        """
        groups = len(geometry.groups)
        pages = sum(group.n_pages for group in geometry.groups)
        regions = sum(len(group.regions) for group in geometry.groups)
        units = max((group.shard_total for group in geometry.groups), default=1)
        return cls(
            max_pages=max(1 << 16, 2 * pages),
            # A leg has at most one slice for each shard unit of each region; beyond the floor that bound is never near.
            max_slices=max(1 << 12, min(regions * max(units, 1), 1 << 18)),
            max_groups=max(16, groups),
            max_regions=max(1 << 12, 2 * regions),
        )
