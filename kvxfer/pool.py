"""PagePool: all page groups of one worker, who owns their pages, and the guarded way to read one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index as index_of
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kvxfer.allocation import GroupSpec, allocate_groups
from kvxfer.dtypes import storage_dtype
from kvxfer.errors import GeometryError, NotReady
from kvxfer.fingerprint import geometry_of
from kvxfer.geometry import Group, PoolGeometry, Region, RegionMemory
from kvxfer.ledger import PageLedger, PageState
from kvxfer.ledger_view import LedgerView
from kvxfer.overlay import id_spaces
from kvxfer.page_allocator import PageAllocator
from kvxfer.page_group import PageGroup

if TYPE_CHECKING:
    from kvxfer._native import PoolMap, SharedMemory

# S2: memory of pools that were dropped while a writer of theirs was not proven silent. Kept for good, by design.
_KEPT: list[object] = []


class PagePool:
    """Page groups and the ownership of their pages. Thread-safe. One pool for one stretch of memory: two pools over the
    same bytes would not know of each other's reservations.

    Args:
        groups: the page groups, at least one.
        pages: use only the first so many pages, of every group or by group name. None: all.
        shared_ids: groups may lie over the same bytes; those that do share one page-id space, in which a page belongs
            to one reservation whatever group it is used for.

    Raises:
        GeometryError: groups of one name, fewer pages than ``pages``, bytes in two regions at once that ``shared_ids``
            does not explain.
    """

    __slots__ = (
        "__weakref__",
        "_allocators",
        "_geometry",
        "_groups",
        "_ledger",
        "_ledger_view",
        "_lock",
        "_native",
        "_region_index",
        "_region_memory",
        "_shared",
        "_specs",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("PagePool cannot be subclassed: it is what keeps unconfirmed pages from being read")

    def __init__(
        self,
        groups: Sequence[PageGroup],
        *,
        pages: int | Mapping[str, int] | None = None,
        shared_ids: bool = False,
    ) -> None:
        self._set_up(tuple(groups), pages, shared_ids, None, ())

    @classmethod
    def allocate(cls, specs: Sequence[GroupSpec], *, pages: int | None = None, huge_pages: bool = False) -> PagePool:
        """A pool in one sealed memfd, zeroed, that peers on the same host can map.

        Args:
            specs: the groups; ``pool.tensor(group, layer)`` gives the engine their arrays.
            pages: pages of every group whose spec does not say otherwise.
            huge_pages: back it with huge pages of the system, which must have been set aside.

        Raises:
            GeometryError: a spec that makes no pages.
            kvxfer._native.NativeError: the system refused the memory.
        """
        specs = tuple(specs)
        shared, groups = allocate_groups(specs, pages, huge_pages)
        pool = object.__new__(cls)
        pool._set_up(tuple(groups), None, False, shared, specs)
        return pool

    def _set_up(
        self,
        groups: tuple[PageGroup, ...],
        pages: int | Mapping[str, int] | None,
        shared_ids: bool,
        shared: SharedMemory | None,
        specs: tuple[GroupSpec, ...],
    ) -> None:
        if not groups or not all(isinstance(group, PageGroup) for group in groups):
            raise GeometryError("a pool needs PageGroups, at least one")
        if len({group.name for group in groups}) < len(groups):
            raise GeometryError("two groups have the same name", names=[group.name for group in groups])
        n_pages = _page_counts(groups, pages)
        spaces = id_spaces(groups, n_pages, shared_ids)
        self._groups = groups
        self._shared = shared
        self._specs = specs
        self._geometry = geometry_of(
            [_group(group, n, space) for group, n, space in zip(groups, n_pages, spaces, strict=True)]
        )
        self._region_memory = tuple(
            tuple(_region_memory(memory, region, n, shared) for memory, region in zip(g.memory, g.regions, strict=True))
            for g, n in zip(groups, n_pages, strict=True)
        )
        self._region_index = tuple({region.layer: at for at, region in enumerate(g.regions)} for g in groups)
        self._ledger = PageLedger(
            [max(n for n, of in zip(n_pages, spaces, strict=True) if of == space) for space in range(max(spaces) + 1)]
        )
        self._ledger_view = LedgerView(self._ledger)
        self._native: PoolMap | None = None
        self._lock = threading.Lock()
        self._allocators: dict[int, PageAllocator] = {}
        finalizer = weakref.finalize(self, _keep_if_written, self._ledger, (shared, groups))
        finalizer.atexit = False

    def __repr__(self) -> str:
        return f"PagePool({', '.join(map(repr, self._groups))}, fingerprint={self.geometry.fingerprint[:8]})"

    # ---- what it consists of -----------------------------------------------------------------------------------------

    @property
    def geometry(self) -> PoolGeometry:
        """What peers are told: groups, regions, capacity in tokens, fingerprint."""
        return self._geometry

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups as given."""
        return self._groups

    @property
    def region_memory(self) -> tuple[tuple[RegionMemory, ...], ...]:
        """By [group][region]: where it lies in this process, and in which memfd. Unguarded: for lanes."""
        return self._region_memory

    @property
    def ledger(self) -> LedgerView:
        """Owner and state of every page, to look at. Only endpoints, which hold the ledger itself, change them."""
        return self._ledger_view

    @property
    def id_spaces(self) -> tuple[int, ...]:
        """Id space of each group; overlaid groups share one."""
        return tuple(group.id_space for group in self._geometry.groups)

    @property
    def native(self) -> PoolMap:
        """The pool as the native core knows it."""
        with self._lock:
            if self._native is None:
                from kvxfer._native import PoolMap

                self._native = PoolMap(
                    [
                        [
                            (m.ptr, r.page_stride, r.page_bytes, group.n_pages)
                            for m, r in zip(memory, group.regions, strict=True)
                        ]
                        for memory, group in zip(self._region_memory, self._geometry.groups, strict=True)
                    ]
                )
            return self._native

    def group_index(self, group: str | int) -> int:
        """Index of a group by name or index. Raises GeometryError."""
        if isinstance(group, str):
            for index, known in enumerate(self._groups):
                if known.name == group:
                    return index
        elif 0 <= index_of(group) < len(self._groups):
            return index_of(group)
        raise GeometryError(f"the pool has no group {group!r}", groups=[known.name for known in self._groups])

    def region_index(self, group: str | int, region: str | int) -> int:
        """Index of a region within its group, by index, region name, or layer name where the layer is one region.

        Raises GeometryError.
        """
        at = self.group_index(group)
        if isinstance(region, str):
            found = self._region_index[at].get(region)
            if found is not None:
                return found
            regions = self.regions_of(at, region)
            if len(regions) == 1:
                return int(regions[0])
            raise GeometryError(
                f"layer {region!r} has {len(regions)} regions; name one of them",
                regions=[self._groups[at].regions[int(index)].layer for index in regions],
            )
        if 0 <= index_of(region) < len(self._groups[at].regions):
            return index_of(region)
        raise GeometryError(
            f"group {self._groups[at].name!r} has no region {region}", regions=len(self._groups[at].regions)
        )

    def layers_of(self, group: str | int) -> tuple[str, ...]:
        """Distinct layer names of a group as they were given, in order; a layer may have several regions."""
        return tuple(dict.fromkeys(self._groups[self.group_index(group)].layer_of))

    def regions_of(self, group: str | int, layer: str | int) -> npt.NDArray[np.uint32]:
        """Indices (u32, ascending) of all regions of a layer: by name, or by its number among ``layers_of(group)``.

        A region's own name names that region. Raises GeometryError for a layer that the group does not have.
        """
        at = self.group_index(group)
        known = self._groups[at]
        if not isinstance(layer, str):
            names = self.layers_of(at)
            if not 0 <= index_of(layer) < len(names):
                raise GeometryError(f"group {known.name!r} has no layer {layer}", layers=len(names))
            layer = names[layer]
        found = [index for index, name in enumerate(known.layer_of) if name == layer]
        if not found and layer in self._region_index[at]:
            found = [self._region_index[at][layer]]
        if not found:
            raise GeometryError(f"group {known.name!r} has no layer {layer!r}", layers=list(self.layers_of(at))[:8])
        return np.array(found, np.uint32)

    # ---- pages -------------------------------------------------------------------------------------------------------

    def page(self, group: str | int, region: str | int, page: int) -> npt.NDArray[np.uint8]:
        """The bytes of one page in one region: u8[page_bytes], no copy; read-only if the page is READY.

        The view is good as long as the page is the caller's: do not keep it beyond the next reservation of that page.

        Raises:
            NotReady: S1: the page is RESERVED or QUARANTINED, so nobody knows whose bytes it holds.
            GeometryError: no such group, region or page.
        """
        at = self.group_index(group)
        region_at = self.region_index(at, region)
        described = self._geometry.groups[at]
        page = index_of(page)
        if not 0 <= page < described.n_pages:
            raise GeometryError(f"group {described.name!r} has no page {page}", pages=described.n_pages)
        state = self._ledger.state_of(described.id_space, page)
        if state not in (PageState.FREE, PageState.READY):
            holder = self._ledger.owner_of(described.id_space, page)
            raise NotReady(
                f"page {page} of group {described.name!r} is {state.name}: its bytes are not confirmed; wait until it "
                "is READY, or for the release of the reservation that holds it",
                reservation=holder or None,
                page=page,
                state=state.name,
            )
        layout = described.regions[region_at]
        ptr = self._region_memory[at][region_at].ptr + page * layout.page_stride
        window = _Window(self, ptr, (layout.page_bytes,), "|u1", None, state == PageState.READY)
        return np.asarray(window)

    def tensor(self, group: str | int, layer: str | int) -> npt.NDArray[Any]:
        """The engine's own array ``[pages, *page_shape]`` of a layer of an allocated pool.

        Unguarded, like any engine's cache tensor: what it shows of a RESERVED or QUARANTINED page is not confirmed.
        ``torch.from_numpy`` takes it without a copy; types that NumPy lacks come as unsigned integers, to be viewed as
        the real type.

        Raises:
            GeometryError: the pool was not made by ``allocate``, or has no such layer.
        """
        if not self._specs:
            raise GeometryError("this pool lies over tensors of yours: use those")
        at = self.group_index(group)
        region_at = self.region_index(at, layer)
        spec = self._specs[at]
        dtype = storage_dtype(spec.dtype)
        shape = (self._geometry.groups[at].n_pages, *spec.page_shape)
        return np.asarray(_Window(self, self._region_memory[at][region_at].ptr, shape, dtype.str, None, False))

    def take(
        self,
        n: int,
        group: str | int | None = None,
        *,
        order: Literal["lifo", "random"] = "lifo",
        seed: int | None = None,
    ) -> npt.NDArray[np.uint64]:
        """``n`` pages (u64) of a group from the pool's own allocator, for programs that have none.

        Args:
            group: may be left out where all groups share one id space.
            order: ``lifo``: those given back last come first; ``random``: any, by ``seed``.

        Raises:
            CapacityError: fewer are free.
            GeometryError: no such group.
        """
        return self._allocator(group).take(n, order, seed)

    def give_back(self, pages: Any, group: str | int | None = None) -> None:
        """Returns taken pages, all of them or none; READY pages become FREE.

        Raises:
            OwnershipError: S2: one is RESERVED or QUARANTINED, or is being sent; wait for the release.
            GeometryError: one was not taken, or is named twice.
        """
        self._allocator(group).give_back(pages)

    def n_free(self, group: str | int | None = None) -> int:
        """Pages of a group that ``take`` has not handed out."""
        return self._allocator(group).n_free

    def _allocator(self, group: str | int | None) -> PageAllocator:
        if group is None:
            if len(set(self.id_spaces)) > 1:
                raise GeometryError("the pool has several page numberings: say which group", groups=len(self._groups))
            group = 0
        space = self.id_spaces[self.group_index(group)]
        with self._lock:
            if space not in self._allocators:
                self._allocators[space] = PageAllocator(self._ledger, space)
            return self._allocators[space]


