"""The numbering of chunks and folds, and the bounds that a hostile RESERVE or plan runs into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import IncompatiblePool, ProtocolViolation
from kvxfer.geometry import SLICE_DTYPE, Group, Region
from kvxfer.protocol.acceptance import check_plan_covers
from kvxfer.protocol.leg import LegLayout, SliceTable
from kvxfer.protocol.messages import ReserveGroup


def packed(numbers: Any) -> bytes:
    return np.array(list(numbers), "<u8").tobytes()


def slices(*rows: tuple[int, ...]) -> bytes:
    """Rows of (group, region, slice, runs, run_bytes, dst_offset, dst_stride); the source lies the same way."""
    full = [(g, r, s, g, r, runs, size, offset, stride, offset, stride) for g, r, s, runs, size, offset, stride in rows]
    return np.array(full, SLICE_DTYPE).tobytes()


def group(name: str = "kv", tokens_per_page: int = 16, n_pages: int = 32, regions: int = 2) -> Group:
    return Group(name, tokens_per_page, n_pages, tuple(Region(f"l{n}", "f2", 64, 64) for n in range(regions)))


WHOLE = slices((0, 0, 0, 1, 64, 0, 0), (0, 1, 0, 1, 64, 0, 0))


def test_ordinals_go_page_by_page_and_slice_by_slice() -> None:
    layout = LegLayout.of([group()], WHOLE, [ReserveGroup(0, 0, 48, packed([0, 1, 2]), packed([9, 7, 8]))])
    assert (layout.n_chunks, layout.total_bytes) == (6, 384)
    assert [tuple(layout.locate(n)) for n in range(6)] == [
        (0, 0, 0, 0, 9), (0, 1, 0, 0, 9), (0, 0, 0, 1, 7), (0, 1, 0, 1, 7), (0, 0, 0, 2, 8), (0, 1, 0, 2, 8),
    ]  # fmt: skip
    assert layout.expected_bitmap == b"\x3f"
    with pytest.raises(IndexError):
        layout.locate(6)


def test_groups_without_slices_have_no_chunks_and_no_folds() -> None:
    groups = [group("a"), group("b")]
    only_b = slices((1, 0, 0, 1, 64, 0, 0))
    pages = [ReserveGroup(0, 0, 16, packed([0]), packed([3])), ReserveGroup(1, 0, 16, packed([0]), packed([4]))]
    layout = LegLayout.of(groups, only_b, pages)
    assert (layout.n_chunks, layout.n_folds) == (1, 1)
    assert layout.locate(0).group == 1
    assert LegLayout.of(groups, b"", pages).n_chunks == 0


@given(
    tokens_per_page=st.sampled_from([0, 1, 3, 16, 63, 64, 65, 1000]),
    n_pages=st.integers(0, 40),
    n_slices=st.integers(1, 3),
)
def test_folds_partition_the_chunks_of_every_group(tokens_per_page: int, n_pages: int, n_slices: int) -> None:
    groups = [group("a", 16), group("b", tokens_per_page, n_pages=64, regions=3)]
    rows = [(0, 0, 0, 1, 64, 0, 0)] + [(1, r, 0, 1, 64, 0, 0) for r in range(n_slices)]
    end = max(1, n_pages * max(tokens_per_page, 1))
    pages = [
        ReserveGroup(0, 0, end, packed([0]), packed([0])),
        ReserveGroup(1, 0, end, packed(range(n_pages)), packed(range(n_pages))),
    ]
    layout = LegLayout.of(groups, slices(*rows), pages)
    covered = [chunk for fold in range(layout.n_folds) for chunk in layout.fold_chunks(fold)]
    assert covered == list(range(layout.n_chunks))
    per_fold = 1 if tokens_per_page == 0 else max(1, 64 // tokens_per_page)
    assert layout.n_folds == 1 + -(-n_pages // per_fold)


def test_pages_of_a_bitmap_are_named_by_group() -> None:
    layout = LegLayout.of([group()], WHOLE, [ReserveGroup(0, 0, 48, packed([0, 1, 2]), packed([9, 7, 8]))])
    ((found, indices),) = layout.pages_of(0b100001)
    assert found.group == 0 and indices.tolist() == [0, 2]
    assert layout.pages_of(0) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * 63,
        slices((0, 1, 0, 1, 64, 0, 0), (0, 0, 0, 1, 64, 0, 0)),
        slices((0, 0, 0, 1, 64, 0, 0), (0, 0, 0, 1, 64, 0, 0)),
        slices((1, 0, 0, 1, 64, 0, 0)),
        slices((0, 2, 0, 1, 64, 0, 0)),
        slices((0, 0, 0, 1, 65, 0, 0)),
        slices((0, 0, 0, 1, 64, 1, 0)),
        slices((0, 0, 0, 2, 32, 0, 33)),
        slices((0, 0, 0, 2, 32, 0, 31)),
        slices((0, 0, 0, 0, 64, 0, 0)),
        slices((0, 0, 0, 1, 0, 0, 0)),
        slices((0, 0, 0, 1, 64, 2**64 - 32, 0)),
        slices((0, 0, 0, 2**32 - 1, 1, 0, 2**63)),
    ],
)
def test_slices_outside_the_pages_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        SliceTable([group()], raw)


def test_slices_outside_prefills_own_pages_are_refused() -> None:
    small = Group("kv", 16, 32, (Region("l0", "f2", 32, 32), Region("l1", "f2", 64, 64)))
    SliceTable([group()], WHOLE, [group()])
    with pytest.raises(ProtocolViolation):
        SliceTable([group()], WHOLE, [small])


@pytest.mark.parametrize(
    "pages",
    [
        [ReserveGroup(1, 0, 16, packed([0]), packed([0]))],
        [ReserveGroup(-1, 0, 16, packed([0]), packed([0]))],
        [ReserveGroup(0, 0, 16, packed([0]), packed([0]))] * 2,
        [ReserveGroup(0, 0, 16, packed([0]) + b"x", packed([0]))],
        [ReserveGroup(0, 0, 32, packed([0, 1]), packed([0]))],
        [ReserveGroup(0, 0, 32, packed([1, 0]), packed([0, 1]))],
        [ReserveGroup(0, 0, 32, packed([0, 0]), packed([0, 1]))],
        [ReserveGroup(0, 0, 32, packed([0, 1]), packed([3, 3]))],
        [ReserveGroup(0, 0, 16, packed([0]), packed([32]))],
        [ReserveGroup(0, 0, 32, packed([0, 1]), packed([0, 2**63]))],
        [ReserveGroup(0, 0, 16, packed([1]), packed([0]))],
        [ReserveGroup(0, 16, 16, packed([0]), packed([0]))],
        [ReserveGroup(0, -1, 16, packed([0]), packed([0]))],
        [ReserveGroup(0, 0, 2**63, packed([0]), packed([0]))],
        [ReserveGroup(0, 0, 1000, packed(range(33)), packed(range(33)))],
        [],
    ],
)
def test_pages_that_cannot_be_are_refused(pages: list[ReserveGroup]) -> None:
    with pytest.raises(ProtocolViolation):
        LegLayout.of([group()], WHOLE, pages)


def test_a_page_that_is_not_indexed_by_token_may_have_any_logical_number() -> None:
    state = group("state", tokens_per_page=0, regions=1)
    one = slices((0, 0, 0, 1, 64, 0, 0))
    layout = LegLayout.of([state], one, [ReserveGroup(0, 0, 5, packed([7]), packed([1]))])
    assert layout.locate(0).logical == 7


def test_a_plan_that_leaves_a_byte_of_a_region_unwritten_is_refused() -> None:
    groups = [group()]
    halves = [slices((0, 0, 0, 1, 64, 0, 0), (0, 1, 0, 1, 32, 0, 0)), slices((0, 1, 1, 1, 32, 32, 0))]
    check_plan_covers(groups, [SliceTable(groups, half) for half in halves])
    with pytest.raises(IncompatiblePool) as refused:
        check_plan_covers(groups, [SliceTable(groups, halves[0])])
    assert refused.value.details == {"field": "kv.l1", "ours": 64, "theirs": 32}
