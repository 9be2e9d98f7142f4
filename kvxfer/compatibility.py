"""Whether two pools can exchange pages. Judged by both sides when a session opens."""

from __future__ import annotations

from typing import Literal

from kvxfer.errors import IncompatiblePool
from kvxfer.geometry import Group, PoolGeometry, Region


def compatible(decode: PoolGeometry, prefill: PoolGeometry, *, side: Literal["decode", "prefill"] = "decode") -> None:
    """Raises IncompatiblePool naming the first field that differs.

    A prefill may be one rank of several: it may lack groups and layers of decode's pool, and hold other shard units.
    Whether all ranks together cover decode's pool is for ``shards.plan`` to say. Regions are matched by layer name, in
    any order. Either geometry may come from a peer and is checked for consistency first.

    Args:
        side: whose words the error uses: ``ours`` is this side's value, ``theirs`` the other's.
    """
    check_geometry(decode)
    check_geometry(prefill)
    judge = _Judge(side)
    by_name = {group.name: group for group in decode.groups}
    for theirs in prefill.groups:
        if theirs.name not in by_name:
            judge.refuse("groups", _names(decode), _names(prefill), f"decode has no group {theirs.name!r}")
    for theirs in prefill.groups:
        _compare_groups(judge, by_name[theirs.name], theirs)


class _Judge:
    def __init__(self, side: str) -> None:
        self._side = side

    def refuse(self, field: str, decode: str | int, prefill: str | int, why: str, **where: str) -> None:
        ours, theirs = (decode, prefill) if self._side == "decode" else (prefill, decode)
        error = IncompatiblePool(
            f"the pools cannot exchange pages: {why}; configure both sides alike", field=field, ours=ours, theirs=theirs
        )
        error.details.update(where)
        raise error

    def equal(self, field: str, decode: str | int, prefill: str | int, **where: str) -> None:
        if decode != prefill:
            self.refuse(field, decode, prefill, f"{field} is {decode!r} at decode and {prefill!r} at prefill", **where)


def _compare_groups(judge: _Judge, decode: Group, prefill: Group) -> None:
    where = {"group": decode.name}
    judge.equal("tokens_per_page", decode.tokens_per_page, prefill.tokens_per_page, **where)
    judge.equal("layout", decode.layout, prefill.layout, **where)
    judge.equal("window", _or_none(decode.window), _or_none(prefill.window), **where)
    judge.equal("shard_total", decode.shard_total, prefill.shard_total, **where)
    by_layer = {region.layer: region for region in decode.regions}
    for theirs in prefill.regions:
        ours = by_layer.get(theirs.layer)
        if ours is not None:
            _compare_regions(judge, decode.shard_total, ours, theirs, {**where, "layer": theirs.layer})


def _compare_regions(judge: _Judge, shard_total: int, decode: Region, prefill: Region, where: dict[str, str]) -> None:
    judge.equal("dtype", decode.dtype, prefill.dtype, **where)
    if shard_total == 1:
        judge.equal("page_bytes", decode.page_bytes, prefill.page_bytes, **where)
    judge.equal("unit_bytes", decode.unit_bytes, prefill.unit_bytes, **where)
    judge.equal("runs", decode.runs, prefill.runs, **where)
    if decode.token_rows and prefill.token_rows:
        judge.equal("token_axis", _token_axis(decode), _token_axis(prefill), **where)


def _token_axis(region: Region) -> str:
    """The token axis in terms that do not depend on how many shard units the pool holds."""
    row_bytes = region.units * region.unit_bytes
    if region.token_bytes >= row_bytes:
        return f"{region.token_rows} rows, {region.token_bytes // row_bytes} unit rows a token"
    return f"{region.token_rows // region.units} rows a unit, {region.token_bytes} bytes a token"


def check_geometry(pool: PoolGeometry) -> None:
    """Raises IncompatiblePool (``field`` names what is wrong) for a geometry that contradicts itself."""
    if not pool.groups:
        _broken("groups", "a pool without groups")
    if len({group.name for group in pool.groups}) < len(pool.groups):
        _broken("groups", "two groups of one name")
    for group in pool.groups:
        if not 0 <= group.shard_start < group.shard_stop <= group.shard_total:
            _broken("shard", f"group {group.name!r} holds no shard units, or more than there are")
        if group.n_pages <= 0 or not group.regions:
            _broken("n_pages", f"group {group.name!r} has no pages or no regions")
        if len({region.layer for region in group.regions}) < len(group.regions):
            _broken("layers", f"group {group.name!r} has two regions of one layer name")
        for region in group.regions:
            if group.n_pages * region.page_stride >= 1 << 63 or region.runs >= 1 << 32:
                _broken("page_stride", f"region {region.layer!r} of group {group.name!r} is larger than memory can be")
            _check_region(group, region)


def _check_region(group: Group, region: Region) -> None:
    where = f"region {region.layer!r} of group {group.name!r}"
    if min(region.runs, region.units, region.unit_bytes) <= 0 or (
        region.runs * region.units * region.unit_bytes != region.page_bytes
    ):
        _broken("page_bytes", f"{where}: page_bytes is not runs * units * unit_bytes")
    if region.page_bytes > region.page_stride:
        _broken("page_stride", f"{where}: pages overlap")
    if region.units != group.shard_stop - group.shard_start:
        _broken("units", f"{where}: units differ from the group's shard")
    if region.token_rows and region.token_rows * group.tokens_per_page * region.token_bytes != region.page_bytes:
        _broken("token_axis", f"{where}: tokens do not fill the page")


def _broken(field: str, why: str) -> None:
    raise IncompatiblePool(f"a pool's description contradicts itself: {why}", field=field)


def _names(pool: PoolGeometry) -> str:
    return ", ".join(group.name for group in pool.groups)


def _or_none(value: int | None) -> int | str:
    return "none" if value is None else value
