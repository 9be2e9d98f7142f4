"""A grant from accept to released: admission, S3, and what the engine is told when."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import (
    Aborted,
    AdmissionClosed,
    CapacityError,
    Closed,
    DeadlineExceeded,
    Declined,
    DuplicateRequest,
    GeometryError,
)
from kvxfer.errors import Rejected as RejectedError
from kvxfer.protocol import messages as m


def test_states_follow_offered_writing_committed_done(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    states = [world.core.state(grant)]
    world.core.check_write(grant)
    assert world.core.note_written(grant) == []
    states.append(world.core.state(grant))
    world.commit(grant)
    states.append(world.core.state(grant))
    world.drain(peer, reserve)
    peer.done(reserve)
    states.append(world.core.state(grant))
    assert states == ["offered", "writing", "committed", "done"]
    assert world.core.released(grant)
    assert world.released_grants == {grant}


def test_write_after_commit_is_refused(world: Any) -> None:
    grant = world.accept()
    world.commit(grant)
    with pytest.raises(AdmissionClosed):
        world.core.check_write(grant)
    world.run(world.core.note_written(grant))
    assert world.audited("illegal")
    assert world.core.state(grant) == "committed"


def test_commit_twice_is_refused(world: Any) -> None:
    grant = world.accept()
    world.commit(grant)
    with pytest.raises(AdmissionClosed):
        world.commit(grant)


@pytest.mark.parametrize("ends", ["abort", "reject", "release"])
def test_write_and_commit_after_the_end_are_refused(world: Any, ends: str) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    if ends == "reject":
        world.run(world.core.reject(world.now, "r", "no", "no", 1.0))
    else:
        world.drains_at_once = ends == "release"
        world.abort(grant)
    with pytest.raises(AdmissionClosed):
        world.core.check_write(grant)
    with pytest.raises(AdmissionClosed):
        world.commit(grant)


@pytest.mark.parametrize(
    "n_tokens, aux_bytes, error", [(-1, 0, GeometryError), (129, 0, CapacityError), (1, 9, GeometryError)]
)
def test_refused_commit_changes_nothing(make_world: Any, n_tokens: int, aux_bytes: int, error: type[Exception]) -> None:
    world = make_world(max_aux_bytes=8)
    grant = world.accept()
    with pytest.raises(error):
        world.core.commit(world.now, grant, n_tokens, aux_bytes)
    world.core.check_write(grant)


@pytest.mark.parametrize("readers, timeout_s", [(0, 1.0), (5000, 1.0), (1, 0.0), (1, float("inf"))])
def test_accept_refuses_impossible_arguments(world: Any, readers: int, timeout_s: float) -> None:
    with pytest.raises(GeometryError):
        world.accept(readers=readers, timeout_s=timeout_s)


def test_a_request_id_is_free_again_once_its_sources_are_though_decode_has_not_said_done(world: Any) -> None:
    peer, first = world.peer(), world.accept()
    reserve = peer.reserve()
    with pytest.raises(DuplicateRequest):
        world.accept()
    world.commit(first)
    world.drain(peer, reserve)
    assert world.core.released(first) and world.core.state(first) == "committed"
    second = world.accept()
    peer.done(reserve)
    assert world.core.state(first) == "done"
    again = peer.reserve()
    world.commit(second)
    world.drain(peer, again)
    peer.done(again)
    assert world.core.state(second) == "done"


def test_sources_are_released_when_they_are_drained_without_waiting_for_done(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    assert not world.core.released(grant)
    world.drain(peer, reserve)
    assert world.kinds(grant) == ["offered", "released"]
    assert not world.released_grants, "decode can still ask for digests"
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]
    assert world.released_grants == {grant}


def test_done_before_the_drain_is_ready_but_not_released(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "ready"]
    world.drain(peer, reserve)
    assert world.kinds(grant) == ["offered", "ready", "released"]


def test_done_before_commit_changes_nothing(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.done(peer.reserve())
    assert world.audited("illegal")
    assert world.kinds(grant) == ["offered"]
    assert world.core.state(grant) == "offered"


def test_done_of_another_leg_changes_nothing(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.drain(peer, reserve)
    peer.say(m.Done(reserve.reservation, 3))
    assert "ready" not in world.kinds(grant)


def test_drain_that_nobody_asked_for_is_not_believed(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.run(world.core.leg_drained(world.now, peer.session, reserve.reservation, (0,)))
    assert world.audited("illegal")
    world.commit(grant)
    assert not world.core.released(grant)


def test_commit_before_reserve_releases_only_after_the_late_reader_drained(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    world.commit(grant)
    assert not world.core.released(grant)
    reserve = peer.reserve()
    assert not world.core.released(grant)
    world.drain(peer, reserve)
    assert world.core.released(grant)


def test_lost_done_is_a_failure_of_unknown_delivery_not_ready(make_world: Any) -> None:
    world = make_world(done_timeout_s=5.0)
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve(deadline_s=1.0)
    world.commit(grant)
    world.drain(peer, reserve)
    world.pass_time(7.0, peer)
    assert world.kinds(grant) == ["offered", "released", "failed"]
    assert isinstance(world.error(grant), DeadlineExceeded)
    assert world.released_grants == {grant}
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "failed"]


def test_abort_of_a_grant_that_was_never_offered_leaves_nothing_behind(world: Any) -> None:
    grant = world.accept()
    world.abort(grant)
    assert world.kinds(grant) == ["failed", "released"]
    assert isinstance(world.error(grant), Aborted)
    assert world.released_grants == {grant}
    peer = world.peer()
    peer.reserve()
    assert isinstance(peer.last(), m.Granted), "the request is as if it had never been accepted"
    assert not world.attached


def test_abort_is_idempotent(world: Any) -> None:
    grant = world.accept()
    world.abort(grant)
    world.abort(grant)
    world.abort(999)
    assert world.kinds(grant) == ["failed", "released"]


def test_preempted_prefill_gets_its_blocks_only_after_the_drain(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.core.note_written(grant)
    world.abort(grant)
    assert [closing.reservation for closing in world.closing_legs] == [reserve.reservation]
    assert peer.heard(m.Failed)[0].cause == "aborted"
    assert world.kinds(grant) == ["offered", "failed"]
    assert world.core.state(grant) == "draining"
    world.drain(peer, reserve, (2,))
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert world.core.state(grant) == "ended"
    peer.abort(reserve)
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (2,))


def test_failure_is_told_until_decode_answers(world: Any) -> None:
    world.drains_at_once = True
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.abort(grant)
    world.pass_time(2.0, peer)
    told = len(peer.heard(m.Failed))
    assert told > 2
    peer.abort(reserve)
    world.pass_time(2.0, peer)
    assert len(peer.heard(m.Failed)) == told


def test_repeated_reserve_of_an_aborted_leg_hears_of_the_failure(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.abort(grant)
    peer.say(reserve)
    assert peer.last() == peer.heard(m.Failed)[0]


def test_abort_after_commit_drains_as_well(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.abort(grant)
    assert world.closing_legs
    assert not world.core.released(grant)
    world.drain(peer, reserve)
    assert world.kinds(grant) == ["offered", "failed", "released"]


def test_reject_after_reserve_fails_the_grant_and_tells_decode(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.run(world.core.reject(world.now, "r", "too_long", "prompt too long", 10.0))
    assert peer.heard(m.Failed)[0].cause == "rejected"
    assert isinstance(world.error(grant), RejectedError)
    world.drain(peer, reserve)
    assert world.core.released(grant)


def test_declined_request_ends_the_grant_without_a_handoff(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.say(m.Decline("r", "prefix hit"))
    assert world.kinds(grant) == ["failed", "released"]
    assert isinstance(world.error(grant), Declined)
    assert not world.attached


def test_request_declined_before_accept_fails_at_once(world: Any) -> None:
    world.peer().say(m.Decline("r", "prefix hit"))
    grant = world.accept()
    assert world.kinds(grant) == ["failed", "released"]
    assert world.accept(), "the decline was used up"


def test_decline_is_forgotten_after_its_time(make_world: Any) -> None:
    world = make_world(decline_ttl_s=1.0)
    world.peer().say(m.Decline("r", "prefix hit"))
    world.now += 2.0
    grant = world.accept()
    assert world.kinds(grant) == []


def test_reserve_after_a_decline_is_refused(world: Any) -> None:
    peer = world.peer()
    peer.say(m.Decline("r", "prefix hit"))
    peer.reserve()
    assert peer.last().code == "declined"


def test_decline_of_a_live_reservation_changes_nothing(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    peer.say(m.Decline("r", "prefix hit"))
    assert world.kinds(grant) == ["offered"]
    assert world.audited("illegal")


def test_remembered_declines_are_bounded(make_world: Any) -> None:
    world = make_world(max_declines=2)
    peer = world.peer()
    for name in "abc":
        peer.say(m.Decline(name, "prefix hit"))
    assert [world.kinds(world.accept(name)) for name in "abc"] == [[], ["failed", "released"], ["failed", "released"]]


def test_leg_with_nothing_to_write_is_offered_committed_and_done_like_any_other(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve(slices=b"", lanes=(0, 1), leg=1, n_legs=2, carries_aux=False)
    world.commit(grant)
    assert not world.core.released(grant), "its records are still under way"
    world.drain(peer, reserve, (0, 0))
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_handoff_of_zero_pages_goes_the_whole_way(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve(groups=(world.pages_of(0, 0),))
    world.commit(grant, 0)
    world.drain(peer, reserve, (0,))
    peer.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_reader_of_the_tail_only_is_admitted_and_says_where_it_begins(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    assert world.core.first_token(grant) is None
    peer.reserve(groups=(world.pages_of(32, 8),))
    assert world.core.first_token(grant) == 32


def test_attach_that_the_sender_refuses_is_rejected_and_needs_no_drain(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    del world.reading[peer.session, reserve.reservation]
    world.run(world.core.leg_failed(world.now, peer.session, reserve.reservation, "attach: busy: no slot"))
    assert peer.last().code == "busy"
    assert world.kinds(grant) == ["offered", "failed", "released"]
    peer.abort(reserve)
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (0,))


def test_digests_are_answered_within_the_leg_after_commit(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()  # 3 pages of 2 regions: 6 chunks
    peer.say(m.FetchDigests(reserve.reservation, 0, 0, 6))
    assert not world.fetched, "not before commit"
    world.commit(grant)
    world.drain(peer, reserve)
    for first, count in [(0, 7), (6, 1), (0, 0), (-1, 2)]:
        peer.say(m.FetchDigests(reserve.reservation, 0, first, count))
    assert not world.fetched
    peer.say(m.FetchDigests(reserve.reservation, 0, 4, 2))
    assert [(fetch.first, fetch.count) for fetch in world.fetched] == [(4, 2)]
    world.run(world.core.digests(world.now, peer.session, reserve.reservation, 0, 4, b"d" * 16))
    assert peer.last() == m.Digests(reserve.reservation, 0, 4, b"d" * 16)


def test_closed_core_accepts_nothing(world: Any) -> None:
    world.run(world.core.close(world.now, "bye"))
    with pytest.raises(Closed):
        world.accept()


def test_live_grants_are_bounded(make_world: Any) -> None:
    world = make_world(max_grants=1)
    world.accept("a")
    with pytest.raises(CapacityError):
        world.accept("b")
