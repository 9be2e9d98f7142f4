"""Both ends of one session's lanes, for every kind: real handshakes, a real Sender (or a hostile one) and Receiver."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer import _native, digest
from kvxfer.geometry import SLICE_DTYPE, Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes.dial import connect_lanes
from kvxfer.lanes.export import export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener
from kvxfer.protocol import record as rec
from kvxfer.protocol.acceptance import Accepted, LegEvidence, Offer, accept
from kvxfer.protocol.actions import LegReport
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import LaneOffer, ReserveGroup

KINDS = ("local-mapped", "local-process_vm_readv", "tcp")
CANARY = 0xEE
TOKENS_PER_PAGE = 16
SESSION, GENERATION = 5, 2
DEADLINE_S = 10.0

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class Event(NamedTuple):
    """One completion."""

    kind: int
    session: int
    generation: int
    lane: int
    reservation: int
    leg: int
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True)
class Leg:
    """One leg as it was offered: page k of the sequence lies in source page ``source[k]``, to go to ``pool[k]``."""

    reservation: int
    number: int
    verify: bool
    lanes: tuple[int, ...]
    source: U64
    pool: U64
    slices: bytes
    layout: LegLayout
    first_page: int = 0

    @property
    def logical(self) -> U64:
        return np.arange(self.first_page, self.first_page + len(self.pool), dtype=np.uint64)

    @property
    def end_token(self) -> int:
        return (self.first_page + len(self.pool)) * TOKENS_PER_PAGE


@dataclass
class Completions:
    """A completion queue, and all it has ever said."""

    queue: Any = field(default_factory=_native.CompletionQueue)
    seen: list[Event] = field(default_factory=list)

    def pump(self) -> None:
        self.seen += [Event(*event) for event in self.queue.poll()]

    def of(self, kind: int, reservation: int | None = None) -> list[Event]:
        self.pump()
        return [e for e in self.seen if e.kind == kind and reservation in (None, e.reservation)]

    def wait(self, kind: int, n: int = 1, reservation: int | None = None) -> list[Event]:
        """``n`` events of a kind; waits on the queue's descriptor alone, so a missing wake-up fails the test."""
        until = time.monotonic() + DEADLINE_S
        while len(found := self.of(kind, reservation)) < n:
            left = until - time.monotonic()
            assert left > 0, f"{len(found)} of {n} events of kind {kind} came; all that came: {self.seen}"
            select.select([self.queue.fileno()], [], [], left)
        return found


