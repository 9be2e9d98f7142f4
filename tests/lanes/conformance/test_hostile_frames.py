"""Data frames that a broken or hostile prefill might send: no page outside the leg changes, and nothing is accepted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import ProtocolViolation, VerificationFailed
from kvxfer.protocol import record as rec


def refused_as(rig: Any, leg: Any) -> str:
    """The kind under which the leg is refused once its records came."""
    with pytest.raises(VerificationFailed) as refused:
        rig.delivered(leg)
    return str(refused.value.details["kind"])


def test_frames_written_by_hand_are_accepted_when_they_are_right(hostile: Any) -> None:
    leg = hostile.offer(1)
    hostile.say(
        0, *hostile.all_writes(leg), hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg)))
    )
    hostile.delivered(leg)
    assert hostile.landed(leg)


# ---- frames of the leg that must not be placed -----------------------------------------------------------------------


def test_a_chunk_that_comes_twice_is_not_placed_again_and_the_leg_is_lost(hostile: Any) -> None:
    leg = hostile.offer(1)
    frames = hostile.all_writes(leg)
    frames.append(hostile.write_frame(0, leg, 2, 0, source=leg.source[3:4]))
    frames.append(hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg))))
    hostile.say(0, *frames)
    (violation,) = hostile.decode.wait(_native.VIOLATION)
    assert violation.text.startswith("duplicate") and violation.reservation == leg.reservation
    assert refused_as(hostile, leg) == "coverage"
    assert hostile.landed(leg)  # the first bytes stayed


@pytest.mark.parametrize(
    "fields",
    [
        {"page_first": 8},
        {"page_first": 2**63},
        {"page_first": 2**64 - 1},
        {"slice": 2},
        {"slice": 2**32 - 1},
        {"group": 1},
        {"group": 2**32 - 1},
    ],
    ids=lambda fields: "=".join(str(x) for pair in fields.items() for x in pair),
)
def test_a_place_outside_the_leg_is_a_violation_and_nothing_changes(hostile: Any, fields: dict[str, int]) -> None:
    leg = hostile.offer(1)
    hostile.say(0, hostile.write_frame(0, leg, 0, 0, **fields))
    (violation,) = hostile.decode.wait(_native.VIOLATION)
    assert violation.text.startswith("bounds")
    assert hostile.untouched(range(hostile.n_pages))
    hostile.say(0, *hostile.all_writes(leg))
    hostile.say(0, hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg))))
    assert refused_as(hostile, leg) == "coverage"


def test_a_run_that_reaches_beyond_the_leg_places_nothing(hostile: Any) -> None:
    leg = hostile.offer(1)
    more = np.concatenate([leg.source, leg.source])[:9]
    hostile.say(0, hostile.write_frame(0, leg, 0, 0, 9, source=more))
    hostile.decode.wait(_native.VIOLATION)
    assert hostile.untouched(range(hostile.n_pages))


@pytest.mark.parametrize("difference", [-1, 1, 8, -8])
def test_a_wrong_length_places_nothing(hostile: Any, difference: int) -> None:
    leg = hostile.offer(1)
    right = len(hostile.write_frame(0, leg, 0, 0, 2)) - 64
    hostile.restart_numbers()
    hostile.say(0, hostile.write_frame(0, leg, 0, 0, 2, body=bytes(right + difference)))
    events = wait_for_any(hostile, _native.VIOLATION, _native.LANE_DOWN)
    assert events
    time.sleep(0.02)
    assert hostile.untouched(range(hostile.n_pages))


def wait_for_any(rig: Any, *kinds: int) -> list[Any]:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        found = [event for kind in kinds for event in rig.decode.of(kind)]
        if found:
            return found
        time.sleep(0.001)
    return []


def test_a_write_behind_the_record_of_its_lane_is_a_violation(hostile: Any) -> None:
    leg = hostile.offer(1)
    writes = [hostile.write_frame(0, leg, 0, region, 7) for region in range(2)]
    chunks = range(7 * 2)
    hostile.say(0, *writes, hostile.record_frame(0, leg, hostile.record(0, leg, chunks)))
    hostile.decode.wait(_native.RECORD)
    hostile.say(0, hostile.write_frame(0, leg, 7, 0))
    (violation,) = hostile.decode.wait(_native.VIOLATION)
    assert violation.text.startswith("closed")
    assert hostile.untouched(leg.pool[7:])


def test_frames_of_unknown_and_of_revoked_legs_are_sunk_and_counted(hostile: Any) -> None:
    leg, dead = hostile.offer(1, 4), hostile.offer(2, 4, pool=[28, 29, 30, 31])
    hostile.receiver.revoke(dead.reservation, 0)
    stranger = hostile.write_frame(0, leg, 0, 0, reservation=12345)
    hostile.say(0, stranger, *hostile.all_writes(dead), *hostile.all_writes(leg))
    hostile.say(0, hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg))))
    hostile.delivered(leg)
    assert hostile.receiver.sunk_frames() == 3
    assert hostile.untouched(hostile.others(leg))


def test_another_legs_number_is_another_leg(hostile: Any) -> None:
    leg = hostile.offer(1)
    hostile.say(0, hostile.write_frame(0, leg, 0, 0, leg=1))
    hostile.say(0, hostile.record_frame(0, leg, hostile.record(0, leg, [])))
    hostile.decode.wait(_native.RECORD)
    assert hostile.untouched(range(hostile.n_pages))


# ---- bytes that are not those that were written ----------------------------------------------------------------------


def test_right_bytes_in_the_wrong_page_do_not_verify(hostile: Any) -> None:
    leg = hostile.offer(1)
    swapped = leg.source.copy()
    swapped[[2, 5]] = swapped[[5, 2]]
    frames = [hostile.write_frame(0, leg, 0, region, 8, source=swapped) for region in range(2)]
    hostile.say(0, *frames, hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg))))
    assert refused_as(hostile, leg) == "digest"


def test_right_bytes_in_the_wrong_region_do_not_verify(hostile: Any) -> None:
    leg = hostile.offer(1)
    hostile.source[1] = hostile.source[1, ::-1].copy()
    frames = hostile.all_writes(leg)
    record = hostile.record(0, leg, hostile.all_chunks(leg))
    hostile.source[[0, 1]] = hostile.source[[1, 0]]
    if hostile.kind == "tcp":
        hostile.restart_numbers()
        frames = hostile.all_writes(leg)
    hostile.say(0, *frames, hostile.record_frame(0, leg, record))
    assert refused_as(hostile, leg) == "digest"


def test_one_flipped_bit_does_not_verify(hostile: Any) -> None:
    leg = hostile.offer(1)
    record = hostile.record(0, leg, hostile.all_chunks(leg))
    hostile.source[1, leg.source[4], 1234] ^= 0x10
    hostile.say(0, *hostile.all_writes(leg), hostile.record_frame(0, leg, record))
    assert refused_as(hostile, leg) == "digest"


# ---- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"reservation": 77}, "record"),
        ({"epoch": bytes(16)}, "record"),
        ({"generation": 1}, "record"),
        ({"leg": 1}, "record"),
        ({"lane": 1}, "record"),
        ({"n_lanes": 2}, "record"),
        ({"kind": rec.PROGRESS}, "nothing"),
        ({"n_tokens": 1}, "tokens"),
        ({"ranges": [(0, 0, 1)]}, "tokens"),
        ({"ranges": []}, "tokens"),
        ({"aux": None}, "record"),
        ({"folds": None}, "record"),
        ({"folds": np.zeros(1, np.uint64)}, "record"),
        ({"folds": np.zeros(2, np.uint64)}, "digest"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_record_that_says_anything_untrue_is_never_accepted(
    hostile: Any, changes: dict[str, Any], verdict: str
) -> None:
    leg = hostile.offer(1)
    record = hostile.record(0, leg, hostile.all_chunks(leg), **changes)
    hostile.say(0, *hostile.all_writes(leg), hostile.record_frame(0, leg, record))
    if verdict == "nothing":
        time.sleep(0.05)
        assert hostile.decode.of(_native.RECORD) == []
        return
    assert refused_as(hostile, leg) == verdict


def test_a_record_that_claims_more_than_was_posted_is_refused(hostile: Any) -> None:
    leg = hostile.offer(1)
    frames = [hostile.write_frame(0, leg, 0, region, 7) for region in range(2)]
    hostile.say(0, *frames, hostile.record_frame(0, leg, hostile.record(0, leg, hostile.all_chunks(leg))))
    assert refused_as(hostile, leg) == "coverage"


def test_a_record_that_claims_less_than_was_posted_is_refused(hostile: Any) -> None:
    leg = hostile.offer(1)
    record = hostile.record(0, leg, range(leg.layout.n_chunks - 1))
    hostile.say(0, *hostile.all_writes(leg), hostile.record_frame(0, leg, record))
    assert refused_as(hostile, leg) == "coverage"


def test_a_replayed_record_of_an_earlier_handoff_is_refused(hostile: Any) -> None:
    first = hostile.offer(1)
    record = hostile.record(0, first, hostile.all_chunks(first))
    hostile.say(0, *hostile.all_writes(first), hostile.record_frame(0, first, record))
    hostile.delivered(first)
    hostile.receiver.forget(first.reservation, 0)
    second = hostile.offer(2, pool=first.pool, source=first.source)
    hostile.say(0, *hostile.all_writes(second), hostile.record_frame(0, second, record))
    assert refused_as(hostile, second) == "record"


def test_a_record_for_a_leg_that_was_revoked_is_dropped(hostile: Any) -> None:
    leg = hostile.offer(1)
    hostile.receiver.revoke(leg.reservation, 0)
    hostile.say(0, hostile.record_frame(0, leg, hostile.record(0, leg, [])))
    hostile.decode.wait(_native.VIOLATION)
    assert hostile.decode.of(_native.RECORD) == []


def test_a_record_with_a_broken_byte_is_not_believed(hostile: Any) -> None:
    leg = hostile.offer(1)
    record = bytearray(hostile.record(0, leg, hostile.all_chunks(leg)))
    record[100] ^= 1
    hostile.say(0, *hostile.all_writes(leg), hostile.record_frame(0, leg, bytes(record)))
    (event,) = hostile.decode.wait(_native.RECORD)
    with pytest.raises(ProtocolViolation, match="digest"):
        rec.parse(event.data)


# ---- framing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": 0},
        {"type": 0},
        {"type": 3},
        {"type": 99},
        {"flags": 1},
        {"generation": 1},
        {"lane": 1},
        {"sequence": 1},
        {"sequence": 2**64 - 1},
        {"n_pages": 0},
        {"n_pages": 2**32 - 1},
        {"body_bytes": 0},
        {"body_bytes": 2**40},
        {"body_bytes": 2**64 - 1},
    ],
    ids=lambda fields: "=".join(str(x) for pair in fields.items() for x in pair),
)
def test_a_frame_that_breaks_the_framing_takes_its_lane_down(hostile: Any, fields: dict[str, int]) -> None:
    leg = hostile.offer(1)
    n_bytes = len(hostile.write_frame(0, leg, 0, 0)) - 64
    hostile.restart_numbers()
    hostile.say(0, hostile.header(0, leg, 1, n_bytes, **({"n_pages": 1} | fields)))
    (down,) = hostile.decode.wait(_native.LANE_DOWN)
    assert down.text.startswith("violation")
    assert hostile.untouched(range(hostile.n_pages))


def test_a_replayed_frame_takes_its_lane_down_and_places_nothing(hostile: Any) -> None:
    leg = hostile.offer(1)
    frame = hostile.write_frame(0, leg, 0, 0)
    hostile.say(0, frame, frame)
    hostile.decode.wait(_native.LANE_DOWN)
    assert int.from_bytes(hostile.report(leg).lane_bitmaps[0], "little") == 1
    assert hostile.untouched(leg.pool[1:])


def test_garbage_takes_its_lane_down_and_leaves_the_other_one(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(hostile=True, n_lanes=2)
    leg = rig.offer(1)
    rig.say(0, os.urandom(10_000))
    (down,) = rig.decode.wait(_native.LANE_DOWN)
    assert down.lane == 0
    assert rig.untouched(range(rig.n_pages))
    rig.say(1, *rig.all_writes(leg, 1), rig.record_frame(1, leg, rig.record(1, leg, rig.all_chunks(leg))))
    rig.decode.wait(_native.RECORD)
    assert rig.landed(leg)
    with pytest.raises(VerificationFailed, match="lane"):
        rig.judge(leg)


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100])
def test_a_stream_that_ends_in_mid_frame_is_an_end_and_no_write(hostile: Any, cut: int) -> None:
    leg = hostile.offer(1)
    frame = hostile.write_frame(0, leg, 0, 0)
    hostile.say(0, frame[: min(cut, len(frame) - 1)])
    hostile.wires[0].close()
    (down,) = hostile.decode.wait(_native.LANE_DOWN)
    assert down.text.startswith("eof")
    assert int.from_bytes(hostile.report(leg).lane_bitmaps.get(0, b""), "little") == 0


def test_a_peer_that_stops_in_mid_frame_holds_up_neither_revoke_nor_fence(hostile: Any) -> None:
    leg = hostile.offer(1)
    hostile.say(0, hostile.write_frame(0, leg, 0, 0, 8)[:-10])
    time.sleep(0.02)
    started = time.monotonic()
    hostile.receiver.revoke(leg.reservation, 0)
    hostile.receiver.fence()
    assert time.monotonic() - started < 0.5


def test_the_rest_of_a_frame_whose_leg_was_revoked_goes_nowhere(hostile: Any) -> None:
    leg = hostile.offer(1)
    frame = hostile.write_frame(0, leg, 0, 0, 8)
    half = 64 + (len(frame) - 64) // 2
    hostile.say(0, frame[:half])
    time.sleep(0.02)
    hostile.receiver.revoke(leg.reservation, 0)
    before = hostile.pool.copy()
    other = hostile.offer(2, 4, pool=hostile.others(leg)[:4])
    hostile.say(0, frame[half:], *hostile.all_writes(other))
    hostile.say(0, hostile.record_frame(0, other, hostile.record(0, other, hostile.all_chunks(other))))
    hostile.delivered(other)
    assert np.array_equal(hostile.pool[:, leg.pool], before[:, leg.pool])


def test_random_and_mutated_streams_change_no_page_outside_the_leg(make_rig: Callable[..., Any]) -> None:
    chance = np.random.default_rng(11)
    for _ in range(12):
        rig = make_rig(hostile=True, n_lanes=1)
        leg = rig.offer(1)
        stream = bytearray(b"".join([*rig.all_writes(leg), rig.record_frame(0, leg, rig.record(0, leg, []))]))
        for at in chance.integers(0, min(len(stream), 400), 3):
            stream[at] = int(chance.integers(0, 256))
        rig.say(0, bytes(stream))
        rig.wires[0].close()
        rig.decode.wait(_native.LANE_DOWN)
        rig.receiver.fence()
        assert rig.untouched(rig.others(leg))
