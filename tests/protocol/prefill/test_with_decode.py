"""Both cores over a control plane that loses and delays: every handoff ends on both sides, and no byte lands in a page
that decode has given back (S2), nor is a source released while a lane reads it (S3)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import DuplicateRequest
from kvxfer.geometry import SLICE_DTYPE, PoolGeometry
from kvxfer.ledger import PageLedger, PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as m
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode import DecodeCore
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.prefill import PrefillConfig, PrefillCore
from kvxfer.protocol.record import build

TOKENS = 16
PAGES = 8


class Network:
    """Two cores, one lane for each session, and a heap of what is still to happen."""

    def __init__(self, seed: int, pool: PoolGeometry, slices: bytes, loss: float) -> None:
        self.dice = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.todo: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.pool = pool
        self.ledger = PageLedger([PAGES])
        plan = [np.frombuffer(slices, SLICE_DTYPE)]
        self.decode = DecodeCore(
            DecodeConfig(verify="coverage"), pool, self.ledger, self.dice.randbytes, lambda *_: plan, "here"
        )
        self.prefill = PrefillCore(
            PrefillConfig(verify="coverage"),
            pool,
            b"life-one",
            self.dice.randbytes,
            (m.LaneOffer("tcp", ("x:1",), 1),),
            "here",
            lambda _: None,
        )
        self.arrival = {"decode": 0.0, "prefill": 0.0}
        self.events: dict[tuple[str, int], list[str]] = {}
        self.legs: dict[tuple[bytes, int], act.LegSpec] = {}  # decode's tables: what may still land
        self.landed: dict[tuple[bytes, int], int] = {}
        self.reading: dict[tuple[int, int], tuple[int, bytes, m.Reserve]] = {}  # prefill: legs that a lane reads
        self.committed: dict[int, int] = {}
        self.epochs: dict[int, bytes] = {}
        self.served: dict[int, int] = {}
        self.receivers: dict[bytes, int] = {}  # epoch -> generation whose lane is connected
        self.prefill_sessions: dict[bytes, int] = {}

    def later(self, delay: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.todo, (self.now + delay, self.order, what))

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def at_decode(self, actions: Sequence[act.Action]) -> None:
        todo = list(actions)
        while todo:
            todo += self.do_at_decode(todo.pop(0)) or ()

    def do_at_decode(self, action: act.Action) -> Sequence[act.Action] | None:
        if isinstance(action, act.Send):
            route = b"%d" % action.session
            self.transmit(
                "prefill",
                lambda: self.at_prefill(
                    self.prefill.message(self.now, route, action.epoch, action.sequence, action.message)
                ),
            )
        elif isinstance(action, act.Notify):
            self.note("decode", action)
            if action.kind == "released":
                assert action.key not in [reservation for _, reservation in self.legs], "S2: freed while it could land"
        elif isinstance(action, act.ConnectLanes):
            self.epochs[action.session] = action.epoch
            self.later(self.dice.uniform(0, 0.2), lambda: self.connect(action))
        elif isinstance(action, act.OpenLeg):
            spec = action.spec
            self.legs[self.epochs[spec.session], spec.reservation] = spec
        elif isinstance(action, act.Revoke):
            self.legs.pop((self.epochs[action.session], action.reservation), None)
            return self.decode.revoked(self.now, action.session, action.reservation, action.leg)
        elif isinstance(action, act.ForgetLeg):
            self.legs.pop((self.epochs[action.session], action.reservation), None)
        elif isinstance(action, (act.Fence, act.CloseSession)):
            if action.session in self.epochs:
                self.fence(self.epochs[action.session])
            if isinstance(action, act.Fence):
                return self.decode.fenced(self.now, action.session, action.generation)
        elif isinstance(action, act.Verify):
            return self.decode.verified(self.now, action.reservation, self.reports(action))
        elif isinstance(action, act.ZeroTail):
            return self.decode.tail_zeroed(self.now, action.reservation)
        return None

    def reports(self, action: act.Verify) -> dict[tuple[int, int], act.LegReport]:
        found = {}
        for session, leg in action.legs:
            bits = self.landed[self.epochs[session], action.reservation]
            bitmap = {0: bits.to_bytes(1, "little")}
            found[session, leg] = act.LegReport(bitmap, np.zeros(0, np.uint64), 0, bits.bit_count())
        return found

    def connect(self, action: act.ConnectLanes) -> None:
        session = self.prefill_sessions.get(action.epoch)
        if session is None or self.served.get(session) != action.generation:
            self.at_decode(self.decode.lanes_failed(self.now, action.session, action.generation, "refused"))
            return
        self.receivers[action.epoch] = action.generation
        self.at_prefill(self.prefill.lane_up(self.now, session, action.generation, 0))
        self.at_decode(self.decode.lane_up(self.now, action.session, action.generation, 0, "tcp"))

    def fence(self, epoch: bytes) -> None:
        """Decode closes its end: nothing lands any more, and prefill's lane sees an error."""
        self.receivers.pop(epoch, None)
        for key in [key for key in self.legs if key[0] == epoch]:
            del self.legs[key]
        for (session, reservation), (_, leg_epoch, _) in list(self.reading.items()):
            if leg_epoch == epoch:
                self.at_prefill(self.prefill.leg_failed(self.now, session, reservation, "lane: eof"))

    def at_prefill(self, actions: Sequence[act.Action]) -> None:
        todo = list(actions)
        while todo:
            todo += self.do_at_prefill(todo.pop(0)) or ()

    def do_at_prefill(self, action: act.Action) -> Sequence[act.Action] | None:
        if isinstance(action, act.Send):
            session = int(action.route)
            self.transmit(
                "decode",
                lambda: self.at_decode(
                    self.decode.message(self.now, session, action.epoch, action.sequence, action.message)
                ),
            )
        elif isinstance(action, act.Notify):
            self.note("prefill", action)
            if action.kind == "released":
                assert action.key not in [grant for grant, _, _ in self.reading.values()], "S3: released while read"
        elif isinstance(action, act.OpenLanes):
            older = self.served.get(action.session)
            self.served[action.session] = action.generation
            self.prefill_sessions[action.epoch] = action.session
            if older is not None:
                return self.destroy(action.session, older)
        elif isinstance(action, act.CloseSession):
            return self.destroy(action.session, self.served.pop(action.session))
        elif isinstance(action, act.Attach):
            epoch = next(epoch for epoch, session in self.prefill_sessions.items() if session == action.session)
            self.reading[action.session, action.reserve.reservation] = action.grant, epoch, action.reserve
            if action.grant in self.committed:
                self.transfer(action.session, action.reserve.reservation)
        elif isinstance(action, act.CloseAdmission):
            closing = action.session, action.reservation
            if self.reading.pop(closing, None) is not None:
                return self.prefill.leg_drained(self.now, action.session, action.reservation, (0,))
        return None

    def destroy(self, session: int, generation: int) -> Sequence[act.Action]:
        for key in [key for key in self.reading if key[0] == session and self.reading[key][2].generation <= generation]:
            del self.reading[key]
        return self.prefill.lanes_closed(self.now, session, generation)

    def note(self, side: str, event: act.Notify) -> None:
        kinds = self.events.setdefault((side, event.key), [])
        assert event.kind not in kinds
        kinds.append(event.kind)

    def transmit(self, towards: str, arrive: Callable[[], None]) -> None:
        """Frames of one direction may be lost and late; they never overtake each other."""
        if self.dice.random() >= self.loss:
            self.arrival[towards] = max(self.arrival[towards], self.now + self.dice.uniform(0.0, 0.3))
            self.later(self.arrival[towards] - self.now, arrive)

    # ---- data --------------------------------------------------------------------------------------------------------

    def transfer(self, session: int, reservation: int) -> None:
        self.later(self.dice.uniform(0, 0.5), lambda: self.land(session, reservation))

    def land(self, session: int, reservation: int) -> None:
        """All pages and the record of one leg, if its lane still stands at both ends."""
        if (session, reservation) not in self.reading:
            return
        grant, epoch, reserve = self.reading[session, reservation]
        if self.receivers.get(epoch) != reserve.generation:
            return
        del self.reading[session, reservation]
        self.at_prefill(self.prefill.leg_drained(self.now, session, reservation, (6,)))
        layout = LegLayout.of(self.pool.groups, reserve.slices, reserve.groups)
        key = epoch, reservation
        if key in self.legs:
            for page in np.frombuffer(reserve.groups[0].pool_pages, "<u8").tolist():
                assert self.ledger.owner_of(0, page) == reservation, "S2: a byte landed in another owner's page"
                assert self.ledger.state_of(0, page) in (PageState.RESERVED, PageState.QUARANTINED)
            self.landed[key] = layout.expected
        n_tokens = self.committed[grant]
        record = build(
            reservation=reservation, epoch=epoch, generation=reserve.generation, leg=0, lane=0, n_lanes=1,
            ranges=[(0, 0, n_tokens)], n_chunks=layout.n_chunks, bitmap=layout.expected, n_tokens=n_tokens, aux=b"aux",
        )  # fmt: skip
        session_at_decode = next(number for number, known in self.epochs.items() if known == epoch)
        self.at_decode(self.decode.record(self.now, session_at_decode, reserve.generation, 0, record))

    # ---- the engines -------------------------------------------------------------------------------------------------

    def reserve(self, request_id: str, pages: Sequence[int]) -> int:
        logical, pool = np.arange(len(pages), dtype=np.uint64), np.array(pages, np.uint64)
        reservation, actions = self.decode.reserve(
            self.now, request_id=request_id, pages={0: (logical, pool, None, len(pages) * TOKENS)},
            prefill=("prefill:1",), incarnation=None, readers=1, rank=0, timeout_s=10.0,
        )  # fmt: skip
        self.at_decode(actions)
        return reservation

    def accept(self, request_id: str) -> int:
        grant, actions = self.prefill.accept(self.now, request_id, readers=1, timeout_s=8.0)
        self.at_prefill(actions)
        return grant

    def commit(self, grant: int, n_tokens: int) -> None:
        if self.prefill.state(grant) in ("offered", "writing"):
            actions = self.prefill.commit(self.now, grant, n_tokens, 3)
            self.committed[grant] = n_tokens
            self.at_prefill(actions)
            for (session, reservation), (of, _, _) in list(self.reading.items()):
                if of == grant:
                    self.transfer(session, reservation)

    def lane_breaks(self) -> None:
        for epoch in list(self.receivers):
            session = next(number for number, known in self.epochs.items() if known == epoch)
            self.at_decode(self.decode.lane_down(self.now, session, self.receivers[epoch], 0, "eof"))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            ticks = [due for due in (self.decode.next_deadline(), self.prefill.next_deadline()) if due is not None]
            due = min([end, *ticks, *(at for at, _, _ in self.todo[:1])])
            self.now = max(self.now, due)
            if self.todo and self.todo[0][0] <= self.now:
                heapq.heappop(self.todo)[2]()
            self.at_decode(self.decode.tick(self.now))
            self.at_prefill(self.prefill.tick(self.now))


