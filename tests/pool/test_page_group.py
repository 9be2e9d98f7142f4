"""Tensors of every common cache layout become regions whose pages are the tensor's own bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import GeometryError
from kvxfer.geometry import Region, Shard
from kvxfer.memory import Memory
from kvxfer.page_group import PageGroup
from kvxfer.pool import PagePool

PAGES, TOKENS, HEADS, DIM = 6, 4, 2, 8


def layers_of(group: PageGroup) -> list[str]:
    return [region.layer for region in group.regions]


def test_a_k_and_a_v_tensor_a_layer_become_one_region_each() -> None:
    tensors = [torch.zeros(PAGES, TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(4)]
    names = ["layer0.k", "layer0.v", "layer1.k", "layer1.v"]
    group = PageGroup("kv", tensors, tokens_per_page=TOKENS, token_axis=1, layers=names)
    assert layers_of(group) == names
    page_bytes = TOKENS * HEADS * DIM * 2
    assert group.regions[2] == Region(
        "layer1.k", "bfloat16", page_bytes, page_bytes, 1, 1, page_bytes, 1, HEADS * DIM * 2
    )
    assert group.memory[3].ptr == tensors[3].data_ptr()
    assert group.memory[3].nbytes == tensors[3].numel() * 2


def test_one_tensor_a_layer_with_k_and_v_outside_the_pages_becomes_two_regions() -> None:
    tensors = [np.zeros((2, PAGES, TOKENS, HEADS, DIM), np.float16) for _ in range(2)]
    group = PageGroup("kv", tensors, tokens_per_page=TOKENS, page_axis=1, token_axis=2, layers=["a", "b"])
    assert layers_of(group) == ["a.0", "a.1", "b.0", "b.1"]
    assert group.layer_of == ("a", "a", "b", "b")
    assert group.memory[1].ptr == tensors[0][1].ctypes.data


def test_k_and_v_inside_the_page_stay_one_region() -> None:
    group = PageGroup(
        "kv",
        [np.zeros((PAGES, 2, TOKENS, HEADS, DIM), np.float16)],
        tokens_per_page=TOKENS,
        token_axis=2,
        shard=Shard(axis=3, start=2, stop=4, total=8),
    )
    (region,) = group.regions
    assert (region.runs, region.units, region.unit_bytes) == (2 * TOKENS, HEADS, DIM * 2)
    assert (region.token_rows, region.token_bytes) == (2, HEADS * DIM * 2)


def test_one_tensor_for_all_layers_is_named_by_its_outer_axes() -> None:
    tensor = np.zeros((3, 2, PAGES, TOKENS, HEADS, DIM), np.float16)
    per_layer = [tensor[layer] for layer in range(3)]
    whole = PageGroup("kv", tensor, tokens_per_page=TOKENS, page_axis=2)
    parts = PageGroup("kv", per_layer, tokens_per_page=TOKENS, page_axis=1)
    assert layers_of(whole) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert (whole.regions, whole.memory) == (parts.regions, parts.memory)
    named = PageGroup("kv", tensor, tokens_per_page=TOKENS, page_axis=2, layers=["x", "y", "z"])
    assert layers_of(named) == ["x.0", "x.1", "y.0", "y.1", "z.0", "z.1"]
    each = PageGroup("kv", tensor, tokens_per_page=TOKENS, page_axis=2, layers=list("abcdef"))
    assert layers_of(each) == list("abcdef")


def test_tensors_of_one_layer_name_are_numbered() -> None:
    tensors = [np.zeros((PAGES, 8), np.uint8) for _ in range(4)]
    group = PageGroup("kv", tensors, tokens_per_page=None, layers=["0", "0", "1", "1"])
    assert layers_of(group) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_latent_cache_is_one_region_a_layer() -> None:
    group = PageGroup(
        "latent", [torch.zeros(PAGES, 64, 576, dtype=torch.bfloat16)], tokens_per_page=64, token_axis=1, replicated=True
    )
    assert group.regions[0].page_bytes == 64 * 576 * 2
    assert group.regions[0].token_bytes == 1152


def test_a_recurrent_state_is_a_page_that_no_token_indexes() -> None:
    group = PageGroup("state", [np.zeros((5, 16, 128), np.float32)], tokens_per_page=0)
    assert (group.tokens_per_page, group.n_pages, group.regions[0].token_rows) == (0, 5, 0)
    assert PageGroup("state", [np.zeros((5, 3), np.uint8)], tokens_per_page=None).tokens_per_page == 0


def test_pages_of_one_odd_byte_are_pages() -> None:
    group = PageGroup("tiny", np.zeros((7, 1), np.uint8), tokens_per_page=1)
    assert (group.regions[0].page_bytes, group.n_pages) == (1, 7)
    assert PageGroup("flat", np.zeros(7, np.uint8), tokens_per_page=1).regions[0].page_bytes == 1


def test_padding_between_pages_is_not_part_of_them() -> None:
    padded = np.zeros((PAGES, 100), np.uint8)[:, :96]
    (region,) = PageGroup("kv", padded, tokens_per_page=4).regions
    assert (region.page_bytes, region.page_stride) == (96, 100)


def test_raw_memory_is_described_like_the_tensor_it_came_from() -> None:
    tensor = torch.zeros(PAGES, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    stride = TOKENS * HEADS * DIM * 2
    memory = Memory(tensor.data_ptr(), PAGES * stride, stride, dtype="bfloat16", page_shape=(TOKENS, HEADS, DIM))
    shard = Shard(2, 0, 2, 4)
    from_memory = PageGroup("kv", memory, tokens_per_page=TOKENS, token_axis=1, shard=shard)
    from_tensor = PageGroup("kv", tensor, tokens_per_page=TOKENS, token_axis=1, shard=shard)
    assert (from_memory.regions, from_memory.memory) == (from_tensor.regions, from_tensor.memory)


def test_raw_memory_without_a_shape_is_flat_pages_and_may_lack_the_last_padding() -> None:
    buffer = np.zeros(100, np.uint8)
    flat = PageGroup("kv", Memory(buffer.ctypes.data, 100, 20), tokens_per_page=1)
    assert (flat.n_pages, flat.regions[0].page_bytes) == (5, 20)
    padded = PageGroup("kv", Memory(buffer.ctypes.data, 98, 20, page_shape=(18,)), tokens_per_page=1)
    assert (padded.n_pages, padded.regions[0].page_bytes, padded.memory[0].nbytes) == (5, 18, 98)


def test_a_permuted_view_is_read_in_the_order_of_memory() -> None:
    heads_first = torch.zeros(PAGES, HEADS, TOKENS, DIM).permute(0, 2, 1, 3)  # [pages, tokens, heads, dim]
    group = PageGroup("kv", heads_first, tokens_per_page=TOKENS, token_axis=1, shard=Shard(2, 0, HEADS, HEADS))
    (region,) = group.regions
    assert (region.runs, region.units, region.unit_bytes) == (1, HEADS, TOKENS * DIM * 4)
    assert (region.token_rows, region.token_bytes) == (HEADS, DIM * 4)


def test_a_shard_of_one_unit_lies_where_its_step_says() -> None:
    heads_first = torch.zeros(PAGES, 1, TOKENS, DIM).permute(0, 2, 1, 3)
    tokens_first = torch.zeros(PAGES, TOKENS, 1, DIM)
    shard = Shard(2, 3, 4, 8)
    (first,) = PageGroup("kv", heads_first, tokens_per_page=TOKENS, shard=shard).regions
    (second,) = PageGroup("kv", tokens_first, tokens_per_page=TOKENS, shard=shard).regions
    assert (first.runs, first.unit_bytes) == (1, TOKENS * DIM * 4)
    assert (second.runs, second.unit_bytes) == (TOKENS, DIM * 4)


def test_a_single_page_does_not_confuse_the_axes() -> None:
    group = PageGroup("kv", np.zeros((2, 1, TOKENS, DIM), np.float32), tokens_per_page=TOKENS, page_axis=1)
    assert layers_of(group) == ["0", "1"]
    assert group.regions[0].page_bytes == TOKENS * DIM * 4
    inserted = PageGroup("kv", np.zeros((TOKENS, DIM), np.float32)[None], tokens_per_page=TOKENS)
    assert (inserted.n_pages, inserted.regions[0].page_bytes) == (1, TOKENS * DIM * 4)


def test_tensors_are_kept_alive() -> None:
    group = PageGroup("kv", np.zeros((4, 8), np.uint8), tokens_per_page=1)
    assert isinstance(group._keepalive[0], tuple)
    assert PageGroup("kv", torch.zeros(4, 8), tokens_per_page=1)._keepalive[0].shape == (4, 8)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int]:
    """An array whose memory order is any permutation of its axes, with or without padding around the page axis."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    stored = [shape[axis] for axis in order]
    cut = draw(st.integers(0, len(shape) - 1))
    pad = draw(st.integers(0, 1))
    padded = list(stored)
    padded[cut] += pad
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    array = np.zeros(padded, dtype)
    raw = array.view(np.uint8).reshape(-1)
    raw[:] = np.random.default_rng(len(raw)).integers(0, 256, len(raw), np.uint8)
    array = array[tuple(slice(0, size) for size in stored)]
    return array.transpose(np.argsort(order)), draw(st.integers(0, len(shape) - 1))


