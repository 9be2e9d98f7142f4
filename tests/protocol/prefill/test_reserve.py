"""RESERVE is refused before anything is kept or attached, and a late one never revives anything (S4, S5, S7)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.errors import DuplicateRequest, Rejected
from kvxfer.protocol import messages as m


def rejected(peer: Any, reserve: m.Reserve) -> m.Rejected:
    peer.say(reserve)
    word = peer.last()
    assert isinstance(word, m.Rejected), word
    assert word.reservation == reserve.reservation
    assert set(word.posted) <= {0}
    assert len(peer.world.attached) == 0
    return word


def test_reserve_after_accept_attaches_before_it_is_granted(world: Any) -> None:
    peer = world.peer()
    grant = world.accept()
    reserve = peer.reserve()
    assert world.attached[0].grant == grant
    assert peer.last() == m.Granted(reserve.reservation, 0)
    assert world.kinds(grant) == ["offered"]


def test_reserve_before_accept_is_kept_and_attached_by_it(world: Any) -> None:
    peer = world.peer()
    reserve = peer.reserve()
    assert peer.last() == m.Granted(reserve.reservation, 0)
    assert not world.attached
    grant = world.accept(readers=None)
    assert world.attached[0].reserve == reserve
    assert world.core.readers(grant) == 1
    assert world.kinds(grant) == ["offered"]


@pytest.mark.parametrize("accepted", [False, True])
def test_verbatim_repeat_is_granted_again_and_attached_once(world: Any, accepted: bool) -> None:
    peer = world.peer()
    if accepted:
        world.accept()
    reserve = peer.reserve()
    peer.say(reserve)
    assert peer.heard(m.Granted) == [m.Granted(reserve.reservation, 0)] * 2
    assert len(world.attached) == accepted


def test_repeat_with_other_contents_changes_nothing(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    before = len(world.sent)
    peer.say(dataclasses.replace(reserve, groups=(world.pages_of(0, 16),)))
    assert len(world.sent) == before
    assert world.audited("illegal")
    assert len(world.attached) == 1


def test_reserve_that_arrives_after_its_abort_is_never_admitted(world: Any) -> None:
    peer = world.peer()
    late = peer.reservation()
    peer.abort(late)
    assert peer.last() == m.Quiesced(late.reservation, 0, ())
    world.accept()
    assert rejected(peer, late).code == "stale_number"


def test_reserve_below_a_later_reservation_is_never_admitted(world: Any) -> None:
    peer = world.peer()
    late = peer.reservation("late")
    peer.reserve("r")
    world.accept("late")
    assert rejected(peer, late).code == "stale_number"


def test_reserve_below_an_abort_of_a_later_number_is_never_admitted(world: Any) -> None:
    peer = world.peer()
    late = peer.reservation("late")
    peer.abort(peer.reservation("other"))
    world.accept("late")
    assert rejected(peer, late).code == "stale_number"


def test_reserve_repeated_after_its_leg_ended_is_not_admitted_again(world: Any) -> None:
    world.drains_at_once = True
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    peer.abort(reserve)
    world.accept()
    peer.say(reserve)
    word = peer.last()
    assert isinstance(word, m.Rejected)
    assert (word.code, word.posted) == ("stale_number", (6,))
    assert len(world.attached) == 1


def test_reserve_of_the_former_epoch_is_not_admitted_in_the_next(world: Any) -> None:
    peer = world.peer()
    old_epoch, late = peer.epoch, peer.reservation()
    peer.say(m.Bye("restart"))
    again = world.peer("decode-1")
    again.say(late, epoch=old_epoch)
    world.accept()
    assert not world.attached
    assert again.heard(m.Refuse)[-1].code == "unknown_epoch"


def test_number_stays_burnt_when_the_reservation_was_rejected(world: Any) -> None:
    peer = world.peer()
    refused = peer.reservation(generation=9)
    assert rejected(peer, refused).code == "generation"
    world.accept()
    peer.say(dataclasses.replace(refused, reservation=99, generation=1))
    assert peer.heard(m.Rejected)[-1].code == "stale_number"
    assert not world.attached


def test_rejection_is_repeated_word_for_word(world: Any) -> None:
    peer = world.peer()
    refused = peer.reservation(verify="coverage")
    first = rejected(peer, refused)
    assert rejected(peer, refused) == first
    assert first.code == "verify"


@pytest.mark.parametrize("lanes", [(), (0, 0), (2,), (0, 5)])
def test_lanes_that_the_session_does_not_have_are_refused(world: Any, lanes: tuple[int, ...]) -> None:
    peer = world.peer()
    assert rejected(peer, peer.reservation(lanes=lanes)).code == "geometry"


def test_lane_that_is_down_is_refused(world: Any) -> None:
    peer = world.peer()
    world.run(world.core.lane_up(world.now, peer.session, 1, 0))
    world.run(world.core.lane_down(world.now, peer.session, 1, 0, "eof"))
    assert rejected(peer, peer.reservation()).code == "generation"


@pytest.mark.parametrize(
    "changes",
    [
        {"leg": 1},
        {"n_legs": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": -1.0},
        {"slices": b"short"},
        {"slices": b"\xff" * 64},
        {"groups": (m.ReserveGroup(9, 0, 16, bytes(8), bytes(8)),)},
        {"groups": (m.ReserveGroup(0, 0, 16, bytes(8), bytes(16)),)},
    ],
)
def test_malformed_legs_are_refused(world: Any, changes: dict[str, Any]) -> None:
    peer = world.peer()
    assert rejected(peer, peer.reservation(**changes)).code == "geometry"


def test_page_outside_decodes_pool_is_refused(world: Any) -> None:
    peer = world.peer()
    outside = m.ReserveGroup(0, 0, 16, world.packed([0]), world.packed([8]))
    assert rejected(peer, peer.reservation(groups=(outside,))).code == "geometry"


def test_slice_outside_prefills_page_is_refused(world: Any) -> None:
    peer = world.peer()
    raw = bytearray(world.whole_pages())
    raw[32:40] = (1).to_bytes(8, "little")  # src_offset
    assert rejected(peer, peer.reservation(slices=bytes(raw))).code == "geometry"


def test_more_tokens_than_prefill_holds_are_refused_with_both_numbers(world: Any) -> None:
    peer = world.stranger("big", world.geometry(pages=20)).dial()
    word = rejected(peer, peer.reservation(groups=(world.pages_of(0, 150),)))
    assert word.code == "capacity"
    assert (word.details["needed"], word.details["available"]) == (150, 128)


def test_more_pages_than_prefill_has_are_refused_with_both_numbers(world: Any) -> None:
    peer = world.stranger("big", world.geometry(pages=20)).dial()
    too_many = m.ReserveGroup(0, 0, 128, world.packed(range(9)), world.packed(range(9)))
    word = rejected(peer, peer.reservation(groups=(too_many,)))
    assert word.code == "capacity"
    assert (word.details["needed"], word.details["available"]) == (9, 8)


def test_same_request_and_rank_twice_is_refused_and_the_first_goes_on(world: Any) -> None:
    first, second = world.peer("one"), world.peer("two")
    grant = world.accept()
    reserve = first.reserve()
    second.reserve()
    assert second.last().code == "duplicate"
    world.commit(grant)
    world.drain(first, reserve)
    first.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_same_request_and_rank_twice_before_accept_is_refused(world: Any) -> None:
    first, second = world.peer("one"), world.peer("two")
    first.reserve()
    assert rejected(second, second.reservation()).code == "duplicate"


@pytest.mark.parametrize("rank, readers", [(1, 1), (0, 0), (0, 5000)])
def test_rank_must_lie_below_a_bounded_number_of_readers(world: Any, rank: int, readers: int) -> None:
    peer = world.peer()
    assert rejected(peer, peer.reservation(rank=rank, readers=readers)).code == "readers"


def test_readers_that_disagree_about_their_number_are_refused(world: Any) -> None:
    peer = world.peer()
    peer.reserve(rank=0, readers=2)
    assert rejected(peer, peer.reservation(rank=1, readers=3)).code == "readers"
    other = world.peer("other")
    world.accept("s", readers=2)
    assert rejected(other, other.reservation("s", readers=1)).code == "readers"


def test_offer_with_another_number_of_readers_than_accepted_is_refused(world: Any) -> None:
    peer = world.peer()
    peer.reserve(readers=1)
    world.accept(readers=2)
    assert peer.last().code == "readers"
    assert not world.attached


def test_rejected_request_is_refused_before_and_after_it_was_reserved(world: Any) -> None:
    early, late = world.peer("early"), world.peer("late")
    early.reserve()
    world.run(world.core.reject(world.now, "r", "too_long", "prompt too long", 10.0))
    assert (early.last().code, early.last().details) == ("rejected", {"reason": "too_long"})
    assert rejected(late, late.reservation()).message == "prompt too long"
    with pytest.raises(Rejected):
        world.accept()


def test_rejection_is_forgotten_after_its_time(world: Any) -> None:
    peer = world.peer()
    world.run(world.core.reject(world.now, "r", "no", "no", 1.0))
    world.now += 1.5
    grant = world.accept()
    peer.reserve()
    assert world.kinds(grant) == ["offered"]


def test_remembered_rejections_are_bounded(make_world: Any) -> None:
    world = make_world(max_rejects=2)
    for name in "abc":
        world.run(world.core.reject(world.now, name, "no", "no", 100.0))
    assert world.accept("a")
    with pytest.raises(Rejected):
        world.accept("c")


def test_offers_are_bounded_in_number(make_world: Any) -> None:
    world = make_world(max_offers=1)
    peer = world.peer()
    peer.reserve("a")
    assert rejected(peer, peer.reservation("b")).code == "busy"


def test_offers_are_bounded_in_bytes(make_world: Any) -> None:
    world = make_world(max_offer_bytes=100)
    peer = world.peer()
    assert rejected(peer, peer.reservation("a")).code == "busy"


def test_offer_frees_its_room_when_it_is_attached_or_aborted(make_world: Any) -> None:
    world = make_world(max_offers=1)
    peer = world.peer()
    peer.reserve("a")
    world.accept("a")
    reserve = peer.reserve("b")
    peer.abort(reserve)
    assert peer.last() == m.Quiesced(reserve.reservation, 0, (0,))
    peer.reserve("c")
    assert isinstance(peer.last(), m.Granted)


def test_live_reservations_of_a_session_are_bounded(make_world: Any) -> None:
    world = make_world(max_legs=1)
    peer = world.peer()
    peer.reserve("a")
    assert rejected(peer, peer.reservation("b")).code == "busy"


def test_offer_that_nobody_accepts_is_rejected_after_its_deadline(make_world: Any) -> None:
    world = make_world(offer_grace_s=1.0)
    peer = world.peer()
    peer.reserve(deadline_s=2.0)
    world.pass_time(2.5, peer)
    assert not peer.heard(m.Rejected)
    world.pass_time(1.0, peer)
    assert peer.heard(m.Rejected)[-1].code == "timeout"
    world.accept()
    assert not world.attached


def test_second_accept_of_a_live_request_raises_and_leaves_the_first_alone(world: Any) -> None:
    peer = world.peer()
    grant = world.accept()
    with pytest.raises(DuplicateRequest):
        world.accept()
    peer.reserve()
    assert world.kinds(grant) == ["offered"]


def test_request_id_is_free_again_after_release(world: Any) -> None:
    first = world.accept()
    world.abort(first)
    assert world.kinds(first) == ["failed", "released"]
    assert world.accept() != first
