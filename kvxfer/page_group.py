"""PageGroup: turns an engine's tensors into regions of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from kvxfer.errors import GeometryError
from kvxfer.geometry import Region, RegionMemory, Shard
from kvxfer.tensors import Strided, describe


class PageGroup:
    """Tensors that share one page numbering.

    A tensor becomes one region, or several: an axis that is laid out around the page axis (``2`` in
    ``[2, pages, ...]``, ``layers`` in one tensor for all of them) gives one region for each of its indices. What lies
    inside a page must be contiguous.

    Args:
        name: the group's name; groups of two pools are matched by it.
        regions: a tensor, an array or ``Memory``, or a sequence of them. All have the same pages.
        tokens_per_page: tokens a page holds; 0 or None: a page is not indexed by token (one request's state, say).
        page_axis: the axis of each tensor that counts pages.
        token_axis: the axis that counts tokens inside a page. None where pages are opaque: nothing in them is then
            zeroed or cut by token.
        layers: names of the regions, by which two pools match them: one a tensor (several regions of one tensor, or
            several tensors of one name, get ``name.0``, ``name.1``, ...), or one a region, or, for a single tensor, one
            an index of its first outer axis. None: numbers in the same scheme.
        window: tokens that attention looks back, where the engine keeps no more pages than that needs.
        replicated: every rank holds the same bytes; one of them writes.
        layout: opaque; must be equal on both sides.
        shard: the part of a sharded axis that these tensors hold.

    Attributes:
        n_pages: pages that every tensor has.
        regions: how each region is described to peers.
        memory: where each region lies.
        layer_of: for each region the name it was given, before numbering.

    Raises:
        GeometryError: the tensors do not make equal, contiguous pages.
    """

    def __init__(
        self,
        name: str,
        regions: Any,
        *,
        tokens_per_page: int | None,
        page_axis: int = 0,
        token_axis: int | None = None,
        layers: Sequence[str] | None = None,
        window: int | None = None,
        replicated: bool = False,
        layout: str = "",
        shard: Shard | None = None,
    ) -> None:
        if not name or not isinstance(name, str):
            raise GeometryError("a page group needs a name")
        if tokens_per_page is not None and not 0 <= tokens_per_page < 1 << 32:
            raise GeometryError(
                "tokens_per_page must be 0 (not indexed by token) or more", tokens_per_page=tokens_per_page
            )
        if window is not None and (window <= 0 or not tokens_per_page):
            raise GeometryError(
                "a window is a number of tokens above 0, in a group that is indexed by token", group=name
            )
        if token_axis is not None and not tokens_per_page:
            raise GeometryError("token_axis needs tokens_per_page: this group is not indexed by token", group=name)
        if shard is not None and not 0 <= shard.start < shard.stop <= shard.total:
            raise GeometryError(
                "a shard must hold units [start, stop) of total, at least one", group=name, shard=str(shard)
            )
        self.name = name
        self.tokens_per_page = tokens_per_page or 0
        self.window = window
        self.replicated = replicated
        self.layout = layout
        self.shard = shard

        tensors = list(regions) if isinstance(regions, (list, tuple)) else [regions]
        bare = not isinstance(regions, (list, tuple))
        if not tensors:
            raise GeometryError("a page group needs at least one region", group=name)
        pieces: list[list[_Piece]] = []
        for index, tensor in enumerate(tensors):
            try:
                pieces.append(list(_split(describe(tensor), page_axis, token_axis, self.tokens_per_page, shard)))
            except GeometryError as error:
                error.details.update(group=name, tensor=index)
                raise
        named = _names(name, pieces, layers, bare)
        self.n_pages = _common_pages(name, pieces)
        flat = [piece for tensor_pieces in pieces for piece in tensor_pieces]
        self.regions = tuple(piece.region(full) for piece, (full, _) in zip(flat, named, strict=True))
        self.memory = tuple(piece.memory() for piece in flat)
        self.layer_of = tuple(base for _, base in named)
        self._keepalive = tuple(piece.keepalive for piece in flat)

    def __repr__(self) -> str:
        return (
            f"PageGroup({self.name!r}, {len(self.regions)} regions, {self.n_pages} pages, "
            f"tokens_per_page={self.tokens_per_page})"
        )


class _Piece:
    """One region before it has a name."""

    __slots__ = (
        "dtype",
        "keepalive",
        "n_pages",
        "outer_index",
        "page_bytes",
        "page_stride",
        "ptr",
        "runs",
        "token_bytes",
        "token_rows",
        "unit_bytes",
        "units",
    )

    def __init__(self, tensor: Strided, outer_index: tuple[int, ...], ptr: int, n_pages: int, page_stride: int) -> None:
        self.dtype = tensor.dtype
        self.keepalive = tensor.keepalive
        self.outer_index = outer_index
        self.ptr = ptr
        self.n_pages = n_pages
        self.page_stride = page_stride
        self.page_bytes = self.unit_bytes = 0
        self.runs = self.units = 1
        self.token_rows = self.token_bytes = 0

    def region(self, layer: str) -> Region:
        return Region(
            layer=layer,
            dtype=self.dtype,
            page_bytes=self.page_bytes,
            page_stride=self.page_stride,
            runs=self.runs,
            units=self.units,
            unit_bytes=self.unit_bytes,
            token_rows=self.token_rows,
            token_bytes=self.token_bytes,
        )

    def memory(self) -> RegionMemory:
        return RegionMemory(self.ptr, (self.n_pages - 1) * self.page_stride + self.page_bytes)


def _split(
    tensor: Strided, page_axis: int, token_axis: int | None, tokens_per_page: int, shard: Shard | None
) -> Iterator[_Piece]:
    shape, strides = tensor.shape, tensor.strides
    page_axis = _axis(page_axis, len(shape), "page_axis")
    n_pages, page_stride = shape[page_axis], strides[page_axis]
    others = [axis for axis in range(len(shape)) if axis != page_axis and shape[axis] > 1]
    if any(strides[axis] == 0 for axis in others) or (n_pages > 1 and page_stride == 0):
        raise GeometryError("a region is broadcast: several of its elements are the same bytes", strides=strides)
    # The step of a single page may equal that of the axis around it: [2, 1, ...] is two regions of one page.
    if page_stride == 0:
        outer = [axis for axis in others if axis < page_axis]
    else:
        outer = [a for a in others if strides[a] > page_stride or (strides[a] == page_stride and a < page_axis)]
    inner = [axis for axis in others if axis not in outer]
    page_bytes = _contiguous_bytes(tensor, inner)
    if n_pages == 1:
        page_stride = max(page_stride, page_bytes)
    if page_bytes > page_stride:
        raise GeometryError(
            "pages overlap: a page has more bytes than the step to the next one; is page_axis right?",
            page_axis=page_axis,
            shape=shape,
            strides=strides,
        )
    runs, units, unit_bytes = 1, 1, page_bytes
    if shard is not None:
        axis = _inner_axis(shard.axis, "the shard's axis", shape, page_axis, outer)
        units = shard.stop - shard.start
        if shape[axis] % units:
            raise GeometryError(
                f"the shard holds {units} units, but its axis has {shape[axis]} elements, which is no multiple of that",
                shape=shape,
            )
        row_bytes = _span(tensor, axis, inner)
        runs, unit_bytes = page_bytes // row_bytes, row_bytes // units
    token_rows = token_bytes = 0
    if token_axis is not None:
        axis = _inner_axis(token_axis, "token_axis", shape, page_axis, outer)
        if shape[axis] != tokens_per_page:
            raise GeometryError(
                f"token_axis has {shape[axis]} elements, but a page holds {tokens_per_page} tokens",
                shape=shape,
                tokens_per_page=tokens_per_page,
            )
        row_bytes = _span(tensor, axis, inner)
        token_rows, token_bytes = page_bytes // row_bytes, row_bytes // tokens_per_page
    for index in product(*(range(shape[axis]) for axis in outer)):
        ptr = tensor.ptr + sum(i * strides[axis] for i, axis in zip(index, outer, strict=True))
        piece = _Piece(tensor, index, ptr, n_pages, page_stride)
        piece.page_bytes, piece.runs, piece.units, piece.unit_bytes = page_bytes, runs, units, unit_bytes
        piece.token_rows, piece.token_bytes = token_rows, token_bytes
        yield piece


def _contiguous_bytes(tensor: Strided, inner: Sequence[int]) -> int:
    step = tensor.itemsize
    for axis in sorted(inner, key=lambda a: tensor.strides[a]):
        if tensor.strides[axis] != step:
            raise GeometryError(
                f"a page is not contiguous: axis {axis} has a step of {tensor.strides[axis]} bytes, not {step}; "
                "pass one tensor for each contiguous part, or the tensor before it was sliced",
                shape=tensor.shape,
                strides=tensor.strides,
            )
        step *= tensor.shape[axis]
    return step


def _span(tensor: Strided, axis: int, inner: Sequence[int]) -> int:
    """Bytes from one full turn of ``axis`` to the next, in the order of memory."""
    span = tensor.strides[axis] * tensor.shape[axis]
    if axis in inner:
        return span
    # An axis of one element may have any step. It is believed where it names a place between the page's other axes.
    inside = [a for a in inner if tensor.strides[a] < span]
    if span == tensor.itemsize * prod(tensor.shape[a] for a in inside):
        return span
    return tensor.itemsize * prod(tensor.shape[a] for a in inner if a > axis)


def _axis(axis: int, n_axes: int, what: str) -> int:
    if not -n_axes <= axis < n_axes:
        raise GeometryError(f"{what} {axis} is not an axis of a tensor with {n_axes} axes")
    return axis % n_axes


def _inner_axis(axis: int, what: str, shape: tuple[int, ...], page_axis: int, outer: Sequence[int]) -> int:
    axis = _axis(axis, len(shape), what)
    if axis == page_axis:
        raise GeometryError(f"{what} cannot be the page axis", axis=axis)
    if axis in outer:
        raise GeometryError(
            f"{what} {axis} lies around the page axis, not inside a page; leave it out and name a layer for each "
            "of its indices",
            shape=shape,
        )
    return axis


def _common_pages(group: str, pieces: Sequence[Sequence[_Piece]]) -> int:
    counts = [tensor_pieces[0].n_pages for tensor_pieces in pieces]
    if len(set(counts)) > 1:
        raise GeometryError(
            "all regions of a group must have the same number of pages; make a group of those that differ",
            group=group,
            pages=sorted(set(counts)),
        )
    return counts[0]


def _names(
    group: str, pieces: Sequence[Sequence[_Piece]], layers: Sequence[str] | None, bare: bool
) -> list[tuple[str, str]]:
    """(unique name, given name) for each region, in order."""
    total = sum(len(tensor_pieces) for tensor_pieces in pieces)
    outer_axes = len(pieces[0][0].outer_index)
    len_first = pieces[0][-1].outer_index[0] + 1 if outer_axes else 0
    if layers is not None and (
        isinstance(layers, str) or not all(isinstance(layer, str) and layer for layer in layers)
    ):
        raise GeometryError("layers must be a sequence of names", group=group)
    keys: list[tuple[str, tuple[int, ...]]] = []
    if layers is not None and len(layers) == len(pieces):
        for layer, tensor_pieces in zip(layers, pieces, strict=True):
            keys.extend((layer, piece.outer_index) for piece in tensor_pieces)
    elif layers is not None and len(layers) == total:
        keys.extend((layer, ()) for layer in layers)
    elif len(pieces) == 1 and outer_axes and (bare if layers is None else len(layers) == len_first):
        for piece in pieces[0]:
            first, rest = piece.outer_index[0], piece.outer_index[1:]
            keys.append((str(first) if layers is None else layers[first], rest))
    elif layers is None:
        for number, tensor_pieces in enumerate(pieces):
            keys.extend((str(number), piece.outer_index) for piece in tensor_pieces)
    else:
        raise GeometryError(
            "layers must name each tensor or each region",
            group=group,
            layers=len(layers),
            tensors=len(pieces),
            regions=total,
        )
    return _numbered(group, keys)


def _numbered(group: str, keys: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, str]]:
    uses: dict[tuple[str, tuple[int, ...]], int] = {}
    for key in keys:
        uses[key] = uses.get(key, 0) + 1
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    named = []
    for layer, index in keys:
        key = (layer, index)
        occurrence = (seen.get(key, 0),) if uses[key] > 1 else ()
        seen[key] = seen.get(key, 0) + 1
        named.append((".".join([layer, *map(str, (*occurrence, *index))]), layer))
    if len({full for full, _ in named}) < len(named):
        raise GeometryError("two regions would have the same layer name; give distinct names", group=group)
    return named
