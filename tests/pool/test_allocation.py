"""Pools of our own: one sealed memfd, mapped by peers, used by the engine as its cache."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.allocation import GroupSpec
from kvxfer.errors import GeometryError
from kvxfer.geometry import Shard
from kvxfer.pool import PagePool

KV = GroupSpec("kv", ["0.k", "0.v"], (16, 2, 8), "bfloat16", 16, token_axis=1, shard=Shard(2, 0, 2, 4))
STATE = GroupSpec("state", 1, (5,), "uint8", None, pages=3)


def test_the_engine_gets_arrays_of_the_shape_it_asked_for() -> None:
    pool = PagePool.allocate([KV, STATE], pages=4)
    tensor = pool.tensor("kv", "0.v")
    assert (tensor.shape, tensor.dtype) == ((4, 16, 2, 8), np.uint16)
    assert pool.tensor("state", 0).shape == (3, 5)
    tensor[2] = 7
    assert pool.page("kv", "0.v", 2).view(np.uint16).tolist() == [7] * 256
    assert not pool.tensor("kv", "0.k").any()


def test_torch_uses_the_same_bytes() -> None:
    pool = PagePool.allocate([KV], pages=4)
    cache = torch.from_numpy(pool.tensor("kv", "0.k")).view(torch.bfloat16)
    cache[1] = 1.0
    assert pool.page("kv", "0.k", 1).tobytes() == cache[1].view(torch.uint8).numpy().tobytes()
    assert cache.data_ptr() == pool.region_memory[0][0].ptr


def test_the_geometry_is_what_the_same_tensors_would_give() -> None:
    pool = PagePool.allocate([KV, STATE], pages=4)
    kv, state = pool.geometry.groups
    assert (kv.n_pages, kv.tokens_per_page, kv.shard_total, state.n_pages, state.tokens_per_page) == (4, 16, 4, 3, 0)
    region = kv.regions[0]
    assert (region.dtype, region.page_bytes, region.runs, region.units, region.unit_bytes) == (
        "bfloat16",
        512,
        16,
        2,
        16,
    )
    assert (region.token_rows, region.token_bytes) == (1, 32)
    assert pool.geometry.capacity_tokens == 64
    assert pool.id_spaces == (0, 1)


def test_a_peer_that_maps_the_memfd_sees_every_page() -> None:
    pool = PagePool.allocate([KV, STATE], pages=4)
    pool.tensor("state", "0")[1] = [1, 2, 3, 4, 5]
    memory = pool.region_memory[1][0]
    size = os.fstat(memory.fd).st_size
    with mmap.mmap(memory.fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert mapped[memory.fd_offset + 5 : memory.fd_offset + 10] == bytes([1, 2, 3, 4, 5])
    assert len({region.fd for group in pool.region_memory for region in group}) == 1


def test_the_memfd_cannot_be_truncated_under_a_peer() -> None:
    pool = PagePool.allocate([STATE])
    fd = pool.region_memory[0][0].fd
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


def test_an_array_keeps_the_memory_when_the_pool_is_gone() -> None:
    pool = PagePool.allocate([STATE])
    tensor = pool.tensor("state", 0)
    fd = pool.region_memory[0][0].fd
    del pool
    gc.collect()
    tensor[...] = 3
    assert tensor.sum() == 45
    base: Any = tensor
    del tensor, base
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_tensors_of_yours_are_not_handed_out_by_the_pool() -> None:
    from kvxfer.page_group import PageGroup

    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    with pytest.raises(GeometryError, match="tensors of yours"):
        pool.tensor("kv", 0)


def test_the_native_core_is_told_the_same_pages() -> None:
    pool = PagePool.allocate([KV, STATE], pages=4)
    assert pool.native is pool.native


@pytest.mark.parametrize(
    "spec",
    [
        GroupSpec("a", 0, (4,), "uint8", 1, pages=1),
        GroupSpec("a", [], (4,), "uint8", 1, pages=1),
        GroupSpec("a", "layers", (4,), "uint8", 1, pages=1),
        GroupSpec("a", 1, (), "uint8", 1, pages=1),
        GroupSpec("a", 1, (0,), "uint8", 1, pages=1),
        GroupSpec("a", 1, (-1, -4), "uint8", 1, pages=1),
        GroupSpec("a", 1, (4,), "float17", 1, pages=1),
        GroupSpec("a", 1, (4,), "uint8", 1),
        GroupSpec("a", 1, (4,), "uint8", 1, pages=0),
        GroupSpec("a", 1, (4,), "uint8", 3, pages=1, token_axis=1),
    ],
)
def test_a_spec_that_makes_no_pages_is_refused(spec: GroupSpec) -> None:
    with pytest.raises(GeometryError):
        PagePool.allocate([spec])


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(GeometryError):
        PagePool.allocate([], pages=4)
