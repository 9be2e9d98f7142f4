"""The benchmark's own check must be able to fail."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.bench.content import BLOCK_BYTES, Contents, page_order
from kvxfer.bench.options import parse_bytes
from kvxfer.errors import GeometryError

SIZES = [(1, 1000), (3, 17), (4096, 9), (BLOCK_BYTES // 2 + 1, 3), (BLOCK_BYTES + 5, 2)]


@pytest.mark.parametrize(("page_bytes", "pages"), SIZES)
def test_filled_pages_match_in_any_order(page_bytes, pages):
    contents = Contents(page_bytes, seed=1, round_number=2)
    source, target = (np.zeros((pages, page_bytes), np.uint8) for _ in range(2))
    source_order, target_order = page_order(pages, 1, 2, "prefill"), page_order(pages, 1, 2, "decode")
    contents.fill(0, source, source_order)
    target[target_order] = source[source_order]
    assert contents.matches(0, target, target_order)


@pytest.mark.parametrize(("page_bytes", "pages"), SIZES)
def test_one_changed_byte_anywhere_is_found(page_bytes, pages):
    contents = Contents(page_bytes, seed=1, round_number=2)
    memory = np.zeros((pages, page_bytes), np.uint8)
    order = page_order(pages, 1, 2, "decode")
    contents.fill(0, memory, order)
    for page, byte in [(0, 0), (pages - 1, page_bytes - 1), (pages // 2, page_bytes // 2)]:
        memory[page, byte] ^= 0x10
        assert not contents.matches(0, memory, order)
        memory[page, byte] ^= 0x10
    assert contents.matches(0, memory, order)


def test_two_swapped_pages_are_found():
    contents = Contents(64, seed=1, round_number=2)
    memory = np.zeros((8, 64), np.uint8)
    order = page_order(8, 1, 2, "decode")
    contents.fill(0, memory, order)
    memory[[2, 5]] = memory[[5, 2]]
    assert not contents.matches(0, memory, order)


def test_what_an_earlier_round_or_another_region_left_is_found():
    memory = np.zeros((8, 64), np.uint8)
    order = page_order(8, 1, 2, "decode")
    Contents(64, seed=1, round_number=1).fill(0, memory, order)
    assert not Contents(64, seed=1, round_number=2).matches(0, memory, order)
    assert not Contents(64, seed=1, round_number=1).matches(1, memory, order)


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("64K", 65536), ("64KiB", 65536), ("1m", 1 << 20), ("3B", 3)])
def test_sizes_are_read_with_and_without_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "64X"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(GeometryError):
        parse_bytes(text)
