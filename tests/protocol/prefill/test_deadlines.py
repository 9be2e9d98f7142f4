"""S6: every wait ends. A deadline never frees a source by itself: it closes admission, then destroys the lanes."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import DeadlineExceeded
from kvxfer.protocol import messages as m


def test_leg_that_does_not_drain_after_an_abort_costs_its_session(world: Any) -> None:
    world.destroys_at_once = False
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.abort(grant)
    world.pass_time(world.config.drain_timeout_s - 0.5, peer)
    assert not peer.heard(m.Bye)
    world.pass_time(1.0, peer)
    assert peer.heard(m.Bye)
    assert not world.core.released(grant), "the time alone frees nothing"
    world.report_destroyed()
    assert world.core.released(grant)
    assert world.core.state(grant) == "fenced"


def test_broken_leg_whose_decode_asks_for_no_new_lanes_costs_its_session(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    world.break_lane(peer, peer.reserve())
    assert not world.core.released(grant)
    world.pass_time(world.config.drain_timeout_s + 0.5, peer)
    assert peer.heard(m.Bye)
    assert world.core.released(grant)


def test_committed_pages_that_do_not_leave_in_time_are_aborted_and_drained(make_world: Any) -> None:
    world = make_world(transfer_timeout_s=3.0)
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve(deadline_s=2.0)
    world.commit(grant)
    world.pass_time(2.5, peer)
    assert not world.closing_legs
    world.pass_time(1.0, peer)
    assert [closing.reservation for closing in world.closing_legs] == [reserve.reservation]
    assert peer.heard(m.Failed)[0].cause == "timeout"
    assert isinstance(world.error(grant), DeadlineExceeded)
    assert not world.core.released(grant)
    world.drain(peer, reserve)
    assert world.core.released(grant)


def test_transfer_may_take_as_long_as_decodes_own_deadline(make_world: Any) -> None:
    world = make_world(transfer_timeout_s=3.0)
    peer, grant = world.peer(), world.accept()
    peer.reserve(deadline_s=30.0)
    world.commit(grant)
    world.pass_time(29.0, peer)
    assert not world.closing_legs


def test_uncommitted_grant_has_no_deadline_of_ours(world: Any) -> None:
    peer, grant = world.peer(), world.accept(timeout_s=1.0)
    peer.reserve(deadline_s=1.0)
    world.pass_time(100.0, peer)
    assert world.kinds(grant) == ["offered"]
    world.core.check_write(grant)


def test_committed_grant_that_nobody_reserves_fails_and_is_released(world: Any) -> None:
    grant = world.accept(timeout_s=2.0)
    world.commit(grant)
    world.pass_time(2.5)
    assert world.kinds(grant) == ["failed", "released"]
    assert isinstance(world.error(grant), DeadlineExceeded)


def test_done_leg_that_does_not_drain_is_closed_and_then_destroyed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    peer.done(reserve)
    world.pass_time(world.config.drain_timeout_s + 0.5, peer)
    assert [closing.reservation for closing in world.closing_legs] == [reserve.reservation]
    assert not peer.heard(m.Failed), "decode has everything; only our own lane is late"
    world.pass_time(world.config.drain_timeout_s + 0.5, peer)
    assert world.kinds(grant) == ["offered", "ready", "released"]


def test_next_deadline_is_never_later_than_what_is_due(world: Any) -> None:
    assert world.core.next_deadline() is None
    peer = world.peer()
    assert world.core.next_deadline() == world.now + world.config.heartbeat_timeout_s
    grant = world.accept(timeout_s=2.0)
    world.commit(grant)
    assert world.core.next_deadline() == world.now + 2.0
    peer.reserve(readers=1)
    world.abort(grant)
    assert world.core.next_deadline() == world.now + world.config.failed_repeat_s


def test_tick_before_the_deadline_does_nothing(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.abort(grant)
    assert world.core.tick(world.now + 0.1) == []


def test_nothing_is_left_to_wait_for_when_everything_has_ended(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.drain(peer, reserve)
    peer.done(reserve)
    peer.say(m.Bye("over"))
    world.pass_time(100.0)
    assert world.core.next_deadline() is None