class _Window:
    """What NumPy needs to make an array over memory, keeping its owner alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self,
        owner: object,
        ptr: int,
        shape: tuple[int, ...],
        typestr: str,
        strides: tuple[int, ...] | None,
        read_only: bool,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (ptr, read_only),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
        }


def page_rows(pool: PagePool, group: int, region: int) -> npt.NDArray[np.uint8]:
    """All pages of a region as u8[pages, page_bytes], unguarded: for tools that look at a pool as a whole."""
    described = pool.geometry.groups[group]
    layout = described.regions[region]
    shape = (described.n_pages, layout.page_bytes)
    window = _Window(pool, pool.region_memory[group][region].ptr, shape, "|u1", (layout.page_stride, 1), False)
    return np.asarray(window)


def _keep_if_written(ledger: PageLedger, memory: object) -> None:
    counts = ledger.counts()
    if counts[PageState.RESERVED] or counts[PageState.QUARANTINED]:
        _KEPT.append(memory)


def _page_counts(groups: Sequence[PageGroup], pages: int | Mapping[str, int] | None) -> list[int]:
    counts = []
    for group in groups:
        wanted = pages.get(group.name) if isinstance(pages, Mapping) else pages
        if wanted is not None and not 0 < wanted <= group.n_pages:
            raise GeometryError(
                f"pages={wanted} does not fit group {group.name!r}, whose tensors have {group.n_pages}",
                group=group.name,
                wanted=wanted,
                available=group.n_pages,
            )
        counts.append(group.n_pages if wanted is None else wanted)
    if isinstance(pages, Mapping) and not set(pages) <= {group.name for group in groups}:
        raise GeometryError("pages= names a group that the pool does not have", names=list(pages))
    return counts


def _group(group: PageGroup, n_pages: int, space: int) -> Group:
    shard = group.shard
    return Group(
        name=group.name,
        tokens_per_page=group.tokens_per_page,
        n_pages=n_pages,
        regions=group.regions,
        id_space=space,
        layout=group.layout,
        replicated=group.replicated,
        window=group.window,
        shard_start=shard.start if shard else 0,
        shard_stop=shard.stop if shard else 1,
        shard_total=shard.total if shard else 1,
    )


def _region_memory(memory: RegionMemory, region: Region, n_pages: int, shared: SharedMemory | None) -> RegionMemory:
    nbytes = (n_pages - 1) * region.page_stride + region.page_bytes
    if shared is None:
        return replace(memory, nbytes=nbytes)
    return RegionMemory(memory.ptr, nbytes, shared.fd, memory.ptr - shared.ptr)
