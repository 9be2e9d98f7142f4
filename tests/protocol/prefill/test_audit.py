"""S8: nothing is silent. Each refusal, failure and end is a line with the reservation, the leg and the numbers.

``World`` also checks that every line of every test is JSON-serialisable.
"""

from __future__ import annotations

from typing import Any


def test_refused_reservation_is_audited_with_its_numbers(world: Any) -> None:
    peer = world.stranger("big", world.geometry(pages=20)).dial()
    reserve = peer.reserve(groups=(world.pages_of(0, 150),))
    (line,) = world.audited("refused")
    assert (line.session, line.reservation, line.leg) == (peer.session, reserve.reservation, 0)
    assert (line.fields["code"], line.fields["needed"], line.fields["available"]) == ("capacity", 150, 128)


def test_refused_hello_is_audited_even_where_it_is_not_answered(world: Any) -> None:
    stranger = world.stranger()
    for _ in range(3):
        stranger.say(stranger.hello(version=9))
    assert [line.fields["code"] for line in world.audited("refused")] == ["version"] * 3
    assert len(stranger.sends()) == 1


def test_failed_leg_is_audited_with_lane_generation_and_cause(world: Any) -> None:
    peer = world.peer()
    world.accept()
    reserve = peer.reserve()
    world.break_lane(peer, reserve, "lane: connection reset")
    (line,) = world.audited("leg_failed")
    assert (line.session, line.reservation, line.leg) == (peer.session, reserve.reservation, 0)
    assert line.fields["cause"] == "lane"
    assert line.fields["generation"] == 1


def test_end_of_a_grant_is_audited_with_its_error_and_its_release(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.abort(grant)
    (line,) = world.audited("failed")
    assert (line.fields["grant"], line.fields["error"]) == (grant, "Aborted")
    assert not world.audited("released")
    world.drain(peer, reserve)
    assert world.audited("released")[0].fields["state"] == "ended"


def test_sessions_and_their_lanes_are_audited_from_open_to_closed(world: Any) -> None:
    peer = world.peer()
    world.run(world.core.lane_down(world.now, peer.session, 1, 0, "eof"))
    world.pass_time(0.5, peer)
    world.pass_time(world.config.heartbeat_timeout_s + 0.5)
    events = [line.event for line in world.audits if line.session == peer.session]
    assert events == ["session_opened", "lane_down", "session_closed"]
    assert world.audited("session_closed")[0].fields["reason"] == "decode fell silent"
