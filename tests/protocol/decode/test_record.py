"""Records: what is built parses to the same, and nothing else parses at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ProtocolViolation
from kvxfer.protocol.record import address, build, parse


def record(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "reservation": 0x0123456789ABCDEF,
        "epoch": bytes(range(16)),
        "generation": 3,
        "leg": 1,
        "lane": 2,
        "n_lanes": 4,
        "ranges": [(0, 0, 50), (2, 16, 34)],
        "n_chunks": 13,
        "bitmap": 0b1010101010101,
        "n_tokens": 50,
        "folds": np.array([11, 12, 13], np.uint64),
        "aux": b"hello",
    }
    return build(**(fields | changed))


def test_a_record_says_what_was_put_into_it() -> None:
    parsed = parse(record())
    assert (parsed.reservation, parsed.epoch) == (0x0123456789ABCDEF, bytes(range(16)))
    assert (parsed.generation, parsed.leg, parsed.lane, parsed.n_lanes) == (3, 1, 2, 4)
    assert parsed.ranges == ((0, 0, 50), (2, 16, 34))
    assert (parsed.n_chunks, parsed.bitmap, parsed.n_tokens) == (13, 0b1010101010101, 50)
    assert (parsed.folds.tolist(), parsed.aux) == ([11, 12, 13], b"hello")


def test_no_aux_and_empty_aux_are_different_things() -> None:
    assert parse(record(aux=None)).aux is None
    assert parse(record(aux=b"")).aux == b""


def test_no_folds_and_zero_folds_are_different_things() -> None:
    assert not parse(record(folds=None)).has_folds
    assert parse(record(folds=np.zeros(0, np.uint64))).has_folds


def test_every_flipped_bit_is_noticed() -> None:
    data = record()
    for position in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(ProtocolViolation):
            parse(bytes(damaged))


def test_every_truncation_and_every_extension_is_noticed() -> None:
    data = record()
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            parse(data[:length])
    for more in range(1, 24):
        with pytest.raises(ProtocolViolation):
            parse(data + bytes(more))


@given(st.binary(max_size=400))
def test_garbage_is_never_a_record(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse(data)
    with pytest.raises(ProtocolViolation):
        parse(record()[:48] + data)


@settings(max_examples=50)
@given(
    n_chunks=st.integers(0, 300),
    bits=st.integers(0, 2**300 - 1),
    aux=st.none() | st.binary(max_size=40),
    n_folds=st.none() | st.integers(0, 20),
)
def test_any_record_survives_the_round_trip(n_chunks: int, bits: int, aux: bytes | None, n_folds: int | None) -> None:
    bitmap = bits & ((1 << n_chunks) - 1)
    folds = None if n_folds is None else np.arange(n_folds, dtype=np.uint64)
    data = record(n_chunks=n_chunks, bitmap=bitmap, aux=aux, folds=folds)
    parsed = parse(data)
    assert (parsed.n_chunks, parsed.bitmap, parsed.aux) == (n_chunks, bitmap, aux)
    assert parsed.folds.tolist() == list(range(n_folds or 0))


def test_groups_out_of_order_are_refused() -> None:
    for ranges in ([(2, 0, 1), (0, 0, 1)], [(1, 0, 1), (1, 0, 1)]):
        with pytest.raises(ProtocolViolation):
            parse(record(ranges=ranges))


def test_an_address_is_read_without_being_believed() -> None:
    data = record()
    claimed = address(data[:96])
    assert claimed is not None
    assert (claimed.reservation, claimed.generation, claimed.leg, claimed.lane) == (0x0123456789ABCDEF, 3, 1, 2)
    assert address(data[:95]) is None
    assert address(b"\0" * 96) is None
