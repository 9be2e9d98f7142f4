"""Sessions: the handshake, heartbeats, restarts, and lanes from generation to generation."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import CapacityError, IncompatiblePool, LaneFailed, PeerLost, PeerRestarted, Rejected
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig


def refuse(world: Any, reservation: int, code: str, **details: Any) -> Any:
    """Prefill answers HELLO with REFUSE; returns the handoff's error."""
    session = world.session()
    nonce = world.sent(msg.Hello)[-1].nonce
    message = msg.Refuse(code, "not you", details)
    world.carry_out(world.core.message(world.now, session, nonce + bytes(8), 0, message))
    return world.error(reservation)


def test_hello_carries_half_an_epoch_and_what_decode_wants(world: Any) -> None:
    world.reserve([5], incarnation=None)
    (first,) = [a for a in world.all(act.Send) if isinstance(a.message, msg.Hello)]
    assert first.epoch == first.message.nonce + bytes(8)
    assert (first.message.verify, first.message.lane_kinds) == ("digest", ("local", "tcp"))
    later = [a for a in world.all(act.Send) if not isinstance(a.message, msg.Hello)]
    assert {a.epoch for a in later} == {world.epochs[world.session()]}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("version", IncompatiblePool),
        ("incompatible_pool", IncompatiblePool),
        ("verify", IncompatiblePool),
        ("capacity", CapacityError),
        ("incarnation", PeerRestarted),
        ("closed", PeerLost),
    ],
)
def test_a_refusal_is_a_typed_error_with_its_details(world: Any, code: str, error: type[Exception]) -> None:
    world.silent.add("p0:1")
    reservation = world.reserve([5])
    found = refuse(world, reservation, code, field="dtype", ours=1, theirs=2, peer="liar", message="liar")
    assert isinstance(found, error)
    assert (found.details["code"], found.details["ours"], found.peer) == (code, 1, "p0:1")
    assert world.events(reservation) == ["failed", "released"]
    assert len(world.all(act.CloseSession)) == 1


def test_the_next_reserve_after_a_refusal_dials_afresh(world: Any) -> None:
    world.silent.add("p0:1")
    refuse(world, world.reserve([5]), "closed")
    world.silent.clear()
    reservation = world.reserve([5])
    assert world.core.state(reservation) == "offered"
    nonces = [hello.nonce for hello in world.sent(msg.Hello)]
    assert len(set(nonces)) == 2


def test_a_peer_that_keeps_refusing_is_dialled_ever_more_slowly(world: Any) -> None:
    world.silent.add("p0:1")
    for number in range(5):
        reservation = world.reserve([5], request_id=f"r{number}")
        world.advance(0.1 * 2**number)
        refuse(world, reservation, "closed")
    hellos = len(world.sent(msg.Hello))
    world.reserve([5], request_id="last")
    assert len(world.sent(msg.Hello)) == hellos
    world.advance(1.0)
    assert len(world.sent(msg.Hello)) > hellos


def test_a_refused_incarnation_fails_only_those_who_asked_for_it(world: Any) -> None:
    world.silent.add("p0:1")
    old = world.reserve([5], request_id="old", incarnation=b"old-one!")
    new = world.reserve([6], request_id="new", incarnation=b"new-one!")
    anybody = world.reserve([7], request_id="any")
    world.silent.clear()
    world.incarnations["p0:1"] = b"new-one!"
    assert isinstance(refuse(world, old, "incarnation"), PeerRestarted)
    assert world.core.state(new) == "offered"
    assert world.core.state(anybody) == "offered"


def test_a_welcome_of_another_incarnation_fails_those_who_expected_one(world: Any) -> None:
    world.silent.add("p0:1")
    anybody = world.reserve([5], request_id="any")
    picky = world.reserve([6], request_id="picky", incarnation=b"another!")
    world.silent.clear()
    world.advance(0.5)
    assert world.core.state(anybody) == "offered"
    assert isinstance(world.error(picky), PeerRestarted)
    assert world.events(picky) == ["failed", "released"]


