"""S7: frames that are malformed, replayed, out of order, of another epoch or simply out of place change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg


def snapshot(world: Any, reservation: int) -> Any:
    return (
        world.core.state(reservation),
        world.events(reservation),
        world.ledger.counts(),
        len(world.all(act.Revoke)),
        len(world.all(act.Fence)),
        len(world.all(act.CloseSession)),
        len(world.sent(msg.Abort)),
    )


def every_message(reservation: int) -> list[msg.Message]:
    return [
        msg.Granted(reservation, 0),
        msg.Rejected(reservation, 0, "rejected", "no"),
        msg.Quiesced(reservation, 0, (0, 0)),
        msg.Failed(reservation, 0, -1, 1, "aborted", "no"),
        msg.Digests(reservation, 0, 0, bytes(8)),
        msg.Lanes(2, bytes(32)),
        msg.Bye("gone"),
        msg.Refuse("unknown_epoch", "who are you"),
    ]


@pytest.mark.parametrize("index", range(8))
def test_a_frame_of_another_epoch_changes_nothing(world: Any, index: int) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    epoch = world.epochs[world.session()]
    for wrong in (bytes(16), epoch[:8] + bytes(8), bytes(8) + epoch[8:], epoch[:15], b""):
        world.carry_out(world.core.message(world.now, world.session(), wrong, 10**6, every_message(reservation)[index]))
    assert snapshot(world, reservation) == before
    assert world.audits("refused") == ["epoch"] * 5
    world.hand_over(reservation)
    assert world.events(reservation) == ["ready"]  # and the sequence has not moved either


@pytest.mark.parametrize("index", range(7))
def test_a_frame_out_of_sequence_changes_nothing(world: Any, index: int) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    for stale in range(world.sequences[world.session()] + 1):
        world.say(world.session(), every_message(reservation)[index], sequence=stale)
    assert snapshot(world, reservation) == before
    assert set(world.audits("refused")) == {"sequence"}


def test_a_refuse_that_is_refused_does_not_move_the_sequence(world: Any) -> None:
    reservation = world.reserve([5])
    session = world.session()
    world.say(session, msg.Refuse("version", "an old answer"), sequence=10**9)
    assert world.audits("refused") == ["refuse_of_an_open_session"]
    world.say(session, msg.Failed(reservation, 0, -1, 1, "aborted", "and this one is heard"))
    assert world.events(reservation) == ["failed", "released"]


def test_a_replayed_failed_changes_nothing(world: Any) -> None:
    first = world.reserve([5])
    world.say(world.session(), msg.Failed(first, 0, -1, 1, "aborted", "no"))
    recorded = world.sequences[world.session()] - 1
    second = world.reserve([6])
    before = snapshot(world, second)
    world.say(world.session(), msg.Failed(second, 0, -1, 1, "aborted", "no"), sequence=recorded)
    assert snapshot(world, second) == before


def test_a_frame_for_an_unknown_session_changes_nothing(world: Any) -> None:
    assert [a.event for a in world.core.message(world.now, 77, bytes(16), 0, msg.Bye("x"))] == ["refused"]
    assert [a.event for a in world.core.record(world.now, 77, 1, 0, b"")] == ["refused"]
    assert world.core.socket_failed(world.now, 77, "x") == []
    assert world.core.lane_down(world.now, 77, 1, 0, "x") == []


def test_messages_that_only_decode_may_send_are_refused(world: Any) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    for message in (
        world.sent(msg.Hello)[0],
        world.sent(msg.Reserve)[0],
        msg.Abort(reservation, 0, 0, "r1", "x"),
        msg.Done(reservation, 0),
        msg.Decline("r1", "x"),
        msg.Relane(2),
        msg.FetchDigests(reservation, 0, 0, 1),
    ):
        world.say(world.session(), message)
    assert snapshot(world, reservation) == before
    assert world.audits("refused") == ["not_for_decode"] * 7


def test_a_second_welcome_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    world.say(world.session(), world.welcome(world.session()))  # another nonce: another epoch
    repeated = [world.core._sessions[world.session()].welcome]
    world.say(world.session(), repeated[0])
    assert snapshot(world, reservation) == before
    assert len(world.all(act.ConnectLanes)) == 1


def test_nothing_but_welcome_and_refuse_is_heard_before_the_session_is_open(world: Any) -> None:
    world.silent.add("p0:1")
    reservation = world.reserve([5])
    session = world.session()
    hello = world.sent(msg.Hello)[0]
    for message in every_message(reservation)[:7]:
        world.carry_out(world.core.message(world.now, session, hello.nonce + bytes(8), 5, message))
    assert world.events(reservation) == []
    assert world.audits("refused") == ["before_welcome"] * 7


def test_words_about_another_sessions_leg_change_nothing(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    before = snapshot(world, reservation)
    for leg in (0, 2, 2**31, -1):
        world.say(world.session("p1:1"), msg.Failed(reservation, leg, -1, 1, "aborted", "no"))
        world.say(world.session("p1:1"), msg.Rejected(reservation, leg, "rejected", "no"))
    assert snapshot(world, reservation) == before


def test_a_failed_of_another_generation_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Failed(reservation, 0, 0, 0, "lane", "an old one"))
    assert world.core.state(reservation) == "offered"
    assert world.audits("refused") == ["failed_of_another_generation"]


def test_quiesced_without_an_abort_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Quiesced(reservation, 0, (0, 0)))
    assert world.core.state(reservation) == "offered"
    assert world.audits("refused") == ["quiesced_without_abort"]


def test_lanes_that_were_not_asked_for_change_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Lanes(2, bytes(32)))
    world.lane_down(world.session())
    world.say(world.session(), msg.Lanes(7, bytes(32)))
    assert world.audits("refused") == ["lanes_without_relane"] * 2
    assert world.events(reservation) == ["failed", "released"]


def test_lanes_with_a_malformed_secret_are_not_connected(world: Any) -> None:
    world.mute.add(msg.Relane)
    world.reserve([5])
    world.lane_down(world.session())
    world.say(world.session(), msg.Lanes(2, b"short"))
    assert len(world.all(act.ConnectLanes)) == 1


@pytest.mark.parametrize("data", [b"", b"x" * 95, b"\0" * 104, b"KVXR" + b"\xff" * 200])
def test_garbage_in_place_of_a_record_changes_nothing(world: Any, data: bytes) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    world.deliver(reservation, data)
    assert snapshot(world, reservation) == before
    assert world.audits("refused") == ["malformed_record"]


def test_no_truncation_of_a_record_makes_anything_readable(world: Any) -> None:
    for length in range(0, 160, 7):
        reservation = world.reserve([5], request_id=f"r{length}")
        world.write(reservation)
        data = world.record_bytes(reservation)
        assert length < len(data)
        world.deliver(reservation, data[:length])
        world.commit(reservation, lanes=[1])
        assert world.core.state(reservation) != "ready"
        world.abort(reservation)


def test_a_damaged_record_on_another_legs_lane_fails_nobody(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.write(reservation, 0)
    data = bytearray(world.record_bytes(reservation, 0, 0))
    data[-1] ^= 1
    world.carry_out(world.core.record(world.now, world.session("p1:1"), 1, 0, bytes(data)))
    world.deliver(reservation, bytes(data), lane=0, generation=9)
    assert world.core.state(reservation) == "offered"


def test_a_violation_that_names_nobody_fails_nobody(world: Any) -> None:
    reservation = world.reserve([5])
    session = world.session()
    for named, leg, generation in ((0, 0, 1), (reservation, 1, 1), (reservation, 0, 2), (reservation ^ 1, 0, 1)):
        world.carry_out(world.core.violation(world.now, session, generation, 0, named, leg, "page outside"))
    assert world.core.state(reservation) == "offered"
    assert len(world.audits("refused")) == 4


def test_late_words_about_ended_reservations_are_ignored(world: Any) -> None:
    reservation = world.reserve([5])
    world.hand_over(reservation)
    for message in every_message(reservation)[:5]:
        world.say(world.session(), message)
    assert world.events(reservation) == ["ready"]
    assert world.page_states(5) == {PageState.READY}
    # A prefill that still asks is told again how it ended.
    assert world.sent(msg.Done) == [msg.Done(reservation, 0)] * 2


def test_a_prefill_that_asks_about_an_aborted_reservation_is_told_again(world: Any) -> None:
    reservation = world.reserve([5])
    world.abort(reservation)
    before = len(world.sent(msg.Abort))
    world.say(world.session(), msg.Failed(reservation, 0, -1, 1, "timeout", "no word from decode"))
    again = world.sent(msg.Abort)
    assert len(again) == before + 1 and again[-1].number == again[0].number


@pytest.mark.parametrize(
    "changed",
    [{"nonce": b"short"}, {"incarnation": b""}, {"secret": b"x"}, {"heartbeat_s": 0.0}, {"heartbeat_s": float("nan")}],
)
def test_a_malformed_welcome_opens_nothing(world: Any, changed: dict[str, Any]) -> None:
    world.mute.add(msg.Hello)
    reservation = world.reserve([5])
    session = world.session()
    good = world.welcome(session)
    fields = {name: getattr(good, name) for name in good.__dataclass_fields__} | changed
    welcome = msg.Welcome(**fields)
    nonce = world.sent(msg.Hello)[0].nonce
    world.carry_out(world.core.message(world.now, session, nonce + welcome.nonce, 0, welcome))
    assert world.all(act.ConnectLanes) == []
    assert world.sent(msg.Reserve) == []
    world.advance(61.0)
    assert world.events(reservation) == ["failed", "released"]


def test_answers_that_nobody_awaits_change_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    before = snapshot(world, reservation)
    core, now, session = world.core, world.now, world.session()
    for actions in (
        core.verified(now, reservation, {}),
        core.verified(now, 1, {}),
        core.fenced(now, session, 1),
        core.revoked(now, session, reservation, 0),
        core.revoked(now, session, reservation, 9),
        core.lane_up(now, session, 1, 0, "tcp"),
        core.lane_up(now, session, 2, 0, "tcp"),
        core.lane_down(now, session, 0, 0, "eof"),
        core.lanes_failed(now, session, 1, "late"),
        core.abort(now, 12345, "unknown"),
    ):
        world.carry_out(actions)
    assert snapshot(world, reservation) == before
