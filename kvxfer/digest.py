"""Chunk digests, their binding to one place in one handoff, and folds.

The native core computes them; ``reference_*`` say what they are, in terms of the ``xxhash`` package.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvxfer.errors import GeometryError

U64 = npt.NDArray[np.uint64]
Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

_BOUND = struct.Struct("<QQ16sIIIIQ8x")


def content(data: Bytes) -> int:
    """XXH3-64 (seed 0) of contiguous bytes."""
    from kvxfer._native import xxh3_64

    return xxh3_64(data)


def chunk_digests(ptrs: U64, chunk_bytes: int, *, threads: int = 1) -> U64:
    """Content digest of the chunk of ``chunk_bytes`` contiguous bytes at each address. Releases the GIL.

    The addresses must be readable for so long: nothing is checked. Raises GeometryError for sizes of 0.
    """
    from kvxfer._native import digest_scattered

    if chunk_bytes <= 0 or threads <= 0:
        raise GeometryError("chunks and threads must be above 0", chunk_bytes=chunk_bytes, threads=threads)
    return digest_scattered(_u64(ptrs), chunk_bytes, threads)


def strided_chunk_digests(ptrs: U64, runs: int, run_bytes: int, stride: int) -> U64:
    """Content digest of chunks of ``runs`` runs of ``run_bytes`` bytes, ``stride`` apart, as if they were one piece."""
    from kvxfer._native import digest_strided

    if runs <= 0 or run_bytes <= 0 or (runs > 1 and stride < run_bytes):
        raise GeometryError("runs must be above 0 and not overlap", runs=runs, run_bytes=run_bytes, stride=stride)
    return digest_strided(_u64(ptrs), runs, run_bytes, stride)


def bind(
    contents: U64,
    *,
    reservation: int,
    epoch: bytes,
    leg: int,
    group: int,
    regions: npt.NDArray[np.uint32],
    slices: npt.NDArray[np.uint32],
    logical: U64,
) -> U64:
    """Binds each content digest to its place in one handoff, so that bytes of another one, or elsewhere, do not verify.

    Arrays have one element a chunk. Raises GeometryError for arrays of several lengths or an epoch not of 16 bytes.
    """
    from kvxfer._native import bind as native_bind

    if len(epoch) != 16 or not len(contents) == len(regions) == len(slices) == len(logical):
        raise GeometryError(
            "bind needs a 16-byte epoch and arrays of one length",
            epoch_bytes=len(epoch),
            lengths=[len(contents), len(regions), len(slices), len(logical)],
        )
    return native_bind(
        _u64(contents),
        reservation,
        epoch,
        leg,
        group,
        np.ascontiguousarray(regions, np.uint32),
        np.ascontiguousarray(slices, np.uint32),
        _u64(logical),
    )


def fold(bound: U64) -> int:
    """XXH3-64 over bound digests in order, each 8 bytes little-endian."""
    return content(np.ascontiguousarray(bound, "<u8").view(np.uint8))


def folds(bound: U64, chunks_per_fold: int) -> U64:
    """One fold for each ``chunks_per_fold`` bound digests in a row; the last may have fewer. No chunks: no folds."""
    if chunks_per_fold <= 0:
        raise GeometryError("a fold covers at least one chunk", chunks_per_fold=chunks_per_fold)
    whole = len(bound) // chunks_per_fold * chunks_per_fold
    ordered = np.ascontiguousarray(bound, "<u8")
    found = np.empty(-(-len(bound) // chunks_per_fold), np.uint64)
    if whole:
        starts = np.arange(0, whole, chunks_per_fold, dtype=np.uint64) * np.uint64(8) + np.uint64(ordered.ctypes.data)
        found[: len(starts)] = chunk_digests(starts, chunks_per_fold * 8)
    if whole < len(bound):
        found[-1] = fold(ordered[whole:])
    return found


def isa() -> str:
    """The vector path that the core uses here: avx512, avx2, neon or scalar."""
    from kvxfer._native import isa as native_isa

    return native_isa()


# ---- what they are ---------------------------------------------------------------------------------------------------


def reference_content(data: Bytes) -> int:
    """``content``, by the xxhash package."""
    return xxhash.xxh3_64_intdigest(bytes(data))


def reference_bind(
    content_digest: int,
    *,
    reservation: int,
    epoch: bytes,
    leg: int,
    group: int,
    region: int,
    slice_unit: int,
    logical: int,
) -> int:
    """One element of ``bind``, by the xxhash package."""
    return xxhash.xxh3_64_intdigest(
        _BOUND.pack(content_digest, reservation, epoch, leg, group, region, slice_unit, logical)
    )


def reference_fold(bound: Sequence[int]) -> int:
    """``fold``, by the xxhash package."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(bound)}Q", *bound))


def _u64(array: U64) -> U64:
    return np.ascontiguousarray(array, np.uint64)
