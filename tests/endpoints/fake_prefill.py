"""A prefill written by hand: it speaks the real control plane and the real lane handshake, and every frame that it puts
on a lane is the test's, right or wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvxfer import PagePool, _native, digest, hosts
from kvxfer.control import codec
from kvxfer.control.inbox import Received
from kvxfer.control.server import ControlServer
from kvxfer.lanes.export import MemoryExport, export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener
from kvxfer.pool import page_rows
from kvxfer.protocol import messages as m
from kvxfer.protocol import record as rec
from kvxfer.protocol.leg import LegLayout

WAIT_S = 10.0
SLOT = 0  # of the generation table; its value while nothing was reused is 0
_MAGIC = 0x4658564B


class FakePrefill:
    """Answers HELLO, RESERVE, PING, RELANE, ABORT and FETCH_DIGESTS truthfully in a thread; the test does the rest.

    ``kind``: the lane it serves; ``local`` lanes may fall back to tcp if ``fallback``. ``export``: makes another
    description of the pool's memory than the true one.
    """

    def __init__(
        self,
        pool: PagePool,
        kind: str,
        *,
        fallback: bool = False,
        export: Callable[[int], MemoryExport] | None = None,
    ) -> None:
        self.pool, self.kind = pool, kind
        self.n_regions = len(pool.geometry.groups[0].regions)
        self.legs: dict[str, Leg] = {}
        self.heard: list[m.Message] = []
        self.answers = True  # False: nothing is answered any more
        self.wires: dict[int, socket.socket] = {}
        self.epoch = bytes(16)
        self.former_epoch = bytes(16)
        self.generation = 1
        self._kinds = {"local": 1, "tcp": 1} if fallback else {kind: 1}
        self._hello: m.Hello | None = None
        self._route = b""
        self._sent = 0
        self._sequence = 0
        self._table = _native.SharedMemory(4096, "kvxfer-test-table")
        self._lock = threading.RLock()
        self._server = ControlServer("127.0.0.1:0")
        self.address = self._server.address
        memory = export(self._table.fd) if export else export_memory(pool.region_memory, pool.geometry, self._table.fd)
        self._listener = LaneListener(
            tcp_hosts=["127.0.0.1"],
            local=True,
            memory=memory,
            on_lane=self._take_lane,
            on_refused=lambda *refusal: None,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---- the control plane -------------------------------------------------------------------------------------------

    def say(self, message: m.Message, *, epoch: bytes | None = None, sequence: int | None = None) -> None:
        """One control frame to decode, in order unless ``sequence`` says otherwise."""
        with self._lock:
            if sequence is None:
                self._sent += 1
                sequence = self._sent
            self.say_raw(codec.encode(self.epoch if epoch is None else epoch, sequence, message))

    def say_raw(self, *parts: bytes) -> None:
        """Any bytes, as one multipart message."""
        with self._lock:
            assert self._server._socket is not None
            with contextlib.suppress(zmq.ZMQError):  # decode has gone
                self._server._socket.send_multipart([self._route, *parts])

    def reserved(self, request_id: str) -> Leg:
        """The leg of this request, once it was offered."""
        _until(lambda: request_id in self.legs)
        return self.legs[request_id]

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                frames = self._server.receive()
                for frame in frames:
                    if isinstance(frame, Received):
                        self._answer(frame)
            if not frames:
                time.sleep(0.001)

    def _answer(self, frame: Received) -> None:
        message = frame.message
        self.heard.append(message)
        if not self.answers:
            return
        if isinstance(message, m.Hello):
            self._welcome(frame.route, message)
        elif isinstance(message, m.Reserve):
            if message.request_id not in self.legs or self.legs[message.request_id].reserve != message:
                self.legs[message.request_id] = Leg(self, message)
            self.say(m.Granted(message.reservation, message.leg))
        elif isinstance(message, m.Ping):
            self.say(m.Pong(message.token))
        elif isinstance(message, m.Abort):
            self.say(m.Quiesced(message.reservation, message.leg, (0,)))
        elif isinstance(message, m.Relane):
            self._serve(message.generation)
        elif isinstance(message, m.FetchDigests):
            for leg in self.legs.values():
                if leg.reserve.reservation == message.reservation:
                    content = leg.contents()[message.first : message.first + message.count]
                    self.say(m.Digests(message.reservation, message.leg, message.first, content.tobytes()))

    def _welcome(self, route: bytes, hello: m.Hello) -> None:
        if self._hello is not None and self._hello.nonce == hello.nonce:
            return
        nonce = os.urandom(8)
        self.former_epoch, self.epoch = self.epoch, hello.nonce + nonce
        self._hello, self._route = hello, route
        self._hang_up_all()
        offers = self._listener.offers(self._kinds)
        secret = os.urandom(32)
        self._open(1, secret)
        self.say(m.Welcome(nonce, bytes(8), self.pool.geometry, 0, offers, secret, 1, hosts.host_identity(), 5.0))

    def _serve(self, generation: int) -> None:
        secret = os.urandom(32)
        self._hang_up_all()
        self._open(generation, secret)
        self.say(m.Lanes(generation, secret))

    def _open(self, generation: int, secret: bytes) -> None:
        self.generation, self._sequence = generation, 0
        self._listener.serve(1, self.epoch, generation, secret, self._kinds)

    # ---- the lane ----------------------------------------------------------------------------------------------------

    def put(self, *frames: Frame | bytes) -> None:
        """Frames, and bytes as they are, on the lane of the current generation."""
        _until(lambda: self.generation in self.wires)
        self.wires[self.generation].sendall(b"".join(map(self.encode, frames)))

    def encode(self, frame: Frame | bytes) -> bytes:
        """The bytes of a frame. Numbers rise by themselves, in the order of this call."""
        if isinstance(frame, bytes):
            return frame
        right = {
            "magic": _MAGIC,
            "type": frame.type,
            "flags": 0,
            "generation": self.generation,
            "lane": 0,
            "sequence": self._sequence,
            "reservation": frame.leg.reserve.reservation,
            "leg": frame.leg.reserve.leg,
            "group": 0,
            "slice": 0,
            "n_pages": 0,
            "page_first": 0,
            "body_bytes": len(frame.body),
        }
        self._sequence += 1
        return struct.pack("<IHHIIQQIIIIQQ", *(right | frame.fields).values()) + frame.body

    def hang_up(self) -> None:
        self.wires[self.generation].close()

    def bump(self, slot: int = SLOT) -> None:
        """Says, as a Sender does before sources are reused, that nothing read from now on may count."""
        ctypes.c_uint64.from_address(self._table.ptr + 8 * slot).value += 1

    def rows(self, region: int) -> npt.NDArray[np.uint8]:
        """The source's pages of one region as bytes: [pages, page bytes]."""
        return page_rows(self.pool, 0, region)

    def _take_lane(self, lane: LaneConnection) -> None:
        wire = socket.socket(fileno=lane.fd)
        wire.settimeout(WAIT_S)
        self.kind = lane.kind
        self.wires[lane.generation] = wire

    def _hang_up_all(self) -> None:
        while self.wires:
            self.wires.popitem()[1].close()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(WAIT_S)
        self._server.close()
        self._listener.close()
        self._hang_up_all()


