"""Lanes break, are replaced, and go with their session: sources are free once our ends are destroyed (S3)."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import LaneFailed, PeerLost, SourceChanged
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as m


def test_error_completion_is_told_and_holds_the_sources_until_the_lanes_are_destroyed(world: Any) -> None:
    world.destroys_at_once = False
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.break_lane(peer, reserve)
    failed = peer.heard(m.Failed)[0]
    assert (failed.cause, failed.lane, failed.generation) == ("lane", 0, 1)
    assert world.kinds(grant) == ["offered", "failed"]
    assert isinstance(world.error(grant), LaneFailed)
    assert world.error(grant).retryable
    peer.say(m.Relane(2))
    assert not world.core.released(grant)
    world.report_destroyed()
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert world.core.state(grant) == "fenced"


def test_changed_source_is_its_own_error(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    world.break_lane(peer, peer.reserve(), "source_changed: page 3")
    assert isinstance(world.error(grant), SourceChanged)


def test_lane_that_breaks_behind_the_commit_leaves_the_verdict_to_decode(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.break_lane(peer, reserve)
    assert peer.heard(m.Failed)
    assert world.kinds(grant) == ["offered"]
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "ready"]
    assert not world.core.released(grant)
    peer.say(m.Relane(2))
    assert world.kinds(grant) == ["offered", "ready", "released"]


def test_lane_that_breaks_behind_the_commit_fails_the_grant_by_decodes_abort(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.break_lane(peer, reserve)
    peer.abort(reserve)
    assert isinstance(world.error(grant), LaneFailed)
    assert not peer.heard(m.Quiesced)


def test_relane_is_answered_with_a_fresh_secret_only_after_the_old_lanes_are_destroyed(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    peer.say(m.Relane(2))
    assert not peer.heard(m.Lanes)
    world.report_destroyed()
    (lanes,) = peer.heard(m.Lanes)
    assert lanes.generation == 2
    assert lanes.secret == world.secrets[peer.session, 2]
    assert lanes.secret != world.secrets[peer.session, 1]


def test_repeated_relane_opens_lanes_once_and_is_answered_equally(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    peer.say(m.Relane(2))
    peer.say(m.Relane(2))
    assert len(world.destroyed) == 1
    world.report_destroyed()
    peer.say(m.Relane(2))
    first, second = peer.heard(m.Lanes)
    assert first == second
    assert not world.destroyed


def test_relane_asked_for_during_a_relane_follows_it(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    peer.say(m.Relane(2))
    peer.say(m.Relane(3))
    world.report_destroyed()
    assert not peer.heard(m.Lanes)
    world.report_destroyed()
    assert [lanes.generation for lanes in peer.heard(m.Lanes)] == [3]


def test_relane_to_a_former_generation_changes_nothing(world: Any) -> None:
    peer = world.peer()
    peer.say(m.Relane(1))
    peer.say(m.Relane(3))
    peer.say(m.Relane(2))
    assert [lanes.generation for lanes in peer.heard(m.Lanes)] == [3]
    assert len(world.audited("illegal")) == 2


def test_reserve_on_a_former_generation_or_during_a_relane_is_refused(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    world.accept()
    peer.say(m.Relane(2))
    peer.reserve(generation=1)
    peer.reserve(generation=2)
    world.report_destroyed()
    peer.reserve(generation=1)
    assert [word.code for word in peer.heard(m.Rejected)] == ["generation"] * 3
    peer.reserve(generation=2)
    assert isinstance(peer.last(), m.Granted)


def test_relane_fails_legs_that_were_not_committed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    peer.say(m.Relane(2))
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert isinstance(world.error(grant), LaneFailed)


def test_relane_rejects_offers_of_the_former_generation(world: Any) -> None:
    peer = world.peer()
    reserve = peer.reserve()
    peer.say(m.Relane(2))
    assert peer.heard(m.Rejected)[0].code == "generation"
    world.accept()
    assert not world.attached
    peer.abort(reserve)
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (0,))


def test_reservation_whose_records_had_left_is_ready_by_decodes_word_after_a_relane(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.drain(peer, reserve)
    peer.say(m.Relane(2))
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_committed_leg_that_decode_never_speaks_of_after_a_relane_fails(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.commit(grant)
    peer.say(m.Relane(2))
    assert world.kinds(grant) == ["offered", "released"]
    world.pass_time(world.config.drain_timeout_s + 1, peer)
    assert isinstance(world.error(grant), LaneFailed)


def test_drain_of_a_destroyed_leg_is_not_believed(world: Any) -> None:
    peer = world.peer()
    grant = world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    peer.say(m.Relane(2))
    world.run(world.core.leg_drained(world.now, peer.session, reserve.reservation, (6,)))
    peer.abort(reserve)
    assert not peer.heard(m.Quiesced)


def test_lane_events_of_other_generations_mean_nothing(world: Any) -> None:
    peer = world.peer()
    peer.say(m.Relane(2))
    peer.generation = 2
    world.run(world.core.lane_down(world.now, peer.session, 1, 0, "eof"))
    world.accept()
    peer.reserve()
    assert isinstance(peer.last(), m.Granted)


def test_new_lanes_serve_where_the_old_ones_were_down(world: Any) -> None:
    peer = world.peer()
    world.run(world.core.lane_down(world.now, peer.session, 1, 0, "eof"))
    peer.say(m.Relane(2))
    peer.generation = 2
    peer.reserve()
    assert isinstance(peer.last(), m.Granted)


def test_bye_closes_the_session_and_frees_its_sources_when_the_lanes_are_destroyed(world: Any) -> None:
    world.destroys_at_once = False
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    peer.say(m.Bye("restart"))
    assert isinstance(world.error(grant), PeerLost)
    assert not world.core.released(grant)
    world.report_destroyed()
    assert world.core.released(grant)
    assert world.released_grants == {grant}


def test_silent_decode_is_closed_after_the_heartbeat_timeout_and_its_sources_are_freed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.pass_time(world.config.heartbeat_timeout_s - 0.5)
    assert not world.core.released(grant)
    world.pass_time(1.0)
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert isinstance(world.error(grant), PeerLost)


def test_decode_that_pings_is_never_closed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.pass_time(10 * world.config.heartbeat_timeout_s, peer)
    assert world.kinds(grant) == ["offered"]


def test_frames_of_a_closed_session_are_refused_as_unknown(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    world.pass_time(world.config.heartbeat_timeout_s + 1)
    peer.ping()
    assert peer.heard(m.Refuse)[-1].code == "unknown_epoch"


def test_lanes_closed_of_an_earlier_request_does_not_end_a_closing_session(world: Any) -> None:
    world.destroys_at_once = False
    peer, grant = world.peer(), world.accept()
    peer.say(m.Relane(2))
    world.report_destroyed()
    peer.generation = 2
    peer.reserve()
    peer.say(m.Bye("restart"))
    world.run(world.core.lanes_closed(world.now, peer.session, 1))
    assert not world.core.released(grant)
    world.report_destroyed()
    assert world.core.released(grant)


def test_late_events_of_a_session_that_is_gone_mean_nothing(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    peer.say(m.Bye("restart"))
    core, now = world.core, world.now
    late: list[list[act.Action]] = [
        core.leg_drained(now, peer.session, reserve.reservation, (1,)),
        core.leg_failed(now, peer.session, reserve.reservation, "lane: eof"),
        core.lane_up(now, peer.session, 1, 0),
        core.lane_down(now, peer.session, 1, 0, "eof"),
        core.lanes_closed(now, peer.session, 1),
        core.digests(now, peer.session, reserve.reservation, 0, 0, b""),
    ]
    assert late == [[]] * len(late)


def test_decode_that_comes_back_gets_a_new_epoch_and_its_handoff_works(world: Any) -> None:
    old = world.peer("old")
    old.say(m.Bye("restart"))
    new = world.peer("new")
    assert new.epoch != old.epoch
    grant = world.accept()
    reserve = new.reserve()
    world.commit(grant)
    world.drain(new, reserve)
    new.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]
