"""Which groups lie over the same bytes, and may: S5 goes by byte, page ids must follow."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import GeometryError
from kvxfer.intervals import Comb, overlaps
from kvxfer.page_group import PageGroup


def id_spaces(groups: Sequence[PageGroup], n_pages: Sequence[int], shared_ids: bool) -> list[int]:
    """Id space of each group, numbered in order of appearance. Groups that have bytes in common share one.

    Raises:
        GeometryError: regions of one group overlap, groups overlap without ``shared_ids``, or not page by page.
    """
    combs, where = [], []
    for index, group in enumerate(groups):
        for region, memory in zip(group.regions, group.memory, strict=True):
            combs.append(Comb(memory.ptr, region.page_stride, region.page_bytes, n_pages[index]))
            where.append((index, region.layer))
    root = list(range(len(groups)))

    def find(group: int) -> int:
        while root[group] != group:
            group = root[group]
        return group

    for overlap in overlaps(combs):
        (first, layer), (second, other_layer) = where[overlap.first], where[overlap.second]
        names = (
            f"page {overlap.page} of {groups[first].name!r}, layer {layer!r}, and page {overlap.other_page} of "
            f"{groups[second].name!r}, layer {other_layer!r}, have bytes in common"
        )
        if first == second:
            raise GeometryError(f"{names}: regions of one group must not overlap")
        if not shared_ids:
            raise GeometryError(f"{names}; pass shared_ids=True if the groups share page ids, or separate them")
        if not overlap.aligned:
            raise GeometryError(f"{names}: groups that share ids must overlap page by page, each at the same number")
        root[find(second)] = find(first)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(index), len(numbers)) for index in range(len(groups))]
