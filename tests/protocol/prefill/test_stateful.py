"""Anything in any order: sources are never released while a lane can read them, and every grant ends.

``World`` itself asserts S3 at every event: no leg that a lane can still read is released or detached, nothing is
attached twice, and ready and failed exclude each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvxfer.errors import AdmissionClosed, DuplicateRequest, Rejected
from kvxfer.protocol import messages as m

REQUESTS = {"a": 1, "b": 2, "c": 2}  # request id -> readers


class PrefillMachine(RuleBasedStateMachine):
    make_world: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world(
            max_answers=2, max_offers=3, decline_ttl_s=3.0, refusal_interval_s=0.0, offer_grace_s=1.0
        )
        self.world.destroys_at_once = False
        self.peers: list[Any] = []
        self.dialled = 0
        self.sent: list[tuple[Any, m.Reserve]] = []
        self.grants: list[int] = []
        self.committed: set[int] = set()
        self.broken: set[tuple[int, int]] = set()

    def pick(self, data: Any, items: list[Any]) -> Any:
        return items[data.draw(st.integers(0, len(items) - 1))]

    # ---- decode ------------------------------------------------------------------------------------------------------

    @initialize()
    def two_decodes(self) -> None:
        self.dial()
        self.dial()

    def dial(self) -> None:
        self.dialled += 1
        self.peers.append(self.world.peer(f"dec-{self.dialled}"))

    def reserve(self, data: Any, request: str) -> None:
        readers = REQUESTS[request] + data.draw(st.sampled_from([0, 0, 0, 1]))
        for rank in range(data.draw(st.integers(1, readers))):
            peer = self.pick(data, self.peers)
            self.sent.append((peer, peer.reserve(request, rank=rank, readers=readers)))

    @rule(data=st.data(), request=st.sampled_from(sorted(REQUESTS)), order=st.sampled_from(["ar", "ra", "arc", "acr"]))
    def handoff(self, data: Any, request: str, order: str) -> None:
        """Accept, reserve and commit, in the orders that occur."""
        steps = {"a": lambda: self.accept(data, request), "r": lambda: self.reserve(data, request), "c": self.commit}
        for step in order:
            steps[step]()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), what=st.sampled_from(["reserve", "abort", "done", "done", "fetch", "decline"]))
    def say(self, data: Any, what: str) -> None:
        peer, reserve = self.pick(data, self.sent[-4:])
        if what == "reserve":
            peer.say(reserve)
        elif what == "abort":
            peer.abort(reserve)
        elif what == "done":
            peer.done(reserve)
        elif what == "fetch":
            peer.say(m.FetchDigests(reserve.reservation, 0, 0, 1))
        else:
            peer.say(m.Decline(reserve.request_id, "prefix hit", reserve.rank))

    @rule(data=st.data(), what=st.sampled_from(["late reserve", "relane", "relane", "replay", "bye", "silence"]))
    def disturb(self, data: Any, what: str) -> None:
        peer = self.pick(data, self.peers)
        before = len(self.world.sent)
        if what == "late reserve":
            late = peer.reservation("a")
            peer.abort(late)
            peer.say(late)
            assert late.reservation not in [attach.reserve.reservation for attach in self.world.attached]
        elif what == "relane":
            peer.say(m.Relane(peer.generation + data.draw(st.integers(0, 2))))
        elif what == "replay":
            peer.say(m.Ping(1), sequence=0)
            assert not [send for send in self.world.sent[before:] if send.session != -1]
        else:
            if what == "bye":
                peer.say(m.Bye("restart"))
            else:
                self.world.pass_time(7.0, *(other for other in self.peers if other is not peer))
            self.peers.remove(peer)
            self.dial()

    # ---- the engine --------------------------------------------------------------------------------------------------

    def accept(self, data: Any, request: str) -> None:
        readers = data.draw(st.sampled_from([None, REQUESTS[request]]))
        with contextlib.suppress(DuplicateRequest, Rejected):
            self.grants.append(self.world.accept(request, readers, 4.0))

    def commit(self) -> None:
        for grant in self.grants[-3:]:
            with contextlib.suppress(AdmissionClosed):
                self.world.commit(grant)
                self.committed.add(grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), what=st.sampled_from(["write", "commit", "commit", "abort", "reject"]))
    def engine(self, data: Any, what: str) -> None:
        grant = self.pick(data, self.grants[-3:])
        if what == "write":
            self.world.run(self.world.core.note_written(grant))
        elif what == "abort":
            self.world.abort(grant)
        elif what == "commit":
            self.commit()
        else:
            request = data.draw(st.sampled_from(sorted(REQUESTS)))
            self.world.run(self.world.core.reject(self.world.now, request, "no", "no", 2.0))

    # ---- lanes -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data())
    def drain(self, data: Any) -> None:
        """The sender drains what was closed or committed; of anything else such a report would be a lie."""
        key = self.pick(data, sorted(self.world.reading))
        closing = {(closed.session, closed.reservation) for closed in self.world.closing_legs}
        if key not in self.broken and (key in closing or self.world.reading[key][0] in self.committed):
            self.world.run(self.world.drain_actions(*key, (1,)))
        else:
            self.world.run(self.world.core.leg_drained(self.world.now, *key, (1,)))

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data(), cause=st.sampled_from(["lane: eof", "source_changed: page 1"]))
    def fail(self, data: Any, cause: str) -> None:
        key = self.pick(data, sorted(self.world.reading))
        self.broken.add(key)
        self.world.run(self.world.core.leg_failed(self.world.now, *key, cause))

    @precondition(lambda self: self.world.destroyed)
    @rule()
    def destroyed(self) -> None:
        self.world.report_destroyed()
        for peer in self.peers:
            if lanes := peer.heard(m.Lanes):
                peer.generation = lanes[-1].generation

    # ---- time --------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.3, 2.0, 7.0]))
    def time(self, seconds: float) -> None:
        self.world.pass_time(seconds, *self.peers)

    @invariant()
    def no_answer_calls_a_broken_leg_quiesced(self) -> None:
        quiesced = {
            (send.session, send.message.reservation) for send in self.world.sent if isinstance(send.message, m.Quiesced)
        }
        assert not quiesced & self.broken

    @invariant()
    def no_answer_calls_a_leg_quiesced_that_a_lane_can_read(self) -> None:
        for send in self.world.sent:
            if isinstance(send.message, m.Quiesced):
                assert (send.session, send.message.reservation) not in self.world.reading

    def teardown(self) -> None:
        """Nobody answers any more but the executor: ticks end every grant that the engine gave up or committed."""
        for grant in self.grants:
            if self.world.core.state(grant) in ("offered", "writing"):
                self.world.abort(grant)
        for _ in range(90):
            self.world.pass_time(1.0, *self.peers)
            while self.world.destroyed:
                self.world.report_destroyed()
        assert not self.world.reading
        assert not self.world.tables
        for grant in self.grants:
            kinds = self.world.kinds(grant)
            assert kinds.count("released") == 1
            assert kinds.count("ready") + kinds.count("failed") == 1
        assert self.world.released_grants == set(self.grants)
        self.world.run(self.world.core.close(self.world.now, "over"))
        while self.world.destroyed:
            self.world.report_destroyed()
        assert self.world.core.is_closed


@pytest.mark.timeout(120)
def test_sources_are_never_released_early_and_every_grant_ends(make_world: Callable[..., Any]) -> None:
    machine = type("Machine", (PrefillMachine,), {"make_world": staticmethod(make_world)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
