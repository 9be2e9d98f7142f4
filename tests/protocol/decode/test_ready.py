"""The good path: what was reserved, written whole and committed becomes READY, once."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import NotReady
from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig


def test_a_whole_handoff_becomes_ready_with_its_tokens_and_aux(world: Any) -> None:
    reservation = world.reserve([5, 6, 7])
    assert world.core.state(reservation) == "offered"
    with pytest.raises(NotReady):
        world.core.ready(reservation)

    world.hand_over(reservation)

    n_tokens, aux, stats = world.core.ready(reservation)
    assert (n_tokens, aux) == (48, b"aux of " + str(reservation).encode())
    assert (stats["lane"], stats["verify"], stats["chunks"], stats["pages"]) == ("tcp", "digest", 6, 3)
    assert world.page_states(5, 6, 7) == {PageState.READY}
    assert world.events(reservation) == ["ready"]
    assert world.sent(msg.Done) == [msg.Done(reservation, 0)]


def test_ready_excludes_released_and_a_later_abort_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5, 6, 7])
    world.hand_over(reservation)
    world.abort(reservation)
    world.advance(120.0)
    assert world.events(reservation) == ["ready"]
    assert world.page_states(5, 6, 7) == {PageState.READY}


def test_the_leg_is_opened_before_its_reserve_is_sent(world: Any) -> None:
    reservation = world.reserve()
    opened = next(i for i, a in enumerate(world.log) if isinstance(a, act.OpenLeg))
    sent = next(i for i, a in enumerate(world.log) if isinstance(a, act.Send) and isinstance(a.message, msg.Reserve))
    assert opened < sent
    assert world.log[opened].spec.reservation == reservation


def test_the_tail_of_the_last_page_is_zeroed_before_ready_is_told(world: Any) -> None:
    reservation = world.reserve([5, 6, 7], tokens=40)
    world.hand_over(reservation)
    kinds = [type(a) for a in world.log if isinstance(a, (act.ZeroTail, act.ForgetLeg, act.Notify))]
    assert kinds == [act.ZeroTail, act.ForgetLeg, act.Notify]
    (zero,) = world.all(act.ZeroTail)
    assert (zero.n_tokens, [group.group for group in zero.groups]) == (40, [0])


def test_nothing_is_ready_while_the_tail_is_not_zeroed(world: Any) -> None:
    reservation = world.reserve([5, 6, 7], tokens=40)
    world.held.add(act.ZeroTail)
    world.hand_over(reservation)
    assert world.page_states(5, 6, 7) == {PageState.RESERVED}
    assert world.events(reservation) == []
    world.carry_out(world.core.tail_zeroed(world.now, reservation))
    assert world.page_states(5, 6, 7) == {PageState.READY}
    assert world.events(reservation) == ["ready"]


def test_a_tail_that_was_zeroed_after_an_abort_makes_nothing_ready(world: Any) -> None:
    reservation = world.reserve([5, 6, 7], tokens=40)
    world.held.add(act.ZeroTail)
    world.hand_over(reservation)
    world.abort(reservation)
    world.carry_out(world.core.tail_zeroed(world.now, reservation))
    assert "ready" not in world.events(reservation)


def test_a_reader_of_the_tail_only_gets_its_pages(world: Any) -> None:
    reservation = world.reserve([9], logical=[2], tokens=40, first_token=32)
    (reserve,) = world.sent(msg.Reserve)
    assert (reserve.groups[0].first_token, reserve.groups[0].n_tokens) == (32, 8)
    world.hand_over(reservation)
    assert world.events(reservation) == ["ready"]


def test_a_handoff_of_zero_pages_needs_a_record_on_every_lane(world: Any) -> None:
    reservation = world.reserve([], tokens=32)
    world.commit(reservation, lanes=[0])
    assert world.events(reservation) == []
    world.commit(reservation, lanes=[1])
    assert world.events(reservation) == ["ready"]


def test_two_legs_write_half_each_and_only_leg_zero_carries_aux(world: Any) -> None:
    reservation = world.reserve([5, 6], prefill=["p0:1", "p1:1"])
    assert [(r.leg, r.n_legs, r.carries_aux) for r in world.sent(msg.Reserve)] == [(0, 2, True), (1, 2, False)]
    world.hand_over(reservation, 0)
    assert world.events(reservation) == []
    world.hand_over(reservation, 1)
    assert world.events(reservation) == ["ready"]
    assert sorted(done.leg for done in world.sent(msg.Done)) == [0, 1]


def test_a_leg_with_nothing_to_write_is_offered_and_must_commit_too(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1", "p2:1"])
    assert world.wire(reservation, 2).layout.n_chunks == 0
    world.hand_over(reservation, 0)
    world.hand_over(reservation, 1)
    assert world.events(reservation) == []
    world.commit(reservation, 2)
    assert world.events(reservation) == ["ready"]


def test_coverage_mode_needs_no_folds_and_says_so(make_world: Any) -> None:
    world = make_world(DecodeConfig(verify="coverage"))
    reservation = world.reserve([5])
    assert world.sent(msg.Reserve)[0].verify == "coverage"
    world.hand_over(reservation)
    assert world.core.ready(reservation).stats["verify"] == "coverage"


def test_pages_that_were_ready_may_be_reserved_again_under_the_same_request_id(world: Any) -> None:
    first = world.reserve([5])
    world.hand_over(first)
    second = world.reserve([5])
    assert second != first
    world.hand_over(second)
    assert world.events(second) == ["ready"]


def test_a_session_is_dialled_once_and_used_again(world: Any) -> None:
    for number in range(3):
        world.hand_over(world.reserve([number], request_id=f"r{number}"))
    assert len(world.all(act.OpenSocket)) == 1
    numbers = [reserve.number for reserve in world.sent(msg.Reserve)]
    assert numbers == sorted(set(numbers))


def test_sequence_numbers_rise_without_a_repeat(world: Any) -> None:
    for number in range(3):
        world.hand_over(world.reserve([number], request_id=f"r{number}"))
    sequences = [action.sequence for action in world.all(act.Send)]
    assert sequences == list(range(len(sequences)))


def test_an_outcome_taken_long_ago_does_not_keep_its_aux(world: Any) -> None:
    taken = []
    for number in range(80):
        reservation = world.reserve([0], request_id=f"r{number}")
        world.hand_over(reservation)
        world.core.ready(reservation)
        taken.append(reservation)
    assert world.core.ready(taken[-1]).aux
    with pytest.raises(KeyError):
        world.core.ready(taken[0])
    assert world.core.state(taken[0]) == "ready"