@pytest.fixture
def network(make_world: Callable[..., Any]) -> Callable[[int, float], Network]:
    return lambda seed, loss: Network(seed, make_world.geometry(), make_world.whole_pages(), loss)  # type: ignore[attr-defined]


def test_handoff_goes_through_at_once_when_nothing_is_lost(network: Callable[[int, float], Network]) -> None:
    net = network(1, 0.0)
    reservation, grant = net.reserve("r", [5, 2, 7]), net.accept("r")
    net.commit(grant, 3 * TOKENS)
    net.run(5.0)
    assert net.events["decode", reservation] == ["ready"]
    assert sorted(net.events["prefill", grant]) == ["offered", "ready", "released"]


@pytest.mark.parametrize("seed", range(25))
def test_every_handoff_ends_on_both_sides_over_a_lossy_control_plane(
    network: Callable[[int, float], Network], seed: int
) -> None:
    net = network(seed, 0.25)
    dice = random.Random(seed)
    reservations, grants = [], []
    for number in range(12):
        request = f"r{number}"
        for step in dice.choice([("reserve", "accept"), ("accept", "reserve"), ("accept", "commit", "reserve")]):
            if step == "reserve":
                free = [
                    page for page in range(PAGES) if net.ledger.state_of(0, page) in (PageState.FREE, PageState.READY)
                ]
                if len(free) >= 3:
                    reservations.append(net.reserve(request, dice.sample(free, 3)))
            elif step == "accept":
                try:
                    grants.append(net.accept(request))
                except DuplicateRequest:
                    pytest.fail("a request id of its own is never a duplicate")
            else:
                net.commit(grants[-1], 3 * TOKENS)
            net.run(dice.uniform(0.0, 0.4))
        trouble = dice.random()
        if trouble < 0.15 and reservations:
            net.at_decode(net.decode.abort(net.now, reservations[-1], "not wanted"))
        elif trouble < 0.3:
            net.at_prefill(net.prefill.abort(net.now, grants[-1], "preempted"))
        elif trouble < 0.4:
            net.lane_breaks()
        if dice.random() < 0.9:
            net.commit(grants[-1], 3 * TOKENS)
        net.run(dice.uniform(0.0, 3.0))
    for grant in grants:
        if net.prefill.state(grant) in ("offered", "writing"):
            net.at_prefill(net.prefill.abort(net.now, grant, "the end"))
    net.run(120.0)
    for reservation in reservations:
        kinds = net.events["decode", reservation]
        assert kinds == ["ready"] or kinds == ["failed", "released"]
    for grant in grants:
        kinds = net.events["prefill", grant]
        assert kinds.count("released") == 1
        assert kinds.count("ready") + kinds.count("failed") == 1
    assert net.ledger.counts()[PageState.QUARANTINED] == 0
    assert net.ledger.counts()[PageState.RESERVED] == 0
    assert not net.reading
