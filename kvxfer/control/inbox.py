"""What both control sockets share: how a frame is judged, and the bounds of a socket."""

from __future__ import annotations

from typing import NamedTuple

import zmq

from kvxfer.control.codec import decode
from kvxfer.control.limits import Limits
from kvxfer.control.refused import Refused
from kvxfer.errors import ProtocolViolation
from kvxfer.protocol.messages import Message

MAX_BATCH = 64


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
