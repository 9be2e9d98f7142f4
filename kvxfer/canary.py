"""Canaries: markers planted in free pages, so that a drill can see whether a page that was never written gets accepted.

A tool to check the rules with. Nothing that decides about a page ever looks for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import GeometryError, NotReady
from kvxfer.ledger import PageState
from kvxfer.pool import PagePool, page_rows

U64 = npt.NDArray[np.uint64]
_TILE_BYTES = 16
_BATCH_BYTES = 16 << 20


def plant_canaries(pool: PagePool, pages: Any = None, group: str | None = None, *, seed: int = 0) -> U64:
    """Overwrites FREE pages with a pattern that depends on ``seed`` and the page's number; returns those pages (u64).

    Args:
        pages: page numbers; None: all FREE pages.
        group: where they count; may be left out where all groups of the pool share one page numbering.

    Raises:
        NotReady: a page is not FREE, so it is not the caller's to overwrite; nothing was written.
        GeometryError: no such group or page, or the group must be named.
    """
    groups = _groups(pool, group)
    chosen = _choose(pool, groups[0], pages, (PageState.FREE,))
    for at in groups:
        for region in range(len(pool.geometry.groups[at].regions)):
            rows = page_rows(pool, at, region)
            for batch in _batches(chosen[chosen < len(rows)], rows.shape[1]):
                rows[batch] = _pattern(batch, rows.shape[1], seed, pool.id_spaces[at])
    return chosen


def find_canaries(pool: PagePool, pages: Any = None, group: str | None = None, *, seed: int = 0) -> U64:
    """Those of ``pages`` in which any 16 aligned bytes of any region still carry the pattern planted with ``seed``.

    Pages below 16 bytes carry it if all of their bytes do, which bytes of a cache may do by chance if they are few.

    Args:
        pages: page numbers; None: all FREE and READY pages.
        group: as for ``plant_canaries``.

    Raises:
        NotReady: S1: a page is RESERVED or QUARANTINED.
        GeometryError: no such group or page, or the group must be named.
    """
    groups = _groups(pool, group)
    chosen = _choose(pool, groups[0], pages, (PageState.FREE, PageState.READY))
    carrying = np.zeros(len(chosen), np.bool_)
    for at in groups:
        for region in range(len(pool.geometry.groups[at].regions)):
            rows = page_rows(pool, at, region)
            within = np.flatnonzero(chosen < len(rows))
            for batch in _batches(within.astype(np.uint64), rows.shape[1]):
                carrying[batch] |= _carries(rows[chosen[batch]], chosen[batch], seed, pool.id_spaces[at])
    return chosen[carrying]


def _groups(pool: PagePool, group: str | None) -> list[int]:
    if group is not None:
        return [pool.group_index(group)]
    if len(set(pool.id_spaces)) > 1:
        raise GeometryError("the pool has several page numberings: say which group", groups=len(pool.groups))
    return list(range(len(pool.groups)))


def _choose(pool: PagePool, group: int, pages: Any, allowed: tuple[PageState, ...]) -> U64:
    space = pool.id_spaces[group]
    if pages is None:
        return np.flatnonzero(np.isin(pool.ledger.states(space), allowed)).astype(np.uint64)
    array = np.asarray(pages).reshape(-1).astype(np.uint64)
    fits = np.isin(pool.ledger.states_of(space, pages), allowed)
    if not fits.all():
        page = int(array[~fits][0])
        state = pool.ledger.state_of(space, page)
        raise NotReady(f"page {page} is {state.name}: it is not the caller's to look at", page=page, state=state.name)
    return array


def _batches(array: U64, page_bytes: int) -> list[U64]:
    step = max(1, _BATCH_BYTES // page_bytes)
    return [array[start : start + step] for start in range(0, len(array), step)]


def _tiles(pages: U64, seed: int, space: int) -> npt.NDArray[np.uint8]:
    """u8[pages, 16]: two steps of splitmix64 from the page's number."""
    words = np.empty((len(pages), 2), np.uint64)
    start = pages + np.uint64((seed * 0x9E3779B97F4A7C15 + space * 0xD1B54A32D192ED03) % (1 << 64))
    for column in range(2):
        mixed = (start * np.uint64(2) + np.uint64(column + 1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[:, column] = mixed ^ (mixed >> np.uint64(31))
    return words.view(np.uint8)


def _pattern(pages: U64, page_bytes: int, seed: int, space: int) -> npt.NDArray[np.uint8]:
    repeats = -(-page_bytes // _TILE_BYTES)
    return np.tile(_tiles(pages, seed, space), (1, repeats))[:, :page_bytes]


def _carries(rows: npt.NDArray[np.uint8], pages: U64, seed: int, space: int) -> npt.NDArray[np.bool_]:
    tiles = _tiles(pages, seed, space)
    if rows.shape[1] < _TILE_BYTES:
        short: npt.NDArray[np.bool_] = (rows == tiles[:, : rows.shape[1]]).all(axis=1)
        return short
    whole = rows.shape[1] // _TILE_BYTES
    blocks = rows[:, : whole * _TILE_BYTES].reshape(len(rows), whole, _TILE_BYTES)
    carrying: npt.NDArray[np.bool_] = (blocks == tiles[:, None, :]).all(axis=2).any(axis=1)
    return carrying
