"""Seeded contents and page orders, made alike on both sides, so that every byte that arrives can be checked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

BLOCK_BYTES = 4 << 20  # bounds the memory that making or checking contents takes


def page_order(n_pages: int, seed: int, round_number: int, side: str) -> U64:
    """A permutation of the pool's pages: logical page k lies in pool page ``order[k]``. Differs by side and round."""
    side_number = {"prefill": 0, "decode": 1, "memcpy": 2}[side]
    generator = np.random.default_rng([seed, round_number, side_number, n_pages])
    return generator.permutation(n_pages).astype(np.uint64)


class Contents:
    """The bytes of one round. Page k of a region has the same bytes wherever it lies; other rounds have other bytes."""

    def __init__(self, page_bytes: int, seed: int, round_number: int) -> None:
        self._page_bytes = page_bytes
        self._key = (seed, round_number)

    def fill(self, region: int, memory: U8, order: U64) -> None:
        """Writes a region's pages; ``memory`` is u8 [pages, page_bytes], ``order[k]`` the row of logical page k."""
        for rows, first, stop, block in self._blocks(region, order):
            memory[rows, first:stop] = block

    def matches(self, region: int, memory: U8, order: U64) -> bool:
        """True if every byte of every page of the region is what ``fill`` writes."""
        return all(
            np.array_equal(memory[rows, first:stop], block) for rows, first, stop, block in self._blocks(region, order)
        )

    def _blocks(self, region: int, order: U64) -> Iterator[tuple[U64, int, int, U8]]:
        """(rows, first byte, end byte, contents u8 [rows, end - first]), block by block."""
        pages_per_block = max(1, BLOCK_BYTES // self._page_bytes)
        piece_bytes = min(self._page_bytes, BLOCK_BYTES)
        for block_number, start in enumerate(range(0, len(order), pages_per_block)):
            rows = order[start : start + pages_per_block]
            for piece, first in enumerate(range(0, self._page_bytes, piece_bytes)):
                stop = min(first + piece_bytes, self._page_bytes)
                key = (*self._key, region, block_number, piece)
                yield rows, first, stop, _random_bytes(key, len(rows), stop - first)


def _random_bytes(key: tuple[int, ...], rows: int, columns: int) -> U8:
    words = -(-rows * columns // 8)
    generator = np.random.Generator(np.random.SFC64(key))
    drawn = generator.integers(0, 1 << 64, size=words, dtype=np.uint64)
    return drawn.view(np.uint8)[: rows * columns].reshape(rows, columns)
