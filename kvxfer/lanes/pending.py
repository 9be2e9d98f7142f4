"""One connection that has not been handed over yet: the listener's side of the handshake, as a state machine.

It never blocks; the listener calls it when the socket is ready. See ``handshake`` for the frames.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvxfer.errors import ProtocolViolation
from kvxfer.lanes import handshake as hs
from kvxfer.lanes.contract import LOCAL
from kvxfer.lanes.export import MemoryExport

_LENGTH_BYTES = 4


class Want(Enum):
    """What a pending connection waits for."""

    READ = auto()
    WRITE = auto()
    HAND_OVER = auto()


class Refusal(Exception):
    """The connection is to be closed without a word; ``reason`` is for our own audit."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(cause)
        self.reason = reason
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Proven:
    """A claim that holds, and the session it belongs to."""

    session: int
    claim: hs.Claim


Judge = Callable[[hs.Claim, bytes, bytes], tuple[Proven, bytes]]


class PendingLane:
    """The server's side of one handshake. Used by the listener's thread only.

    ``judge(claim, nonce, mac)`` returns what was proven and the Accept frame, or raises Refusal.
    """

    def __init__(
        self,
        sock: socket.socket,
        kind: str,
        peer: str,
        nonce: bytes,
        since: float,
        deadline: float,
        memory: MemoryExport | None,
    ) -> None:
        self.sock = sock
        self.kind = kind
        self.peer = peer
        self.since = since
        self.deadline = deadline
        self.proven: Proven | None = None
        self._nonce = nonce
        self._memory = memory
        self._received = bytearray()
        self._expected = hs.PROOF_BYTES
        self._to_send = hs.pack_challenge(nonce)
        self._fds: tuple[int, ...] = ()

    def start(self) -> Want:
        return self._flush()

    def on_ready(self, judge: Judge) -> Want:
        """Goes as far as the socket allows. Raises Refusal."""
        if self._to_send:
            return self._flush()
        try:
            # Never a byte more than the frame that is due, so that nothing of what follows Go is swallowed.
            data = self.sock.recv(self._expected - len(self._received))
        except BlockingIOError:
            return Want.READ
        except OSError as cause:
            raise Refusal("closed_early", f"the connection broke: {cause.strerror}") from cause
        if not data:
            raise Refusal("closed_early", f"closed by the peer after {len(self._received)} bytes")
        self._received += data
        if len(self._received) < self._expected:
            return Want.READ
        frame = bytes(self._received)
        self._received.clear()
        if self.proven is not None:
            if frame != hs.GO:
                raise Refusal("framing", "the handshake did not end as it should")
            return Want.HAND_OVER
        return self._prove(frame, judge)

    def _prove(self, frame: bytes, judge: Judge) -> Want:
        try:
            claim, mac = hs.parse_proof(frame)
        except ProtocolViolation as cause:
            raise Refusal("framing", cause.message) from cause
        if claim.kind != self.kind:
            raise Refusal("framing", f"a {claim.kind} lane was claimed on a {self.kind} connection")
        self.proven, accept = judge(claim, self._nonce, mac)
        self._expected = len(hs.GO)
        self._to_send = accept
        if claim.kind == LOCAL and claim.want_memory:
            if self._memory is None:
                raise Refusal("no_memory", "no memory is exported on this lane")
            description = self._memory.description
            self._to_send += len(description).to_bytes(_LENGTH_BYTES, "little") + description
            self._fds = self._memory.fds_to_send
        return self._flush()

    def _flush(self) -> Want:
        try:
            if self._fds:
                sent = socket.send_fds(self.sock, [self._to_send], self._fds)
            else:
                sent = self.sock.send(self._to_send, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return Want.WRITE
        except OSError as cause:
            raise Refusal("closed_early", f"the connection broke: {cause.strerror}") from cause
        self._fds = ()
        self._to_send = self._to_send[sent:]
        return Want.WRITE if self._to_send else Want.READ
