"""Which pages of two regions have bytes in common. Exact also for regions that interleave without touching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Comb:
    """Pages ``[ptr + i * stride, ptr + i * stride + nbytes)`` for i in ``[0, n)``; ``nbytes <= stride``."""

    ptr: int
    stride: int
    nbytes: int
    n: int

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.ptr + (self.n - 1) * self.stride + self.nbytes


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two combs with bytes in common. ``page`` of the first touches ``other_page`` of the second; ``aligned``: every
    page that touches anything touches only its own number."""

    first: int
    second: int
    page: int
    other_page: int
    aligned: bool


def overlaps(combs: Sequence[Comb]) -> Iterator[Overlap]:
    """Every pair that has a byte in common, once, by index into ``combs``."""
    order = sorted(range(len(combs)), key=lambda k: combs[k].ptr)
    starts = np.array([combs[k].ptr for k in order], np.uint64)
    strides = np.array([combs[k].stride for k in order], np.uint64)
    sizes = np.array([combs[k].nbytes for k in order], np.uint64)
    for position, index in enumerate(order):
        comb = combs[index]
        # Only combs that start before this one ends can touch it; those before it in order have looked at it already.
        last = int(np.searchsorted(starts, np.uint64(comb.end), side="left"))
        candidates = _same_stride_candidates(comb, position, last, starts, strides, sizes)
        for at in candidates.tolist():
            found = _pair(comb, combs[order[at]])
            if found is not None:
                page, other, aligned = found
                yield Overlap(index, order[at], page, other, aligned)


def _same_stride_candidates(
    comb: Comb,
    position: int,
    last: int,
    starts: npt.NDArray[np.uint64],
    strides: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.int64]:
    """Positions after ``position`` that may touch ``comb``; of the many that interleave at its stride only those whose
    place within the stride really meets it."""
    if last <= position + 1:
        return np.empty(0, np.int64)
    window = slice(position + 1, last)
    stride = np.uint64(comb.stride)
    place = (starts[window] - np.uint64(comb.ptr)) % stride
    meets = (place < np.uint64(comb.nbytes)) | (place + sizes[window] > stride)
    return np.flatnonzero(meets | (strides[window] != stride)) + position + 1


def _pair(a: Comb, b: Comb) -> tuple[int, int, bool] | None:
    if a.stride == b.stride:
        return _pair_same_stride(a, b)
    if a.n > b.n:
        swapped = _pair(b, a)
        return None if swapped is None else (swapped[1], swapped[0], swapped[2])
    # For each page i of a: the pages j of b with b.ptr + j * b.stride in (a's start - b.nbytes, a's end).
    offset = a.ptr - b.ptr
    step = max(1, 1 << 16)
    aligned, first = True, None
    for begin in range(0, a.n, step):
        i = np.arange(begin, min(a.n, begin + step), dtype=np.int64)
        start = offset + i * a.stride
        low = np.maximum((start - b.nbytes) // b.stride + 1, 0)
        high = np.minimum(-((-(start + a.nbytes)) // b.stride) - 1, b.n - 1)
        hit = low <= high
        if not hit.any():
            continue
        if first is None:
            at = int(np.argmax(hit))
            first = int(i[at]), int(low[at])
        off = hit & ((low != i) | (high != i))
        if off.any():
            at = int(np.argmax(off))
            page = int(i[at])
            other = int(low[at]) if int(low[at]) != page else int(high[at])
            return page, other, False
    return None if first is None else (*first, aligned)


def _pair_same_stride(a: Comb, b: Comb) -> tuple[int, int, bool] | None:
    """Pages i and i + k touch iff -b.nbytes < offset + k * stride < a.nbytes."""
    offset = b.ptr - a.ptr
    low = max((-b.nbytes - offset) // a.stride + 1, -(a.n - 1))
    high = min(-((-(a.nbytes - offset)) // a.stride) - 1, b.n - 1)
    if low > high:
        return None
    shift = low if low != 0 else high
    page = max(0, -shift)
    return page, page + shift, low == high == 0
