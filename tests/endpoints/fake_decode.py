"""A decode written by hand: one DEALER socket, on which the test says what it likes to a real prefill."""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar

import numpy as np
import zmq

from kvxfer import PagePool, hosts
from kvxfer.control import codec
from kvxfer.control.limits import Limits
from kvxfer.errors import ProtocolViolation
from kvxfer.protocol import messages as m
from kvxfer.shards import plan

WAIT_S = 10.0
Message = TypeVar("Message")


class FakeDecode:
    """``keys``: (public, secret) of ours; ``server_key``: dial with CURVE. Nothing is answered by itself."""

    def __init__(
        self, address: str, pool: PagePool, *, keys: tuple[bytes, bytes] | None = None, server_key: bytes = b""
    ) -> None:
        self.pool = pool
        self.epoch = bytes(16)
        self.welcome: m.Welcome | None = None
        self.received: list[m.Message] = []
        self._sent = 0
        self._next_number = 0
        self._limits = Limits.for_pool(pool.geometry)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(16))
        if server_key:
            public, secret = keys or zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(address)

    def send_raw(self, *parts: bytes) -> None:
        self._socket.send_multipart(list(parts))

    def frame(self, message: m.Message, *, epoch: bytes | None = None, sequence: int | None = None) -> bytes:
        """One frame, in order unless ``sequence`` says otherwise."""
        if sequence is None:
            self._sent += 1
            sequence = self._sent
        return codec.encode(self.epoch if epoch is None else epoch, sequence, message)

    def say(self, message: m.Message, *, epoch: bytes | None = None, sequence: int | None = None) -> None:
        self.send_raw(self.frame(message, epoch=epoch, sequence=sequence))

    def hear(self, kind: type[Message], timeout_s: float = WAIT_S) -> Message:
        """The next message of this kind; others are passed over. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            try:
                _, _, message = codec.decode(self._socket.recv(), self._limits)
            except ProtocolViolation as cause:
                raise AssertionError("prefill sent a malformed frame") from cause
            self.received.append(message)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} came; all that came: {self.received}")

    def hello(self, nonce: bytes | None = None) -> m.Hello:
        return m.Hello(nonce or os.urandom(8), self.pool.geometry, 0, "digest", ("local", "tcp"), hosts.host_identity())

    def open(self) -> None:
        """HELLO and WELCOME."""
        hello = self.hello()
        self.epoch = hello.nonce + bytes(8)
        self.say(hello)
        self.welcome = self.hear(m.Welcome)
        self.epoch = hello.nonce + self.welcome.nonce

    def settle(self) -> None:
        """Returns when prefill has dealt with all that was said before."""
        token = int.from_bytes(os.urandom(7), "little")
        self.say(m.Ping(token))
        while self.hear(m.Pong).token != token:
            pass

    def reserve(self, request_id: str, pages: list[int], *, number: int | None = None, **changes: Any) -> m.Reserve:
        """A right RESERVE of whole pages, or one changed by ``changes``; it is not sent yet."""
        assert self.welcome is not None
        if number is None:
            number = self._next_number
        self._next_number = max(self._next_number, number + 1)
        logical, pool = np.arange(len(pages), dtype="<u8"), np.array(pages, "<u8")
        fields: dict[str, Any] = {
            "reservation": int.from_bytes(os.urandom(8), "little"),
            "number": number,
            "request_id": request_id,
            "rank": 0,
            "readers": 1,
            "leg": 0,
            "n_legs": 1,
            "carries_aux": True,
            "verify": "digest",
            "generation": self.welcome.generation,
            "lanes": (0,),
            "groups": (m.ReserveGroup(0, 0, 16 * len(pages), logical.tobytes(), pool.tobytes()),),
            "slices": plan(self.pool.geometry, [self.welcome.pool])[0].tobytes(),
            "deadline_s": 30.0,
        }
        return m.Reserve(**(fields | changes))

    def close(self) -> None:
        self._socket.close(0)
