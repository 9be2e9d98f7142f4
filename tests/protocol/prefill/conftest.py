"""A prefill core with a played executor and played decodes. Every test that uses ``world`` checks S3."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from kvxfer.errors import IncompatiblePool
from kvxfer.geometry import SLICE_DTYPE, Group, PoolGeometry, Region
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as m
from kvxfer.protocol.prefill import PrefillConfig, PrefillCore

PAGE_BYTES = 64
TOKENS = 16
PAGES = 8
INCARNATION = b"life-one"
OFFERS = (m.LaneOffer("local", ("name",), 1), m.LaneOffer("tcp", ("127.0.0.1:1",), 2))

Kind = TypeVar("Kind", bound=m.Message)


def geometry(pages: int = PAGES, name: str = "kv") -> PoolGeometry:
    regions = tuple(Region(layer, "float16", PAGE_BYTES, PAGE_BYTES) for layer in ("k", "v"))
    return PoolGeometry((Group(name, TOKENS, pages, regions),), capacity_tokens=pages * TOKENS)


def whole_pages() -> bytes:
    """Two slices: each region's page as it is."""
    rows = [(0, region, 0, 0, region, 1, PAGE_BYTES, 0, 0, 0, 0) for region in (0, 1)]
    return np.array(rows, SLICE_DTYPE).tobytes()


def packed(pages: Sequence[int]) -> bytes:
    return np.array(pages, "<u8").tobytes()


