"""The core's digests are those that the xxhash package defines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import digest
from kvxfer.errors import GeometryError

EPOCH = bytes(range(16))
U64S = st.integers(0, (1 << 64) - 1)
U32S = st.integers(0, (1 << 32) - 1)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=3000))
def test_content_is_xxh3_of_the_bytes(data: bytes) -> None:
    assert digest.content(data) == digest.reference_content(data)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 240, 241, 1024, 4097])
@pytest.mark.parametrize("threads", [1, 2])
def test_scattered_chunks_are_digested_each_on_its_own(chunk_bytes: int, threads: int) -> None:
    pages = np.random.default_rng(1).integers(0, 256, (9, chunk_bytes), np.uint8)
    order = np.array([4, 0, 8, 1, 1], np.uint64)
    ptrs = np.uint64(pages.ctypes.data) + order * np.uint64(chunk_bytes)
    found = digest.chunk_digests(ptrs, chunk_bytes, threads=threads)
    assert found.tolist() == [digest.reference_content(pages[int(page)].tobytes()) for page in order]


def test_a_strided_chunk_is_digested_as_if_it_were_one_piece() -> None:
    page = np.random.default_rng(2).integers(0, 256, (7, 100), np.uint8)
    ptrs = np.array([page.ctypes.data + 5], np.uint64)
    (found,) = digest.strided_chunk_digests(ptrs, 7, 33, 100).tolist()
    assert found == digest.reference_content(np.ascontiguousarray(page[:, 5:38]).tobytes())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(U64S, U32S, U32S, U64S), max_size=6), U64S, st.binary(min_size=16, max_size=16), U32S, U32S)
def test_binding_covers_every_part_of_a_chunks_place(
    chunks: list[tuple[int, int, int, int]], reservation: int, epoch: bytes, leg: int, group: int
) -> None:
    contents, regions, slices, logical = zip(*chunks, strict=True) if chunks else ((), (), (), ())
    bound = digest.bind(
        np.array(contents, np.uint64),
        reservation=reservation,
        epoch=epoch,
        leg=leg,
        group=group,
        regions=np.array(regions, np.uint32),
        slices=np.array(slices, np.uint32),
        logical=np.array(logical, np.uint64),
    )
    assert bound.tolist() == [
        digest.reference_bind(
            content,
            reservation=reservation,
            epoch=epoch,
            leg=leg,
            group=group,
            region=region,
            slice_unit=slice_unit,
            logical=page,
        )
        for content, region, slice_unit, page in chunks
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"reservation": 8},
        {"epoch": bytes(16)},
        {"leg": 1},
        {"group": 1},
        {"region": 1},
        {"slice_unit": 1},
        {"logical": 1},
    ],
)
def test_the_same_bytes_elsewhere_do_not_verify(change: dict[str, int | bytes]) -> None:
    place = {"reservation": 7, "epoch": EPOCH, "leg": 0, "group": 0, "region": 0, "slice_unit": 0, "logical": 0}
    assert digest.reference_bind(5, **place) != digest.reference_bind(5, **{**place, **change})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(U64S, max_size=40), st.integers(1, 9))
def test_folds_are_digests_over_runs_of_bound_digests(bound: list[int], chunks_per_fold: int) -> None:
    found = digest.folds(np.array(bound, np.uint64), chunks_per_fold)
    runs = [bound[at : at + chunks_per_fold] for at in range(0, len(bound), chunks_per_fold)]
    assert found.tolist() == [digest.reference_fold(run) for run in runs]
    assert digest.fold(np.array(bound, np.uint64)) == digest.reference_fold(bound)


def test_the_order_of_chunks_in_a_fold_matters() -> None:
    assert digest.reference_fold([1, 2]) != digest.reference_fold([2, 1])


def test_arguments_that_make_no_chunks_are_refused() -> None:
    ptrs = np.zeros(1, np.uint64)
    with pytest.raises(GeometryError):
        digest.chunk_digests(ptrs, 0)
    with pytest.raises(GeometryError):
        digest.chunk_digests(ptrs, 8, threads=0)
    with pytest.raises(GeometryError):
        digest.strided_chunk_digests(ptrs, 2, 8, 7)
    with pytest.raises(GeometryError):
        digest.folds(ptrs, 0)
    places = {"regions": np.zeros(1, np.uint32), "slices": np.zeros(1, np.uint32), "logical": ptrs}
    with pytest.raises(GeometryError):
        digest.bind(ptrs, reservation=1, epoch=bytes(15), leg=0, group=0, **places)
    with pytest.raises(GeometryError):
        digest.bind(np.zeros(2, np.uint64), reservation=1, epoch=EPOCH, leg=0, group=0, **places)


def test_the_core_names_its_vector_path() -> None:
    assert digest.isa() in ("avx512", "avx2", "neon", "scalar")
