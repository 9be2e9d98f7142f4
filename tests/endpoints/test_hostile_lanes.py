"""Whoever finds prefill's lane port and cannot prove a session's secret is shut out, and leaves a line in the audit."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.lanes import handshake as hs

from .fake_decode import FakeDecode
from .waiting import until

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


@pytest.fixture
def lane() -> str:
    return "tcp"


@pytest.fixture
def lane_port(pair: Any) -> Iterator[tuple[str, int]]:
    """Where prefill's tcp lanes are dialled, as any decode is told."""
    decode = FakeDecode(pair.prefill.address, pair.target.pool)
    decode.open()
    assert decode.welcome is not None
    (offer,) = [offer for offer in decode.welcome.offers if offer.kind == "tcp"]
    host, _, port = offer.addresses[0].rpartition(":")
    yield host, int(port)
    decode.close()


def refused_lanes(pair: Any) -> list[dict[str, Any]]:
    return [line for line in pair.prefill.audit_lines() if line["event"] == "refused_lane"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(hs.PROOF_BYTES), "framing"),
        (b"", "closed_early"),
    ],
)
def test_a_connection_that_proves_nothing_is_closed_and_audited_and_the_next_handoff_arrives(
    pair: Any, lane_port: tuple[str, int], said: bytes, kind: str
) -> None:
    with socket.create_connection(lane_port, timeout=10) as stranger:
        if said:
            stranger.sendall(said)
        else:
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass  # the challenge, and then the end
    until(lambda: bool(refused_lanes(pair)))
    (line,) = refused_lanes(pair)
    assert (line["side"], line["kind"], line["peer"]) == ("prefill", kind, lane_port[0])
    assert line["cause"]
    assert pair.prefill.counters()["refused_lane"] == 1
    pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)
