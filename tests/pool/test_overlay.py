"""Groups over the same bytes share page ids, or are refused (S5 goes by byte)."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import GeometryError, OwnershipError
from kvxfer.page_group import PageGroup
from kvxfer.pool import PagePool


def group(name: str, *tensors: np.ndarray) -> PageGroup:  # type: ignore[type-arg]
    return PageGroup(name, list(tensors), tokens_per_page=4)


def test_groups_declared_to_share_bytes_share_one_page_numbering() -> None:
    first, second, apart = (np.zeros((8, 64), np.uint8) for _ in range(3))
    pool = PagePool(
        [group("full", first, second), group("window", first), group("other", apart), group("state", second[:, :16])],
        shared_ids=True,
    )
    assert pool.id_spaces == (0, 0, 1, 0)
    assert pool.ledger.sizes == (8, 8)
    assert [g.id_space for g in pool.geometry.groups] == [0, 0, 1, 0]


def test_a_page_of_an_overlay_belongs_to_one_reservation_whatever_group_it_is_for() -> None:
    tensor = np.zeros((8, 64), np.uint8)
    pool = PagePool([group("full", tensor), group("window", tensor)], shared_ids=True)
    full, window = pool.id_spaces
    pool._ledger.claim(1, {full: [3]})
    with pytest.raises(OwnershipError):
        pool._ledger.claim(2, {window: [3]})


def test_an_overlay_that_was_not_declared_is_refused() -> None:
    tensor = np.zeros((8, 64), np.uint8)
    with pytest.raises(GeometryError, match="shared_ids"):
        PagePool([group("full", tensor), group("window", tensor)])


def test_one_byte_in_common_is_an_overlap() -> None:
    buffer = np.zeros(8 * 64, np.uint8)
    low = np.lib.stride_tricks.as_strided(buffer, (8, 33), (64, 1))
    high = np.lib.stride_tricks.as_strided(buffer[32:], (8, 32), (64, 1))
    with pytest.raises(GeometryError, match="page 0 of 'low'"):
        PagePool([group("low", low), group("high", high)])


def test_groups_that_interleave_without_touching_are_separate() -> None:
    rows = np.zeros((8, 64), np.uint8)
    pool = PagePool([group("low", rows[:, :32]), group("high", rows[:, 32:])])
    assert pool.id_spaces == (0, 1)


def test_regions_of_one_group_never_overlap() -> None:
    tensor = np.zeros((8, 64), np.uint8)
    for shared_ids in (False, True):
        with pytest.raises(GeometryError, match="regions of one group"):
            PagePool([group("full", tensor, tensor)], shared_ids=shared_ids)


def test_an_overlay_whose_page_numbers_do_not_agree_is_refused() -> None:
    buffer = np.zeros(16 * 64, np.uint8)
    large, small = buffer.reshape(8, 128), buffer.reshape(16, 64)
    with pytest.raises(GeometryError, match="same number"):
        PagePool([group("large", large), group("small", small)], shared_ids=True)
    shifted = buffer.reshape(16, 64)[1:]
    with pytest.raises(GeometryError, match="same number"):
        PagePool([group("small", small), group("shifted", shifted)], shared_ids=True)


def test_bytes_beyond_the_pages_in_use_do_not_count() -> None:
    buffer = np.zeros((16, 64), np.uint8)
    pool = PagePool([group("low", buffer), group("high", buffer[8:])], pages={"low": 8})
    assert pool.id_spaces == (0, 1)
