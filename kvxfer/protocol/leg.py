"""How the chunks and folds of one leg are numbered, and the checks that its slices and pages stay inside the pool.

Both sides build a ``LegLayout`` from the same RESERVE, and the native cores count in the same way
(native/lanes/record.hpp). Groups are taken in order of group index; within a group page by page, within a page slice
by slice:

    ordinal(group, page index k, slice ordinal s) = base(group) + k * n_slices(group) + s

Objects here are immutable once built and safe to share between threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ProtocolViolation
from kvxfer.geometry import SLICE_DTYPE, Group
from kvxfer.protocol.messages import ReserveGroup

U64 = npt.NDArray[np.uint64]
_U64 = np.dtype("<u8")

FOLD_TOKENS = 64
"""Pages with fewer tokens share a fold, so that the record of a long request stays small."""

MAX_TOKENS = 1 << 48
MAX_SLICES = 1 << 20


class Chunk(NamedTuple):
    """Where one chunk lies. ``slice`` is its shard unit, ``logical`` the sequence's page, ``pool_page`` decode's."""

    group: int
    region: int
    slice: int
    logical: int
    pool_page: int


@dataclass(frozen=True, slots=True)
class LegGroup:
    """One group of a leg. ``logical`` and ``pool_pages`` are u64 arrays of equal length."""

    group: int
    tokens_per_page: int
    first_token: int
    n_tokens: int
    logical: U64
    pool_pages: U64
    first_slice: int
    n_slices: int
    base: int
    pages_per_fold: int
    first_fold: int
    n_folds: int

    @property
    def n_pages(self) -> int:
        return len(self.logical)

    @property
    def n_chunks(self) -> int:
        return len(self.logical) * self.n_slices


class SliceTable:
    """The slices of a leg, checked once against the geometry; reservations between the same peers share one.

    Attributes:
        raw: the ``SLICE_DTYPE`` records as they travel.
        slices: the same as a structured array.
        spans: group index -> (index of its first slice, number of slices), groups with slices only.
    """

    __slots__ = ("raw", "slices", "spans")

    def __init__(self, groups: Sequence[Group], raw: bytes, source: Sequence[Group] | None = None) -> None:
        """``groups`` is decode's geometry; ``source``, where given, prefill's. Raises ProtocolViolation."""
        if len(raw) % SLICE_DTYPE.itemsize or len(raw) > MAX_SLICES * SLICE_DTYPE.itemsize:
            raise ProtocolViolation("slices of a leg have an impossible length", nbytes=len(raw))
        self.raw = raw
        self.slices = np.frombuffer(raw, dtype=SLICE_DTYPE)
        self.spans: dict[int, tuple[int, int]] = {}
        before = (-1, -1, -1)
        for index, row in enumerate(self.slices.tolist()):
            group, region, unit, src_group, src_region, runs, run_bytes, *extents = row
            src_offset, src_stride, dst_offset, dst_stride = extents
            if (group, region, unit) <= before:
                raise ProtocolViolation("slices are not sorted and distinct", slice=index)
            before = (group, region, unit)
            _check_extent(groups, "decode", index, group, region, runs, run_bytes, dst_offset, dst_stride)
            if runs > 1 and dst_stride < run_bytes:
                raise ProtocolViolation("runs of a slice overlap", slice=index, stride=dst_stride, run_bytes=run_bytes)
            if source is not None:
                _check_extent(source, "prefill", index, src_group, src_region, runs, run_bytes, src_offset, src_stride)
            first, count = self.spans.get(group, (index, 0))
            self.spans[group] = (first, count + 1)


def _check_extent(
    groups: Sequence[Group],
    side: str,
    index: int,
    group: int,
    region: int,
    runs: int,
    run_bytes: int,
    offset: int,
    stride: int,
) -> None:
    if group >= len(groups) or region >= len(groups[group].regions):
        raise ProtocolViolation(f"slice names a region {side} does not have", slice=index, group=group, region=region)
    page_bytes = groups[group].regions[region].page_bytes
    if runs < 1 or run_bytes < 1 or offset + (runs - 1) * stride + run_bytes > page_bytes:
        raise ProtocolViolation(
            f"slice lies outside {side}'s page", slice=index, group=group, region=region, page_bytes=page_bytes
        )


class LegLayout:
    """Numbering of one leg's chunks and folds.

    Attributes:
        table: the leg's slices.
        groups: one ``LegGroup`` for each group of the RESERVE, by group index.
        n_chunks, n_folds: totals over all groups.
        total_bytes: bytes the leg is to deliver.
    """

    __slots__ = ("_bases", "_folds", "groups", "n_chunks", "n_folds", "table")

    def __init__(
        self, geometry: Sequence[Group], table: SliceTable, groups: Sequence[ReserveGroup], *, checked: bool = False
    ) -> None:
        """``geometry`` is decode's groups. Raises ProtocolViolation for pages or token ranges that cannot be.

        ``checked``: ``page_fault`` has been asked about these very pages before.
        """
        self.table = table
        built: list[LegGroup] = []
        base = fold = 0
        before = -1
        for reserve in groups:
            if not before < reserve.group < len(geometry):
                raise ProtocolViolation("groups are not sorted, distinct and known", group=reserve.group)
            before = reserve.group
            group = geometry[before]
            if len(reserve.logical) % 8 or len(reserve.pool_pages) % 8:
                raise ProtocolViolation("page list is not whole 64-bit numbers", group=before)
            logical = np.frombuffer(reserve.logical, _U64)
            pool_pages = np.frombuffer(reserve.pool_pages, _U64)
            fault = None
            if not checked:
                fault = page_fault(group, reserve.first_token, reserve.n_tokens, logical, pool_pages)
            if fault is not None:
                raise ProtocolViolation(fault, group=before)
            first_slice, n_slices = table.spans.get(before, (0, 0))
            pages_per_fold = max(1, FOLD_TOKENS // group.tokens_per_page) if group.tokens_per_page else 1
            n_folds = -(-len(logical) // pages_per_fold) if n_slices else 0
            built.append(
                LegGroup(
                    before, group.tokens_per_page, reserve.first_token, reserve.n_tokens, logical, pool_pages,
                    first_slice, n_slices, base, pages_per_fold, fold, n_folds,
                )
            )  # fmt: skip
            base += len(logical) * n_slices
            fold += n_folds
        if not table.spans.keys() <= {group.group for group in built}:
            raise ProtocolViolation("slices of a group without pages in the reservation")
        self.groups = tuple(built)
        self.n_chunks = base
        self.n_folds = fold
        self._bases = [group.base for group in built]
        self._folds = [group.first_fold for group in built]

    @classmethod
    def of(
        cls,
        geometry: Sequence[Group],
        slices: bytes,
        groups: Sequence[ReserveGroup],
        source: Sequence[Group] | None = None,
    ) -> LegLayout:
        """Checks slices and groups of one RESERVE in one go. Raises ProtocolViolation."""
        return cls(geometry, SliceTable(geometry, slices, source), groups)

    @property
    def expected(self) -> int:
        """Bitmap of every chunk of the leg, as an integer: bit k is chunk k."""
        return (1 << self.n_chunks) - 1

    @property
    def expected_bitmap(self) -> bytes:
        """The same as it travels: bit k is ``1 << k % 8`` of byte ``k // 8``, padded to whole bytes only."""
        return self.expected.to_bytes((self.n_chunks + 7) // 8, "little")

    @property
    def total_bytes(self) -> int:
        slices = self.table.slices
        sizes = slices["runs"].astype(np.uint64) * slices["run_bytes"]
        return sum(g.n_pages * int(sizes[g.first_slice : g.first_slice + g.n_slices].sum()) for g in self.groups)

    def ordinal(self, group: int, page_index: int, slice_ordinal: int) -> int:
        """Number of a chunk by group index, index into the group's page list and slice ordinal within the group."""
        found = next(g for g in self.groups if g.group == group)
        return found.base + page_index * found.n_slices + slice_ordinal

    def locate(self, ordinal: int) -> Chunk:
        """The chunk with this number. Raises IndexError."""
        if not 0 <= ordinal < self.n_chunks:
            raise IndexError(ordinal)
        group = self.groups[bisect_right(self._bases, ordinal) - 1]
        page, slice_ordinal = divmod(ordinal - group.base, group.n_slices)
        row = self.table.slices[group.first_slice + slice_ordinal]
        return Chunk(
            group.group, int(row["region"]), int(row["slice"]), int(group.logical[page]), int(group.pool_pages[page])
        )

    def fold_group(self, fold: int) -> LegGroup:
        """The group that fold number ``fold`` belongs to. Raises IndexError."""
        if not 0 <= fold < self.n_folds:
            raise IndexError(fold)
        return self.groups[bisect_right(self._folds, fold) - 1]

    def fold_page_indices(self, fold: int) -> range:
        """Indices into the group's page list that a fold covers."""
        group = self.fold_group(fold)
        first = (fold - group.first_fold) * group.pages_per_fold
        return range(first, min(first + group.pages_per_fold, group.n_pages))

    def fold_chunks(self, fold: int) -> range:
        """Ordinals of the chunks that a fold covers; they follow each other."""
        group = self.fold_group(fold)
        pages = self.fold_page_indices(fold)
        return range(group.base + pages.start * group.n_slices, group.base + pages.stop * group.n_slices)

    def pages_of(self, chunks: int) -> list[tuple[LegGroup, U64]]:
        """Groups and page indices (u64, rising) that have at least one chunk in the bitmap ``chunks``."""
        if not chunks:
            return []
        packed = np.frombuffer(chunks.to_bytes((self.n_chunks + 7) // 8, "little"), dtype=np.uint8)
        bits = np.unpackbits(packed, count=self.n_chunks, bitorder="little")
        found = []
        for group in self.groups:
            if group.n_chunks:
                own = bits[group.base : group.base + group.n_chunks].reshape(group.n_pages, group.n_slices)
                indices = np.flatnonzero(own.any(axis=1)).astype(np.uint64)
                if len(indices):
                    found.append((group, indices))
        return found


def page_fault(group: Group, first_token: int, n_tokens: int, logical: U64, pool_pages: U64) -> str | None:
    """What is wrong with the pages of one group, or None. Asked before anything is sized by the answer."""
    count = len(logical)
    if count != len(pool_pages):
        return f"{count} logical pages but {len(pool_pages)} pool pages"
    if count > group.n_pages:
        return f"{count} pages do not fit a group of {group.n_pages} pages"
    if not (0 <= first_token <= MAX_TOKENS and 0 <= n_tokens <= MAX_TOKENS):
        return f"token range [{first_token}, +{n_tokens}) is out of bounds"
    if count == 0:
        return None
    if count > 1:
        if not bool((logical[1:] > logical[:-1]).all()):
            return "logical pages are not sorted and distinct"
        if int(pool_pages.max()) >= group.n_pages:
            return f"pool page {int(pool_pages.max())} is outside a group of {group.n_pages} pages"
        seen = np.zeros(group.n_pages, dtype=np.bool_)
        seen[pool_pages] = True
        if int(np.count_nonzero(seen)) != count:
            return "a pool page is named twice"
    elif int(pool_pages[0]) >= group.n_pages:
        return f"pool page {int(pool_pages[0])} is outside a group of {group.n_pages} pages"
    if group.tokens_per_page:
        end = first_token + n_tokens
        if int(logical[-1]) * group.tokens_per_page >= end:
            return f"logical page {int(logical[-1])} begins at or after the last token ({end})"
        if (int(logical[0]) + 1) * group.tokens_per_page <= first_token:
            return f"logical page {int(logical[0])} ends before the first token ({first_token})"
    return None
