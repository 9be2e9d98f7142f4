"""Which bytes of a decode pool come from which prefill rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.compatibility import compatible
from kvxfer.errors import IncompatiblePool
from kvxfer.geometry import SLICE_DTYPE, Group, PoolGeometry, Region

Slices = npt.NDArray[np.void]


class _Holder:
    """A prefill rank's copy of some units of one region."""

    __slots__ = ("group", "group_index", "leg", "region", "region_index")

    def __init__(self, leg: int, group_index: int, group: Group, region_index: int) -> None:
        self.leg = leg
        self.group_index = group_index
        self.group = group
        self.region_index = region_index
        self.region = group.regions[region_index]

    def holds(self, unit: int) -> bool:
        return self.group.shard_start <= unit < self.group.shard_stop


def plan(decode: PoolGeometry, prefills: Sequence[PoolGeometry]) -> list[Slices]:
    """Slices of each leg, one array of ``geometry.SLICE_DTYPE`` a prefill, sorted by (group, region, slice).

    Every byte of every page of decode is in exactly one slice of one leg. Where several prefills hold the same bytes
    (replicated groups, grouped heads fewer than ranks) one of them is elected, so that the legs carry about as much; a
    leg may end up empty. The result depends on the arguments only.

    Raises:
        IncompatiblePool: a prefill is not compatible with decode, or together they do not cover its pool.
    """
    for prefill in prefills:
        compatible(decode, prefill)
    holders = _holders(prefills)
    legs: list[list[tuple[int, ...]]] = [[] for _ in prefills]
    load = [0] * len(prefills)
    for group_index, group in enumerate(decode.groups):
        for region_index, region in enumerate(group.regions):
            having = holders.get((group.name, region.layer), [])
            _check_replicas(group, region, having)
            for first, last, holder in _elect(group, region, having, load):
                legs[holder.leg].append(_slice(group_index, group, region_index, region, first, last, holder))
    return [np.array(leg, SLICE_DTYPE) for leg in legs]


def _holders(prefills: Sequence[PoolGeometry]) -> dict[tuple[str, str], list[_Holder]]:
    found: dict[tuple[str, str], list[_Holder]] = {}
    for leg, prefill in enumerate(prefills):
        for group_index, group in enumerate(prefill.groups):
            for region_index, region in enumerate(group.regions):
                holder = _Holder(leg, group_index, group, region_index)
                found.setdefault((group.name, region.layer), []).append(holder)
    return found


def _check_replicas(group: Group, region: Region, having: Sequence[_Holder]) -> None:
    """Two ranks with the whole of an unsharded region either hold the same bytes, or forgot to say which part they
    hold: guessing would hand a rank the heads of another."""
    if group.shard_total == 1 and len(having) > 1 and not all(holder.group.replicated for holder in having):
        raise IncompatiblePool(
            f"{len(having)} prefill ranks hold layer {region.layer!r} of group {group.name!r}; declare shard= if "
            "each holds a part, or replicated=True if all hold the same bytes",
            field="shard",
            ours="one writer",
            theirs=f"prefill ranks {', '.join(str(holder.leg) for holder in having)}",
            group=group.name,
            layer=region.layer,
        )


def _elect(group: Group, region: Region, having: Sequence[_Holder], load: list[int]) -> list[tuple[int, int, _Holder]]:
    """(first unit, unit after the last, who writes them), ascending, in units of the whole axis."""
    bounds = {group.shard_start, group.shard_stop}
    for holder in having:
        bounds.update(
            unit
            for unit in (holder.group.shard_start, holder.group.shard_stop)
            if group.shard_start < unit < group.shard_stop
        )
    edges = sorted(bounds)
    elected: list[tuple[int, int, _Holder]] = []
    for first, last in zip(edges, edges[1:], strict=False):
        candidates = [holder for holder in having if holder.holds(first)]
        if not candidates:
            raise _uncovered(group, region, having, first, last)
        nbytes = region.runs * (last - first) * region.unit_bytes
        chosen = min(candidates, key=lambda holder: (load[holder.leg], holder.leg))
        load[chosen.leg] += nbytes
        if elected and elected[-1][2] is chosen:
            elected[-1] = (elected[-1][0], last, chosen)
        else:
            elected.append((first, last, chosen))
    return elected


def _slice(
    group_index: int, group: Group, region_index: int, region: Region, first: int, last: int, holder: _Holder
) -> tuple[int, ...]:
    runs, run_bytes = region.runs, (last - first) * region.unit_bytes
    src_stride = holder.region.units * region.unit_bytes
    dst_stride = region.units * region.unit_bytes
    if run_bytes == src_stride == dst_stride:
        runs, run_bytes = 1, runs * run_bytes
        src_stride = dst_stride = run_bytes
    return (
        group_index,
        region_index,
        first - group.shard_start,
        holder.group_index,
        holder.region_index,
        runs,
        run_bytes,
        (first - holder.group.shard_start) * region.unit_bytes,
        src_stride,
        (first - group.shard_start) * region.unit_bytes,
        dst_stride,
    )


def _uncovered(group: Group, region: Region, having: Sequence[_Holder], first: int, last: int) -> IncompatiblePool:
    if having:
        what = f"shard units [{first}, {last}) of layer {region.layer!r}"
        held = ", ".join(f"[{holder.group.shard_start}, {holder.group.shard_stop})" for holder in having)
        field, ours, theirs = "shard", f"[{first}, {last})", held
    else:
        what = f"layer {region.layer!r}"
        field, ours, theirs = "layers", region.layer, "none of the prefill ranks"
    return IncompatiblePool(
        f"no prefill rank holds {what} of group {group.name!r}; list every rank of the prefill, and name groups and "
        "layers alike on both sides",
        field=field,
        ours=ours,
        theirs=theirs,
        group=group.name,
        layer=region.layer,
    )