def test_a_restarted_prefill_fails_the_old_epoch_and_the_first_new_handoff_works(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    session = world.session()
    world.say(session, msg.Refuse("unknown_epoch", "who"), sequence=0)  # its count begins anew
    assert isinstance(world.error(reservation), PeerRestarted) and world.error(reservation).retryable
    assert world.events(reservation) == ["failed", "released"]
    again = world.reserve([5])
    assert world.session() != session
    world.hand_over(again)
    assert world.events(again) == ["ready"]


def test_records_of_the_old_epoch_do_not_count_in_the_new_one(world: Any) -> None:
    first = world.reserve([5])
    world.write(first)
    old = [world.record_bytes(first, 0, lane) for lane in (0, 1)]
    session = world.session()
    world.say(session, msg.Refuse("unknown_epoch", "who"), sequence=0)
    again = world.reserve([5])
    for lane, data in enumerate(old):
        world.carry_out(world.core.record(world.now, session, 1, lane, data))
        world.deliver(again, data, lane=lane)
    assert world.core.state(again) == "offered"


def test_an_idle_session_is_pinged_and_lives(world: Any) -> None:
    world.hand_over(world.reserve([5]))
    world.advance(60.0)
    assert len(world.sent(msg.Ping)) > 20
    assert world.all(act.CloseSession) == []


def test_pings_of_the_peer_are_answered(world: Any) -> None:
    world.reserve([5])
    world.say(world.session(), msg.Ping(42))
    assert world.sent(msg.Pong) == [msg.Pong(42)]


def test_a_pause_of_our_own_is_not_held_against_the_peer(world: Any) -> None:
    reservation = world.reserve([5], timeout_s=600.0)
    world.now += 60.0  # we were stopped: no tick for a minute
    world.carry_out(world.core.tick(world.now))
    world.carry_out(world.core.tick(world.now))
    assert world.all(act.CloseSession) == []
    world.hand_over(reservation)
    assert world.events(reservation) == ["ready"]


def test_a_broken_lane_asks_the_peer_at_once_whether_it_lives(world: Any) -> None:
    world.reserve([5])
    world.silent.add("p0:1")
    before = len(world.sent(msg.Ping))
    world.lane_down(world.session())
    assert len(world.sent(msg.Ping)) == before + 1
    world.advance(1.0)
    assert len(world.all(act.CloseSession)) == 1


def test_a_broken_lane_of_a_living_peer_gets_a_new_generation_and_a_new_secret(world: Any) -> None:
    failed = world.reserve([5])
    world.lane_down(world.session())
    assert isinstance(world.error(failed), LaneFailed)
    first, second = world.all(act.ConnectLanes)
    assert (first.generation, second.generation) == (1, 2)
    assert first.epoch == second.epoch
    world.advance(5.0)
    assert world.all(act.CloseSession) == []
    retried = world.reserve([5])
    assert world.wire(retried).spec.generation == 2
    world.hand_over(retried)
    assert world.events(retried) == ["ready"]


def test_a_reservation_whose_records_had_all_arrived_outlives_its_lanes(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.hand_over(reservation, 0)
    world.lane_down(world.session("p0:1"))
    assert world.core.state(reservation) == "offered"
    world.hand_over(reservation, 1)
    assert world.events(reservation) == ["ready"]


def test_a_reservation_whose_records_had_all_arrived_outlives_its_peer(world: Any) -> None:
    world.held.add(act.Verify)
    reservation = world.reserve([5])
    world.hand_over(reservation)
    world.say(world.session(), msg.Bye("done for today"))
    (verify,) = world.all(act.Verify)
    world.carry_out(world.core.verified(world.now, reservation, world.reports(verify)))
    assert world.events(reservation) == ["ready"]


def test_a_report_that_cannot_be_had_any_more_fails_the_handoff_as_retryable(world: Any) -> None:
    world.held.add(act.Verify)
    reservation = world.reserve([5])
    world.hand_over(reservation)
    world.lane_down(world.session())
    world.carry_out(world.core.verified(world.now, reservation, {}))
    assert isinstance(world.error(reservation), LaneFailed)
    assert world.events(reservation) == ["failed", "released"]


def test_new_reservations_wait_until_every_legs_lanes_are_up(world: Any) -> None:
    world.held.add(act.ConnectLanes)
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.connect(world.session("p0:1"))
    assert world.sent(msg.Reserve) == []
    world.connect(world.session("p1:1"))
    assert world.core.state(reservation) == "offered"


def test_lanes_of_two_kinds_are_never_mixed_in_one_session(world: Any) -> None:
    world.held.add(act.ConnectLanes)
    reservation = world.reserve([5])
    session = world.session()
    world.carry_out(world.core.lane_up(world.now, session, 1, 0, "tcp"))
    world.carry_out(world.core.lane_up(world.now, session, 1, 1, "local"))
    assert world.core.state(reservation) == "waiting"


def test_local_lanes_are_offered_only_on_one_host(make_world: Any) -> None:
    for host, kinds in (("this-host", ["local", "tcp"]), ("elsewhere", ["tcp"])):
        world = make_world()
        world.mute.add(msg.Hello)
        world.reserve([5])
        session = world.session()
        good = world.welcome(session)
        offers = (msg.LaneOffer("tcp", ("a:1",), 8), msg.LaneOffer("local", ("@x",), 1))
        fields = {name: getattr(good, name) for name in good.__dataclass_fields__}
        welcome = msg.Welcome(**(fields | {"offers": offers, "host": host}))
        nonce = world.sent(msg.Hello)[0].nonce
        world.epochs[session] = nonce + welcome.nonce
        world.carry_out(world.core.message(world.now, session, world.epochs[session], 0, welcome))
        (connect,) = world.all(act.ConnectLanes)
        assert [offer.kind for offer in connect.offers] == kinds
        assert connect.offers[-1].lanes == 2  # no more than decode wants


def test_no_shared_kind_of_lane_is_an_error_that_names_both_sides(make_world: Any) -> None:
    world = make_world(DecodeConfig(lane_kinds=("local",)))
    reservation = world.reserve([5])
    error = world.error(reservation)
    assert isinstance(error, LaneFailed) and not error.retryable
    assert (error.details["accepted"], error.details["offered"]) == (["local"], ["tcp"])


def test_decline_reaches_every_rank_also_before_the_session_is_open(world: Any) -> None:
    world.silent.add("p0:1")
    world.carry_out(world.core.decline(world.now, "r1", ["p0:1", "p1:1"], "prefix hit"))
    assert [decline.request_id for decline in world.sent(msg.Decline)] == ["r1"]
    world.silent.clear()
    world.advance(0.5)
    assert len(world.sent(msg.Decline)) == 2


@pytest.mark.parametrize(
    ("cause", "retryable"), [("lane", True), ("source_changed", True), ("aborted", False), ("timeout", True)]
)
def test_what_prefill_says_has_failed_fails_with_its_cause(world: Any, cause: str, retryable: bool) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Failed(reservation, 0, -1, 1, cause, "because"))
    error = world.error(reservation)
    assert (error.details["cause"], error.retryable, error.peer) == (cause, retryable, "p0:1")
    assert world.events(reservation) == ["failed", "released"]


def test_the_engines_reason_for_a_rejection_is_the_errors_code(world: Any) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Rejected(reservation, 0, "rejected", "too long", {"reason": "prompt_too_long"}))
    error = world.error(reservation)
    assert isinstance(error, Rejected)
    assert error.details["code"] == "prompt_too_long"


@pytest.mark.parametrize("code", ["generation", "stale_number", "busy", "closed", "duplicate", "ended"])
def test_a_rejection_for_a_reason_that_passes_is_retryable(world: Any, code: str) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Rejected(reservation, 0, code, "not now"))
    assert world.error(reservation).retryable


@pytest.mark.parametrize("code", ["rejected", "capacity", "geometry", "verify", "readers", "declined"])
def test_a_rejection_that_will_come_again_is_not_retryable(world: Any, code: str) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Rejected(reservation, 0, code, "never"))
    assert not world.error(reservation).retryable


def test_closing_says_bye_fences_and_closes_every_session(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.carry_out(world.core.close(world.now, "shutting down"))
    assert world.events(reservation) == ["failed", "released"]
    assert len(world.sent(msg.Bye)) == 2 and len(world.all(act.Fence)) == 2
    assert world.core.is_closed
    assert world.core.next_deadline() is None
