"""Pages: which pool page holds which page of a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import GeometryError


class Pages:
    """A sparse page table of one group: logical page ``logical[k]`` of the sequence lies in pool page ``pool[k]``.

    Immutable; compared by value.

    Args:
        logical: distinct logical page numbers, any sequence or array of integers, in any order.
        pool: as many pool page numbers, in the same order.
        first_token: first token that these pages are to hold; None: what the other groups of the request say, or 0.
        n_tokens: tokens from ``first_token`` on; None: up to the end that the other groups say.

    Attributes:
        logical: u64, ascending.
        pool: u64, in the order of ``logical``.

    Raises:
        GeometryError: negative or non-integer numbers, a logical page named twice, lengths that differ.
    """

    __slots__ = ("first_token", "logical", "n_tokens", "pool")

    logical: npt.NDArray[np.uint64]
    pool: npt.NDArray[np.uint64]
    first_token: int | None
    n_tokens: int | None

    def __init__(self, logical: Any, pool: Any, *, first_token: int | None = None, n_tokens: int | None = None) -> None:
        logical_pages = _page_numbers(logical, "logical")
        pool_pages = _page_numbers(pool, "pool")
        if len(logical_pages) != len(pool_pages):
            raise GeometryError(
                "each logical page needs one pool page", logical=len(logical_pages), pool=len(pool_pages)
            )
        if len(logical_pages) > 1 and not (logical_pages[1:] > logical_pages[:-1]).all():
            order = np.argsort(logical_pages, kind="stable")
            logical_pages, pool_pages = logical_pages[order], pool_pages[order]
            twice = logical_pages[1:][logical_pages[1:] == logical_pages[:-1]]
            if len(twice):
                raise GeometryError(f"logical page {int(twice[0])} is named twice", page=int(twice[0]))
        logical_pages.flags.writeable = False
        pool_pages.flags.writeable = False
        put = object.__setattr__
        put(self, "logical", logical_pages)
        put(self, "pool", pool_pages)
        put(self, "first_token", _token_number(first_token, "first_token"))
        put(self, "n_tokens", _token_number(n_tokens, "n_tokens"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Pages cannot be changed; make new ones")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("Pages cannot be changed; make new ones")

    def __len__(self) -> int:
        return len(self.logical)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pages):
            return NotImplemented
        return (
            (self.first_token, self.n_tokens) == (other.first_token, other.n_tokens)
            and np.array_equal(self.logical, other.logical)
            and np.array_equal(self.pool, other.pool)
        )

    def __hash__(self) -> int:
        return hash((self.logical.tobytes(), self.pool.tobytes(), self.first_token, self.n_tokens))

    def __repr__(self) -> str:
        head = ", ".join(f"{a}→{b}" for a, b in zip(self.logical[:4].tolist(), self.pool[:4].tolist(), strict=True))
        more = f", … {len(self)} pages" if len(self) > 4 else ""
        return f"Pages({head}{more}, first_token={self.first_token}, n_tokens={self.n_tokens})"


def _page_numbers(numbers: Any, what: str) -> npt.NDArray[np.uint64]:
    """A copy as contiguous u64."""
    array = np.asarray(numbers if hasattr(numbers, "__len__") else list(numbers))
    if array.ndim != 1:
        raise GeometryError(f"{what} pages must be a flat sequence of integers", shape=array.shape)
    if array.dtype == np.uint64:
        return array.copy()
    if len(array) == 0:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise GeometryError(f"{what} pages must be integers of 64 bits at most", dtype=str(array.dtype))
    if array.dtype.kind == "i" and int(array.min()) < 0:
        raise GeometryError(f"{what} page {int(array.min())} is negative")
    return array.astype(np.uint64)


def _token_number(number: int | None, what: str) -> int | None:
    if number is None:
        return None
    try:
        value = number.__index__()
    except AttributeError:
        raise GeometryError(f"{what} must be an integer", value=repr(number)) from None
    if not 0 <= value < 1 << 63:
        raise GeometryError(f"{what} must be between 0 and 2**63 - 1", value=value)
    return value
