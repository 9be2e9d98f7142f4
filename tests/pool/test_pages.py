"""Page tables: sorted by logical page, distinct, immutable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import GeometryError
from kvxfer.pages import Pages


def test_pages_are_sorted_by_logical_page_and_keep_their_pool_pages() -> None:
    pages = Pages([7, 2, 5], [70, 20, 50], first_token=32, n_tokens=80)
    assert pages.logical.tolist() == [2, 5, 7]
    assert pages.pool.tolist() == [20, 50, 70]
    assert (pages.first_token, pages.n_tokens, len(pages)) == (32, 80, 3)
    assert pages.logical.dtype == pages.pool.dtype == np.uint64


@pytest.mark.parametrize(
    "numbers",
    [[3, 9], (3, 9), range(3, 15, 6), np.array([3, 9], np.int32), torch.tensor([3, 9]), iter([3, 9])],
    ids=["list", "tuple", "range", "int32", "torch", "iterator"],
)
def test_any_sequence_of_integers_will_do(numbers: Any) -> None:
    assert Pages(numbers, [0, 1]).logical.tolist() == [3, 9]


def test_no_pages_are_pages_too() -> None:
    assert len(Pages([], [], n_tokens=0)) == 0


def test_the_callers_array_stays_its_own() -> None:
    table = np.array([1, 2], np.uint64)
    pages = Pages([0, 1], table)
    table[0] = 99
    assert pages.pool.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        pages.pool[0] = 5
    with pytest.raises(AttributeError):
        pages.pool = table
    with pytest.raises(AttributeError):
        del pages.pool


def test_equal_tables_are_equal() -> None:
    assert Pages([1, 0], [5, 6]) == Pages([0, 1], [6, 5])
    assert hash(Pages([1, 0], [5, 6])) == hash(Pages([0, 1], [6, 5]))
    assert Pages([0], [1]) != Pages([0], [1], n_tokens=3)
    assert Pages([0], [1]) != "pages"
    assert "0→1" in repr(Pages([0], [1]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([0, 1], [0]), "each logical page"),
        (([0, 0], [1, 2]), "named twice"),
        (([5, 1, 5], [1, 2, 3]), "named twice"),
        (([-1], [0]), "negative"),
        (([0], [-3]), "negative"),
        (([0.5], [0]), "integers"),
        (([True], [0]), "integers"),
        ((["a"], [0]), "integers"),
        (([1 << 64], [0]), "integers"),
        (([[0]], [[0]]), "flat"),
    ],
)
def test_tables_that_name_no_pages_are_refused(arguments: tuple[Any, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        Pages(*arguments)


@pytest.mark.parametrize("number", [-1, 1 << 63, 1.5, "3"])
def test_token_numbers_must_be_non_negative_integers(number: Any) -> None:
    with pytest.raises(GeometryError):
        Pages([0], [0], first_token=number)
    with pytest.raises(GeometryError):
        Pages([0], [0], n_tokens=number)
