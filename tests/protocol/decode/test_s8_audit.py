"""S8: every refusal, failure, fence and quarantine leaves a line that names the reservation, and JSON can hold it."""

from __future__ import annotations

import json
from typing import Any

from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg


def lines(world: Any, event: str) -> list[Any]:
    return [action for action in world.all(act.Audit) if action.event == event]


def test_a_failed_handoff_leaves_its_error_its_quarantine_and_its_release(world: Any) -> None:
    world.held.add(act.Revoke)
    reservation = world.reserve([5, 6], prefill=["p0:1", "p1:1"])
    world.abort(reservation)
    (failed,) = lines(world, "failed")
    (quarantine,) = lines(world, "quarantine")
    assert (failed.reservation, failed.fields["error"]) == (reservation, "Aborted")
    assert (quarantine.reservation, quarantine.fields["pages"]) == (reservation, 2)
    assert lines(world, "released") == []
    world.revoked(reservation, 0)
    world.revoked(reservation, 1)
    (released,) = lines(world, "released")
    assert released.fields["legs"] == {"0": "revoked", "1": "revoked"}


def test_what_was_never_offered_is_never_called_quarantined(world: Any) -> None:
    world.silent.add("p0:1")
    world.abort(world.reserve([5]))
    assert lines(world, "quarantine") == []


def test_a_fence_says_which_generation_and_why(world: Any) -> None:
    world.reserve([5])
    world.lane_down(world.session(), lane=1, cause="eof")
    (down,) = lines(world, "lane_down")
    (fence,) = lines(world, "fence")
    assert (down.fields["lane"], down.fields["cause"]) == (1, "eof")
    assert (fence.session, fence.fields["generation"], fence.fields["cause"]) == (world.session(), 1, "lane 1: eof")


def test_a_lost_session_and_a_rejection_are_told(world: Any) -> None:
    reservation = world.reserve([5])
    world.say(world.session(), msg.Rejected(reservation, 0, "busy", "later"))
    world.say(world.session(), msg.Bye("closing"))
    assert [line.fields["code"] for line in lines(world, "rejected")] == ["busy"]
    assert ["closing" in line.fields["cause"] for line in lines(world, "session_lost")] == [True]


def test_every_line_is_json(world: Any) -> None:
    reservation = world.reserve([5, 6, 7], tokens=48)
    world.write(reservation, chunks=[0, 1])
    world.commit(reservation, tokens=1)
    other = world.reserve([9], request_id="other")
    world.deliver(other, b"garbage")
    world.lane_down(world.session())
    world.say(world.session(), msg.Bye("gone"))
    assert len(world.all(act.Audit)) > 8
    for action in world.all(act.Audit):
        json.dumps(action.fields)
    for action in world.all(act.Notify):
        json.dumps(None if action.error is None else action.error.details)
