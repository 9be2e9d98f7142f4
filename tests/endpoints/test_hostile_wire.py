"""Both endpoints are real, and what is between them is not honest: bytes on a tcp lane are changed, cut, added, or sent
again on their way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import decode_executor
from kvxfer.errors import AdmissionClosed, KvxferError, LaneFailed, VerificationFailed
from kvxfer.lanes import handshake as hs
from kvxfer.protocol.messages import LaneOffer

from .waiting import until

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
CANARY = 123.0
PAGE_BYTES = 1024
RECORD = b"KVXR"
HANDSHAKE_BYTES = hs.CHALLENGE_BYTES + hs.ACCEPT_BYTES  # what prefill says before its first frame


class Wire:
    """A relay in front of prefill's lane port. ``tamper(piece, at)`` makes other bytes of a piece of prefill's frames,
    which begins ``at`` bytes behind the handshake; ``None`` hangs up."""

    def __init__(self, upstream: str) -> None:
        self.tamper: Callable[[bytes, int], bytes | None] = lambda piece, at: piece
        self.connections = 0
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._server]
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                decode, _ = self._server.accept()
                prefill = socket.create_connection(self._upstream)
                self.connections += 1
                self._sockets += [decode, prefill]
                self._start(self._relay, decode, prefill, lambda piece, at: piece)
                self._start(self._relay, prefill, decode, self._frames)

    def _frames(self, piece: bytes, at: int) -> bytes | None:
        """The handshake passes as it is."""
        left = max(0, HANDSHAKE_BYTES - at)
        changed = self.tamper(piece[left:], at + left - HANDSHAKE_BYTES) if len(piece) > left else b""
        return None if changed is None else piece[:left] + changed

    @staticmethod
    def _relay(source: socket.socket, sink: socket.socket, change: Callable[[bytes, int], bytes | None]) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                changed = change(piece, at)
                at += len(piece)
                if changed is None:
                    break
                sink.sendall(changed)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def lane() -> str:
    return "tcp"  # local lanes have no wire: the kernel carries them between two processes of one user


@pytest.fixture
def wired(make_pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Wire]]:
    """A pair with one tcp connection, and the wire in between."""
    pair = make_pair(prefill={"tcp_lanes": 1})
    for layer in pair.target.layers:
        layer[:] = CANARY
    wire = Wire(pair.prefill._listener.addresses("tcp")[0])
    connect = decode_executor.connect_lanes

    def through_the_wire(offers: Any, *args: Any, **kwargs: Any) -> Any:
        return connect([LaneOffer(offer.kind, (wire.address,), offer.lanes) for offer in offers], *args, **kwargs)

    monkeypatch.setattr(decode_executor, "connect_lanes", through_the_wire)
    yield pair, wire
    wire.close()


def handed_over(pair: Any, request_id: str) -> Any:
    handoff = pair.reserve(request_id, TARGET, N_TOKENS)
    send(pair, request_id)
    return handoff


def send(pair: Any, request_id: str) -> None:
    with contextlib.suppress(AdmissionClosed):  # decode may refuse what was written before the commit
        pair.send(request_id, SOURCE, N_TOKENS, aux=b"token 17")


def refused(pair: Any, handoff: Any, *kinds: type[KvxferError]) -> KvxferError:
    with pytest.raises(kinds) as caught:
        handoff.wait(10)
    assert handoff.wait_released(10)
    others = [page for page in range(32) if page not in TARGET]
    assert all((layer[others] == CANARY).all() for layer in pair.target.layers)
    assert not pair.target.pool.ledger.states(0).any()
    return caught.value


def succeeds(pair: Any, wire: Wire) -> None:
    """The next handoff, as an engine makes it: what is retryable is tried again."""
    wire.tamper = lambda piece, at: piece
    for attempt in range(4):  # the broken lane may be noticed by one side, or by nobody, before the next handoff
        handoff = handed_over(pair, f"next{attempt}")
        try:
            handoff.wait(10)
            break
        except KvxferError as error:
            assert error.retryable and handoff.wait_released(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def flip_at(position: int) -> Callable[[bytes, int], bytes]:
    """One bit of the byte ``position`` bytes behind the handshake."""

    def tamper(piece: bytes, at: int) -> bytes:
        changed = bytearray(piece)
        if at <= position < at + len(piece):
            changed[position - at] ^= 0x10
        return bytes(changed)

    return tamper


def test_a_wire_that_changes_nothing_delivers(wired: tuple[Any, Wire]) -> None:
    pair, wire = wired
    succeeds(pair, wire)
    assert wire.connections == 1


@pytest.mark.parametrize("page", range(4))
def test_a_bit_flipped_on_the_wire_refuses_the_handoff_and_names_the_page(wired: tuple[Any, Wire], page: int) -> None:
    pair, wire = wired
    wire.tamper = flip_at(64 + page * PAGE_BYTES + 321)  # the first frame carries layer 0 of all four pages
    error = refused(pair, handed_over(pair, "r"), VerificationFailed)
    assert error.details["kind"] == "digest" and error.retryable
    assert error.details["chunk"]["logical_page"] == page
    assert error.details["chunk"]["pool_page"] == TARGET[page]
    succeeds(pair, wire)


@pytest.mark.parametrize("at", [0, 4, 8, 16, 24, 32, 40, 44, 48, 56])
def test_a_bit_flipped_in_a_frame_header_never_makes_a_handoff(wired: tuple[Any, Wire], at: int) -> None:
    pair, wire = wired
    wire.tamper = flip_at(at)
    refused(pair, handed_over(pair, "r"), VerificationFailed, LaneFailed)
    succeeds(pair, wire)


@pytest.mark.parametrize("part", ["reservation", "epoch", "tokens", "aux", "digest"])
def test_a_bit_flipped_in_the_commit_record_refuses_the_handoff(wired: tuple[Any, Wire], part: str) -> None:
    pair, wire = wired
    inside = {"reservation": 8, "epoch": 16, "tokens": 80, "aux": -16, "digest": -1}[part]

    def tamper(piece: bytes, at: int) -> bytes:
        found = piece.rfind(RECORD)
        if found < 0:
            return piece
        changed = bytearray(piece)
        changed[found + inside if inside >= 0 else len(piece) + inside] ^= 0x10
        return bytes(changed)

    wire.tamper = tamper
    handoff = pair.reserve("r", TARGET, N_TOKENS, timeout_s=1.0)
    send(pair, "r")
    # Of a record that does not even name its reservation only the lane and the deadline are left to say so.
    error = refused(pair, handoff, VerificationFailed if part != "reservation" else KvxferError)
    assert error.retryable
    succeeds(pair, wire)


@pytest.mark.parametrize("cut", [1, 63, 64, 1000, 4 * PAGE_BYTES + 64, 8 * PAGE_BYTES + 130])
def test_a_connection_cut_in_mid_frame_fails_the_handoff_as_retryable(wired: tuple[Any, Wire], cut: int) -> None:
    pair, wire = wired

    def tamper(piece: bytes, at: int) -> bytes | None:
        return None if at + len(piece) > cut else piece

    wire.tamper = tamper
    handoff = handed_over(pair, "r")
    assert refused(pair, handoff, LaneFailed).retryable
    succeeds(pair, wire)
    assert wire.connections == 2


def test_bytes_behind_the_record_do_not_undo_what_was_accepted(wired: tuple[Any, Wire]) -> None:
    pair, wire = wired
    wire.tamper = lambda piece, at: piece + bytes(200) if RECORD in piece else piece
    handed_over(pair, "r").wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)
    until(lambda: pair.decode.counters().get("lane_down") == 1)
    succeeds(pair, wire)


def test_frames_sent_again_are_not_placed_again(wired: tuple[Any, Wire]) -> None:
    pair, wire = wired
    wire.tamper = lambda piece, at: piece + piece
    handoff = handed_over(pair, "r")
    try:
        handoff.wait(10)
    except LaneFailed as error:
        assert error.retryable and handoff.wait_released(10)
    else:
        pair.assert_delivered(SOURCE, TARGET, N_TOKENS)
    until(lambda: pair.decode.counters().get("lane_down") == 1)
    succeeds(pair, wire)


def test_frames_of_an_earlier_handoff_sent_in_a_later_one_change_nothing(wired: tuple[Any, Wire]) -> None:
    pair, wire = wired
    taped: list[bytes] = []

    def record(piece: bytes, at: int) -> bytes:
        taped.append(piece)
        return piece

    wire.tamper = record
    handed_over(pair, "first").wait(10)
    pair.source.fill(2)
    wire.tamper = lambda piece, at: b"".join(taped)  # instead of the second one's
    handoff = handed_over(pair, "second")
    refused(pair, handoff, LaneFailed, VerificationFailed)
    succeeds(pair, wire)
    landed = pair.target.copy(TARGET)[0]
    np.testing.assert_array_equal(landed, pair.source.copy(SOURCE)[0])
