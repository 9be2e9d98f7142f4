"""Sessions open only between pools that fit, and only their own frames count (S4, S7)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as m


def refusal(world: Any, **hello: Any) -> m.Refuse:
    stranger = world.stranger()
    stranger.say(stranger.hello(**hello))
    assert not stranger.heard(m.Welcome)
    assert not world.generations, "a refused decode gets no lanes"
    return stranger.heard(m.Refuse)[-1]


def test_hello_is_answered_with_an_epoch_of_both_nonces_and_lanes_are_served_first(world: Any) -> None:
    stranger = world.stranger()
    actions = stranger.say(stranger.hello())
    lanes = next(action for action in actions if isinstance(action, act.OpenLanes))
    welcome = stranger.heard(m.Welcome)[0]
    assert actions.index(lanes) < next(i for i, action in enumerate(actions) if isinstance(action, act.Send))
    assert lanes.epoch == stranger.nonce + welcome.nonce
    assert lanes.secret == welcome.secret
    assert [offer.kind for offer in welcome.offers] == ["local", "tcp"]


def test_repeated_hello_gets_the_same_welcome_and_no_second_session(world: Any) -> None:
    peer = world.stranger()
    peer.say(peer.hello())
    peer.say(peer.hello())
    first, second = peer.sends()
    assert first.message == second.message
    assert first.session == second.session
    assert first.epoch == second.epoch
    assert second.sequence > first.sequence
    assert len(world.generations) == 1


def test_same_nonce_from_another_route_is_another_epoch(world: Any) -> None:
    first = world.peer()
    copy = world.stranger("copy")
    copy.nonce = first.nonce
    copy.epoch = first.nonce + bytes(8)
    copy.dial()
    assert copy.epoch != first.epoch
    assert copy.session != first.session


def test_changed_hello_on_a_known_route_changes_nothing(world: Any) -> None:
    peer = world.peer()
    before = len(peer.sends())
    peer.say(dataclasses.replace(peer.hello(), max_context_tokens=5))
    assert len(peer.sends()) == before
    assert world.audited("dropped")


def test_hello_with_a_foreign_epoch_is_dropped(world: Any) -> None:
    stranger = world.stranger()
    stranger.say(stranger.hello(), epoch=b"x" * 16)
    assert not world.sent
    assert world.audited("dropped")


def test_other_version_is_refused_with_both_numbers(world: Any) -> None:
    refuse = refusal(world, version=99)
    assert refuse.code == "version"
    assert refuse.details == {"ours": m.PROTOCOL_VERSION, "theirs": 99}


def test_other_verify_mode_is_refused(world: Any) -> None:
    assert refusal(world, verify="coverage").code == "verify"


def test_incompatible_pool_is_refused_with_the_field(world: Any) -> None:
    refuse = refusal(world, pool=world.geometry(name="other"))
    assert refuse.code == "incompatible_pool"
    assert refuse.details["field"] == "groups"
    assert {"kv", "other"} == {refuse.details["ours"], refuse.details["theirs"]}


def test_prefill_pool_below_one_full_context_is_refused_with_both_numbers(world: Any) -> None:
    refuse = refusal(world, max_context_tokens=129)
    assert refuse.code == "capacity"
    assert refuse.details == {"needed": 129, "available": 128}


def test_decode_pool_below_one_full_context_is_refused_with_both_numbers(make_world: Any) -> None:
    world = make_world(max_context_tokens=100)
    refuse = refusal(world, pool=world.geometry(pages=4))
    assert refuse.details == {"needed": 100, "available": 64}


def test_smaller_capacity_is_taken_only_where_it_was_accepted_explicitly(make_world: Any) -> None:
    assert make_world(accept_smaller_capacity=True).peer(max_context_tokens=1000).session > 0


def test_another_incarnation_than_expected_is_refused(world: Any) -> None:
    assert refusal(world, incarnation=b"life-two").code == "incarnation"
    assert world.peer("next", incarnation=b"life-one").session > 0


def test_no_lane_in_common_is_refused(world: Any) -> None:
    assert refusal(world, lane_kinds=("verbs",)).code == "lanes"


def test_only_lanes_that_decode_accepts_are_offered(world: Any) -> None:
    peer = world.peer(lane_kinds=("tcp",))
    assert [offer.kind for offer in peer.heard(m.Welcome)[0].offers] == ["tcp"]


def test_sessions_are_bounded(make_world: Any) -> None:
    world = make_world(max_sessions=1)
    world.peer("first")
    stranger = world.stranger()
    stranger.say(stranger.hello())
    assert stranger.heard(m.Refuse)[0].code == "busy"


def test_closed_prefill_refuses_new_sessions(world: Any) -> None:
    world.run(world.core.close(world.now, "bye"))
    assert refusal(world).code == "closed"


def test_unknown_epoch_is_told_so_at_that_route_and_without_a_session(world: Any) -> None:
    stranger = world.stranger()
    stranger.say(m.Ping(1), epoch=b"e" * 16)
    (send,) = stranger.sends()
    assert send.session == -1
    assert send.epoch == b"e" * 16
    assert isinstance(send.message, m.Refuse)
    assert send.message.code == "unknown_epoch"


def test_strangers_are_answered_at_a_bounded_rate(world: Any) -> None:
    stranger = world.stranger()
    for _ in range(50):
        stranger.say(m.Ping(1), epoch=b"e" * 16)
    assert len(stranger.sends()) == 1
    world.now += 1.0
    stranger.say(m.Ping(1), epoch=b"e" * 16)
    assert len(stranger.sends()) == 2


@pytest.mark.parametrize("forged", [{"sequence": 0}, {"route": b"other"}])
def test_replayed_or_rerouted_frame_changes_nothing(world: Any, forged: dict[str, Any]) -> None:
    peer = world.peer()
    reserve = peer.reservation()
    before = len(world.sent)
    peer.say(reserve, **forged)
    assert len(world.sent) == before
    assert world.audited("dropped")
    world.accept()
    assert not world.attached, "the forged RESERVE left no offer"


def test_same_frame_twice_counts_once(world: Any) -> None:
    peer = world.peer()
    reserve = peer.reserve()
    before = len(world.sent)
    peer.say(reserve, sequence=peer.sequence - 1)
    assert len(world.sent) == before


def test_messages_that_prefill_never_gets_are_audited_and_change_nothing(world: Any) -> None:
    peer = world.peer()
    before = len(world.sent)
    peer.say(m.Granted(1, 0))
    peer.say(m.Lanes(7, bytes(32)))
    peer.say(m.Done(12345, 0))
    assert len(world.sent) == before
    assert len(world.audited("illegal")) == 3


def test_ping_is_answered_with_its_token(world: Any) -> None:
    peer = world.peer()
    peer.say(m.Ping(77))
    assert peer.last() == m.Pong(77)
    assert world.core.route(peer.session) == peer.route


def test_sequence_numbers_rise_in_each_session(world: Any) -> None:
    peers = [world.peer("one"), world.peer("two")]
    for _ in range(3):
        for peer in peers:
            peer.ping()
    for peer in peers:
        assert [send.sequence for send in peer.sends()] == [0, 1, 2, 3]
