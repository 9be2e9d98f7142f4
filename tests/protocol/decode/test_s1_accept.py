"""S1: a reserved page may be read only when every clause of the rule holds. Each test breaks one clause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import Aborted, Rejected, VerificationFailed
from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.record import PROGRESS


def refused(world: Any, reservation: int, kind: str) -> VerificationFailed:
    """The handoff ended refused, and its pages never became readable."""
    assert world.events(reservation) == ["failed", "released"]
    error = world.error(reservation)
    assert isinstance(error, VerificationFailed)
    assert error.details["kind"] == kind
    assert error.reservation == reservation
    assert not [a for a in world.all(act.MarkPages) if a.state == "ready"]
    assert PageState.READY not in world.page_states(*range(64))
    return error


# ---- token ranges ----------------------------------------------------------------------------------------------------


def test_the_incident_inside_one_page_is_refused_by_its_token_count(world: Any) -> None:
    reservation = world.reserve([5, 6, 7, 8], tokens=50)
    world.write(reservation)  # the placeholder fills whole pages
    world.commit(reservation, tokens=1)
    error = refused(world, reservation, "tokens")
    assert (error.details["tokens_reserved"], error.details["tokens_committed"]) == (50, 1)
    assert error.details["logical_pages"] == {"kv": [0, 1, 2, 3]}
    assert error.details["pool_pages"] == {"kv": [5, 6, 7, 8]}


def test_one_token_too_few_in_the_last_page_is_refused(world: Any) -> None:
    reservation = world.reserve([5, 6, 7, 8], tokens=50)
    world.write(reservation)
    world.commit(reservation, tokens=49)
    error = refused(world, reservation, "tokens")
    assert error.details["logical_pages"] == {"kv": [3]}


def test_more_tokens_than_were_reserved_are_refused(world: Any) -> None:
    reservation = world.reserve([5], tokens=16)
    world.write(reservation)
    world.commit(reservation, tokens=17)
    refused(world, reservation, "tokens")


def test_a_range_of_one_group_that_differs_is_refused(world: Any) -> None:
    reservation = world.reserve([5], tokens=16)
    world.write(reservation)
    for lane in (0, 1):
        world.deliver(reservation, world.record_bytes(reservation, 0, lane, ranges=[(0, 0, 15)]), lane=lane)
    refused(world, reservation, "tokens")


def test_an_empty_range_does_not_hide_a_commit_that_is_too_short(world: Any) -> None:
    reservation = world.reserve([], tokens=32, first_token=32)
    world.commit(reservation, tokens=1)
    refused(world, reservation, "tokens")


# ---- coverage --------------------------------------------------------------------------------------------------------


def test_n_minus_one_of_n_pages_are_refused_and_the_missing_page_is_named(world: Any) -> None:
    reservation = world.reserve([5, 6, 7])
    world.write(reservation, chunks=[0, 1, 4, 5])  # two chunks a page: page 1 is missing
    world.commit(reservation)
    error = refused(world, reservation, "coverage")
    assert error.details["logical_pages"] == {"kv": [1]}
    assert error.details["pool_pages"] == {"kv": [6]}
    assert error.details["pages_refused"] == 1


def test_one_missing_region_of_one_page_is_refused(world: Any) -> None:
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=[0, 1, 2])
    world.commit(reservation)
    assert refused(world, reservation, "coverage").details["chunks_missing"] == 1


def test_a_count_that_is_right_does_not_hide_a_chunk_posted_twice(world: Any) -> None:
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=[0, 1, 2], lane=0)
    world.write(reservation, chunks=[0], lane=1)  # four posted, of which one twice
    world.commit(reservation)
    error = refused(world, reservation, "coverage")
    assert error.details["chunks_missing"] == 1
    assert error.details["logical_pages"] == {"kv": [0, 1]}


def test_a_chunk_on_two_lanes_is_refused_even_if_nothing_is_missing(world: Any) -> None:
    reservation = world.reserve([5, 6])
    world.write(reservation)
    world.write(reservation, chunks=[1], lane=0)
    world.commit(reservation)
    refused(world, reservation, "coverage")


def test_a_posted_chunk_that_has_not_landed_is_refused(world: Any) -> None:
    reservation = world.reserve([5, 6])
    world.write(reservation)
    world.wire(reservation).landed[0] &= ~(1 << 2)
    world.commit(reservation)
    error = refused(world, reservation, "coverage")
    assert error.details["logical_pages"] == {"kv": [1]}


def test_what_has_not_landed_is_refused_without_digests_too(make_world: Any) -> None:
    world = make_world(DecodeConfig(verify="coverage"))
    reservation = world.reserve([5, 6])
    world.write(reservation)
    world.wire(reservation).landed[0] &= ~(1 << 2)
    world.commit(reservation)
    refused(world, reservation, "coverage")


def test_a_chunk_that_landed_on_another_lane_than_it_was_posted_on_is_refused(world: Any) -> None:
    reservation = world.reserve([5, 6])
    wire = world.wire(reservation)
    world.write(reservation)
    wire.landed[0], wire.landed[1] = wire.landed[0] & ~1, wire.landed[1] | 1
    world.commit(reservation)
    refused(world, reservation, "coverage")


def test_a_refused_frame_of_the_leg_is_enough_to_refuse_it(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    world.wire(reservation).violations = 1
    world.commit(reservation)
    refused(world, reservation, "coverage")


def test_a_violation_that_is_announced_refuses_at_once(world: Any) -> None:
    reservation = world.reserve([5])
    spec = world.wire(reservation).spec
    world.carry_out(
        world.core.violation(world.now, spec.session, spec.generation, 0, reservation, 0, "chunk 0 came twice")
    )
    refused(world, reservation, "coverage")


def source_taken_away(world: Any, reservation: int) -> None:
    spec = world.wire(reservation).spec
    cause = "source: slot has moved on"
    world.carry_out(world.core.violation(world.now, spec.session, spec.generation, 0, reservation, 0, cause))


def test_a_source_that_changed_under_the_copy_is_named_as_such(world: Any) -> None:
    reservation = world.reserve([5])
    source_taken_away(world, reservation)
    world.core.extend(world.now, reservation, 60.0)
    world.advance(1.0)
    world.advance(world.core.config.diagnosis_timeout_s)
    assert refused(world, reservation, "source").retryable


def test_a_withdrawn_source_never_becomes_ready_whatever_records_follow(world: Any) -> None:
    reservation = world.reserve([5])
    spec = world.wire(reservation).spec
    world.carry_out(
        world.core.violation(world.now, spec.session, spec.generation, 0, reservation, 0, "source: slot has moved on")
    )
    world.hand_over(reservation)
    refused(world, reservation, "source")


def test_prefills_reason_for_withdrawing_a_source_is_the_error(world: Any) -> None:
    reservation = world.reserve([5])
    spec = world.wire(reservation).spec
    for lane in spec.lanes:
        world.carry_out(
            world.core.violation(world.now, spec.session, spec.generation, lane, reservation, 0, "source: let go")
        )
    world.carry_out(world.core.extend(world.now, reservation, 60))
    world.say(spec.session, msg.Failed(reservation, 0, -1, spec.generation, "rejected", "too long"))
    assert isinstance(world.error(reservation), Rejected)


def test_a_leg_whose_source_changed_is_refused_even_if_everything_else_arrives(world: Any) -> None:
    reservation = world.reserve([5])
    source_taken_away(world, reservation)
    world.hand_over(reservation)
    refused(world, reservation, "source")


def test_a_prefill_that_aborts_gets_to_say_why_it_took_its_source_away(world: Any) -> None:
    reservation = world.reserve([5])
    source_taken_away(world, reservation)
    world.say(world.session(), msg.Failed(reservation, 0, -1, 1, "aborted", "preempted"))
    assert isinstance(world.error(reservation), Aborted)
    assert world.events(reservation) == ["failed", "released"]


def test_a_group_announced_and_not_delivered_is_refused(make_world: Any, make_geometry: Any) -> None:
    world = make_world(pool=make_geometry(groups=("full", "indexer")))
    reservation = world.reserve([5, 6])
    world.write(reservation, chunks=range(4))  # of eight: the whole first group
    world.commit(reservation)
    error = refused(world, reservation, "coverage")
    assert error.details["logical_pages"] == {"indexer": [0, 1]}


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_missing_lane_keeps_the_pages_unreadable(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation, lane=0)  # nothing at all goes over lane 1
    world.commit(reservation, lanes=[0])
    assert world.events(reservation) == []
    world.advance(61.0)
    assert world.events(reservation) == ["failed", "released"]


def test_a_missing_leg_keeps_the_pages_unreadable(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.hand_over(reservation, 0)
    world.write(reservation, 1)
    assert world.core.state(reservation) == "offered"  # nothing is judged before everything is there
    world.advance(61.0)
    assert world.events(reservation) == ["failed", "released"]


def test_a_progress_record_commits_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    for lane in (0, 1):
        world.deliver(reservation, world.record_bytes(reservation, 0, lane, kind=PROGRESS, aux=None), lane=lane)
    assert world.events(reservation) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"epoch": bytes(16)}, "record_of_another_epoch"),
        ({"generation": 0}, "record_of_another_generation"),
        ({"lane": 1}, "record_on_another_lane"),
        ({"n_lanes": 1}, "record_on_another_lane"),
        ({"leg": 1}, "record_of_unknown_leg"),
        ({"reservation": 99}, "record_of_unknown_leg"),
    ],
)
def test_a_record_counts_only_for_its_own_leg_lane_epoch_and_generation(world: Any, changed: Any, why: str) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    world.commit(reservation, lanes=[1])
    world.deliver(reservation, world.record_bytes(reservation, 0, 0, changed=changed))
    assert world.core.state(reservation) == "offered"
    assert why in world.audits("refused")
    world.commit(reservation, lanes=[0])  # the true one still counts
    assert world.events(reservation) == ["ready"]


def test_a_record_that_comes_on_another_generation_of_the_lane_does_not_count(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    world.commit(reservation, lanes=[1])
    world.deliver(reservation, world.record_bytes(reservation, 0, 0), generation=2)
    assert world.core.state(reservation) == "offered"


def test_a_record_that_comes_on_another_lane_than_it_names_does_not_count(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    world.commit(reservation, lanes=[1])
    world.deliver(reservation, world.record_bytes(reservation, 0, 0), lane=1)
    assert world.core.state(reservation) == "offered"


@pytest.mark.parametrize("epoch_of", ["p1:1", "p0:1"], ids=["replayed", "forged"])
def test_a_record_of_one_leg_does_not_count_on_the_session_of_another(world: Any, epoch_of: str) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.hand_over(reservation, 0)
    world.write(reservation, 1)
    epoch = world.epochs[world.session(epoch_of)]
    for lane in (0, 1):
        data = world.record_bytes(reservation, 1, lane, changed={"epoch": epoch})
        world.carry_out(world.core.record(world.now, world.session("p0:1"), 1, lane, data))
    assert world.core.state(reservation) == "offered"
    world.commit(reservation, 1)
    assert world.events(reservation) == ["ready"]


def test_a_record_of_another_request_is_not_this_ones(world: Any) -> None:
    first = world.reserve([5], request_id="a")
    second = world.reserve([6], request_id="b")
    world.write(first)
    world.write(second)
    for lane in (0, 1):
        world.deliver(second, world.record_bytes(first, 0, lane), lane=lane)
    assert world.events(first) == ["ready"]  # its own records, wherever they were meant to count
    assert world.core.state(second) == "offered"
    world.commit(second)
    assert world.core.ready(second).aux == b"aux of " + str(second).encode()


def test_a_replayed_record_stands_for_no_other_lane_and_changes_nothing(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    data = world.record_bytes(reservation, 0, 0)
    for _ in range(3):
        world.deliver(reservation, data)
    assert world.core.state(reservation) == "offered"
    assert world.audits("refused").count("record_replayed") == 2
    world.commit(reservation, lanes=[1])
    assert world.events(reservation) == ["ready"]


def test_a_record_replayed_from_an_ended_reservation_changes_nothing(world: Any) -> None:
    first = world.reserve([5])
    world.write(first)
    old = [world.record_bytes(first, 0, lane) for lane in (0, 1)]
    world.commit(first)
    second = world.reserve([5])
    for lane, data in enumerate(old):
        world.deliver(second, data, lane=lane)
    assert world.core.state(second) == "offered"


def test_two_commits_that_contradict_each_other_are_refused(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    world.deliver(reservation, world.record_bytes(reservation, 0, 0))
    world.deliver(reservation, world.record_bytes(reservation, 0, 0, tokens=3))
    refused(world, reservation, "record")


def test_a_record_with_a_flipped_bit_is_refused(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    data = bytearray(world.record_bytes(reservation, 0, 0))
    data[-20] ^= 1
    world.deliver(reservation, bytes(data))
    refused(world, reservation, "record")


def test_aux_on_a_leg_that_does_not_carry_it_is_refused(world: Any) -> None:
    reservation = world.reserve([5], prefill=["p0:1", "p1:1"])
    world.hand_over(reservation, 0)
    world.write(reservation, 1)
    for lane in (0, 1):
        data = world.record_bytes(reservation, 1, lane, aux=b"not yours" if lane == 0 else None)
        world.deliver(reservation, data, 1, lane)
    refused(world, reservation, "record")


def test_aux_that_is_missing_is_refused(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    for lane in (0, 1):
        world.deliver(reservation, world.record_bytes(reservation, 0, lane, aux=None), lane=lane)
    refused(world, reservation, "record")


# ---- digests ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_page_is_refused_and_its_chunk_is_named(world: Any) -> None:
    reservation = world.reserve([5, 6, 7, 8, 9])
    world.write(reservation)
    world.wire(reservation).landed_content[9] ^= np.uint64(1)
    world.commit(reservation)
    error = refused(world, reservation, "digest")
    assert error.retryable
    assert error.details["chunk"] == {
        "leg": 0, "group": "kv", "region": 1, "slice": 0, "logical_page": 4, "pool_page": 9,
    }  # fmt: skip
    assert error.details["logical_pages"] == {"kv": [4]}


def test_right_bytes_in_the_wrong_page_are_refused(world: Any) -> None:
    reservation = world.reserve([5, 6])
    world.write(reservation)
    content = world.wire(reservation).landed_content
    content[0], content[2] = content[2], content[0]
    world.commit(reservation)
    refused(world, reservation, "digest")


def test_a_commit_without_digests_is_refused_where_digests_were_asked_for(world: Any) -> None:
    reservation = world.reserve([5])
    world.write(reservation)
    for lane in (0, 1):
        world.deliver(reservation, world.record_bytes(reservation, 0, lane, folds=None), lane=lane)
    refused(world, reservation, "record")


def test_a_mismatch_is_reported_within_a_second_even_if_prefill_does_not_name_the_chunk(world: Any) -> None:
    world.mute.add(msg.FetchDigests)
    reservation = world.reserve([5])
    world.write(reservation)
    world.wire(reservation).landed_content[0] ^= np.uint64(1)
    world.commit(reservation)
    assert world.core.state(reservation) == "naming"
    world.advance(1.0)
    error = refused(world, reservation, "digest")
    assert "not named" in error.details["chunk"]


def test_digests_nobody_asked_for_are_refused(world: Any) -> None:
    world.mute.add(msg.FetchDigests)
    reservation = world.reserve([5])
    world.write(reservation)
    world.wire(reservation).landed_content[0] ^= np.uint64(1)
    world.commit(reservation)
    world.say(world.session(), msg.Digests(reservation, 0, 7, bytes(16)))
    world.say(world.session(), msg.Digests(reservation, 0, 0, bytes(8)))
    assert world.core.state(reservation) == "naming"
    assert world.audits("refused") == ["unasked_digests", "digests_of_wrong_length"]


def test_an_abort_while_the_chunk_is_being_named_still_reports_the_mismatch(world: Any) -> None:
    world.mute.add(msg.FetchDigests)
    reservation = world.reserve([5])
    world.write(reservation)
    world.wire(reservation).landed_content[0] ^= np.uint64(1)
    world.commit(reservation)
    world.abort(reservation)
    refused(world, reservation, "digest")


def test_every_mismatch_is_audited_with_the_pages_concerned(world: Any) -> None:
    reservation = world.reserve([5, 6, 7])
    world.write(reservation, chunks=[0, 1, 4, 5])
    world.commit(reservation)
    (mismatch,) = [a for a in world.all(act.Audit) if a.event == "mismatch"]
    assert mismatch.reservation == reservation
    assert mismatch.fields["pool_pages"] == {"kv": [6]}