@dataclass(frozen=True)
class Frame:
    """One frame to come. ``fields`` replace what would be right in its header."""

    leg: Leg
    type: int
    body: bytes
    fields: dict[str, int]


class Leg:
    """One reservation as it was offered to the fake. ``source``: the pages it is to be filled from, by default those
    that follow each other from page 0 on."""

    def __init__(self, prefill: FakePrefill, reserve: m.Reserve) -> None:
        assert prefill._hello is not None
        self.prefill, self.reserve = prefill, reserve
        self.layout = LegLayout.of(prefill._hello.pool.groups, reserve.slices, reserve.groups)
        self.n_pages = len(reserve.groups[0].logical) // 8
        self.source = list(range(self.n_pages))
        self.n_tokens = reserve.groups[0].first_token + reserve.groups[0].n_tokens
        self._contents: npt.NDArray[np.uint64] | None = None

    # ---- right frames ------------------------------------------------------------------------------------------------

    def writes(self, first: int = 0, n: int | None = None) -> list[Frame]:
        """Right frames for pages ``[first, first + n)`` in every region."""
        count = self.n_pages - first if n is None else n
        return [self.write(first, region, count) for region in range(self.prefill.n_regions)]

    def write(self, first: int, region: int, n: int = 1, *, body: bytes | None = None, **fields: Any) -> Frame:
        """``n`` pages of one region. ``source``: other pages than the leg's; ``slot``, ``expected``: on local lanes."""
        pages = fields.pop("source", self.source[first : first + n])
        slot, expected = fields.pop("slot", SLOT), fields.pop("expected", 0)
        if body is None and self.prefill.kind == "local":
            body = struct.pack("<QQ", slot, expected) + np.array(pages, "<u8").tobytes()
        elif body is None:
            body = self.prefill.rows(region)[pages].tobytes()
        return Frame(self, 1, body, {"slice": region, "n_pages": n, "page_first": first} | fields)

    def record(self, **changes: Any) -> Frame:
        """The commit record of every chunk; ``changes`` replace what is true. ``raw``: makes other bytes of it."""
        raw = changes.pop("raw", bytes)
        slot, expected = changes.pop("slot", SLOT), changes.pop("expected", 0)
        digests = self.reserve.verify == "digest"
        true: dict[str, Any] = {
            "reservation": self.reserve.reservation,
            "epoch": self.prefill.epoch,
            "generation": self.reserve.generation,
            "leg": self.reserve.leg,
            "lane": 0,
            "n_lanes": 1,
            "ranges": [(group.group, group.first_token, group.n_tokens) for group in self.reserve.groups],
            "n_chunks": self.layout.n_chunks,
            "bitmap": self.layout.expected,
            "n_tokens": self.n_tokens,
            "folds": self.folds() if digests else None,
            "aux": b"",
        }
        body = raw(rec.build(**(true | changes)))
        if self.prefill.kind == "local":
            body = struct.pack("<QQ", slot, expected) + body
        return Frame(self, 2, body, {})

    # ---- digests -----------------------------------------------------------------------------------------------------

    def digest_now(self) -> None:
        """Takes the content digests, as ``write()`` does: what happens to the sources later is not in them."""
        self._contents = self.contents()

    def contents(self) -> npt.NDArray[np.uint64]:
        """Content digests of the leg's sources by chunk ordinal."""
        if self._contents is not None:
            return self._contents
        pages, regions = range(self.n_pages), range(self.prefill.n_regions)
        rows = [self.prefill.rows(region) for region in regions]
        return np.array([digest.content(rows[r][self.source[page]]) for page in pages for r in regions], np.uint64)

    def folds(self) -> npt.NDArray[np.uint64]:
        places = [self.layout.locate(ordinal) for ordinal in range(self.layout.n_chunks)]
        bound = digest.bind(
            self.contents(),
            reservation=self.reserve.reservation,
            epoch=self.prefill.epoch,
            leg=self.reserve.leg,
            group=0,
            regions=np.array([place.region for place in places], np.uint32),
            slices=np.array([place.slice for place in places], np.uint32),
            logical=np.array([place.logical for place in places], np.uint64),
        )
        group = self.layout.groups[0]
        return digest.folds(bound, group.pages_per_fold * group.n_slices)


def flip(data: bytes, at: int) -> bytes:
    """``data`` with one bit of byte ``at`` changed."""
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.001)
