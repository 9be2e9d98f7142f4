"""The proof of a lane's connection holds for one connection, one role and one claim only."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolViolation
from kvxfer.lanes import handshake as hs
from kvxfer.lanes.contract import PROMISES

SECRET = os.urandom(32)
SERVER_NONCE = os.urandom(32)
CLAIM = hs.Claim("tcp", b"e" * 16, 3, 1, os.urandom(32))


def test_a_proof_holds_for_what_it_claims() -> None:
    claim, mac = hs.parse_proof(hs.pack_proof(SECRET, CLAIM, SERVER_NONCE))
    assert claim == CLAIM
    assert hs.proves(SECRET, claim, SERVER_NONCE, mac)
    assert hs.accepts(SECRET, claim, SERVER_NONCE, hs.pack_accept(SECRET, claim, SERVER_NONCE))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "local"},
        {"epoch": b"f" * 16},
        {"generation": 4},
        {"lane": 2},
        {"nonce": bytes(32)},
        {"want_memory": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_proof_does_not_hold_for_another_claim(change: dict[str, Any]) -> None:
    _, mac = hs.parse_proof(hs.pack_proof(SECRET, CLAIM, SERVER_NONCE))
    assert not hs.proves(SECRET, dataclasses.replace(CLAIM, **change), SERVER_NONCE, mac)


def test_a_proof_does_not_hold_for_another_connection_or_secret() -> None:
    _, mac = hs.parse_proof(hs.pack_proof(SECRET, CLAIM, SERVER_NONCE))
    assert not hs.proves(SECRET, CLAIM, os.urandom(32), mac)
    assert not hs.proves(os.urandom(32), CLAIM, SERVER_NONCE, mac)


def test_a_proof_cannot_be_sent_back_as_the_answer_to_it() -> None:
    _, mac = hs.parse_proof(hs.pack_proof(SECRET, CLAIM, SERVER_NONCE))
    assert not hs.accepts(SECRET, CLAIM, SERVER_NONCE, mac)


@given(frame=st.binary(min_size=hs.PROOF_BYTES, max_size=hs.PROOF_BYTES))
def test_random_bytes_prove_nothing(frame: bytes) -> None:
    try:
        claim, mac = hs.parse_proof(frame)
    except ProtocolViolation:
        return
    assert not hs.proves(SECRET, claim, SERVER_NONCE, mac)


def test_a_stranger_on_the_port_is_recognised() -> None:
    with pytest.raises(ProtocolViolation):
        hs.parse_challenge(b"HTTP/1.1 400 Bad Request".ljust(hs.CHALLENGE_BYTES, b"."))
    challenge = bytearray(hs.pack_challenge(SERVER_NONCE))
    assert hs.parse_challenge(bytes(challenge)) == SERVER_NONCE
    challenge[4] += 1
    with pytest.raises(ProtocolViolation, match="version"):
        hs.parse_challenge(bytes(challenge))


@pytest.mark.parametrize("kind", sorted(PROMISES))
def test_every_kind_of_lane_says_what_it_promises_and_can_be_claimed(kind: str) -> None:
    promise = PROMISES[kind]
    assert promise.kind == kind and promise.fence and promise.drained
    claim = dataclasses.replace(CLAIM, kind=kind)
    assert hs.parse_proof(hs.pack_proof(SECRET, claim, SERVER_NONCE))[0] == claim
