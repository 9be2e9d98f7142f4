"""What a pool says of itself: how many tokens fit, and whether it is the same pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.fingerprint import capacity_tokens, fingerprint, geometry_of, pages_needed
from kvxfer.geometry import Group, Region

REGION = Region("0", "uint8", 64, 64, 1, 1, 64)
FULL = Group("full", 16, 10, (REGION,))


def test_capacity_is_that_of_the_group_that_fills_first() -> None:
    assert capacity_tokens([FULL]) == 160
    assert capacity_tokens([FULL, replace(FULL, name="b", id_space=1, tokens_per_page=64, n_pages=2)]) == 128


def test_groups_that_share_pages_share_the_capacity() -> None:
    assert capacity_tokens([FULL, replace(FULL, name="b")]) == 80
    state = Group("state", 0, 10, (REGION,))
    assert capacity_tokens([FULL, state]) == 144, "one page goes to the request's state"


def test_a_windowed_group_does_not_bound_a_long_sequence() -> None:
    windowed = replace(FULL, name="w", id_space=1, window=33, n_pages=3)
    assert pages_needed(windowed, 10_000) == 3
    assert pages_needed(windowed, 16) == 1
    assert capacity_tokens([FULL, windowed]) == 160
    assert capacity_tokens([windowed]) == 0, "nothing bounds it"
    assert capacity_tokens([replace(windowed, n_pages=2)]) == 32


def test_a_pool_that_no_token_indexes_has_no_capacity_in_tokens() -> None:
    assert capacity_tokens([Group("state", 0, 10, (REGION,))]) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(FULL, name="x"),
        replace(FULL, tokens_per_page=32),
        replace(FULL, n_pages=11),
        replace(FULL, layout="x"),
        replace(FULL, window=64),
        replace(FULL, shard_total=2),
        replace(FULL, regions=(replace(REGION, layer="1"),)),
        replace(FULL, regions=(replace(REGION, dtype="int8"),)),
        replace(FULL, regions=(replace(REGION, page_stride=128),)),
    ],
)
def test_every_difference_shows_in_the_fingerprint(other: Group) -> None:
    assert fingerprint([FULL]) == fingerprint([replace(FULL)])
    assert fingerprint([FULL]) != fingerprint([other])


def test_the_geometry_carries_both() -> None:
    geometry = geometry_of([FULL])
    assert (geometry.capacity_tokens, geometry.fingerprint) == (160, fingerprint([FULL]))