class Remote:
    """A prefill process (``prefill_worker.py``) that can be paused and killed. It writes what ``start`` says."""

    def __init__(self, kind: str, n_lanes: int, n_pages: int, page_bytes: int, regions: int) -> None:
        arguments = [kind, str(n_lanes), str(n_pages), str(page_bytes), str(regions)]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("prefill_worker.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = b""
        hello = self._read()
        self.epoch, self.secret = bytes.fromhex(hello["epoch"]), bytes.fromhex(hello["secret"])
        self.offer = LaneOffer(*hello["offer"])

    def start(self, leg: Leg, *, commit: bool = True, pause_s: float = 0.0) -> None:
        """Attaches the leg, writes its pages 16 at a time with pauses between, and commits, in a thread over there."""
        order = {
            "reservation": leg.reservation,
            "leg": leg.number,
            "verify": leg.verify,
            "lanes": leg.lanes,
            "slices": leg.slices.hex(),
            "first_token": leg.first_page * TOKENS_PER_PAGE,
            "logical": leg.logical.tolist(),
            "source": leg.source.tolist(),
            "n_tokens": leg.end_token,
            "commit": commit,
            "pause_s": pause_s,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, event: str) -> None:
        """Until that process says WRITTEN, LEG_DRAINED, LEG_FAILED or LANE_DOWN."""
        while self._read()["event"] != event:
            pass

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            ready, _, _ = select.select([fd], [], [], DEADLINE_S)
            data = os.read(fd, 4096) if ready else b""
            assert data, "the prefill process said nothing"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class Rig:
    """Prefill's pool and decode's, ``regions`` regions each, joined by ``n_lanes`` lanes of ``kind``.

    ``hostile``: instead of a Sender the test holds prefill's ends (``wires``) and writes frames by hand.
    ``deaf``: instead of a Receiver the test holds decode's ends (``ears``), and nobody reads them.
    ``remote``: prefill is this process, made by ``remote_prefill`` with the same sizes.
    ``relay``: makes another offer of the real one, to put something in between.
    """

    def __init__(
        self,
        kind: str,
        *,
        n_lanes: int = 2,
        n_pages: int = 32,
        page_bytes: int = 4096,
        regions: int = 2,
        hostile: bool = False,
        deaf: bool = False,
        remote: Remote | None = None,
        relay: Callable[[LaneOffer], LaneOffer] | None = None,
    ) -> None:
        self.kind = kind.partition("-")[0]
        self.n_lanes, self.n_pages, self.page_bytes, self.regions = n_lanes, n_pages, page_bytes, regions
        region = Region("layer", "uint8", page_bytes, page_bytes, unit_bytes=page_bytes)
        self.geometry = PoolGeometry((Group("kv", TOKENS_PER_PAGE, n_pages, (region,) * regions),))
        self.source, source_memory = self._source_memory(mapped=kind != "local-process_vm_readv")
        self.source[:] = np.random.default_rng(7).integers(0, 256, self.source.shape, dtype=np.uint8)
        self.pool: U8 = np.full((regions, n_pages, page_bytes), CANARY, np.uint8)
        self.prefill, self.decode = Completions(), Completions()
        self.epoch = remote.epoch if remote else os.urandom(16)
        self.secret = remote.secret if remote else os.urandom(32)
        self.taken: list[LaneConnection] = []
        self.wires: dict[int, socket.socket] = {}
        self.ears: list[socket.socket] = []
        self._sequences: dict[int, int] = {}
        self._source_map = _native.PoolMap(self._regions_of(self.source))
        self._pool_map = _native.PoolMap(self._regions_of(self.pool))
        self._table = _native.SharedMemory(4096, "kvxfer-test-table")
        self.sender = None if hostile or remote else _native.Sender(self.prefill.queue, self._source_map)
        table_fd = self._table.fd if self.sender is None else self.sender.generation_table_fd
        if self.sender is not None:
            self.sender.open_session(SESSION, self.epoch, GENERATION, n_lanes)
        self.listener = LaneListener(
            tcp_hosts=["127.0.0.1"],
            local=True,
            memory=export_memory(source_memory, self.geometry, table_fd),
            on_lane=self._take_lane,
            on_refused=lambda *refusal: None,
        )
        self.receiver = _native.Receiver(
            self.decode.queue, self._pool_map, SESSION, self.epoch, GENERATION, max_record_bytes=1 << 20
        )
        offer = remote.offer if remote else self._serve()
        self._connect(relay(offer) if relay else offer, deaf)

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _source_memory(self, *, mapped: bool) -> tuple[U8, list[list[RegionMemory]]]:
        shape = (self.regions, self.n_pages, self.page_bytes)
        region_bytes = self.n_pages * self.page_bytes
        if not mapped:
            raw = np.zeros(shape, np.uint8)
            return raw, [[RegionMemory(raw[i].ctypes.data, region_bytes) for i in range(self.regions)]]
        self._shared = _native.SharedMemory(self.regions * region_bytes, "kvxfer-test-pool")
        whole = (ctypes.c_uint8 * (self.regions * region_bytes)).from_address(self._shared.ptr)
        places = [(self._shared.ptr + i * region_bytes, i * region_bytes) for i in range(self.regions)]
        memory = [RegionMemory(ptr, region_bytes, self._shared.fd, offset) for ptr, offset in places]
        return np.frombuffer(whole, np.uint8).reshape(shape), [memory]

    def _regions_of(self, array: U8) -> list[list[tuple[int, int, int, int]]]:
        return [[(region.ctypes.data, self.page_bytes, self.page_bytes, self.n_pages) for region in array]]

    def _take_lane(self, lane: LaneConnection) -> None:
        self.taken.append(lane)
        if self.sender is not None:
            self.sender.add_lane(lane.session, lane.generation, lane.lane, lane.kind, lane.fd)
            return
        wire = socket.socket(fileno=lane.fd)
        wire.settimeout(DEADLINE_S)
        self.wires[lane.lane] = wire

    def _serve(self) -> LaneOffer:
        self.listener.serve(SESSION, self.epoch, GENERATION, self.secret, {self.kind: self.n_lanes})
        (offer,) = self.listener.offers({self.kind: self.n_lanes})
        return offer

    def _connect(self, offer: LaneOffer, deaf: bool) -> None:
        _, lanes, reasons = connect_lanes(
            [offer],
            (self.kind,),
            epoch=self.epoch,
            generation=GENERATION,
            secret=self.secret,
            timeout_s=DEADLINE_S,
        )
        assert reasons == {}
        if deaf:
            self.ears = [socket.socket(fileno=lane.detach()) for lane in lanes]
            self.prefill.wait(_native.LANE_UP, self.n_lanes)
            return
        for number, lane in enumerate(lanes):
            self.receiver.add_lane(number, self.kind, lane.detach(), lane.peer_memory)
        self.decode.wait(_native.LANE_UP, self.n_lanes)
        if self.sender is not None:
            self.prefill.wait(_native.LANE_UP, self.n_lanes)
        until = time.monotonic() + DEADLINE_S
        while offer.addresses == self.listener.addresses(self.kind) and len(self.taken) < self.n_lanes:
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        self.receiver.fence()
        self.listener.close()
        if self.sender is not None:
            self.sender.close()
        for sock in (*self.wires.values(), *self.ears):
            sock.close()

    # ---- offers and writes -------------------------------------------------------------------------------------------

    def slices(self) -> bytes:
        """Every region, whole pages."""
        rows = [(0, i, 0, 0, i, 1, self.page_bytes, 0, 0, 0, 0) for i in range(self.regions)]
        return np.array(rows, SLICE_DTYPE).tobytes()

    def offer(
        self,
        reservation: int,
        n_pages: int = 8,
        *,
        pool: Sequence[int] | None = None,
        source: Sequence[int] | None = None,
        verify: bool = True,
        first_page: int = 0,
        slices: bytes | None = None,
    ) -> Leg:
        """Opens a leg at the receiver. Pages are permuted on both sides, unless given."""
        shuffle = np.random.default_rng(reservation)
        to = shuffle.permutation(self.n_pages)[:n_pages] if pool is None else np.array(pool)
        come_from = shuffle.permutation(self.n_pages)[:n_pages] if source is None else np.array(source)
        to, come_from = to.astype(np.uint64), come_from.astype(np.uint64)
        slices = self.slices() if slices is None else slices
        logical = np.arange(first_page, first_page + len(to), dtype=np.uint64)
        first_token, n_tokens = first_page * TOKENS_PER_PAGE, len(to) * TOKENS_PER_PAGE
        group = ReserveGroup(0, first_token, n_tokens, logical.tobytes(), to.tobytes())
        layout = LegLayout.of(self.geometry.groups, slices, [group])
        self.receiver.open_leg(reservation, 0, verify, slices, [(0, TOKENS_PER_PAGE, logical, to)])
        return Leg(reservation, 0, verify, tuple(range(self.n_lanes)), come_from, to, slices, layout, first_page)

    def attach(self, grant: Any, leg: Leg) -> None:
        grant.attach(
            SESSION,
            GENERATION,
            leg.reservation,
            leg.number,
            leg.verify,
            True,
            leg.lanes,
            leg.slices,
            [(0, TOKENS_PER_PAGE, leg.first_page * TOKENS_PER_PAGE, leg.logical)],
        )

    def grant(self, leg: Leg | None = None) -> Any:
        """A source grant, attached to ``leg``."""
        assert self.sender is not None
        grant = self.sender.grant(leg.reservation if leg else 1)
        if leg is not None:
            self.attach(grant, leg)
        return grant

    def write(
        self, grant: Any, leg: Leg, pages: slice = slice(None), regions: Sequence[int] | None = None, **options: Any
    ) -> None:
        """Writes the leg's pages ``pages`` (indices into its list), all regions unless given."""
        chosen = range(self.regions) if regions is None else regions
        grant.write(0, leg.logical[pages], leg.source[pages], np.array(chosen, np.uint32), **options)

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def landed(self, leg: Leg) -> bool:
        """True if the leg's pages hold the source's bytes, all of them."""
        return bool(np.array_equal(self.pool[:, leg.pool], self.source[:, leg.source]))

    def untouched(self, pages: Sequence[int] | U64) -> bool:
        return bool((self.pool[:, np.asarray(pages)] == CANARY).all())

    def others(self, *legs: Leg) -> list[int]:
        """Pages of no leg."""
        taken = {int(page) for leg in legs for page in leg.pool}
        return [page for page in range(self.n_pages) if page not in taken]

    def report(self, leg: Leg) -> LegReport:
        return LegReport(*self.receiver.report(leg.reservation, leg.number))

    def records(self, leg: Leg) -> dict[int, rec.Record]:
        """The records that came for the leg so far, by lane."""
        found = self.decode.of(_native.RECORD, leg.reservation)
        return {event.lane: rec.parse(event.data) for event in found}

    def judge(self, leg: Leg, records: dict[int, rec.Record] | None = None) -> Accepted:
        """S1 over what came, or over ``records``. Raises VerificationFailed."""
        verify = "digest" if leg.verify else "coverage"
        offer = Offer(leg.reservation, "request", verify, leg.end_token, ("kv",))
        found = self.records(leg) if records is None else records
        evidence = LegEvidence(leg.number, self.epoch, GENERATION, leg.lanes, True, leg.layout, found, self.report(leg))
        return accept(offer, [evidence])

    def delivered(self, leg: Leg) -> Accepted:
        """Waits for the leg's records on all lanes, then judges."""
        self.decode.wait(_native.RECORD, len(leg.lanes), leg.reservation)
        return self.judge(leg)

    # ---- prefill by hand ---------------------------------------------------------------------------------------------

    def header(self, wire: int, of: Leg, frame_type: int, n_bytes: int, **fields: int) -> bytes:
        """A frame header; ``fields`` replace what would be right. Numbers rise by themselves."""
        sequence = self._sequences.get(wire, 0)
        self._sequences[wire] = sequence + 1
        right = {
            "magic": 0x4658564B,
            "type": frame_type,
            "flags": 0,
            "generation": GENERATION,
            "lane": wire,
            "sequence": sequence,
            "reservation": of.reservation,
            "leg": of.number,
            "group": 0,
            "slice": 0,
            "n_pages": 0,
            "page_first": 0,
            "body_bytes": n_bytes,
        }
        return struct.pack("<IHHIIQQIIIIQQ", *(right | fields).values())

    def write_frame(self, wire: int, of: Leg, page: int, slice_: int, n_pages: int = 1, **fields: Any) -> bytes:
        """A write of ``n_pages`` chunks from page index ``page`` on. ``source``: other source pages; ``body``: other
        bytes."""
        pages = np.asarray(fields.pop("source", of.source[page : page + n_pages]), np.uint64)
        body = fields.pop("body", None)
        if body is None and self.kind == "local":
            body = struct.pack("<QQ", 0, 0) + pages.tobytes()
        elif body is None:
            body = self.source[slice_, pages].tobytes()
        named = {"slice": slice_, "n_pages": n_pages, "page_first": page} | fields
        return self.header(wire, of, 1, len(body), **named) + body

    def record_frame(self, wire: int, of: Leg, record: bytes, **fields: int) -> bytes:
        body = record if self.kind == "tcp" else struct.pack("<QQ", 0, 0) + record
        return self.header(wire, of, 2, len(body), **fields) + body

    def record(self, wire: int, of: Leg, chunks: Sequence[int], **changes: Any) -> bytes:
        """A true record of ``chunks`` (ordinals) posted on this lane, or one changed by ``changes``."""
        first = wire == of.lanes[0]
        true = {
            "reservation": of.reservation,
            "epoch": self.epoch,
            "generation": GENERATION,
            "leg": of.number,
            "lane": wire,
            "n_lanes": len(of.lanes),
            "ranges": [(0, of.first_page * TOKENS_PER_PAGE, len(of.pool) * TOKENS_PER_PAGE)],
            "n_chunks": of.layout.n_chunks,
            "bitmap": sum(1 << chunk for chunk in chunks),
            "n_tokens": of.end_token,
            "folds": self.folds(of) if first and of.verify else None,
            "aux": b"" if first else None,
        }
        return rec.build(**(true | changes))

    def folds(self, leg: Leg) -> U64:
        """Folds over all of the leg's source pages."""
        places = [(page, region) for page in range(len(leg.source)) for region in range(self.regions)]
        contents = [digest.content(self.source[region, leg.source[page]]) for page, region in places]
        bound = digest.bind(
            np.array(contents, np.uint64),
            reservation=leg.reservation,
            epoch=self.epoch,
            leg=leg.number,
            group=0,
            regions=np.array([region for _, region in places], np.uint32),
            slices=np.zeros(len(places), np.uint32),
            logical=np.array([leg.logical[page] for page, _ in places], np.uint64),
        )
        return digest.folds(bound, 64 // TOKENS_PER_PAGE * self.regions)

    def table_bytes(self) -> Any:
        """The hostile prefill's generation table, writable: u64 slots."""
        return (ctypes.c_uint8 * self._table.nbytes).from_address(self._table.ptr)

    def restart_numbers(self) -> None:
        """Frames are numbered from 0 again: those made so far are not going to be sent."""
        self._sequences.clear()

    def say(self, lane: int, *frames: bytes) -> None:
        self.wires[lane].sendall(b"".join(frames))

    def all_writes(self, leg: Leg, lane: int = 0) -> list[bytes]:
        return [self.write_frame(lane, leg, 0, region, len(leg.pool)) for region in range(self.regions)]

    def all_chunks(self, leg: Leg) -> range:
        return range(leg.layout.n_chunks)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_rig(kind: str) -> Iterator[Callable[..., Rig]]:
    """Makes rigs of the kind under test."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(kind, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def make_remote(kind: str, make_rig: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Remote]]]:
    """Makes rigs whose prefill is a process of its own."""
    made: list[Remote] = []

    def make(
        *, n_lanes: int = 2, n_pages: int = 128, page_bytes: int = 1 << 16, regions: int = 2
    ) -> tuple[Rig, Remote]:
        made.append(Remote(kind, n_lanes, n_pages, page_bytes, regions))
        sizes = {"n_lanes": n_lanes, "n_pages": n_pages, "page_bytes": page_bytes, "regions": regions}
        return make_rig(remote=made[-1], **sizes), made[-1]

    yield make
    for remote in made:
        remote.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def hostile(make_rig: Callable[..., Rig]) -> Rig:
    """A rig whose prefill is written by hand, on one lane."""
    return make_rig(hostile=True, n_lanes=1)
