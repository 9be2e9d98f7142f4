"""Decode's ABORT: admission closes, QUIESCED follows the drain and nothing else, and is said again when asked (S2)."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import Aborted
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as m


def test_abort_closes_admission_and_is_answered_only_after_the_drain(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    peer.abort(reserve)
    assert [closing.reservation for closing in world.closing_legs] == [reserve.reservation]
    assert not peer.heard(m.Quiesced)
    world.drain(peer, reserve, (3,))
    assert peer.heard(m.Quiesced) == [m.Quiesced(reserve.reservation, 0, (3,))]
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert isinstance(world.error(grant), Aborted)


def test_repeated_abort_closes_admission_once_and_is_answered_equally_each_time(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    for _ in range(3):
        peer.abort(reserve)
    assert len(world.closing_legs) == 1
    assert not peer.heard(m.Quiesced)
    world.drain(peer, reserve, (3,))
    for _ in range(3):
        peer.abort(reserve)
    assert peer.heard(m.Quiesced) == [m.Quiesced(reserve.reservation, 0, (3,))] * 4


def test_abort_before_anything_was_reserved_is_answered_with_nothing_posted(world: Any) -> None:
    peer = world.peer()
    unknown = peer.reservation()
    peer.abort(unknown)
    peer.abort(unknown)
    assert peer.heard(m.Quiesced) == [m.Quiesced(unknown.reservation, 0, ())] * 2


def test_abort_of_a_committed_and_drained_leg_is_answered_at_once(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.drain(peer, reserve)
    peer.abort(reserve)
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (6,))
    assert not world.closing_legs
    assert world.kinds(grant) == ["offered", "released", "failed"]


def test_abort_while_committed_writes_are_under_way_waits_for_their_drain(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    peer.abort(reserve)
    assert world.closing_legs
    assert not peer.heard(m.Quiesced)
    world.drain(peer, reserve, (4,))
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (4,))


def test_abort_from_both_sides_at_once_drains_once_and_fails_once(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.abort(grant)
    peer.abort(reserve)
    assert len(world.closing_legs) == 1
    world.drain(peer, reserve, (3,))
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (3,))
    assert world.kinds(grant) == ["offered", "failed", "released"]


@pytest.mark.parametrize("cause", ["lane: eof", "source_changed: page 3"])
def test_error_completion_is_never_answered_with_quiesced(world: Any, cause: str) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.break_lane(peer, reserve, cause)
    assert peer.heard(m.Failed)[0].cause == cause.partition(":")[0]
    peer.abort(reserve)
    world.run(world.core.leg_drained(world.now, peer.session, reserve.reservation, (3,)))
    peer.abort(reserve)
    assert not peer.heard(m.Quiesced)
    assert not world.core.released(grant)
    assert world.audited("illegal")


def test_leg_whose_drain_fails_is_answered_with_failed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    peer.abort(reserve)
    world.break_lane(peer, reserve)
    assert isinstance(peer.last(), m.Failed)
    assert not world.core.released(grant)
    peer.say(m.Relane(2))
    assert not peer.heard(m.Quiesced)
    assert world.core.released(grant), "our end of the lane is destroyed"


def test_last_word_on_a_failed_leg_outlives_the_leg(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    world.break_lane(peer, reserve)
    peer.abort(reserve)
    peer.say(m.Relane(2))
    peer.abort(reserve)
    assert isinstance(peer.last(), m.Failed)
    peer.say(reserve)
    assert isinstance(peer.last(), m.Failed)


def test_failed_leg_is_not_called_quiesced_even_when_its_last_word_was_dropped_for_room(make_world: Any) -> None:
    world = make_world(max_answers=1)
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    world.break_lane(peer, reserve)
    peer.abort(reserve)
    peer.say(m.Relane(2))
    for _ in range(3):
        peer.abort(peer.reservation())
    quiesced = len(peer.heard(m.Quiesced))
    peer.abort(reserve)
    assert isinstance(peer.last(), m.Failed)
    peer.say(reserve)
    assert isinstance(peer.last(), m.Failed)
    assert len(peer.heard(m.Quiesced)) == quiesced


def test_abort_with_another_leg_number_changes_nothing(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    peer.say(m.Abort(reserve.reservation, reserve.number, 5, "r", "x"))
    assert not world.closing_legs
    assert world.core.state(grant) == "offered"


def test_abort_without_a_number_still_ends_a_known_leg(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    peer.say(m.Abort(reserve.reservation, 0, 0, "", "the reservation has ended"))
    assert world.closing_legs
    assert world.core.state(grant) == "draining"


def test_abort_reaches_only_its_own_sessions_reservation(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept()
    reserve = one.reserve()
    two.abort(reserve)
    assert not world.closing_legs
    assert world.kinds(grant) == ["offered"]


def test_nothing_of_an_aborted_reservation_is_attached_again(world: Any) -> None:
    world.drains_at_once = True
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    peer.abort(reserve)
    world.accept()
    peer.say(reserve)
    peer.say(m.Relane(2))
    peer.generation = 2
    peer.say(reserve)
    assert len(world.attached) == 1


def test_actions_close_admission_before_anything_is_said(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    actions = world.core.message(
        world.now, peer.route, peer.epoch, peer.sequence + 1, m.Abort(reserve.reservation, 1, 0, "r", "x")
    )
    assert isinstance(actions[0], act.CloseAdmission)
    assert not any(isinstance(action, act.Send) for action in actions)