def pages_of(first_token: int, n_tokens: int) -> m.ReserveGroup:
    """Logical pages that hold these tokens, at the same pages of decode's pool."""
    pages = range(first_token // TOKENS, -(-(first_token + n_tokens) // TOKENS)) if n_tokens else range(0)
    return m.ReserveGroup(0, first_token, n_tokens, packed(pages), packed(pages))


class Peer:
    """One decode process's session, as far as it needs to speak."""

    def __init__(self, world: World, name: str, pool: PoolGeometry | None = None) -> None:
        self.world = world
        self.route = name.encode()
        self.nonce = name.encode().ljust(8, b"\1")[:8]
        self.pool = geometry() if pool is None else pool
        self.epoch = self.nonce + bytes(8)
        self.sequence = -1
        self.number = 0
        self.generation = 1
        self.session = -1

    def say(self, message: m.Message, **frame: Any) -> list[act.Action]:
        """Sends one frame; ``epoch``, ``sequence`` and ``route`` may be forged."""
        self.sequence += 1
        epoch, sequence = frame.get("epoch", self.epoch), frame.get("sequence", self.sequence)
        route = frame.get("route", self.route)
        return self.world.run(self.world.core.message(self.world.now, route, epoch, sequence, message))

    def hello(self, **changes: Any) -> m.Hello:
        fields: dict[str, Any] = {
            "nonce": self.nonce,
            "pool": self.pool,
            "max_context_tokens": 0,
            "verify": "digest",
            "lane_kinds": ("local", "tcp"),
            "host": "here",
        }
        return m.Hello(**(fields | changes))

    def dial(self, **changes: Any) -> Peer:
        self.say(self.hello(**changes))
        welcome = self.heard(m.Welcome)[-1]
        self.epoch = self.nonce + welcome.nonce
        self.session = self.sends()[-1].session
        return self

    def sends(self) -> list[act.Send]:
        return [send for send in self.world.sent if send.route == self.route]

    def heard(self, kind: type[Kind]) -> list[Kind]:
        return [send.message for send in self.sends() if isinstance(send.message, kind)]

    def last(self) -> m.Message:
        return self.sends()[-1].message

    def reservation(self, request_id: str = "r", **changes: Any) -> m.Reserve:
        """A RESERVE for 40 tokens that was not sent yet, with the next number."""
        self.number += 1
        fields: dict[str, Any] = {
            "reservation": (self.session << 32) + self.number,
            "number": self.number,
            "request_id": request_id,
            "rank": 0,
            "readers": 1,
            "leg": 0,
            "n_legs": 1,
            "carries_aux": True,
            "verify": "digest",
            "generation": self.generation,
            "lanes": (0,),
            "groups": (pages_of(0, 40),),
            "slices": whole_pages(),
            "deadline_s": 20.0,
        }
        return m.Reserve(**(fields | changes))

    def reserve(self, request_id: str = "r", **changes: Any) -> m.Reserve:
        reserve = self.reservation(request_id, **changes)
        self.say(reserve)
        return reserve

    def abort(self, reserve: m.Reserve) -> None:
        self.say(m.Abort(reserve.reservation, reserve.number, reserve.leg, reserve.request_id, "changed my mind"))

    def done(self, reserve: m.Reserve) -> None:
        self.say(m.Done(reserve.reservation, reserve.leg))

    def ping(self) -> None:
        self.say(m.Ping(1))


class World:
    """The executor and the lanes. ``reading`` is the truth about which legs a lane may still read."""

    geometry = staticmethod(geometry)
    pages_of = staticmethod(pages_of)
    packed = staticmethod(packed)
    whole_pages = staticmethod(whole_pages)

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.config = PrefillConfig(**config)
        self.n_random = 0
        self.core = PrefillCore(
            self.config, geometry(), INCARNATION, self.random, OFFERS, "here", self.check_compatible
        )
        self.sent: list[act.Send] = []
        self.events: list[act.Notify] = []
        self.audits: list[act.Audit] = []
        self.attached: list[act.Attach] = []
        self.reading: dict[tuple[int, int], tuple[int, int]] = {}  # (session, reservation) -> (grant, generation)
        self.tables: dict[tuple[int, int], int] = {}  # legs that are not detached
        self.closing_legs: list[act.CloseAdmission] = []
        self.released_grants: set[int] = set()
        self.fetched: list[act.AnswerDigests] = []
        self.generations: dict[int, int] = {}
        self.secrets: dict[tuple[int, int], bytes] = {}
        self.drains_at_once = False
        self.destroys_at_once = True
        self.destroyed: list[tuple[int, int]] = []  # lanes_closed that is still to be reported

    def random(self, n: int) -> bytes:
        self.n_random += 1
        return self.n_random.to_bytes(8, "little").ljust(n, b"\7")[:n]

    @staticmethod
    def check_compatible(pool: PoolGeometry) -> None:
        if pool.groups[0].name != "kv":
            raise IncompatiblePool("the pools differ", field="groups", ours="kv", theirs=pool.groups[0].name)

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def run(self, actions: list[act.Action]) -> list[act.Action]:
        todo = list(actions)
        while todo:
            todo += self.carry_out(todo.pop(0))
        return actions

    def carry_out(self, action: act.Action) -> list[act.Action]:
        if isinstance(action, act.Send):
            self.sent.append(action)
        elif isinstance(action, act.Audit):
            json.dumps(action.fields)
            self.audits.append(action)
        elif isinstance(action, act.Notify):
            self.check_event(action)
            self.events.append(action)
        elif isinstance(action, act.Attach):
            key = action.session, action.reserve.reservation
            assert key not in self.tables, "a reservation is attached once at most"
            self.attached.append(action)
            self.tables[key] = action.grant
            self.reading[key] = action.grant, action.reserve.generation
        elif isinstance(action, act.CloseAdmission):
            self.closing_legs.append(action)
            if self.drains_at_once:
                return self.drain_actions(action.session, action.reservation)
        elif isinstance(action, act.DetachLeg):
            key = action.session, action.reservation
            assert key not in self.reading, "S3: a leg was detached while a lane could read it"
            del self.tables[key]
        elif isinstance(action, act.ReleaseGrant):
            assert action.grant not in self.tables.values(), "a grant's tables went before its legs"
            self.released_grants.add(action.grant)
        elif isinstance(action, act.AnswerDigests):
            self.fetched.append(action)
        elif isinstance(action, act.OpenLanes):
            older = self.generations.get(action.session)
            self.generations[action.session] = action.generation
            self.secrets[action.session, action.generation] = action.secret
            if older is not None:
                return self.destroy(action.session, older)
        elif isinstance(action, act.CloseSession):
            return self.destroy(action.session, self.generations[action.session])
        else:
            raise AssertionError(f"prefill must not ask for {action}")
        return []

    def check_event(self, event: act.Notify) -> None:
        earlier = [other.kind for other in self.events if other.key == event.key]
        assert event.kind not in earlier, f"{event.kind} was told twice"
        if event.kind in ("ready", "failed"):
            assert not {"ready", "failed"} & set(earlier), "ready and failed exclude each other"
        if event.kind == "released":
            assert event.key not in [grant for grant, _ in self.reading.values()], "S3: released while a lane can read"

    def destroy(self, session: int, generation: int) -> list[act.Action]:
        self.destroyed.append((session, generation))
        return self.report_destroyed_actions() if self.destroys_at_once else []

    def report_destroyed_actions(self) -> list[act.Action]:
        session, generation = self.destroyed.pop(0)
        for key, (_, served) in list(self.reading.items()):
            if key[0] == session and served <= generation:
                del self.reading[key]
        return self.core.lanes_closed(self.now, session, generation)

    def report_destroyed(self) -> None:
        self.run(self.report_destroyed_actions())

    def drain_actions(self, session: int, reservation: int, posted: Sequence[int] = (6,)) -> list[act.Action]:
        self.reading.pop((session, reservation), None)
        return self.core.leg_drained(self.now, session, reservation, posted)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def drain(self, peer: Peer, reserve: m.Reserve, posted: Sequence[int] = (6,)) -> None:
        self.run(self.drain_actions(peer.session, reserve.reservation, posted))

    def break_lane(self, peer: Peer, reserve: m.Reserve, cause: str = "lane: eof") -> None:
        self.run(self.core.leg_failed(self.now, peer.session, reserve.reservation, cause, 0))

    def accept(self, request_id: str = "r", readers: int | None = 1, timeout_s: float = 10.0) -> int:
        grant, actions = self.core.accept(self.now, request_id, readers=readers, timeout_s=timeout_s)
        self.run(actions)
        return grant

    def commit(self, grant: int, n_tokens: int = 40) -> None:
        self.run(self.core.commit(self.now, grant, n_tokens, 0))

    def abort(self, grant: int) -> None:
        self.run(self.core.abort(self.now, grant, "preempted"))

    def pass_time(self, seconds: float, *alive: Peer) -> None:
        """Lets time pass in small steps; the peers given keep pinging."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for peer in alive:
                peer.ping()
            self.run(self.core.tick(self.now))

    def kinds(self, grant: int) -> list[str]:
        return [event.kind for event in self.events if event.key == grant]

    def error(self, grant: int) -> Any:
        return next(event.error for event in self.events if event.key == grant and event.kind == "failed")

    def audited(self, event: str) -> list[act.Audit]:
        return [audit for audit in self.audits if audit.event == event]

    def peer(self, name: str = "decode-0", **hello: Any) -> Peer:
        return Peer(self, name).dial(**hello)

    def stranger(self, name: str = "stranger", pool: PoolGeometry | None = None) -> Peer:
        return Peer(self, name, pool)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World
