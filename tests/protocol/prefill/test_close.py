"""Closing: what is committed may still arrive for a moment, everything else is aborted, and it ends with the lanes."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import Aborted, PeerLost
from kvxfer.protocol import messages as m


def close(world: Any) -> None:
    world.run(world.core.close(world.now, "shutting down"))


def test_idle_core_closes_at_once(world: Any) -> None:
    close(world)
    assert world.core.is_closed
    assert world.core.outstanding() == ()


def test_close_says_goodbye_and_waits_for_the_lanes(world: Any) -> None:
    world.destroys_at_once = False
    peer = world.peer()
    close(world)
    assert peer.heard(m.Bye)
    assert not world.core.is_closed
    assert len(world.core.outstanding()) == 1
    world.report_destroyed()
    assert world.core.is_closed


def test_close_aborts_what_is_not_committed(world: Any) -> None:
    world.destroys_at_once = False
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    close(world)
    assert peer.heard(m.Failed)[0].cause == "aborted"
    assert isinstance(world.error(grant), Aborted)
    assert not world.core.released(grant)
    assert not world.core.is_closed
    world.report_destroyed()
    assert world.core.released(grant)
    assert world.core.is_closed


def test_close_rejects_offers(world: Any) -> None:
    peer = world.peer()
    peer.reserve()
    close(world)
    assert peer.heard(m.Rejected)[0].code == "closed"


def test_close_lets_a_committed_grant_arrive(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    reserve = peer.reserve()
    world.commit(grant)
    world.drain(peer, reserve)
    close(world)
    assert not peer.heard(m.Bye)
    peer.done(reserve)
    assert "ready" in world.kinds(grant)
    assert peer.heard(m.Bye)
    assert world.core.is_closed


def test_close_waits_for_a_committed_grant_no_longer_than_its_grace(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.commit(grant)
    close(world)
    world.pass_time(world.config.close_grace_s + 0.5, peer)
    assert isinstance(world.error(grant), PeerLost)
    assert world.core.released(grant)
    assert world.core.is_closed


def test_second_close_does_not_wait_for_the_grace(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.commit(grant)
    close(world)
    close(world)
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert world.core.is_closed


def test_reserve_while_closing_is_rejected(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    peer.reserve()
    world.commit(grant)
    close(world)
    peer.reserve("other")
    assert peer.last().code == "closed"


def test_close_does_not_wait_for_readers_that_have_not_come(world: Any) -> None:
    grant = world.accept(timeout_s=1000.0)
    world.commit(grant)
    close(world)
    assert world.kinds(grant) == ["failed", "released"]
    assert world.core.is_closed
