"""S6: every wait ends in a typed error, and every message that must arrive is repeated until it is answered."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import DeadlineExceeded, GeometryError, LaneFailed, PeerLost
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig


def test_a_reservation_whose_peer_never_answers_ends_at_its_deadline(world: Any) -> None:
    world.silent.add("p0:1")
    reservation = world.reserve([5], timeout_s=3.0)
    world.advance(2.9)
    assert world.events(reservation) == []
    world.advance(0.1)
    assert world.events(reservation) == ["failed", "released"]
    error = world.error(reservation)
    assert isinstance(error, DeadlineExceeded) and error.retryable
    assert error.details["waiting_for"] == {"p0:1": "session dialing, lanes none"}


def test_a_peer_that_never_answers_hello_is_given_up(world: Any) -> None:
    world.silent.add("p0:1")
    reservation = world.reserve([5], timeout_s=600.0)
    world.advance(10.0)
    assert isinstance(world.error(reservation), PeerLost)
    assert len(world.all(act.CloseSession)) == 1
    assert len(world.sent(msg.Hello)) == 20


def test_a_handoff_that_never_commits_ends_at_its_deadline_and_says_what_is_missing(world: Any) -> None:
    reservation = world.reserve([5], timeout_s=3.0)
    world.write(reservation)
    world.commit(reservation, lanes=[0])
    world.advance(3.0)
    assert world.error(reservation).details["waiting_for"] == {"p0:1": "1 of 2 commit records"}


def test_a_report_that_never_comes_ends_at_the_deadline(world: Any) -> None:
    world.held.add(act.Verify)
    reservation = world.reserve([5], timeout_s=3.0)
    world.hand_over(reservation)
    world.advance(3.0)
    assert isinstance(world.error(reservation), DeadlineExceeded)


def test_extend_moves_the_deadline(world: Any) -> None:
    reservation = world.reserve([5], timeout_s=3.0)
    world.core.extend(world.now, reservation, 4.0)
    world.advance(6.9)
    assert world.events(reservation) == []
    world.advance(0.1)
    assert isinstance(world.error(reservation), DeadlineExceeded)
    assert world.core.extend(world.now, reservation, 1.0) == []
    with pytest.raises(GeometryError):
        world.core.extend(world.now, reservation, -1.0)


def test_reserve_is_repeated_word_for_word_until_it_is_answered(world: Any) -> None:
    world.mute.add(msg.Reserve)
    reservation = world.reserve([5])
    world.advance(3.5)
    reserves = world.sent(msg.Reserve)
    assert len(reserves) == 4 and len(set(map(id, reserves))) == 1
    world.say(world.session(), msg.Granted(reservation, 0))
    world.advance(3.0)
    assert len(world.sent(msg.Reserve)) == 4


def test_a_record_answers_reserve_as_well_as_granted_does(world: Any) -> None:
    world.mute.add(msg.Reserve)
    reservation = world.reserve([5])
    world.commit(reservation, lanes=[0])
    world.advance(3.5)
    assert len(world.sent(msg.Reserve)) == 1


def test_abort_is_repeated_until_it_is_answered_even_after_release(world: Any) -> None:
    world.mute.add(msg.Abort)
    reservation = world.reserve([5])
    world.abort(reservation)
    assert world.events(reservation) == ["failed", "released"]
    world.advance(1.6)
    assert len(world.sent(msg.Abort)) == 4
    world.say(world.session(), msg.Quiesced(reservation, 0, (0, 0)))
    world.advance(20.0)
    assert len(world.sent(msg.Abort)) == 4


def test_an_abort_that_is_never_answered_is_not_repeated_for_ever(world: Any) -> None:
    world.mute.add(msg.Abort)
    world.abort(world.reserve([5]))
    world.advance(60.0)
    repeated = len(world.sent(msg.Abort))
    world.advance(600.0)
    assert len(world.sent(msg.Abort)) == repeated
    assert world.core._reservations == {}


def test_relane_is_repeated_until_lanes_come(world: Any) -> None:
    world.mute.add(msg.Relane)
    world.reserve([5])
    world.lane_down(world.session())
    world.advance(1.1)
    relanes = world.sent(msg.Relane)
    assert len(relanes) == 3 and {relane.generation for relane in relanes} == {2}
    world.say(world.session(), msg.Lanes(2, bytes(32)))
    world.advance(3.0)
    assert len(world.sent(msg.Relane)) == 3


def test_lanes_that_cannot_be_connected_fail_the_waiting_after_a_few_attempts(world: Any) -> None:
    world.held.add(act.ConnectLanes)
    reservation = world.reserve([5], timeout_s=600.0)
    for attempt in range(3):
        session = world.session()
        assert len(world.all(act.ConnectLanes)) == attempt + 1
        world.carry_out(world.core.lanes_failed(world.now, session, world.generations[session], "refused"))
        world.advance(1.0)
    error = world.error(reservation)
    assert isinstance(error, LaneFailed) and error.retryable and "refused" in error.message
    assert world.events(reservation) == ["failed", "released"]
    world.held.clear()
    world.carry_out(world.core.lanes_failed(world.now, session, world.generations[session], "refused"))
    later = world.reserve([5], timeout_s=600.0)
    world.advance(10.0)
    assert world.core.state(later) == "offered"  # nobody is blacklisted for good


def test_lanes_that_keep_breaking_are_connected_ever_more_slowly(world: Any) -> None:
    world.reserve([5])
    gaps = []
    for _ in range(6):
        broken_at, connected = world.now, len(world.all(act.ConnectLanes))
        world.lane_down(world.session())
        while len(world.all(act.ConnectLanes)) == connected:
            world.advance(0.01)
        gaps.append(world.now - broken_at)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 10 * gaps[1]


def test_the_core_asks_for_no_tick_when_nothing_can_become_due(make_world: Any) -> None:
    world = make_world(DecodeConfig())
    assert world.core.next_deadline() is None
    world.silent.add("p0:1")
    world.abort(world.reserve([5]))
    world.advance(11.0)
    assert world.core.next_deadline() is None


def test_timers_of_ended_reservations_do_not_pile_up(world: Any) -> None:
    for number in range(500):
        world.hand_over(world.reserve([1], request_id=f"r{number}", timeout_s=3600.0))
    assert len(world.core._timers._heap) < 100
    assert len(world.core._reservations) == 0


def test_a_prefill_that_answers_every_abort_with_failed_is_answered_ever_more_rarely(world: Any) -> None:
    reservation = world.reserve([5])
    failed = msg.Failed(reservation, 0, -1, 1, "lane", "the lanes went before it drained")
    world.say(world.session(), failed)
    world.say(world.session(), failed)  # the answer to ABORT: from here on only the end of the handoff is remembered
    answered = len(world.sent(msg.Abort))
    for _ in range(1000):
        world.advance(0.01)
        world.say(world.session(), failed)
    assert answered < len(world.sent(msg.Abort)) < answered + 8
