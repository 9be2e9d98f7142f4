"""What both control sockets share: how a frame is judged, and the bounds of a socket."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import zmq

from kvxfer.control.codec import decode
from kvxfer.control.limits import Limits
from kvxfer.control.refused import Refused
from kvxfer.errors import ProtocolViolation
from kvxfer.protocol.messages import Message

MAX_BATCH = 64
_numbers = itertools.count()
# Plain integers: an enum's operators cost more than the calls that take them.
_DONTWAIT, _EVENTS, _POLLIN, _RCVMORE = int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)


class Received(NamedTuple):
    """One message. ``route`` is the ROUTER's name of the peer."""

    route: bytes
    epoch: bytes
    sequence: int
    message: Message


def judge(parts: list[bytes], route: bytes, limits: Limits) -> Received | Refused:
    """The message in ``parts``, which must be one frame, or why not."""
    if len(parts) != 1:
        return Refused("parts", route, f"{len(parts)} frames where one is expected")
    try:
        return Received(route, *decode(parts[0], limits))
    except ProtocolViolation as refusal:
        return Refused(str(refusal.details.get("kind", "malformed")), route, refusal.message)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking is cheaper than the exception that tells of an empty socket."""
    events = socket.get(_EVENTS)
    assert isinstance(events, int)
    return bool(events & _POLLIN)


def receive_parts(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """One message that waits, or None. Never blocks."""
    try:
        parts = [socket.recv(_DONTWAIT)]
        while socket.get(_RCVMORE):
            parts.append(socket.recv(_DONTWAIT))
    except zmq.Again:
        return None
    return parts


def watch_connections(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that tells of ``events``. To end it: ``disable_monitor`` of the watched one, then close this one."""
    place = f"inproc://kvxfer-events-{next(_numbers)}"  # libzmq frees a name some time after its socket
    socket.monitor(place, events)
    watcher: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    watcher.setsockopt(zmq.LINGER, 0)
    # Where this queue is full libzmq's own thread waits, and whoever closes the watched socket waits for it.
    watcher.setsockopt(zmq.RCVHWM, 0)
    watcher.connect(place)
    readable(watcher)  # its descriptor announces nothing before it was asked once
    return watcher


def set_common_options(socket: zmq.Socket[bytes], limits: Limits, hwm: int) -> None:
    """Bounds and time-outs that both ends share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    # CURVE adds a few dozen bytes to a frame; the codec holds it to its exact bound afterwards.
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes + 1024)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
