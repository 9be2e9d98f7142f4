"""A small world around ``DecodeCore``: scripted prefills, lanes that land chunks, and a clock that the test moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import xxhash

from kvxfer.geometry import SLICE_DTYPE, Group, PoolGeometry, Region
from kvxfer.ledger import PageLedger, PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode import DecodeCore
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.record import build

TOKENS_PER_PAGE = 16
PAGE_BYTES = 256
A = TypeVar("A")
U64 = np.ndarray[Any, np.dtype[np.uint64]]


def geometry(pages: int = 64, layers: int = 2, groups: Sequence[str] = ("kv",)) -> PoolGeometry:
    regions = tuple(
        Region(f"layer{n}", "float16", PAGE_BYTES, PAGE_BYTES, token_rows=1, token_bytes=PAGE_BYTES // TOKENS_PER_PAGE)
        for n in range(layers)
    )
    made = tuple(Group(name, TOKENS_PER_PAGE, pages, regions, id_space=index) for index, name in enumerate(groups))
    return PoolGeometry(made, pages * TOKENS_PER_PAGE)


def plan_by_layer(decode: PoolGeometry, prefills: Sequence[PoolGeometry]) -> list[np.ndarray[Any, np.dtype[np.void]]]:
    """Layer n of every group comes from prefill n modulo their number."""
    legs = []
    for index in range(len(prefills)):
        rows = [
            (g, r, 0, g, r, 1, region.page_bytes, 0, 0, 0, 0)
            for g, group in enumerate(decode.groups)
            for r, region in enumerate(group.regions)
            if r % len(prefills) == index
        ]
        legs.append(np.array(rows, dtype=SLICE_DTYPE))
    return legs


class Wire:
    """What one leg's lanes have carried: the receiver's tables and the sender's, apart so that tests can part them."""

    def __init__(self, spec: act.LegSpec, layout: LegLayout) -> None:
        self.spec = spec
        self.layout = layout
        self.landed = dict.fromkeys(spec.lanes, 0)
        self.posted = dict.fromkeys(spec.lanes, 0)
        self.landed_content = np.zeros(layout.n_chunks, np.uint64)
        self.sent_content = np.arange(1, layout.n_chunks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.violations = 0
        self.revoked = False

    def folds(
        self, content: np.ndarray[Any, np.dtype[np.uint64]], present: int
    ) -> np.ndarray[Any, np.dtype[np.uint64]]:
        folds = []
        for fold in range(self.layout.n_folds):
            chunks = self.layout.fold_chunks(fold)
            whole = all(present >> chunk & 1 for chunk in chunks)
            folds.append(xxhash.xxh3_64_intdigest(content[chunks.start : chunks.stop].tobytes()) if whole else 0)
        return np.array(folds, np.uint64)


class World:
    """Drives one core. ``held`` names the actions that the test answers itself: Revoke, Fence, Verify, ConnectLanes."""

    def __init__(
        self,
        config: DecodeConfig | None = None,
        pool: PoolGeometry | None = None,
        peer_pools: Mapping[str, PoolGeometry] | None = None,
        revocable: bool = True,
        lanes: int = 2,
    ) -> None:
        self.now = 100.0
        self.pool = pool or geometry()
        self.peer_pools = dict(peer_pools or {})
        self.config = config or DecodeConfig()
        self.ledger = PageLedger([group.n_pages for group in self.pool.groups])
        self.revocable = revocable
        self.lanes = lanes
        self.counter = 0
        self.log: list[act.Action] = []
        self.peers: dict[int, str] = {}
        self.epochs: dict[int, bytes] = {}
        self.sequences: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.wires: dict[tuple[int, int, int], Wire] = {}
        self.incarnations: dict[str, bytes] = {}
        self.held: set[type] = set()
        self.silent: set[str] = set()  # peers whose control plane does not answer
        self.mute: set[type] = set()  # messages that nobody answers
        self.core = DecodeCore(self.config, self.pool, self.ledger, self.random, plan_by_layer, "this-host")

    def random(self, n: int) -> bytes:
        self.counter += 1
        return hashlib.sha256(str(self.counter).encode()).digest()[:n]

    # ---- the engine --------------------------------------------------------------------------------------------------

    def reserve(
        self,
        pages: Iterable[int] = (5, 6, 7),
        *,
        tokens: int | None = None,
        request_id: str = "r1",
        prefill: Sequence[str] = ("p0:1",),
        timeout_s: float = 60.0,
        logical: Iterable[int] | None = None,
        first_token: int | None = None,
        **more: Any,
    ) -> int:
        pool_pages = np.array(list(pages), np.uint64)
        wanted = np.array(list(range(len(pool_pages)) if logical is None else logical), np.uint64)
        end = len(pool_pages) * TOKENS_PER_PAGE if tokens is None else tokens
        n_tokens = end - (first_token or 0)
        request = dict.fromkeys(range(len(self.pool.groups)), (wanted, pool_pages, first_token, n_tokens))
        reservation, actions = self.core.reserve(
            self.now, request_id=request_id, pages=request, prefill=prefill, timeout_s=timeout_s, **more
        )
        self.carry_out(actions)
        return reservation

    def abort(self, reservation: int) -> None:
        self.carry_out(self.core.abort(self.now, reservation, "not wanted any more"))

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Moves the clock, calling ``tick`` whenever the core asked for it."""
        until = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.carry_out(self.core.tick(self.now))
        self.now = until

    # ---- what happened -----------------------------------------------------------------------------------------------

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.log if isinstance(action, kind)]

    def sent(self, kind: type[A]) -> list[A]:
        return [action.message for action in self.all(act.Send) if isinstance(action.message, kind)]

    def events(self, reservation: int) -> list[str]:
        return [action.kind for action in self.all(act.Notify) if action.key == reservation]

    def error(self, reservation: int) -> Any:
        return next(a.error for a in self.all(act.Notify) if a.key == reservation and a.kind == "failed")

    def audits(self, event: str) -> list[str]:
        return [str(action.fields.get("why", "")) for action in self.all(act.Audit) if action.event == event]

    def page_states(self, *pages: int, space: int = 0) -> set[PageState]:
        return {self.ledger.state_of(space, page) for page in pages}

    def session(self, peer: str = "p0:1") -> int:
        return max(number for number, name in self.peers.items() if name == peer)

    def wire(self, reservation: int, leg: int = 0) -> Wire:
        return next(w for (_, r, number), w in self.wires.items() if (r, number) == (reservation, leg))

    # ---- what prefill and the lanes do -------------------------------------------------------------------------------

    def say(
        self, session: int, message: msg.Message, *, epoch: bytes | None = None, sequence: int | None = None
    ) -> None:
        if sequence is None:
            self.sequences[session] = self.sequences.get(session, -1) + 1
            sequence = self.sequences[session]
        self.carry_out(self.core.message(self.now, session, epoch or self.epochs[session], sequence, message))

    def write(
        self, reservation: int, leg: int = 0, chunks: Iterable[int] | None = None, lane: int | None = None
    ) -> None:
        """Chunks are posted, spread over the leg's lanes, and land."""
        wire = self.wire(reservation, leg)
        for chunk in range(wire.layout.n_chunks) if chunks is None else chunks:
            on = wire.spec.lanes[chunk % len(wire.spec.lanes)] if lane is None else lane
            wire.posted[on] |= 1 << chunk
            if not wire.revoked:
                wire.landed[on] |= 1 << chunk
                wire.landed_content[chunk] = wire.sent_content[chunk]

    def record_bytes(
        self,
        reservation: int,
        leg: int = 0,
        lane: int = 0,
        tokens: int | None = None,
        changed: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        """The record prefill would put on this lane, with fields changed as the test likes."""
        wire = self.wire(reservation, leg)
        first = lane == wire.spec.lanes[0]
        groups = wire.layout.groups
        n_tokens = max((g.first_token + g.n_tokens for g in groups), default=0) if tokens is None else tokens
        posted = 0
        for bitmap in wire.posted.values():
            posted |= bitmap
        digest = wire.spec.verify == "digest"
        fields: dict[str, Any] = {
            "reservation": reservation,
            "epoch": self.epochs[wire.spec.session],
            "generation": wire.spec.generation,
            "leg": leg,
            "lane": lane,
            "n_lanes": len(wire.spec.lanes),
            "ranges": [(g.group, g.first_token, max(0, n_tokens - g.first_token)) for g in groups],
            "n_chunks": wire.layout.n_chunks,
            "bitmap": wire.posted[lane],
            "n_tokens": n_tokens,
            "folds": wire.folds(wire.sent_content, posted) if first and digest else None,
            "aux": b"aux of " + str(reservation).encode() if leg == 0 and first else None,
        }
        return build(**(fields | dict(changed or {}) | more))

    def deliver(
        self, reservation: int, data: bytes, leg: int = 0, lane: int = 0, generation: int | None = None
    ) -> None:
        spec = self.wire(reservation, leg).spec
        on = spec.generation if generation is None else generation
        self.carry_out(self.core.record(self.now, spec.session, on, lane, data))

    def commit(
        self, reservation: int, leg: int = 0, tokens: int | None = None, lanes: Iterable[int] | None = None
    ) -> None:
        for lane in self.wire(reservation, leg).spec.lanes if lanes is None else lanes:
            self.deliver(reservation, self.record_bytes(reservation, leg, lane, tokens), leg, lane)

    def hand_over(self, reservation: int, leg: int = 0) -> None:
        self.write(reservation, leg)
        self.commit(reservation, leg)

    def lane_down(self, session: int, lane: int = 0, cause: str = "eof") -> None:
        self.carry_out(self.core.lane_down(self.now, session, self.generations[session], lane, cause))

    def revoked(self, reservation: int, leg: int = 0) -> None:
        session = self.wire(reservation, leg).spec.session
        self.carry_out(self.core.revoked(self.now, session, reservation, leg))

    def fenced(self, session: int, generation: int | None = None) -> None:
        fence = [a for a in self.all(act.Fence) if a.session == session][-1]
        self.carry_out(self.core.fenced(self.now, session, fence.generation if generation is None else generation))

    def connect(self, session: int) -> None:
        """Brings up the lanes that were asked for last."""
        action = [a for a in self.all(act.ConnectLanes) if a.session == session][-1]
        offer = action.offers[0]
        for lane in range(offer.lanes):
            self.carry_out(self.core.lane_up(self.now, session, action.generation, lane, offer.kind, self.revocable))

    def reports(self, action: act.Verify) -> dict[tuple[int, int], act.LegReport]:
        found = {}
        for session, leg in action.legs:
            wire = self.wires[session, action.reservation, leg]
            present = 0
            for bitmap in wire.landed.values():
                present |= bitmap
            digest = wire.spec.verify == "digest"
            found[session, leg] = act.LegReport(
                {lane: bits.to_bytes((wire.layout.n_chunks + 7) // 8, "little") for lane, bits in wire.landed.items()},
                wire.folds(wire.landed_content, present) if digest else np.zeros(0, np.uint64),
                wire.violations,
                present.bit_count() * PAGE_BYTES,
                wire.landed_content if action.with_digests else None,
            )
        return found

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def carry_out(self, actions: Sequence[act.Action]) -> None:
        queue = list(actions)
        while queue:
            action = queue.pop(0)
            self.log.append(action)
            queue.extend(self.answer(action))

    def answer(self, action: act.Action) -> Sequence[act.Action]:
        core, now = self.core, self.now
        if isinstance(action, act.OpenSocket):
            self.peers[action.session] = action.peer
        elif isinstance(action, act.Send):
            return self.prefill_answers(action)
        elif isinstance(action, act.ConnectLanes):
            self.generations[action.session] = action.generation
            if act.ConnectLanes not in self.held:
                answers: list[act.Action] = []
                for lane in range(action.offers[0].lanes):
                    answers += core.lane_up(
                        now, action.session, action.generation, lane, action.offers[0].kind, self.revocable
                    )
                return answers
        elif isinstance(action, act.OpenLeg):
            spec = action.spec
            layout = LegLayout.of(self.pool.groups, spec.slices, spec.groups)
            self.wires[spec.session, spec.reservation, spec.leg] = Wire(spec, layout)
        elif isinstance(action, act.Revoke) and act.Revoke not in self.held:
            self.wires[action.session, action.reservation, action.leg].revoked = True
            return core.revoked(now, action.session, action.reservation, action.leg)
        elif isinstance(action, act.Fence) and act.Fence not in self.held:
            return core.fenced(now, action.session, action.generation)
        elif isinstance(action, act.Verify) and act.Verify not in self.held:
            return core.verified(now, action.reservation, self.reports(action))
        elif isinstance(action, act.ZeroTail) and act.ZeroTail not in self.held:
            return core.tail_zeroed(now, action.reservation)
        return ()

    def welcome(self, session: int) -> msg.Welcome:
        peer = self.peers[session]
        incarnation = self.incarnations.setdefault(peer, hashlib.sha256(peer.encode()).digest()[:8])
        pool = self.peer_pools.get(peer, self.pool)
        return msg.Welcome(
            self.random(8),
            incarnation,
            pool,
            0,
            (msg.LaneOffer("tcp", ("127.0.0.1:9",), self.lanes),),
            bytes(32),
            1,
            "this-host",
            self.config.heartbeat_s,
        )

    def prefill_answers(self, action: act.Send) -> Sequence[act.Action]:
        session, message = action.session, action.message
        if self.peers.get(session) in self.silent or type(message) in self.mute:
            return ()
        reply: msg.Message
        if isinstance(message, msg.Hello):
            welcome = self.welcome(session)
            self.epochs[session] = message.nonce + welcome.nonce
            reply = welcome
        elif isinstance(message, msg.Reserve):
            reply = msg.Granted(message.reservation, message.leg)
        elif isinstance(message, msg.Abort):
            wire = self.wires[session, message.reservation, message.leg]
            posted = tuple(wire.posted[lane].bit_count() for lane in wire.spec.lanes)
            reply = msg.Quiesced(message.reservation, message.leg, posted)
        elif isinstance(message, msg.Relane):
            reply = msg.Lanes(message.generation, bytes(32))
        elif isinstance(message, msg.Ping):
            reply = msg.Pong(message.token)
        elif isinstance(message, msg.FetchDigests):
            content = self.wires[session, message.reservation, message.leg].sent_content
            part = content[message.first : message.first + message.count]
            reply = msg.Digests(message.reservation, message.leg, message.first, part.tobytes())
        else:
            return ()
        self.sequences[session] = self.sequences.get(session, -1) + 1
        return self.core.message(self.now, session, self.epochs[session], self.sequences[session], reply)


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def make_geometry() -> Callable[..., PoolGeometry]:
    return geometry


@pytest.fixture
def world() -> World:
    return World()
