"""One grant for several decode ranks: each ends for itself, and the sources wait for all of them."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import Aborted, DeadlineExceeded, PeerLost
from kvxfer.protocol import messages as m


def two_readers(world: Any, readers: int | None = 2) -> tuple[int, Any, m.Reserve, Any, m.Reserve]:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=readers)
    first = one.reserve(rank=0, readers=2)
    second = two.reserve(rank=1, readers=2)
    return grant, one, first, two, second


def test_offered_comes_once_when_every_reader_has_reserved(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=None)
    one.reserve(rank=0, readers=2)
    assert world.core.readers(grant) == 2
    assert world.kinds(grant) == []
    two.reserve(rank=1, readers=2)
    assert world.kinds(grant) == ["offered"]


def test_ready_needs_done_of_every_reader(world: Any) -> None:
    grant, one, first, two, second = two_readers(world)
    world.commit(grant)
    world.drain(one, first)
    one.done(first)
    assert not world.core.released(grant)
    assert world.kinds(grant) == ["offered"]
    world.drain(two, second)
    two.done(second)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_one_reader_of_two_aborting_does_not_end_the_other(world: Any) -> None:
    grant, one, first, two, second = two_readers(world)
    world.core.note_written(grant)
    one.abort(first)
    assert [closing.reservation for closing in world.closing_legs] == [first.reservation]
    world.drain(one, first, (1,))
    assert one.last() == m.Quiesced(first.reservation, 0, (1,))
    world.core.check_write(grant)
    world.commit(grant)
    world.drain(two, second)
    two.done(second)
    assert world.kinds(grant) == ["offered", "released", "failed"]
    error = world.error(grant)
    assert isinstance(error, Aborted)
    assert (error.details["readers_failed"], error.details["readers_done"]) == ([0], [1])


def test_last_reader_aborting_before_commit_closes_the_grant(world: Any) -> None:
    grant, one, first, two, second = two_readers(world)
    one.abort(first)
    two.abort(second)
    assert world.core.state(grant) == "draining"
    world.drain(one, first)
    assert not world.core.released(grant), "of two legs one is quiesced and one is not"
    world.drain(two, second)
    assert world.core.released(grant)


def test_one_reader_declining_leaves_the_grant_to_the_other(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=2)
    one.say(m.Decline("r", "prefix hit", 0))
    assert world.kinds(grant) == []
    reserve = two.reserve(rank=1, readers=2)
    assert world.kinds(grant) == ["offered"]
    world.commit(grant)
    world.drain(two, reserve)
    two.done(reserve)
    assert world.kinds(grant) == ["offered", "released", "ready"]


def test_one_readers_session_dying_does_not_end_the_other(world: Any) -> None:
    grant, one, first, two, second = two_readers(world)
    world.pass_time(world.config.heartbeat_timeout_s + 1, two)
    assert (one.session, first.reservation) not in world.reading
    world.commit(grant)
    world.drain(two, second)
    two.done(second)
    assert world.kinds(grant) == ["offered", "released", "failed"]
    assert isinstance(world.error(grant), PeerLost)


def test_readers_with_different_ranges_each_get_theirs(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=2)
    one.reserve(rank=0, readers=2, groups=(world.pages_of(0, 40),))
    two.reserve(rank=1, readers=2, groups=(world.pages_of(16, 24),))
    assert world.core.first_token(grant) == 0
    assert [len(attach.reserve.groups[0].logical) // 8 for attach in world.attached] == [3, 2]


def test_missing_reader_fails_the_grant_after_the_time_from_commit_and_not_before(world: Any) -> None:
    one = world.peer("one")
    grant = world.accept(readers=2, timeout_s=3.0)
    reserve = one.reserve(rank=0, readers=2)
    world.pass_time(10.0, one)
    assert world.kinds(grant) == [], "the time starts at commit"
    world.commit(grant)
    world.pass_time(3.0, one)
    assert world.kinds(grant) == ["failed"]
    assert isinstance(world.error(grant), DeadlineExceeded)
    assert not world.core.released(grant), "S3: the reader that came is still reading"
    assert not world.closing_legs, "and it may complete"
    world.drain(one, reserve)
    assert world.core.released(grant)
    one.done(reserve)
    assert world.kinds(grant) == ["failed", "released"]


def test_reader_that_comes_after_the_time_is_refused(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=2, timeout_s=1.0)
    one.reserve(rank=0, readers=2)
    world.commit(grant)
    world.pass_time(1.5, one, two)
    two.reserve(rank=1, readers=2)
    assert two.last().code == "ended"


def test_reader_that_comes_while_an_aborted_grant_drains_is_refused(world: Any) -> None:
    one, two = world.peer("one"), world.peer("two")
    grant = world.accept(readers=2)
    one.reserve(rank=0, readers=2)
    world.abort(grant)
    two.reserve(rank=1, readers=2)
    assert two.last().code == "ended"


def test_retry_of_a_failed_reader_is_kept_for_the_next_accept(world: Any) -> None:
    peer, grant = world.peer(), world.accept()
    first = peer.reserve()
    peer.abort(first)
    retry = peer.reserve()
    assert peer.last() == m.Granted(retry.reservation, 0)
    assert len(world.attached) == 1, "nothing of the failed grant is posted again"
    world.drain(peer, first)
    again = world.accept()
    assert again != grant
    assert world.attached[-1].reserve == retry


def test_two_ranks_of_one_session_end_together_with_it(world: Any) -> None:
    peer, grant = world.peer(), world.accept(readers=2)
    peer.reserve(rank=0, readers=2)
    peer.reserve(rank=1, readers=2)
    peer.say(m.Bye("done"))
    assert world.kinds(grant) == ["offered", "failed", "released"]
    assert world.core.state(grant) == "fenced"
