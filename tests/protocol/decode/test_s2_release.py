"""S2: pages go back only when every leg that was offered is quiesced or fenced; never because time has passed."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import Aborted, DeadlineExceeded, LaneFailed, OwnershipError, PeerLost, SourceChanged
from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig

DAY_S = 86_400.0


def assert_quarantined(world: Any, reservation: int, *pages: int) -> None:
    assert world.events(reservation) == ["failed"]
    assert world.page_states(*pages) == {PageState.QUARANTINED}
    with pytest.raises(OwnershipError):
        world.reserve(list(pages), request_id="another")


def assert_released(world: Any, reservation: int, *pages: int) -> None:
    assert world.events(reservation) == ["failed", "released"]
    assert world.page_states(*pages) == {PageState.FREE}


# ---- lanes on which one leg can be revoked ---------------------------------------------------------------------------


def test_an_abort_before_anything_was_offered_releases_at_once_and_tells_nobody(world: Any) -> None:
    world.silent.add("p0:1")
    reservation = world.reserve([5, 6])
    world.abort(reservation)
    assert_released(world, reservation, 5, 6)
    assert world.sent(msg.Abort) == [] and world.all(act.Revoke) == []


@pytest.mark.parametrize("written", [[], [0, 1, 2], range(4)])
def test_an_abort_releases_when_the_revoke_has_returned_and_not_before(world: Any, written: Any) -> None:
    world.held.add(act.Revoke)
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=written)
    world.abort(reservation)
    assert isinstance(world.error(reservation), Aborted)
    assert_quarantined(world, reservation, 5, 6)
    world.revoked(reservation)
    assert_released(world, reservation, 5, 6)


def test_an_abort_after_the_last_record_still_waits_for_its_revoke(world: Any) -> None:
    world.held |= {act.Verify, act.Revoke}
    reservation = world.reserve([5, 6])
    world.hand_over(reservation)
    world.abort(reservation)
    assert_quarantined(world, reservation, 5, 6)
    world.revoked(reservation)
    assert_released(world, reservation, 5, 6)


def test_a_report_that_comes_after_the_abort_makes_nothing_ready(world: Any) -> None:
    world.held |= {act.Verify, act.Revoke}
    reservation = world.reserve([5, 6])
    world.hand_over(reservation)
    (verify,) = world.all(act.Verify)
    reports = world.reports(verify)
    world.abort(reservation)
    world.carry_out(world.core.verified(world.now, reservation, reports))
    assert_quarantined(world, reservation, 5, 6)
    world.revoked(reservation)
    world.carry_out(world.core.verified(world.now, reservation, reports))
    assert_released(world, reservation, 5, 6)


def test_granted_means_offered_so_an_unanswered_reserve_is_revoked_too(world: Any) -> None:
    world.held.add(act.Revoke)
    world.mute.add(msg.Reserve)
    reservation = world.reserve([5])
    world.abort(reservation)
    assert len(world.all(act.Revoke)) == 1
    assert_quarantined(world, reservation, 5)


def test_the_deadline_fails_the_handoff_and_releases_nothing(make_world: Any) -> None:
    world = make_world(revocable=False)
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5], timeout_s=2.0)
    world.advance(2.0)
    assert isinstance(world.error(reservation), DeadlineExceeded)
    world.advance(DAY_S)
    assert_quarantined(world, reservation, 5)


# ---- lanes without: quiesce or fence ---------------------------------------------------------------------------------


@pytest.fixture
def verbs_like(make_world: Any) -> Any:
    """A world whose lanes cannot take away one leg's means to write."""
    return make_world(revocable=False)


def test_nothing_is_released_on_time_alone(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=[0])
    world.abort(reservation)
    world.advance(DAY_S)
    assert_quarantined(world, reservation, 5, 6)
    assert world.core.outstanding() == {reservation: 2}
    world.fenced(world.session())
    assert_released(world, reservation, 5, 6)


def test_quiesced_counts_only_with_a_record_on_every_lane_that_was_written(verbs_like: Any) -> None:
    world = verbs_like
    reservation = world.reserve([5, 6])
    world.write(reservation, lane=0)
    world.abort(reservation)  # QUIESCED says: four chunks on lane 0
    assert_quarantined(world, reservation, 5, 6)
    world.commit(reservation, lanes=[0])
    assert_released(world, reservation, 5, 6)


def test_quiesced_without_a_single_write_releases(verbs_like: Any) -> None:
    world = verbs_like
    reservation = world.reserve([5, 6])
    world.abort(reservation)
    assert_released(world, reservation, 5, 6)


