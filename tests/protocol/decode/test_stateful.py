"""Random events in random order: no page is ever released early or read unproven, and every reservation ends.

The model keeps its own account of what the writers can still do, independent of the core's: a leg's writer may write
from the moment RESERVE was sent until the leg was revoked, its generation fenced, or it has put a record on every lane
that it wrote to and closed admission.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.errors import KvxferError, OwnershipError
from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg

PAGES = 12
CHOICE = st.integers(0, 5)


class Handoffs(RuleBasedStateMachine):
    """One decode, two prefills, reservations of one or two legs on lanes with or without per-leg revoke."""

    world: Any

    @initialize(revocable=st.booleans(), coverage=st.booleans(), reports_wait=st.booleans())
    def start(self, revocable: bool, coverage: bool, reports_wait: bool) -> None:
        conftest = sys.modules[self.world_module]
        config = conftest.DecodeConfig(verify="coverage" if coverage else "digest", heartbeat_s=4.0)
        self.world = conftest.World(config, pool=conftest.geometry(pages=PAGES), revocable=revocable)
        self.world.held |= {act.Revoke, act.Fence, act.Verify} if reports_wait else {act.Revoke, act.Fence}
        self.world.mute |= {msg.Abort, msg.Relane, msg.Reserve}
        self.number = 0
        self.reserved: dict[int, list[int]] = {}
        self.silent: set[tuple[int, int]] = set()  # legs that were revoked or fenced
        self.closed: set[tuple[int, int]] = set()  # legs whose sender has closed admission
        self.recorded: dict[tuple[int, int], set[int]] = {}  # lanes on which the leg's record has come
        self.checked = 0
        self.reserve(0, 2, 2, 60.0)

    world_module = ""

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def pick(self, items: list[Any], choice: int) -> Any:
        return items[choice % len(items)]

    def legs(self) -> list[Any]:
        """Newest first, so that small choices fall on what is still under way."""
        return list(self.world.wires.values())[::-1]

    def of(self, kind: type) -> list[Any]:
        return [a for a in self.world.all(kind) if a.session in self.world.core._sessions]

    # ---- the engine --------------------------------------------------------------------------------------------------

    @rule(
        choice=CHOICE, n_pages=st.integers(0, 4), n_legs=st.integers(1, 2), timeout_s=st.sampled_from([1.0, 60.0, 60.0])
    )
    def reserve(self, choice: int, n_pages: int, n_legs: int, timeout_s: float) -> None:
        pages = [(choice + k * 5) % PAGES for k in range(n_pages)]
        taken = (PageState.RESERVED, PageState.QUARANTINED)
        held = {page for page in range(PAGES) if self.world.ledger.state_of(0, page) in taken}
        self.number += 1
        prefill = ["p0:1", "p1:1"][:n_legs]
        tokens = max(1, 16 * n_pages)
        try:
            reservation = self.world.reserve(
                pages, tokens=tokens, request_id=f"r{self.number}", prefill=prefill, timeout_s=timeout_s
            )
        except OwnershipError:
            assert held & set(pages)
            return
        assert not held & set(pages)
        self.reserved[reservation] = pages

    @precondition(lambda self: self.reserved)
    @rule(choice=CHOICE)
    def abort(self, choice: int) -> None:
        self.world.abort(self.pick(list(self.reserved), choice * 7))

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    # ---- the lanes ---------------------------------------------------------------------------------------------------

    @rule(works=st.booleans())
    def connecting_succeeds_or_hangs(self, works: bool) -> None:
        (self.world.held.discard if works else self.world.held.add)(act.ConnectLanes)
        for action in self.of(act.ConnectLanes):
            session = self.world.core._sessions[action.session]
            if session.lanes_state == "connecting" and session.generation == action.generation:
                if works:
                    self.world.connect(action.session)
                else:
                    core, now = self.world.core, self.world.now
                    self.world.carry_out(core.lanes_failed(now, action.session, action.generation, "no route"))

    @precondition(lambda self: self.world.wires)
    @rule(choice=CHOICE, part=st.sampled_from(["all", "all", "all", "all", "some", "damaged"]))
    def prefill_writes(self, choice: int, part: str) -> None:
        wire = self.pick(self.legs(), choice)
        spec = wire.spec
        if (spec.reservation, spec.leg) in self.silent | self.closed:
            return
        count = wire.layout.n_chunks
        chunks = range(count) if part != "some" else range(count // 2)
        if any(wire.posted.values()):
            return
        self.world.write(spec.reservation, spec.leg, chunks)
        if part == "damaged" and count:
            wire.landed_content[choice % count] ^= np.uint64(1)

    @precondition(lambda self: self.world.wires)
    @rule(choice=CHOICE, lanes=st.sampled_from([(0, 1), (0, 1), (0,)]), short=st.sampled_from([0, 0, 0, 1]))
    def prefill_commits(self, choice: int, lanes: tuple[int, ...], short: int) -> None:
        wire = self.pick(self.legs(), choice)
        tokens = 1 if short and wire.layout.n_chunks > 2 else None
        leg = (wire.spec.reservation, wire.spec.leg)
        self.closed.add(leg)
        if leg not in self.silent:
            self.recorded.setdefault(leg, set()).update(lanes)
        for lane in lanes:
            data = self.world.record_bytes(wire.spec.reservation, wire.spec.leg, lane, tokens)
            self.world.deliver(wire.spec.reservation, data, wire.spec.leg, lane)

    @precondition(lambda self: len(self.reserved) > 2)
    @rule(choice=CHOICE, lane=st.integers(0, 1))
    def a_lane_breaks(self, choice: int, lane: int) -> None:
        sessions = sorted(s for s in self.world.core._sessions if s in self.world.generations)
        if sessions:
            self.world.lane_down(self.pick(sessions, choice), lane)

    @precondition(lambda self: self.world.wires)
    @rule(choice=CHOICE)
    def a_frame_is_refused(self, choice: int) -> None:
        spec = self.pick(self.legs(), choice).spec
        core = self.world.core
        self.world.carry_out(
            core.violation(self.world.now, spec.session, spec.generation, 0, spec.reservation, spec.leg, "twice")
        )

    # ---- answers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.all(act.Revoke))
    @rule(choice=CHOICE)
    def a_revoke_returns(self, choice: int) -> None:
        action = self.pick(self.world.all(act.Revoke)[::-1], choice)
        self.silent.add((action.reservation, action.leg))
        self.world.wires[action.session, action.reservation, action.leg].revoked = True
        self.world.revoked(action.reservation, action.leg)

    @precondition(lambda self: self.world.all(act.Fence))
    @rule(choice=CHOICE)
    def a_fence_returns(self, choice: int) -> None:
        action = self.pick(self.world.all(act.Fence)[::-1], choice)
        for wire in self.legs():
            if wire.spec.session == action.session and wire.spec.generation <= action.generation:
                self.silent.add((wire.spec.reservation, wire.spec.leg))
                wire.revoked = True
        self.world.fenced(action.session, action.generation)

    @precondition(lambda self: self.world.all(act.Verify))
    @rule(choice=CHOICE)
    def a_report_comes(self, choice: int) -> None:
        action = self.pick(self.world.all(act.Verify)[::-1], choice)
        reports = self.world.reports(action)
        self.world.carry_out(self.world.core.verified(self.world.now, action.reservation, reports))

    @precondition(lambda self: self.world.wires)
    @rule(choice=CHOICE)
    def a_whole_handoff_is_carried_out(self, choice: int) -> None:
        reservation = self.pick(self.legs(), choice).spec.reservation
        for wire in self.legs():
            leg = (wire.spec.reservation, wire.spec.leg)
            if leg[0] == reservation and leg not in self.silent | self.closed and not any(wire.posted.values()):
                self.world.write(*leg)
                self.closed.add(leg)
                self.recorded[leg] = {0, 1}
                self.world.commit(*leg)

    # ---- what prefill says -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.wires)
    @rule(choice=CHOICE, what=st.sampled_from(["granted", "rejected", "failed", "lane", "quiesced", "late"]))
    def prefill_says(self, choice: int, what: str) -> None:
        wire = self.pick(self.legs(), choice)
        spec = wire.spec
        if spec.session not in self.world.core._sessions:
            return
        message: msg.Message
        if what == "granted":
            message = msg.Granted(spec.reservation, spec.leg)
        elif what == "rejected":
            message = msg.Rejected(spec.reservation, spec.leg, "busy", "later")
        elif what == "quiesced":
            if spec.reservation not in {m.reservation for m in self.world.sent(msg.Abort)}:
                return
            posted = tuple(wire.posted[lane].bit_count() for lane in spec.lanes)
            message = msg.Quiesced(spec.reservation, spec.leg, posted)
            self.closed.add((spec.reservation, spec.leg))
        else:
            cause = {"failed": "source_changed", "lane": "lane", "late": "timeout"}[what]
            message = msg.Failed(spec.reservation, spec.leg, -1, spec.generation, cause, "because")
        self.world.say(spec.session, message)

    @precondition(lambda self: len(self.reserved) > 3)
    @rule(choice=CHOICE, what=st.sampled_from(["bye", "lanes", "lanes", "restart", "socket"]))
    def a_session_changes(self, choice: int, what: str) -> None:
        sessions = sorted(s for s in self.world.core._sessions if s in self.world.epochs)
        if not sessions:
            return
        session = self.pick(sessions, choice)
        if what == "bye":
            self.world.say(session, msg.Bye("gone"))
        elif what == "lanes":
            self.world.say(session, msg.Lanes(self.world.core._sessions[session].generation, bytes(32)))
        elif what == "restart":
            self.world.say(session, msg.Refuse("unknown_epoch", "who"), sequence=0)
        else:
            self.world.carry_out(self.world.core.socket_failed(self.world.now, session, "reset"))

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def writer_may_write(self, wire: Any) -> bool:
        leg = (wire.spec.reservation, wire.spec.leg)
        if leg in self.silent:
            return False
        written = {lane for lane, posted in wire.posted.items() if posted}
        return leg not in self.closed or not written <= self.recorded.get(leg, set())

    @invariant()
    def events_come_in_order_and_once(self) -> None:
        for reservation in self.reserved:
            assert self.world.events(reservation) in ([], ["ready"], ["failed"], ["failed", "released"])

    @invariant()
    def nothing_is_ready_that_was_not_wholly_and_truly_written(self) -> None:
        for reservation in self.reserved:
            if self.world.events(reservation) == ["ready"]:
                wires = [wire for wire in self.legs() if wire.spec.reservation == reservation]
                assert wires
                for wire in wires:
                    present = wire.landed[0] | wire.landed[1]
                    assert present == wire.layout.expected
                    if wire.spec.verify == "digest":
                        assert np.array_equal(wire.landed_content, wire.sent_content)

    @invariant()
    def pages_are_released_only_when_no_writer_is_left(self) -> None:
        for action in self.world.log[self.checked :]:
            if isinstance(action, act.Notify) and action.kind == "released":
                for wire in self.legs():
                    if wire.spec.reservation == action.key:
                        assert not self.writer_may_write(wire), "released while a writer may still write"
        self.checked = len(self.world.log)

    @invariant()
    def the_ledger_agrees_with_the_events(self) -> None:
        for reservation, pages in self.reserved.items():
            events = self.world.events(reservation)
            if events in ([], ["failed"]):
                expected = PageState.RESERVED if not events else PageState.QUARANTINED
                for page in pages:
                    assert self.world.ledger.owner_of(0, page) == reservation
                    assert self.world.ledger.state_of(0, page) == expected

    def teardown(self) -> None:
        """Whatever happened: with time and fences that return, every reservation ends and nothing stays behind."""
        if not hasattr(self, "reserved"):
            return
        self.world.advance(130.0)
        for reservation in self.reserved:
            assert self.world.events(reservation) != [], "a reservation outlived every deadline"
        self.world.held.clear()
        for action in list(self.world.all(act.Fence)):
            for wire in self.legs():
                if wire.spec.session == action.session and wire.spec.generation <= action.generation:
                    self.silent.add((wire.spec.reservation, wire.spec.leg))
            self.world.fenced(action.session, action.generation)
        self.world.carry_out(self.world.core.close(self.world.now, "the end"))
        assert self.world.core.is_closed
        for reservation in self.reserved:
            assert self.world.events(reservation) in (["ready"], ["failed", "released"])
        counts = self.world.ledger.counts()
        assert counts[PageState.RESERVED] == counts[PageState.QUARANTINED] == 0
        assert self.world.core._reservations == {} or all(
            r.state == "released" for r in self.world.core._reservations.values()
        )


def test_random_events_never_release_early_and_always_end(world: Any) -> None:
    Handoffs.world_module = type(world).__module__
    machine = Handoffs.TestCase()
    machine.settings = settings(
        max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )
    machine.runTest()


def test_the_error_of_every_failure_is_typed(world: Any) -> None:
    reservation = world.reserve([1])
    world.abort(reservation)
    assert isinstance(world.error(reservation), KvxferError)
