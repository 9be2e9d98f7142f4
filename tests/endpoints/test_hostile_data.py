"""Data frames and commit records that a broken or hostile prefill might put on its lane: the handoff is refused with
the pages named where they are known, no page outside it changes, its own come back, and the next one succeeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import GroupSpec, PageGroup, PagePool, Pages
from kvxfer.errors import Aborted, DeadlineExceeded, KvxferError, LaneFailed, VerificationFailed
from kvxfer.protocol.messages import Bye
from kvxfer.protocol.record import PROGRESS

from .fake_prefill import FakePrefill, Leg, flip

N_PAGES, N_TOKENS = 4, 50
TARGET = [2, 11, 4, 30]
CANARY = 123.0
SHAPE = (16, 2, 8)
PAGE_BYTES = 1024


def source_pool(lane: str) -> PagePool:
    if lane != "local-read":
        spec = GroupSpec("kv", 2, SHAPE, "float32", 16, token_axis=1)
        return PagePool.allocate([spec], pages=32)
    layers = [np.zeros((32, *SHAPE), np.float32) for _ in range(2)]
    return PagePool([PageGroup("kv", layers, tokens_per_page=16, token_axis=1)])


@pytest.fixture
def fake(lane: str, ends: Any) -> Iterator[FakePrefill]:
    prefill = FakePrefill(ends.fill(source_pool(lane), seed=1), "tcp" if lane == "tcp" else "local")
    yield prefill
    prefill.close()


class Hostile:
    """A decode whose pool holds canaries, and a prefill by hand."""

    def __init__(
        self, fake: FakePrefill, decode: Any, target: Any, until: Callable[[Callable[[], bool]], None]
    ) -> None:
        self.until = until
        self.fake, self.decode, self.target = fake, decode, target
        for layer in target.layers:
            layer[:] = CANARY
        self.others = [page for page in range(32) if page not in TARGET]

    def reserve(self, request_id: str = "r", timeout_s: float = 10.0) -> tuple[Any, Leg]:
        wanted = {"kv": Pages(range(N_PAGES), TARGET, first_token=0, n_tokens=N_TOKENS)}
        handoff = self.decode.reserve(request_id, wanted, prefill=self.fake.address, timeout_s=timeout_s)
        return handoff, self.fake.reserved(request_id)

    def refused(self, handoff: Any, kind: type[KvxferError] = VerificationFailed) -> KvxferError:
        """The typed error; nothing but the reserved pages has changed, and they are free again."""
        with pytest.raises(kind) as caught:
            handoff.wait(10)
        assert caught.value.reservation == handoff.reservation
        assert handoff.wait_released(10)
        assert not self.target.pool.ledger.states(0).any()
        self.assert_others_unchanged()
        return caught.value

    def never_counts(self, handoff: Any, why: str) -> None:
        """The record was refused and audited; the handoff waits on, as if it had not come, and can still be ended."""
        self.until(lambda: self.says("refused", why))
        with pytest.raises(TimeoutError):
            handoff.wait(0.02)
        handoff.abort()
        self.refused(handoff, Aborted)

    def assert_others_unchanged(self) -> None:
        assert all((layer[self.others] == CANARY).all() for layer in self.target.layers)

    def succeeds(self, request_id: str = "next") -> None:
        """An honest handoff into the same pages."""
        handoff, leg = self.reserve(request_id)
        self.fake.put(*leg.writes(), leg.record())
        handoff.wait(10)
        for layer in range(2):
            landed = self.target.layers[layer][TARGET].reshape(-1, *SHAPE[1:])[:N_TOKENS]
            sent = self.fake.rows(layer)[leg.source].view(np.float32).reshape(-1, *SHAPE[1:])[:N_TOKENS]
            np.testing.assert_array_equal(landed, sent)
        self.assert_others_unchanged()

    def says(self, event: str, why: str) -> bool:
        return any(line["event"] == event and line.get("why") == why for line in self.decode.audit_lines())


@pytest.fixture
def hostile(fake: FakePrefill, decode: Any, target: Any, ends: Any) -> Hostile:
    return Hostile(fake, decode, target, ends.until)


def test_right_frames_by_hand_are_accepted(hostile: Hostile) -> None:
    hostile.succeeds()


# ---- bytes that are not those that were written ----------------------------------------------------------------------


def test_one_flipped_bit_refuses_the_handoff_and_names_the_chunk(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    record = leg.record()
    leg.digest_now()
    hostile.fake.rows(1)[2, 700] ^= 0x10
    hostile.fake.put(*leg.writes(), record)
    error = hostile.refused(handoff)
    assert error.details["kind"] == "digest"
    assert error.details["chunk"]["logical_page"] == 2
    assert (error.details["chunk"]["region"], error.details["chunk"]["pool_page"]) == (1, TARGET[2])
    assert error.details["chunks_differing"] == 1


def test_right_bytes_in_the_wrong_page_refuse_the_handoff(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    swapped = [leg.source[k] for k in (0, 2, 1, 3)]
    writes = [leg.write(0, region, N_PAGES, source=swapped) for region in range(2)]
    hostile.fake.put(*writes, leg.record())
    error = hostile.refused(handoff)
    assert error.details["kind"] == "digest"
    assert error.details["chunk"]["logical_page"] == 1 and error.details["chunks_differing"] == 4
    hostile.succeeds()


# ---- chunks that are missing, twice, or elsewhere --------------------------------------------------------------------


def test_all_pages_but_one_claimed_as_all_are_refused_with_the_page(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(0, 2), *leg.writes(3, 1), leg.record())
    error = hostile.refused(handoff)
    assert (error.details["kind"], error.details["logical_pages"]) == ("coverage", {"kv": [2]})
    assert error.details["pool_pages"] == {"kv": [TARGET[2]]}
    hostile.succeeds()


@pytest.mark.parametrize("verify", ["digest", "coverage"])
def test_all_pages_but_one_truthfully_recorded_are_refused_with_the_page(
    fake: FakePrefill, ends: Any, target: Any, verify: str
) -> None:
    hostile = Hostile(fake, ends.decode(target.pool, verify=verify), target, ends.until)
    handoff, leg = hostile.reserve()
    without_page_2 = leg.layout.expected & ~(0b11 << 2 * 2)
    hostile.fake.put(*leg.writes(0, 2), *leg.writes(3, 1), leg.record(bitmap=without_page_2))
    error = hostile.refused(handoff)
    assert (error.details["kind"], error.details["logical_pages"]) == ("coverage", {"kv": [2]})
    hostile.succeeds()


def test_all_pages_but_one_and_one_of_them_twice_are_refused(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(0, 3), *leg.writes(2, 1), leg.record())
    error = hostile.refused(handoff)
    assert error.details["kind"] == "coverage" and "duplicate" in str(error)
    hostile.succeeds()


def test_a_page_that_comes_twice_is_not_placed_again_and_refuses_the_handoff(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.write(1, 0, source=[20]), leg.record())
    error = hostile.refused(handoff)
    assert error.details["kind"] == "coverage" and "duplicate" in str(error)
    landed = hostile.target.layers[0][TARGET[1]]
    np.testing.assert_array_equal(landed.reshape(-1), hostile.fake.rows(0)[1].view(np.float32))
    hostile.succeeds()


@pytest.mark.parametrize(
    "fields",
    [
        {"page_first": N_PAGES},
        {"page_first": 2**64 - 1},
        {"page_first": 2, "n_pages": 3},
        {"slice": 2},
        {"slice": 2**32 - 1},
        {"group": 1},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_a_chunk_outside_the_reservation_its_region_or_group_is_never_placed(
    hostile: Hostile, fields: dict[str, int]
) -> None:
    handoff, leg = hostile.reserve()
    n = fields.get("n_pages", 1)
    hostile.fake.put(leg.write(0, 0, n, **{"source": [7] * n} | fields), *leg.writes(), leg.record())
    error = hostile.refused(handoff)
    assert error.details["kind"] == "coverage" and "bounds" in str(error)
    assert hostile.says("refused", "violation")
    hostile.succeeds()


@pytest.mark.parametrize("difference", [-1, 1, 8, PAGE_BYTES])
def test_a_wrong_length_is_never_placed(hostile: Hostile, difference: int) -> None:
    handoff, leg = hostile.reserve()
    right = PAGE_BYTES * 2 if hostile.fake.kind == "tcp" else 16 + 8 * 2
    before = hostile.target.copy(TARGET)
    hostile.fake.put(leg.write(0, 0, 2, body=bytes(right + difference)))
    # On a local lane the length follows from the header, so the lane itself is in error.
    hostile.refused(handoff, VerificationFailed if hostile.fake.kind == "tcp" else LaneFailed)
    for old, new in zip(before, hostile.target.copy(TARGET), strict=True):
        np.testing.assert_array_equal(old, new)
    hostile.succeeds()


def test_a_record_before_its_data_refuses_the_handoff_and_what_follows_lands_nowhere(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    before = hostile.target.copy(TARGET)
    hostile.fake.put(leg.record(), *leg.writes())
    error = hostile.refused(handoff)
    assert error.details["kind"] == "coverage"
    for old, new in zip(before, hostile.target.copy(TARGET), strict=True):
        np.testing.assert_array_equal(old, new)
    hostile.succeeds()


def test_writes_behind_the_record_change_nothing_that_was_accepted(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.record())
    handoff.wait(10)
    accepted = hostile.target.copy(TARGET)
    hostile.fake.put(leg.write(0, 0, 4, source=[20, 21, 22, 23]), leg.record(), leg.record(n_tokens=1))
    hostile.succeeds("next")  # into the same pages, so what came before it has been dealt with
    assert handoff.state == "ready"
    for old, new in zip(accepted, hostile.target.copy(TARGET), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_next_owner_of_the_pages_is_not_written_under_the_former_reservation(hostile: Hostile) -> None:
    handoff, former = hostile.reserve("former")
    handoff.abort()
    assert handoff.wait_released(10)
    second, leg = hostile.reserve("second")
    hostile.fake.put(*leg.writes(), former.write(0, 0, 4, source=[20, 21, 22, 23]), former.record(), leg.record())
    second.wait(10)
    landed = hostile.target.layers[0][TARGET[1]]
    np.testing.assert_array_equal(landed.reshape(-1), hostile.fake.rows(0)[1].view(np.float32))


# ---- commit records --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": bytes(16)}, "record_of_another_epoch"),
        ({"generation": 0}, "record_of_another_generation"),
        ({"generation": 2}, "record_of_another_generation"),
        ({"lane": 1}, "record_on_another_lane"),
        ({"n_lanes": 2}, "record_on_another_lane"),
        ({"leg": 1}, "record_of_unknown_leg"),
        ({"reservation": 77}, "record_of_unknown_leg"),
    ],
    ids=lambda value: ",".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_record_of_another_epoch_generation_lane_leg_or_reservation_never_counts(
    hostile: Hostile, changes: dict[str, Any], why: str
) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.record(**changes))
    hostile.never_counts(handoff, why)
    hostile.succeeds()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"n_tokens": 1}, "tokens"),
        ({"ranges": [(0, 0, 1)]}, "tokens"),
        ({"ranges": []}, "tokens"),
        ({"bitmap": 0}, "coverage"),
        ({"bitmap": 0b01111111}, "coverage"),
        ({"n_chunks": 7, "bitmap": 0}, "record"),
        ({"aux": None}, "record"),
        ({"folds": None}, "record"),
        ({"folds": np.zeros(2, np.uint64)}, "record"),
        ({"folds": np.zeros(1, np.uint64)}, "digest"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_record_that_says_anything_untrue_is_refused_as_what_it_is(
    hostile: Hostile, changes: dict[str, Any], kind: str
) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.record(**changes))
    assert hostile.refused(handoff).details["kind"] == kind
    hostile.succeeds()


@pytest.mark.parametrize("at", [100, -16, -1], ids=["groups", "aux", "digest"])
def test_a_record_altered_on_its_way_its_aux_too_is_refused(hostile: Hostile, at: int) -> None:
    handoff, leg = hostile.reserve()
    altered = leg.record(aux=b"token 17", raw=lambda data: flip(data, at % len(data)))
    hostile.fake.put(*leg.writes(), altered)
    error = hostile.refused(handoff)
    assert error.details["kind"] == "record" and error.retryable
    hostile.succeeds()


def test_a_progress_record_does_not_stand_for_a_commit(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve(timeout_s=0.6)
    hostile.fake.put(*leg.writes(), leg.record(kind=PROGRESS))
    hostile.refused(handoff, DeadlineExceeded)
    hostile.succeeds()


def test_a_record_replayed_for_a_second_reservation_does_not_count(hostile: Hostile) -> None:
    first, leg = hostile.reserve("first")
    record = leg.record()
    hostile.fake.put(*leg.writes(), record)
    first.wait(10)
    second, again = hostile.reserve("second")
    body = record.body[16 if hostile.fake.kind == "local" else 0 :]
    hostile.fake.put(*again.writes(), again.record(raw=lambda _: body))
    hostile.never_counts(second, "record_of_unknown_leg")
    hostile.succeeds()


def test_a_commit_of_an_older_epoch_does_not_count_in_the_next_one(hostile: Hostile) -> None:
    hostile.succeeds("first")
    hostile.fake.say(Bye("restarts"))
    hostile.until(lambda: hostile.decode.counters().get("session_lost") == 1)
    old = hostile.fake.epoch
    handoff, leg = hostile.reserve("second")
    assert hostile.fake.former_epoch == old != hostile.fake.epoch
    hostile.fake.put(*leg.writes(), leg.record(epoch=old))
    hostile.never_counts(handoff, "record_of_another_epoch")
    hostile.succeeds()


def test_the_same_record_twice_is_one_record(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.record(), leg.record())
    try:
        handoff.wait(10)  # it was READY before the second one came
    except VerificationFailed as error:
        assert error.details["kind"] == "coverage"
    hostile.assert_others_unchanged()
    hostile.succeeds()


# ---- framing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": 0},
        {"type": 99},
        {"flags": 1},
        {"generation": 0},
        {"lane": 1},
        {"sequence": 7},
        {"n_pages": 0},
        {"n_pages": 2**32 - 1},
        {"body_bytes": 2**40},
        {"body_bytes": 2**64 - 1},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_a_frame_that_breaks_the_framing_costs_its_lane_and_new_lanes_serve_the_next_handoff(
    hostile: Hostile, fields: dict[str, int]
) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(0, 2), leg.write(2, 0, **fields))
    assert hostile.refused(handoff, LaneFailed).retryable
    assert hostile.decode.counters()["lane_down"] == 1
    hostile.succeeds()


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 80])
def test_a_connection_that_ends_in_mid_frame_fails_the_handoff_as_retryable(hostile: Hostile, cut: int) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(0, 2))
    hostile.fake.put(hostile.fake.encode(leg.write(2, 0))[:cut])
    hostile.fake.hang_up()
    assert hostile.refused(handoff, LaneFailed).retryable
    hostile.succeeds()


def test_garbage_behind_the_record_costs_the_lane_and_not_the_handoff(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    hostile.fake.put(*leg.writes(), leg.record(), os.urandom(4096))
    handoff.wait(10)
    hostile.until(lambda: hostile.decode.counters().get("lane_down") == 1)
    hostile.succeeds()


def test_a_replayed_frame_costs_the_lane(hostile: Hostile) -> None:
    handoff, leg = hostile.reserve()
    frame = hostile.fake.encode(leg.write(0, 0))
    hostile.fake.put(frame, frame)
    hostile.refused(handoff, LaneFailed)
    hostile.succeeds()


def test_random_changes_to_the_stream_never_make_a_wrong_page_readable(hostile: Hostile, target: Any) -> None:
    chance = np.random.default_rng(23)
    outcomes: set[Callable[..., Any] | str] = set()
    for number in range(12):
        handoff, leg = hostile.reserve(f"r{number}", timeout_s=0.4)
        stream = bytearray(b"".join(map(hostile.fake.encode, [*leg.writes(), leg.record()])))
        stream[int(chance.integers(0, len(stream)))] ^= 1 << int(chance.integers(0, 8))
        hostile.fake.put(bytes(stream))
        try:
            handoff.wait(10)
        except KvxferError as error:
            outcomes.add(type(error).__name__)
            assert handoff.wait_released(10)
        else:
            outcomes.add("ready")  # a change in what is not looked at, slots past the last token say
            landed = target.layers[0][TARGET].reshape(-1, *SHAPE[1:])[:N_TOKENS]
            sent = hostile.fake.rows(0)[leg.source].view(np.float32).reshape(-1, *SHAPE[1:])[:N_TOKENS]
            np.testing.assert_array_equal(landed, sent)
        hostile.assert_others_unchanged()
    assert outcomes - {"ready"}