def test_records_on_all_lanes_are_the_quiesce_of_a_refused_handoff(verbs_like: Any) -> None:
    world = verbs_like
    world.mute.add(msg.Abort)
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=[0])
    world.commit(reservation)
    assert_released(world, reservation, 5, 6)


def test_a_leg_whose_frames_were_refused_is_not_believed_when_it_says_quiesced(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    reservation = world.reserve([5])
    spec = world.wire(reservation).spec
    world.carry_out(world.core.violation(world.now, spec.session, 1, 0, reservation, 0, "page outside the leg"))
    assert_quarantined(world, reservation, 5)


def test_an_error_completion_never_counts_as_drained(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    reservation = world.reserve([5])
    world.say(world.session(), msg.Failed(reservation, 0, 0, 1, "lane", "error completion"))
    assert isinstance(world.error(reservation), LaneFailed)
    assert_quarantined(world, reservation, 5)
    assert len(world.all(act.Fence)) == 1
    world.fenced(world.session())
    assert_released(world, reservation, 5)


def test_a_rejection_is_no_proof_that_nothing_was_written(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5])
    world.say(world.session(), msg.Rejected(reservation, 0, "stale_number", "seen before"))
    assert_quarantined(world, reservation, 5)


def test_a_fence_is_made_after_the_quiesce_timeout_when_pages_run_low(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5])
    world.abort(reservation)
    world.core.pages_low = True
    world.advance(4.9)
    assert world.all(act.Fence) == []
    world.advance(0.7)
    assert len(world.all(act.Fence)) == 1
    assert_quarantined(world, reservation, 5)


