"""Pools in memory of our own, which peers on the same host can map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvxfer.dtypes import itemsize_of
from kvxfer.errors import GeometryError
from kvxfer.geometry import Shard
from kvxfer.memory import Memory
from kvxfer.page_group import PageGroup

if TYPE_CHECKING:
    from kvxfer._native import SharedMemory

_REGION_ALIGNMENT = 4096
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One page group to allocate. Each layer is one tensor ``[pages, *page_shape]``; axes count from the page axis, 0.

    Attributes:
        name: the group's name.
        layers: names of the layers, or how many there are ("0", "1", ...).
        page_shape: shape of one page in one layer, in elements.
        dtype: element type by name; ``bfloat16`` and the ``float8`` types are stored as unsigned integers in NumPy.
        tokens_per_page: tokens a page holds; 0 or None: not indexed by token.
        token_axis, shard, window, replicated, layout: as for ``PageGroup``.
        pages: pages of this group, where it has another number than the rest of the pool.
    """

    name: str
    layers: int | Sequence[str]
    page_shape: tuple[int, ...]
    dtype: str
    tokens_per_page: int | None
    token_axis: int | None = None
    shard: Shard | None = None
    window: int | None = None
    replicated: bool = False
    layout: str = ""
    pages: int | None = None

    def layer_names(self) -> tuple[str, ...]:
        """Raises GeometryError where there are none."""
        names = tuple(map(str, range(self.layers))) if isinstance(self.layers, int) else tuple(self.layers)
        if not names or isinstance(self.layers, str):
            raise GeometryError("a group needs at least one layer: a number above 0, or names", group=self.name)
        return names


def allocate_groups(
    specs: Sequence[GroupSpec], pages: int | None, huge_pages: bool
) -> tuple[SharedMemory, list[PageGroup]]:
    """One sealed memfd with every layer of every group, and the groups over it.

    Raises:
        GeometryError: a spec without pages, layers or bytes.
        NativeError: the system has not so much memory to give.
    """
    from kvxfer._native import SharedMemory

    if not specs:
        raise GeometryError("a pool needs at least one group")
    offsets: list[list[int]] = []
    total = 0
    for spec in specs:
        n_pages, page_bytes = _pages_of(spec, pages), _page_bytes_of(spec)
        starts = []
        for _ in spec.layer_names():
            starts.append(total)
            total += _round_up(n_pages * page_bytes, _REGION_ALIGNMENT)
        offsets.append(starts)
    shared = SharedMemory(_round_up(total, _HUGE_PAGE_BYTES if huge_pages else _REGION_ALIGNMENT), "kvxfer", huge_pages)
    groups = []
    for spec, starts in zip(specs, offsets, strict=True):
        page_bytes = _page_bytes_of(spec)
        nbytes = _pages_of(spec, pages) * page_bytes
        groups.append(
            PageGroup(
                spec.name,
                [
                    Memory(shared.ptr + at, nbytes, page_bytes, "cpu", spec.dtype, tuple(spec.page_shape))
                    for at in starts
                ],
                tokens_per_page=spec.tokens_per_page,
                token_axis=spec.token_axis,
                layers=spec.layer_names(),
                window=spec.window,
                replicated=spec.replicated,
                layout=spec.layout,
                shard=spec.shard,
            )
        )
    return shared, groups


def _pages_of(spec: GroupSpec, pages: int | None) -> int:
    n_pages = pages if spec.pages is None else spec.pages
    if n_pages is None or n_pages <= 0:
        raise GeometryError("say how many pages: pages= of the pool or of the group, above 0", group=spec.name)
    return n_pages


def _page_bytes_of(spec: GroupSpec) -> int:
    page_bytes = prod(spec.page_shape) * itemsize_of(spec.dtype)
    if page_bytes <= 0 or min(spec.page_shape, default=0) <= 0:
        raise GeometryError("page_shape must have at least one axis, and all of them elements", group=spec.name)
    return page_bytes


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
