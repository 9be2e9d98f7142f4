"""The core's digests against the xxhash package, its memory and its completion queue, as Python sees them."""

from __future__ import annotations

import os
import random
import select
import struct
import threading

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvxfer import _native

Bytes = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

LENGTHS = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4096, 8448, 73728, 100_003]


def random_bytes(n: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def chunk_ptrs(buffer: Bytes, chunk_bytes: int, order: list[int]) -> U64:
    base = buffer.ctypes.data
    return np.array([base + k * chunk_bytes for k in order], dtype=np.uint64)


@pytest.mark.parametrize("n", LENGTHS)
def test_digest_equals_the_xxhash_package(n: int) -> None:
    data = random_bytes(n)
    expected = xxhash.xxh3_64_intdigest(data.tobytes())
    assert _native.xxh3_64(data) == expected
    assert _native.xxh3_64(data.tobytes()) == expected
    assert _native.xxh3_64(bytearray(data.tobytes())) == expected
    assert _native.xxh3_64(memoryview(data.tobytes())) == expected


def test_digest_refuses_bytes_that_do_not_lie_together() -> None:
    every_other = random_bytes(64)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        _native.xxh3_64(every_other)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [1, 17, 1152, 4096, 16384])
def test_fused_copy_moves_each_chunk_to_its_place_and_digests_it(chunk_bytes: int, threads: int) -> None:
    count = 41
    source = random_bytes(count * chunk_bytes)
    fused, plain = np.zeros_like(source), np.zeros_like(source)
    rng = random.Random(chunk_bytes)
    read_order, write_order = rng.sample(range(count), count), rng.sample(range(count), count)
    src = chunk_ptrs(source, chunk_bytes, read_order)

    digests = _native.copy_digest_scattered(chunk_ptrs(fused, chunk_bytes, write_order), src, chunk_bytes, threads)
    _native.copy_scattered(chunk_ptrs(plain, chunk_bytes, write_order), src, chunk_bytes, threads)

    chunks = source.reshape(count, chunk_bytes)
    expected = np.empty_like(source).reshape(count, chunk_bytes)
    expected[write_order] = chunks[read_order]
    assert np.array_equal(fused.reshape(count, chunk_bytes), expected)
    assert np.array_equal(plain, fused)
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(chunks[k].tobytes()) for k in read_order]
    assert _native.digest_scattered(src, chunk_bytes, threads).tolist() == digests.tolist()


def test_strided_digest_is_that_of_the_runs_joined() -> None:
    data = random_bytes(4 * 5 * 300).reshape(4, 5, 300)
    ptrs = np.array([data[i].ctypes.data + 20 for i in range(4)], dtype=np.uint64)
    digests = _native.digest_strided(ptrs, runs=5, run_bytes=130, stride=300)
    joined = [np.ascontiguousarray(data[i, :, 20:150]).tobytes() for i in range(4)]
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(j) for j in joined]


def test_bound_digest_covers_every_field_in_the_documented_order() -> None:
    content = np.array([5, 2**64 - 1], dtype=np.uint64)
    region, slice_ = np.array([7, 8], dtype=np.uint32), np.array([9, 10], dtype=np.uint32)
    logical = np.array([2**40, 3], dtype=np.uint64)
    epoch = bytes(range(16))
    bound = _native.bind(content, 2**63 + 1, epoch, 2, 6, region, slice_, logical)
    packed = [
        struct.pack("<QQ16sIIIIQ8x", c, 2**63 + 1, epoch, 2, 6, r, s, k)
        for c, r, s, k in zip(content.tolist(), region.tolist(), slice_.tolist(), logical.tolist(), strict=True)
    ]
    assert bound.tolist() == [xxhash.xxh3_64_intdigest(p) for p in packed]


def test_arrays_of_different_lengths_are_refused() -> None:
    one, two = np.zeros(1, dtype=np.uint64), np.zeros(2, dtype=np.uint64)
    short, empty = np.zeros(1, dtype=np.uint32), np.zeros(0, dtype=np.uint64)
    with pytest.raises(ValueError, match="src has 1 elements, expected 2"):
        _native.copy_scattered(two, one, 0)
    with pytest.raises(ValueError, match="logical has 0 elements, expected 1"):
        _native.bind(one, 1, bytes(16), 0, 0, short, short, empty)
    with pytest.raises(ValueError, match="epoch has 15 elements, expected 16"):
        _native.bind(one, 1, bytes(15), 0, 0, short, short, one)


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_a_number_of_threads_out_of_range_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        _native.digest_scattered(np.zeros(1, dtype=np.uint64), 0, threads)


def test_digesting_lets_other_python_threads_run() -> None:
    data = random_bytes(1 << 20)
    ptrs = np.full(4000, data.ctypes.data, dtype=np.uint64)
    finished = threading.Event()

    def digest() -> None:
        _native.digest_scattered(ptrs, data.size)
        finished.set()

    digesting = threading.Thread(target=digest)
    digesting.start()
    turns = 0
    while not finished.wait(0.001):
        turns += 1
    digesting.join()
    assert turns > 3


def test_shared_memory_cannot_be_truncated_under_a_reader() -> None:
    memory = _native.SharedMemory(10_000, "kvxfer-test")
    assert memory.nbytes == 10_000
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 100)
    memory.close()
    assert (memory.ptr, memory.fd) == (0, -1)


def test_a_failed_system_call_names_itself_and_errno() -> None:
    with pytest.raises(_native.NativeError, match=r"memfd_create.*errno 22"):
        _native.SharedMemory(4096, "n" * 300)


def test_zero_runs_clears_exactly_the_runs() -> None:
    data = np.full((3, 4, 10), 7, dtype=np.uint8)
    _native.zero_runs(np.array([data[0].ctypes.data + 2, data[2].ctypes.data + 2], dtype=np.uint64), 4, 10, 5)
    expected = np.full((3, 4, 10), 7, dtype=np.uint8)
    expected[[0, 2], :, 2:7] = 0
    assert np.array_equal(data, expected)


def test_a_region_beyond_the_address_space_is_refused() -> None:
    _native.PoolMap([[(4096, 64, 64, 10)], []])
    with pytest.raises(ValueError, match="region 1 of group 0"):
        _native.PoolMap([[(4096, 64, 64, 10), (2**63, 2**40, 64, 2**40)]])


def test_an_idle_queue_has_no_events_and_a_quiet_descriptor() -> None:
    queue = _native.CompletionQueue()
    assert queue.poll() == []
    assert select.select([queue.fileno()], [], [], 0)[0] == []
