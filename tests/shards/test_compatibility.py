"""Pools that cannot exchange pages are refused with the field that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.compatibility import check_geometry, compatible
from kvxfer.errors import IncompatiblePool
from kvxfer.geometry import Group, PoolGeometry, Region

#                layer  dtype      page  stride runs units unit rows token
K = Region("a", "float16", 512, 512, 16, 2, 16, 1, 32)
GROUP = Group("kv", 16, 8, (K, replace(K, layer="b")), shard_start=0, shard_stop=2, shard_total=4)
DECODE = PoolGeometry((GROUP,))


def pool(**changes: object) -> PoolGeometry:
    return PoolGeometry((replace(GROUP, **changes),))  # type: ignore[arg-type]


def regions(**changes: object) -> PoolGeometry:
    return pool(regions=tuple(replace(region, **changes) for region in GROUP.regions))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "field", "ours", "theirs"),
    [
        (pool(name="latent"), "groups", "kv", "latent"),
        (pool(tokens_per_page=32, regions=(replace(K, token_rows=0),)), "tokens_per_page", 16, 32),
        (pool(layout="HND"), "layout", "", "HND"),
        (pool(window=128), "window", "none", 128),
        (pool(shard_total=8), "shard_total", 4, 8),
        (regions(dtype="bfloat16"), "dtype", "float16", "bfloat16"),
        (regions(unit_bytes=32, page_bytes=1024, page_stride=1024, token_bytes=64), "unit_bytes", 16, 32),
        (regions(runs=8, page_bytes=256, token_rows=0), "runs", 16, 8),
        (
            regions(token_rows=2, token_bytes=16),
            "token_axis",
            "1 rows, 1 unit rows a token",
            "1 rows a unit, 16 bytes a token",
        ),
    ],
)
def test_the_first_field_that_differs_is_named(
    prefill: PoolGeometry, field: str, ours: str | int, theirs: str | int
) -> None:
    with pytest.raises(IncompatiblePool) as caught:
        compatible(DECODE, prefill)
    details = caught.value.details
    assert (details["field"], details["ours"], details["theirs"]) == (field, ours, theirs)
    with pytest.raises(IncompatiblePool) as caught:
        compatible(DECODE, prefill, side="prefill")
    assert (caught.value.details["ours"], caught.value.details["theirs"]) == (theirs, ours)


def test_unsharded_pages_must_have_equal_sizes() -> None:
    flat = Region("a", "uint8", 64, 64, 1, 1, 64)
    ours = PoolGeometry((Group("kv", 16, 8, (flat,)),))
    theirs = PoolGeometry((Group("kv", 16, 8, (replace(flat, page_bytes=32, unit_bytes=32),)),))
    with pytest.raises(IncompatiblePool) as caught:
        compatible(ours, theirs)
    assert (caught.value.details["field"], caught.value.details["layer"]) == ("page_bytes", "a")


def test_what_does_not_matter_to_an_exchange_may_differ() -> None:
    compatible(DECODE, DECODE)
    compatible(DECODE, pool(n_pages=99))
    compatible(DECODE, regions(page_stride=4096))
    compatible(DECODE, regions(token_rows=0, token_bytes=0))
    compatible(DECODE, pool(regions=GROUP.regions[::-1]))
    compatible(DECODE, pool(replicated=True))


def test_a_pipeline_stage_may_have_fewer_layers_or_groups() -> None:
    two = PoolGeometry((GROUP, replace(GROUP, name="indexer", id_space=1)))
    compatible(two, pool(regions=GROUP.regions[:1]))
    compatible(pool(regions=GROUP.regions[:1]), DECODE)
    with pytest.raises(IncompatiblePool):
        compatible(DECODE, two)


def test_another_share_of_the_heads_is_compatible() -> None:
    wide = replace(K, page_bytes=1024, page_stride=1024, units=4, token_bytes=64)
    compatible(DECODE, pool(regions=(wide,), shard_stop=4))


def test_heads_outside_of_tokens_are_compared_by_head() -> None:
    outside = Region("a", "float16", 512, 512, 1, 2, 256, 2, 16)
    more = replace(outside, page_bytes=1024, page_stride=1024, units=4, token_rows=4)
    compatible(pool(regions=(outside,)), pool(regions=(more,), shard_stop=4))


@pytest.mark.parametrize(
    ("geometry", "field"),
    [
        (PoolGeometry(()), "groups"),
        (PoolGeometry((GROUP, GROUP)), "groups"),
        (pool(n_pages=0), "n_pages"),
        (pool(regions=()), "n_pages"),
        (pool(regions=(K, K)), "layers"),
        (pool(shard_start=2), "shard"),
        (pool(shard_stop=5), "shard"),
        (pool(shard_start=-1), "shard"),
        (pool(shard_stop=3), "units"),
        (regions(page_bytes=511), "page_bytes"),
        (regions(runs=0, page_bytes=0), "page_bytes"),
        (regions(runs=-16, units=-2), "page_bytes"),
        (regions(page_stride=511), "page_stride"),
        (pool(n_pages=1 << 60), "page_stride"),
        (regions(token_bytes=31), "token_axis"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused_on_either_side(geometry: PoolGeometry, field: str) -> None:
    with pytest.raises(IncompatiblePool) as caught:
        check_geometry(geometry)
    assert caught.value.details["field"] == field
    with pytest.raises(IncompatiblePool):
        compatible(geometry, DECODE)
    with pytest.raises(IncompatiblePool):
        compatible(DECODE, geometry)
