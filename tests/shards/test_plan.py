"""Every byte of decode's pool comes from exactly one prefill rank, and copying the slices rebuilds the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import IncompatiblePool
from kvxfer.geometry import SLICE_DTYPE, PoolGeometry, Shard
from kvxfer.page_group import PageGroup
from kvxfer.pool import PagePool, page_rows
from kvxfer.shards import plan

PAGES, TOKENS, DIM = 3, 2, 4


@dataclass(frozen=True)
class Rank:
    """A worker's share: layers, and heads [start, stop) of all."""

    layers: tuple[int, ...]
    start: int
    stop: int


def build(rank: Rank, full: np.ndarray[Any, Any], heads_axis: int, latent: np.ndarray[Any, Any] | None) -> PagePool:
    """``full``: [layer, page, ...] with the heads at ``heads_axis`` of a layer's tensor."""
    cut: list[Any] = [slice(None)] * (full.ndim - 1)
    cut[heads_axis] = slice(rank.start, rank.stop)
    names = [f"layer{layer}" for layer in rank.layers]
    groups = [
        PageGroup(
            "kv",
            [np.ascontiguousarray(full[layer][tuple(cut)]) for layer in rank.layers],
            tokens_per_page=TOKENS,
            layers=names,
            shard=Shard(heads_axis, rank.start, rank.stop, full.shape[1 + heads_axis]),
        )
    ]
    if latent is not None:
        tensors = [latent[layer].copy() for layer in rank.layers]
        groups.insert(0, PageGroup("latent", tensors, tokens_per_page=TOKENS, layers=names, replicated=True))
    return PagePool(groups)


def copy_slices(decode: PagePool, prefills: list[PagePool]) -> list[int]:
    """What the lanes do, in NumPy. Returns how often each byte of decode was written, as a sorted list of counts."""
    geometry = decode.geometry
    written = [
        [np.zeros_like(page_rows(decode, g, r)) for r in range(len(group.regions))]
        for g, group in enumerate(geometry.groups)
    ]
    for leg, slices in enumerate(plan(geometry, [prefill.geometry for prefill in prefills])):
        assert slices.dtype == SLICE_DTYPE
        keys = [(int(s["group"]), int(s["region"]), int(s["slice"])) for s in slices]
        assert keys == sorted(set(keys))
        for s in slices:
            source = page_rows(prefills[leg], int(s["src_group"]), int(s["src_region"]))
            target = page_rows(decode, int(s["group"]), int(s["region"]))
            for run in range(int(s["runs"])):
                src = int(s["src_offset"]) + run * int(s["src_stride"])
                dst = int(s["dst_offset"]) + run * int(s["dst_stride"])
                size = int(s["run_bytes"])
                assert src + size <= source.shape[1] and dst + size <= target.shape[1]
                target[:, dst : dst + size] = source[:, src : src + size]
                written[int(s["group"])][int(s["region"])][:, dst : dst + size] += 1
    return sorted({int(count) for group in written for region in group for count in np.unique(region)})


