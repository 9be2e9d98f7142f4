"""Plain data that says how a pool's bytes are laid out. No tensors, no pointers, no I/O: this is what HELLO carries.

Vocabulary (docs/design.md): a *group* has pages under one numbering; a *region* is one stretch of memory that holds one
group's pages at a fixed stride; a *chunk* is one page's bytes in one region, or one *slice* of them; a slice is a
strided pattern of equal *runs*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SLICE_DTYPE = np.dtype(
    [
        ("group", "<u4"),  # decode's group index
        ("region", "<u4"),  # decode's region index within the group
        ("slice", "<u4"),  # first shard unit of the slice within the region: names it in digests
        ("src_group", "<u4"),  # prefill's group index
        ("src_region", "<u4"),  # prefill's region index within its group
        ("runs", "<u4"),  # number of contiguous runs in the chunk
        ("run_bytes", "<u8"),  # bytes in each run; the chunk has runs * run_bytes bytes
        ("src_offset", "<u8"),  # first run's offset inside prefill's page
        ("src_stride", "<u8"),  # distance between runs inside prefill's page
        ("dst_offset", "<u8"),  # the same inside decode's page
        ("dst_stride", "<u8"),
    ]
)
"""One slice of a leg, 64 bytes, little-endian. A leg's slices are sorted by (group, region, slice)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a sharded tensor axis that a pool holds: units ``[start, stop)`` of ``total`` along ``axis``.

    ``axis`` indexes the tensor's axes as given to ``PageGroup`` (the page axis included). A pool without a shard holds
    everything.
    """

    axis: int
    start: int
    stop: int
    total: int


@dataclass(frozen=True, slots=True)
class Region:
    """One region as both sides describe it to each other.

    A page is ``runs`` rows, each of ``units`` shard units of ``unit_bytes`` bytes, back to back:
    ``page_bytes == runs * units * unit_bytes``. Where the group has no shard: ``runs == units == 1``.
    Tokens, where the axis is known: a page is ``token_rows`` rows of ``tokens_per_page`` tokens, ``token_bytes`` each;
    ``token_rows == 0`` where the token axis is unknown.
    """

    layer: str
    dtype: str
    page_bytes: int
    page_stride: int
    runs: int = 1
    units: int = 1
    unit_bytes: int = 0
    token_rows: int = 0
    token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """One page group. ``tokens_per_page == 0``: a page is not indexed by token (a recurrent state, say)."""

    name: str
    tokens_per_page: int
    n_pages: int
    regions: tuple[Region, ...]
    id_space: int = 0  # groups with the same number share page ids and bytes (overlay)
    layout: str = ""  # opaque; must be equal on both sides
    replicated: bool = False
    window: int | None = None
    shard_start: int = 0
    shard_stop: int = 1
    shard_total: int = 1


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """A whole pool. ``capacity_tokens`` is the longest sequence whose pages fit (0: nothing bounds it, as no group is
    indexed by token or all of those keep only a window)."""

    groups: tuple[Group, ...]
    capacity_tokens: int = 0
    fingerprint: str = field(default="", compare=False)

    def group_index(self, name: str) -> int:
        """Index of the group called ``name``. Raises KeyError."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """Where a region lies in this process: address, size, and the memfd (with offset) behind it, or fd == -1."""

    ptr: int
    nbytes: int
    fd: int = -1
    fd_offset: int = 0
