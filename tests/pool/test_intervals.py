"""Overlap is decided by byte, exactly: regions that interleave without touching are fine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.intervals import Comb, overlaps


@st.composite
def combs(draw: st.DrawFn) -> Comb:
    stride = draw(st.integers(1, 12))
    return Comb(draw(st.integers(100, 140)), stride, draw(st.integers(1, stride)), draw(st.integers(1, 6)))


def touching(a: Comb, b: Comb) -> set[tuple[int, int]]:
    def pages(comb: Comb) -> list[set[int]]:
        return [set(range(comb.ptr + i * comb.stride, comb.ptr + i * comb.stride + comb.nbytes)) for i in range(comb.n)]

    return {(i, j) for i, left in enumerate(pages(a)) for j, right in enumerate(pages(b)) if left & right}


@settings(max_examples=300, deadline=None)
@given(st.lists(combs(), min_size=2, max_size=5))
def test_overlaps_are_found_exactly_as_sets_of_bytes_would_find_them(given_combs: list[Comb]) -> None:
    found = {frozenset((o.first, o.second)): o for o in overlaps(given_combs)}
    for a in range(len(given_combs)):
        for b in range(a + 1, len(given_combs)):
            expected = touching(given_combs[a], given_combs[b])
            overlap = found.pop(frozenset((a, b)), None)
            assert (overlap is not None) == bool(expected)
            if overlap is None:
                continue
            pair = (overlap.page, overlap.other_page)
            assert (pair if overlap.first == a else pair[::-1]) in expected
            assert overlap.aligned == all(i == j for i, j in expected)
            assert overlap.aligned or overlap.page != overlap.other_page
    assert not found


def test_a_thousand_interleaved_regions_are_checked_quickly_and_do_not_overlap() -> None:
    page_major = [Comb(1 << 20 | layer * 512, 1000 * 512, 512, 4096) for layer in range(1000)]
    assert not list(overlaps(page_major))