def splits(total: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    def spans(cuts: set[int]) -> list[tuple[int, int]]:
        edges = [0, *sorted(cuts), total]
        return list(zip(edges, edges[1:], strict=False))

    return st.sets(st.integers(1, total - 1) if total > 1 else st.nothing(), max_size=total - 1).map(spans)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_of_heads_and_layers_is_rebuilt_byte_for_byte(data: st.DataObject) -> None:
    n_heads, n_layers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    heads_axis = data.draw(st.sampled_from([1, 2, 3]))
    shape = [TOKENS, DIM]
    shape.insert(heads_axis - 1, n_heads)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    full = rng.integers(0, 1 << 16, (n_layers, PAGES, *shape)).astype(np.uint16)
    latent = rng.integers(0, 255, (n_layers, PAGES, 7)).astype(np.uint8) if data.draw(st.booleans()) else None
    decode_layers = tuple(data.draw(st.permutations(range(n_layers))))
    if data.draw(st.booleans()):
        decode_layers = decode_layers[: max(1, n_layers // 2)]
    span = data.draw(st.sampled_from(data.draw(splits(n_heads))))
    decode = build(Rank(decode_layers, *span), np.zeros_like(full), heads_axis, None if latent is None else latent * 0)
    ranks = [
        Rank(tuple(range(first, last)), *heads)
        for first, last in data.draw(splits(n_layers))
        for heads in data.draw(splits(n_heads))
        for _ in range(data.draw(st.integers(1, min(2, n_heads))))  # grouped heads: two ranks may hold the same ones
    ]
    ranks = data.draw(st.permutations(ranks))
    prefills = [build(rank, full, heads_axis, latent) for rank in ranks]

    assert copy_slices(decode, prefills) == [1]

    expected = build(Rank(decode_layers, *span), full, heads_axis, latent)
    for g, group in enumerate(decode.geometry.groups):
        for r in range(len(group.regions)):
            assert np.array_equal(page_rows(decode, g, r), page_rows(expected, g, r))


def kv(start: int, stop: int, total: int, *, layers: str = "ab", name: str = "kv", heads_axis: int = 2) -> PoolGeometry:
    shape = [PAGES, TOKENS, DIM]
    shape.insert(heads_axis, stop - start)
    tensors = [np.zeros(shape, np.uint8) for _ in layers]
    shard = Shard(heads_axis, start, stop, total)
    return PagePool([PageGroup(name, tensors, tokens_per_page=TOKENS, layers=list(layers), shard=shard)]).geometry


def whole(name: str = "kv", *, layers: str = "ab", replicated: bool = False) -> PageGroup:
    tensors = [np.zeros((PAGES, 16), np.uint8) for _ in layers]
    return PageGroup(name, tensors, tokens_per_page=TOKENS, layers=list(layers), replicated=replicated)


def test_equal_pools_exchange_whole_pages_in_one_run() -> None:
    (leg,) = plan(kv(0, 4, 4), [kv(0, 4, 4)])
    assert leg.tolist() == [
        (0, 0, 0, 0, 0, 1, TOKENS * 4 * DIM, 0, TOKENS * 4 * DIM, 0, TOKENS * 4 * DIM),
        (0, 1, 0, 0, 1, 1, TOKENS * 4 * DIM, 0, TOKENS * 4 * DIM, 0, TOKENS * 4 * DIM),
    ]


def test_half_the_heads_are_strided_runs_on_the_side_that_has_more() -> None:
    first, second = plan(kv(0, 4, 4, layers="a"), [kv(0, 2, 4, layers="a"), kv(2, 4, 4, layers="a")])
    assert first.tolist() == [(0, 0, 0, 0, 0, TOKENS, 2 * DIM, 0, 2 * DIM, 0, 4 * DIM)]
    assert second.tolist() == [(0, 0, 2, 0, 0, TOKENS, 2 * DIM, 0, 2 * DIM, 2 * DIM, 4 * DIM)]


def test_heads_that_lie_outermost_in_the_page_are_one_run() -> None:
    (leg,) = plan(kv(1, 2, 4, layers="a", heads_axis=1), [kv(0, 4, 4, layers="a", heads_axis=1)])
    assert leg.tolist() == [(0, 0, 0, 0, 0, 1, TOKENS * DIM, TOKENS * DIM, 4 * TOKENS * DIM, 0, TOKENS * DIM)]


def test_regions_are_matched_by_layer_name_in_any_order() -> None:
    (leg,) = plan(kv(0, 1, 1, layers="ab"), [kv(0, 1, 1, layers="bca")])
    assert [(int(s["region"]), int(s["src_region"])) for s in leg] == [(0, 2), (1, 0)]


def test_a_replicated_group_has_one_writer_a_region_and_the_ranks_share_the_work() -> None:
    prefills = [PagePool([whole(replicated=True)]).geometry for _ in range(2)]
    first, second = plan(PagePool([whole()]).geometry, prefills)
    assert [int(s["region"]) for s in first] == [0]
    assert [int(s["region"]) for s in second] == [1]


def test_a_rank_with_nothing_to_write_has_an_empty_leg() -> None:
    prefills = [PagePool([whole(layers="a", replicated=True)]).geometry for _ in range(3)]
    legs = plan(PagePool([whole(layers="a")]).geometry, prefills)
    assert [len(leg) for leg in legs] == [1, 0, 0]
    assert legs[1].dtype == SLICE_DTYPE


def test_ranks_of_another_pipeline_stage_have_empty_legs() -> None:
    legs = plan(kv(0, 1, 1, layers="a"), [kv(0, 1, 1, layers="a"), kv(0, 1, 1, layers="b")])
    assert [len(leg) for leg in legs] == [1, 0]


def test_two_ranks_with_undeclared_parts_are_refused_instead_of_guessed() -> None:
    geometry = PagePool([whole()]).geometry
    with pytest.raises(IncompatiblePool, match=r"declare shard=") as caught:
        plan(geometry, [geometry, geometry])
    assert caught.value.details["field"] == "shard"


def test_heads_that_no_rank_holds_are_named() -> None:
    with pytest.raises(IncompatiblePool) as caught:
        plan(kv(0, 4, 4), [kv(0, 1, 4), kv(3, 4, 4)])
    assert caught.value.details["field"] == "shard"
    assert caught.value.details["ours"] == "[1, 3)"
    assert caught.value.details["layer"] == "a"


def test_a_layer_that_no_rank_holds_is_named() -> None:
    with pytest.raises(IncompatiblePool) as caught:
        plan(kv(0, 1, 1, layers="abc"), [kv(0, 1, 1, layers="a"), kv(0, 1, 1, layers="c")])
    assert (caught.value.details["field"], caught.value.details["layer"]) == ("layers", "b")


def test_a_group_that_was_announced_and_that_no_rank_has_is_refused() -> None:
    decode = PagePool([whole("kv"), whole("indexer")]).geometry
    with pytest.raises(IncompatiblePool) as caught:
        plan(decode, [PagePool([whole("kv")]).geometry])
    assert caught.value.details["group"] == "indexer"


def test_without_any_prefill_nothing_is_covered() -> None:
    with pytest.raises(IncompatiblePool):
        plan(kv(0, 1, 1), [])


def test_the_plan_depends_on_nothing_but_its_arguments() -> None:
    arguments = kv(0, 4, 4), [kv(0, 4, 4), kv(0, 2, 4), kv(2, 4, 4)]
    first, second = plan(*arguments), plan(*arguments)
    assert [leg.tobytes() for leg in first] == [leg.tobytes() for leg in second]


def test_an_incompatible_rank_is_refused_before_anything_is_planned() -> None:
    other_axis = kv(0, 4, 4, heads_axis=1)
    with pytest.raises(IncompatiblePool) as caught:
        plan(kv(0, 4, 4), [kv(0, 4, 4), other_axis])
    assert caught.value.details["field"] == "unit_bytes"