@settings(max_examples=300, deadline=None)
@given(laid_out())
def test_a_regions_page_is_what_indexing_the_tensor_gives(case: tuple[np.ndarray[Any, Any], int]) -> None:
    array, page_axis = case
    try:
        group = PageGroup("g", array, tokens_per_page=None, page_axis=page_axis)
    except GeometryError as error:
        assert "contiguous" in error.message or "overlap" in error.message
        return
    pool = PagePool([group])
    seen = []
    for page in range(group.n_pages):
        seen.append([pool.page("g", region, page).tobytes() for region in range(len(group.regions))])
    for page in range(group.n_pages):
        indexed = array.take([page], axis=page_axis)
        assert sum(map(len, seen[page])) == indexed.nbytes
        assert sorted(b"".join(seen[page])) == sorted(indexed.tobytes())
        # Writing through the page view must change this page of the tensor and no other.
        before = array.copy()
        for region in range(len(group.regions)):
            view = pool.page("g", region, page)
            view ^= 0xFF
        changed = before != array
        others = np.delete(changed, page, axis=page_axis)
        assert changed.any() and not others.any()


BAD = np.zeros((PAGES, TOKENS, HEADS, DIM), np.float32)


@pytest.mark.parametrize(
    ("regions", "arguments", "says"),
    [
        (BAD, {"page_axis": 4}, "not an axis"),
        (BAD, {"page_axis": -5}, "not an axis"),
        (BAD[:, :, :, :4], {}, "not contiguous"),
        (BAD[:, ::2], {}, "not contiguous"),
        (BAD[::-1], {}, "negative stride"),
        (np.broadcast_to(np.zeros((1, 8), np.uint8), (4, 8)), {}, "read-only"),
        (torch.zeros(1, 8).expand(4, 8), {}, "broadcast"),
        (torch.zeros(8, 1).expand(8, 4), {}, "broadcast"),
        (torch.as_strided(torch.zeros(100), (4, 8), (4, 1)), {}, "contiguous|overlap"),
        (torch.as_strided(torch.zeros(100), (4, 2, 4), (6, 4, 1)), {}, "pages overlap"),
        (BAD[:0], {}, "at least one axis and one element"),
        (np.zeros((), np.float32), {}, "at least one axis"),
        ([], {}, "at least one region"),
        ([BAD, np.zeros((PAGES + 1, 8), np.float32)], {}, "same number of pages"),
        ("tensor", {}, "must be a torch tensor"),
        (np.zeros(4, object), {}, "objects"),
        (torch.zeros(4, 8).to_sparse(), {}, "strided"),
        (torch.zeros(4, 8, device="meta"), {}, "not supported yet"),
        (BAD, {"token_axis": 2}, "holds 4 tokens"),
        (BAD, {"token_axis": 0}, "page axis"),
        (BAD, {"token_axis": 9}, "not an axis"),
        (BAD, {"token_axis": 1, "tokens_per_page": 0}, "not indexed by token"),
        (BAD, {"tokens_per_page": -1}, "tokens_per_page"),
        (BAD, {"window": 0}, "window"),
        (BAD, {"window": 8, "tokens_per_page": None}, "window"),
        (BAD, {"shard": Shard(2, 0, 3, 8)}, "no multiple"),
        (BAD, {"shard": Shard(0, 0, 2, 8)}, "page axis"),
        (BAD, {"shard": Shard(2, 2, 2, 8)}, "shard must hold"),
        (BAD, {"shard": Shard(2, 6, 9, 8)}, "shard must hold"),
        (BAD, {"shard": Shard(2, -1, 1, 8)}, "shard must hold"),
        (np.zeros((2, PAGES, 4), np.uint8), {"page_axis": 1, "shard": Shard(0, 0, 2, 2)}, "around the page axis"),
        (np.zeros((4, PAGES, 4), np.uint8), {"page_axis": 1, "token_axis": 0}, "around the page axis"),
        (BAD, {"layers": ["a", "b"]}, "layers must name"),
        (BAD, {"layers": "a"}, "sequence of names"),
        (BAD, {"layers": [""]}, "sequence of names"),
        ([BAD, BAD + 0, BAD + 0], {"layers": ["a.0", "a", "a"]}, "same layer name"),
        (BAD, {"name": ""}, "needs a name"),
    ],
)
def test_what_makes_no_pages_is_refused_with_the_reason(regions: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        PageGroup(**{"name": "kv", "regions": regions, "tokens_per_page": TOKENS, **arguments})


class FakeCudaArray:
    __cuda_array_interface__ = {"data": (1, False)}


def test_device_memory_is_refused_as_not_supported_yet() -> None:
    with pytest.raises(GeometryError, match="not supported yet"):
        PageGroup("kv", FakeCudaArray(), tokens_per_page=1)
    with pytest.raises(GeometryError, match="not supported yet"):
        PageGroup("kv", Memory(4096, 64, 64, device="cuda:0"), tokens_per_page=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ptr": 0, "nbytes": 64, "stride": 8},
        {"ptr": 64, "nbytes": 0, "stride": 8},
        {"ptr": 64, "nbytes": 64, "stride": 0},
        {"ptr": 64, "nbytes": 65, "stride": 8},
        {"ptr": (1 << 64) - 8, "nbytes": 64, "stride": 8},
        {"ptr": 64, "nbytes": 64, "stride": 8, "page_shape": (9,)},
        {"ptr": 64, "nbytes": 64, "stride": 8, "page_shape": (0,)},
        {"ptr": 64, "nbytes": 9, "stride": 9, "dtype": "float16"},
        {"ptr": 64, "nbytes": 64, "stride": 8, "dtype": "float17"},
        {"ptr": 64, "nbytes": 64, "stride": 8, "dtype": "object"},
    ],
)
def test_raw_memory_that_holds_no_whole_pages_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        Memory(**arguments)


def test_an_error_in_one_of_many_tensors_says_which() -> None:
    with pytest.raises(GeometryError) as caught:
        PageGroup("kv", [BAD, BAD[:, :, :, :4]], tokens_per_page=TOKENS)
    assert caught.value.details["tensor"] == 1
