"""What every kind of lane must do, whoever is at its ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import VerificationFailed

QUIET_S = 0.1  # how long is waited for something that must not happen


# ---- post, progress, commit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False], ids=["digest", "coverage"])
def test_what_is_written_and_committed_arrives_whole_and_is_accepted(rig: Any, verify: bool) -> None:
    leg = rig.offer(1, verify=verify)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    grant.commit(leg.end_token, b"aux of request 1")
    accepted = rig.delivered(leg)
    assert (accepted.aux, accepted.n_tokens) == (b"aux of request 1", leg.end_token)
    assert rig.landed(leg)
    assert rig.untouched(rig.others(leg))


def test_writes_before_the_leg_is_attached_are_delivered(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant()
    rig.write(grant, leg)
    rig.attach(grant, leg)
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    assert rig.landed(leg)


def test_a_leg_attached_after_the_commit_gets_everything(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant()
    rig.write(grant, leg)
    grant.commit(leg.end_token, b"late")
    rig.attach(grant, leg)
    assert rig.delivered(leg).aux == b"late"
    assert rig.landed(leg)


def test_layers_are_written_one_by_one_with_progress(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    for region in range(rig.regions):
        for half in (slice(0, 4), slice(4, 8)):
            rig.write(grant, leg, half, [region], progress=True)
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    assert len(rig.decode.of(_native.RECORD)) == rig.n_lanes  # progress is not a commit
    assert rig.landed(leg)


def test_every_lane_carries_a_record_also_where_nothing_was_written(rig: Any) -> None:
    leg = rig.offer(1, slices=b"")
    grant = rig.grant(leg)
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    assert sorted(rig.records(leg)) == [0, 1]
    assert rig.untouched(range(rig.n_pages))


def test_a_reader_of_the_tail_gets_the_tail_only(rig: Any) -> None:
    whole = rig.offer(1, 6)
    tail = rig.offer(2, 2, first_page=4, pool=rig.others(whole)[:2], source=whole.source[4:6])
    grant = rig.grant(tail)
    rig.write(grant, whole)
    grant.commit(tail.end_token, b"")
    rig.delivered(tail)
    assert rig.landed(tail)
    assert rig.untouched(whole.pool)
    assert grant.skipped(2) == 4 * rig.regions


def test_two_readers_of_one_grant_get_the_same_bytes(rig: Any) -> None:
    one = rig.offer(1)
    two = rig.offer(2, pool=rig.others(one)[:8], source=one.source)
    grant = rig.grant(one)
    rig.write(grant, one)
    rig.attach(grant, two)
    grant.commit(one.end_token, b"")
    rig.delivered(one)
    rig.delivered(two)
    assert rig.landed(one) and rig.landed(two)


@pytest.mark.parametrize("page_bytes", [1, 7, 1000, 300_000])
def test_odd_page_sizes_arrive_whole(make_rig: Callable[..., Any], page_bytes: int) -> None:
    rig = make_rig(page_bytes=page_bytes)
    leg = rig.offer(1, 20)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    assert rig.landed(leg) and rig.untouched(rig.others(leg))


def test_one_page_short_is_refused_and_the_page_is_named(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg, slice(0, 7))
    grant.commit(leg.end_token, b"")
    with pytest.raises(VerificationFailed) as refused:
        rig.delivered(leg)
    assert refused.value.details["kind"] == "coverage"
    assert refused.value.details["pool_pages"] == {"kv": [int(leg.pool[7])]}


def test_a_placeholder_of_one_token_in_the_right_page_is_refused_by_its_token_count(rig: Any) -> None:
    leg = rig.offer(1, 1)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    grant.commit(1, b"")
    with pytest.raises(VerificationFailed) as refused:
        rig.delivered(leg)
    assert refused.value.details["kind"] == "tokens"


def test_a_source_that_changes_before_it_is_sent_is_never_accepted(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant()
    rig.write(grant, leg)
    rig.source[0, leg.source[3]] ^= 1
    rig.attach(grant, leg)
    grant.commit(leg.end_token, b"")
    with pytest.raises(VerificationFailed) as refused:
        rig.delivered(leg)
    assert refused.value.details["kind"] == "digest"
    assert int(leg.pool[3]) in refused.value.details["pool_pages"]["kv"]


# ---- what never leaves the sender ------------------------------------------------------------------------------------


def test_a_write_after_the_commit_is_refused(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg, slice(0, 7))
    grant.commit(leg.end_token, b"")
    with pytest.raises(RuntimeError, match="closed"):
        rig.write(grant, leg, slice(7, 8))
    rig.decode.wait(_native.RECORD, rig.n_lanes)
    assert rig.untouched(leg.pool[7:])


def test_a_second_commit_is_refused(rig: Any) -> None:
    grant = rig.grant(rig.offer(1))
    grant.commit(16, b"")
    with pytest.raises(RuntimeError, match="closed"):
        grant.commit(16, b"")


def test_a_page_is_written_once(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg, slice(0, 4))
    with pytest.raises(ValueError, match="duplicate"):
        rig.write(grant, leg, slice(3, 8))
    rig.write(grant, leg, slice(4, 8))
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    assert rig.landed(leg)


def test_a_page_or_region_outside_the_pool_is_refused(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    one = np.array([0], np.uint64)
    for group, page, region in ((0, rig.n_pages, 0), (0, 2**63, 0), (0, 0, rig.regions), (1, 0, 0)):
        with pytest.raises(ValueError, match="bounds"):
            grant.write(group, one, np.array([page], np.uint64), np.array([region], np.uint32))
    assert grant.written() == 0


# ---- close_admission -> drained --------------------------------------------------------------------------------------


def test_after_drained_nothing_reads_the_sources(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg, slice(0, 5))
    grant.close_admission(5, leg.reservation)
    (drained,) = rig.prefill.wait(_native.LEG_DRAINED)
    rig.source[:] = 0
    posted = np.frombuffer(drained.data, "<u8")
    assert len(posted) == rig.n_lanes and posted.sum() <= 5 * rig.regions
    rig.write(grant, leg, slice(5, 8))
    grant.commit(leg.end_token, b"")  # the grant lives on for other readers
    time.sleep(QUIET_S)
    assert rig.decode.of(_native.RECORD) == []
    assert len(rig.prefill.of(_native.LEG_DRAINED)) == 1


def test_a_committed_leg_drains_by_itself(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    grant.commit(leg.end_token, b"")
    rig.delivered(leg)
    (drained,) = rig.prefill.wait(_native.LEG_DRAINED)
    assert np.frombuffer(drained.data, "<u8").sum() == leg.layout.n_chunks
    assert drained.reservation == leg.reservation


def test_one_reader_aborts_and_the_other_is_served(rig: Any) -> None:
    one = rig.offer(1)
    two = rig.offer(2, pool=rig.others(one)[:8], source=one.source)
    grant = rig.grant(one)
    rig.attach(grant, two)
    rig.write(grant, one, slice(0, 4))
    rig.receiver.revoke(one.reservation, 0)
    grant.close_admission(5, one.reservation)
    rig.write(grant, two, slice(4, 8))
    grant.commit(two.end_token, b"")
    rig.delivered(two)
    assert rig.landed(two)
    rig.prefill.wait(_native.LEG_DRAINED, 2)
    assert rig.decode.of(_native.RECORD, one.reservation) == []


# ---- revoke and fence ------------------------------------------------------------------------------------------------


def big(make_rig: Callable[..., Any]) -> Any:
    return make_rig(page_bytes=1 << 16, n_pages=128)


def test_when_revoke_has_returned_no_byte_lands_for_the_leg(make_rig: Callable[..., Any]) -> None:
    rig = big(make_rig)
    leg = rig.offer(1, 128)
    grant = rig.grant(leg)
    writing = threading.Thread(target=rig.write, args=(grant, leg))
    writing.start()
    until = time.monotonic() + 5
    while rig.untouched(leg.pool[:64]) and time.monotonic() < until:
        pass
    rig.receiver.revoke(leg.reservation, 0)
    before = rig.pool.copy()
    writing.join()
    time.sleep(QUIET_S)
    assert np.array_equal(rig.pool, before)


def test_revoke_of_one_leg_leaves_the_others_theirs(make_rig: Callable[..., Any]) -> None:
    rig = big(make_rig)
    one = rig.offer(1, 64)
    two = rig.offer(2, 64, pool=rig.others(one))
    first, second = rig.grant(one), rig.grant(two)
    rig.write(first, one, slice(0, 32))
    rig.write(second, two, slice(0, 32))
    rig.receiver.revoke(one.reservation, 0)
    rig.write(first, one, slice(32, 64))
    rig.write(second, two, slice(32, 64))
    second.commit(two.end_token, b"")
    rig.delivered(two)
    assert rig.landed(two)


def test_revoked_pages_can_be_given_to_the_next_reservation_at_once(make_rig: Callable[..., Any]) -> None:
    rig = big(make_rig)
    old = rig.offer(1, 128)
    stale = rig.grant(old)
    rig.write(stale, old)
    rig.receiver.revoke(old.reservation, 0)
    new = rig.offer(2, 128, pool=old.pool, source=old.source[::-1])
    fresh = rig.grant(new)
    rig.write(fresh, new)
    fresh.commit(new.end_token, b"")
    rig.delivered(new)
    time.sleep(QUIET_S)
    assert rig.landed(new)


def test_an_unknown_leg_may_be_revoked(rig: Any) -> None:
    rig.receiver.revoke(999, 3)


def test_when_fence_has_returned_no_byte_lands_and_prefill_hears_of_it(make_rig: Callable[..., Any]) -> None:
    rig = big(make_rig)
    leg = rig.offer(1, 128)
    grant = rig.grant(leg)
    writing = threading.Thread(target=rig.write, args=(grant, leg))
    writing.start()
    started = time.monotonic()
    rig.receiver.fence()
    assert time.monotonic() - started < 1
    before = rig.pool.copy()
    writing.join()
    rig.prefill.wait(_native.LANE_DOWN, rig.n_lanes)
    rig.prefill.wait(_native.LEG_FAILED)
    assert rig.prefill.of(_native.LEG_DRAINED) == []
    time.sleep(QUIET_S)
    assert np.array_equal(rig.pool, before)


def test_fence_is_idempotent(rig: Any) -> None:
    rig.receiver.fence()
    rig.receiver.fence()


def test_a_closed_session_is_heard_of_at_decode_and_fails_its_legs_at_prefill(rig: Any) -> None:
    leg = rig.offer(1)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    rig.sender.close_session(5, 2)
    rig.decode.wait(_native.LANE_DOWN, rig.n_lanes)
    rig.prefill.wait(_native.LEG_FAILED)
    grant.close()


def test_events_name_their_session_generation_and_lane(rig: Any) -> None:
    for completions in (rig.prefill, rig.decode):
        up = completions.of(_native.LANE_UP)
        assert {(event.session, event.generation) for event in up} == {(5, 2)}
        assert sorted(event.lane for event in up) == [0, 1]


def test_many_handoffs_at_once_all_arrive(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(n_pages=200)
    free = list(np.random.default_rng(1).permutation(200))
    legs = [rig.offer(n + 1, 4, pool=[free.pop() for _ in range(4)]) for n in range(50)]
    grants = [rig.grant(leg) for leg in legs]
    for page in range(4):
        for grant, leg in zip(grants, legs, strict=True):
            rig.write(grant, leg, slice(page, page + 1))
    for grant, leg in zip(grants, legs, strict=True):
        grant.commit(leg.end_token, leg.reservation.to_bytes(4, "little"))
    for leg in legs:
        assert rig.delivered(leg).aux == leg.reservation.to_bytes(4, "little")
        assert rig.landed(leg)