def test_a_quarantine_of_a_large_part_of_the_pool_counts_as_low(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    world.abort(world.reserve(range(32)))
    world.advance(6.0)
    assert len(world.all(act.Fence)) == 1


def test_neighbours_are_spared_until_the_hard_limit(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    world.abort(world.reserve([5]))
    world.advance(29.0)
    assert world.all(act.Fence) == []
    world.advance(2.0)
    assert len(world.all(act.Fence)) == 1


def test_one_fence_serves_all_waiting_aborts_and_the_rest_of_the_generation(verbs_like: Any) -> None:
    world = verbs_like
    world.held |= {act.Fence, act.Verify}
    world.mute.add(msg.Abort)
    aborted = [world.reserve([page], request_id=f"a{page}") for page in (1, 2)]
    world.advance(20.0)
    whole = world.reserve([3], request_id="whole", timeout_s=300.0)
    partial = world.reserve([4], request_id="partial", timeout_s=300.0)
    world.hand_over(whole)
    world.write(partial)
    world.commit(partial, lanes=[0])
    for reservation in aborted:
        world.abort(reservation)
    world.advance(40.0)
    (fence,) = world.all(act.Fence)
    assert isinstance(world.error(partial), LaneFailed) and world.error(partial).retryable
    waiting = world.reserve([9], request_id="later", timeout_s=300.0)
    assert world.core.state(waiting) == "waiting"

    world.fenced(world.session())
    for reservation, page in zip([*aborted, partial], (1, 2, 4), strict=True):
        assert_released(world, reservation, page)
    (verify,) = world.all(act.Verify)
    world.carry_out(world.core.verified(world.now, whole, world.reports(verify)))
    assert world.events(whole) == ["ready"]
    assert world.core.state(waiting) == "offered"
    assert world.wire(waiting).spec.generation == fence.generation + 1


def test_the_fence_of_another_generation_releases_nothing(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5])
    world.write(reservation)
    world.abort(reservation)
    world.carry_out(world.core.fenced(world.now, world.session(), 1))  # nobody asked for it yet
    assert_quarantined(world, reservation, 5)
    world.advance(31.0)
    world.fenced(world.session(), generation=0)
    assert_quarantined(world, reservation, 5)


# ---- several legs ----------------------------------------------------------------------------------------------------


def test_an_abort_reaches_every_leg(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.abort(reservation)
    assert sorted(abort.leg for abort in world.sent(msg.Abort)) == [0, 1]
    assert sorted(revoke.leg for revoke in world.all(act.Revoke)) == [0, 1]


def test_one_leg_revoked_and_one_not_releases_nothing(world: Any) -> None:
    world.held.add(act.Revoke)
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.abort(reservation)
    world.revoked(reservation, 0)
    world.revoked(reservation, 0)
    assert_quarantined(world, reservation, 5)
    world.revoked(reservation, 1)
    assert_released(world, reservation, 5)


def test_one_leg_quiesced_and_one_paused_releases_only_after_the_fence(verbs_like: Any) -> None:
    world = verbs_like
    world.held.add(act.Fence)
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.write(reservation, 1)
    world.silent.add("p1:1")
    world.abort(reservation)
    world.advance(2.0)
    assert_quarantined(world, reservation, 5)
    world.advance(30.0)
    assert [fence.session for fence in world.all(act.Fence)] == [world.session("p1:1")]
    assert_quarantined(world, reservation, 5)
    world.fenced(world.session("p1:1"))
    assert_released(world, reservation, 5)


def test_a_failing_leg_ends_the_others(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.say(world.session("p1:1"), msg.Failed(reservation, 1, -1, 1, "source_changed", "page 3"))
    assert isinstance(world.error(reservation), SourceChanged)
    assert sorted(abort.leg for abort in world.sent(msg.Abort)) == [0, 1]
    assert_released(world, reservation, 5)


# ---- lanes and peers that go away ------------------------------------------------------------------------------------


def test_a_broken_lane_releases_when_its_generation_is_fenced(world: Any) -> None:
    world.held.add(act.Fence)
    reservation = world.reserve([5])
    world.write(reservation)
    world.commit(reservation, lanes=[1])
    world.lane_down(world.session())
    assert isinstance(world.error(reservation), LaneFailed)
    assert_quarantined(world, reservation, 5)
    world.fenced(world.session())
    assert_released(world, reservation, 5)


def test_a_peer_that_falls_silent_is_fenced_and_its_pages_return_by_the_fence(world: Any) -> None:
    world.held.add(act.Fence)
    reservation = world.reserve([5])
    world.silent.add("p0:1")
    world.advance(6.0)
    assert isinstance(world.error(reservation), PeerLost)
    assert_quarantined(world, reservation, 5)
    world.fenced(world.session())
    assert_released(world, reservation, 5)
    assert [close.session for close in world.all(act.CloseSession)] == [world.session()]


def test_an_abort_in_flight_when_the_peer_dies_is_ended_by_the_fence(world: Any) -> None:
    world.held |= {act.Fence, act.Revoke}
    reservation = world.reserve([5])
    world.abort(reservation)
    world.carry_out(world.core.socket_failed(world.now, world.session(), "connection reset"))
    assert_quarantined(world, reservation, 5)
    world.fenced(world.session())
    assert_released(world, reservation, 5)


def test_closing_ends_everything_by_fences_and_says_what_is_still_held(world: Any) -> None:
    world.held |= {act.Fence, act.Revoke}
    reservation = world.reserve([5, 6])
    world.carry_out(world.core.close(world.now, "shutting down"))
    assert not world.core.is_closed
    assert world.core.outstanding() == {reservation: 2}
    world.advance(DAY_S)
    assert not world.core.is_closed
    world.fenced(world.session())
    assert world.core.is_closed and world.core.outstanding() == {}
    assert_released(world, reservation, 5, 6)


def test_the_shortest_timeouts_release_no_sooner(make_world: Any) -> None:
    world = make_world(DecodeConfig(quiesce_timeout_s=0.001, fence_hard_limit_s=0.001), revocable=False)
    world.held.add(act.Fence)
    world.mute.add(msg.Abort)
    reservation = world.reserve([5])
    world.abort(reservation)
    world.advance(10.0)
    assert_quarantined(world, reservation, 5)


def test_a_revoke_nobody_asked_for_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.revoked(reservation)
    assert world.core.state(reservation) == "offered"
    assert world.audits("refused") == ["revoke_was_not_asked"]
    world.hand_over(reservation)
    assert world.events(reservation) == ["ready"]


def test_released_is_told_once_however_often_the_proofs_come(world: Any) -> None:
    world.held.add(act.Revoke)
    reservation = world.reserve([5])
    world.abort(reservation)
    world.abort(reservation)
    for _ in range(3):
        world.revoked(reservation)
        world.say(world.session(), msg.Quiesced(reservation, 0, (0, 0)))
    assert_released(world, reservation, 5)


def test_pages_that_were_reserved_again_are_not_released_by_the_old_reservations_proofs(world: Any) -> None:
    world.held.add(act.Revoke)
    old = world.reserve([5])
    world.abort(old)
    world.revoked(old)
    new = world.reserve([5], request_id="r2")
    world.revoked(old)
    world.say(world.session(), msg.Quiesced(old, 0, (0, 0)))
    assert world.page_states(5) == {PageState.RESERVED}
    assert world.ledger.owner_of(0, 5) == new
