"""Decode's end of the control plane: one DEALER socket for one session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvxfer.control.inbox import MAX_BATCH, judge, readable, receive_parts, set_common_options, watch_connections
from kvxfer.control.keys import Keys
from kvxfer.control.limits import Limits
from kvxfer.control.loopback import dial_address
from kvxfer.control.refused import Refused
from kvxfer.errors import Closed, ConfigurationError
from kvxfer.hosts import Address, parse_address
from kvxfer.protocol.messages import Message

_HWM = 1024
_TROUBLE = {
    int(zmq.EVENT_CONNECT_RETRIED): "nobody answers at this address",
    int(zmq.EVENT_DISCONNECTED): "the connection was closed",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the security handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the two sides do not agree on security: keys missing or different",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the peer does not authorise our key",
}
# these follow every other failure, so they never replace its reason
_VAGUE = frozenset({int(zmq.EVENT_CONNECT_RETRIED), int(zmq.EVENT_DISCONNECTED)})


class Answer(NamedTuple):
    """One message of the server."""

    epoch: bytes
    sequence: int
    message: Message


class ControlClient:
    """Not thread-safe: call it under one lock. ``fileno()`` is edge-triggered, so after ``receive`` or ``send`` ask
    ``pending()`` before waiting for it again.

    The socket has a fresh random name, and connects and reconnects in the background.

    Args:
        peer: ``host:port``, ``tcp://host:port``, ``[::1]:port`` or ``ipc://path``.
        keys: our CURVE keys; the server must prove the key that they name for ``peer``.
        insecure: allow an address beyond loopback without keys.
        limits: bounds of what may arrive.

    Raises:
        InsecureEndpoint: the loopback rule forbids ``peer``.
        ConfigurationError: the address is malformed, or the keys name no server key for it.
    """

    def __init__(
        self, peer: str, *, keys: Keys | None = None, insecure: bool = False, limits: Limits | None = None
    ) -> None:
        self._limits = limits if limits is not None else Limits()
        self._trouble: str | None = None
        self.address = dial_address(peer, keys, insecure)
        server_key = keys.server_key(_named(peer, self.address)) if keys is not None else b""
        self._socket: zmq.Socket[bytes] | None = zmq.Context.instance().socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._configure(self._socket, keys, server_key)
            self._socket.connect(str(self.address))
        except zmq.ZMQError as cause:
            self.close()
            raise ConfigurationError(f"cannot dial: {cause.strerror}", address=peer) from cause

    def fileno(self) -> int:
        return int(self._require().getsockopt(zmq.FD))

    def pending(self) -> bool:
        """True if ``receive`` would return something now."""
        return readable(self._require())

    def frames(self) -> Iterator[Answer | Refused]:
        """Messages and refusals until none waits; never blocks. Stop asking once the client is closed.

        The socket is asked for the next one only when the last one has been dealt with, so that at the end nothing is
        left, whatever was sent meanwhile.
        """
        socket = self._require()
        while readable(socket):
            parts = receive_parts(socket)
            if parts is None:
                return
            found = judge(parts, b"", self._limits)
            yield found if isinstance(found, Refused) else Answer(found.epoch, found.sequence, found.message)

    def receive(self) -> list[Answer | Refused]:
        """At most 64 messages and refusals that wait now; never blocks."""
        return list(islice(self.frames(), MAX_BATCH))

    def send(self, frame: bytes) -> bool:
        """Hands a frame to the socket. False: its queue is full, so the frame is lost, as any frame may be."""
        try:
            self._require().send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def trouble(self) -> str | None:
        """What went wrong while connecting, for the text of a time-out; None if nothing did since the last success."""
        monitor = self._monitor
        while monitor is not None:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.ZMQError:
                break
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._trouble = None
            elif event in _TROUBLE and (event not in _VAGUE or self._trouble is None):
                self._trouble = _TROUBLE[event]
        return self._trouble

    def close(self) -> None:
        """Closes the socket with no linger. Idempotent."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None and self._socket is not None:
            self._socket.disable_monitor()
            monitor.close(0)
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _require(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise Closed("the control client is closed")
        return self._socket

    def _configure(self, socket: zmq.Socket[bytes], keys: Keys | None, server_key: bytes) -> None:
        set_common_options(socket, self._limits, _HWM)
        socket.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(16))  # a name must not begin with a zero byte
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = watch_connections(socket, sum(_TROUBLE) | int(zmq.EVENT_HANDSHAKE_SUCCEEDED))


def _named(peer: str, resolved: Address) -> Address:
    """The address by the name that the caller used, because that is how keys name their servers."""
    return parse_address(peer) if resolved.scheme == "tcp" else resolved
