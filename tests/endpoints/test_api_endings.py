"""How a request ends other than READY: abort and drain, decline, reject, deadlines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvxfer import Pages
from kvxfer.errors import Aborted, AdmissionClosed, DeadlineExceeded, Declined, GeometryError, NotReady, Rejected

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
FULL = {"kv": Pages(range(4), SOURCE)}


def _free(pair: Any) -> bool:
    return not pair.target.pool.ledger.states_of(0, TARGET).any()


# ---- abort at prefill ------------------------------------------------------------------------------------------------


def test_a_drained_abort_gives_the_sources_back_at_the_call(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    pair.wait_offered(grant)
    assert grant.abort("preempted", drain_timeout_s=10)
    assert grant.released
    with pytest.raises(Aborted, match="preempted"):
        handoff.wait(10)
    assert handoff.wait_released(10)
    assert _free(pair)


def test_an_abort_without_a_drain_time_returns_at_once_and_released_follows(pair: Any) -> None:
    pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    assert grant.abort() in (True, False)
    assert grant.wait_released(10)
    assert grant.abort() and grant.abort(drain_timeout_s=1)


def test_an_aborted_grant_that_was_never_offered_leaves_nothing_behind(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    assert grant.abort()
    pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_nothing_can_be_written_or_committed_after_an_abort(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.abort()
    with pytest.raises(AdmissionClosed):
        grant.write(FULL)
    with pytest.raises(AdmissionClosed):
        grant.commit(N_TOKENS)


def test_an_abort_after_the_sources_are_free_changes_nothing(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    assert grant.wait_released(10)
    assert grant.abort()
    assert handoff.state == "ready"
    assert grant.error is None


# ---- abort at decode -------------------------------------------------------------------------------------------------


def test_an_abort_at_decode_tells_prefill_and_frees_both_sides(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    pair.wait_offered(grant)
    handoff.abort("client went away")
    handoff.abort("said twice")
    with pytest.raises(Aborted, match="client went away"):
        handoff.wait(10)
    assert handoff.wait_released(10) and handoff.state == "released"
    assert grant.wait_released(10)
    assert "client went away" in str(grant.error)
    assert _free(pair)


def test_an_abort_before_the_offer_frees_the_pages_at_once(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)  # the session is still being dialled
    handoff.abort()
    assert handoff.wait_released(10)
    assert _free(pair)


def test_an_abort_after_ready_changes_nothing(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS)
    ready = handoff.wait(10)
    handoff.abort()
    assert handoff.state == "ready"
    assert ready.page("kv", 0, 0).any()


def test_a_release_is_never_announced_for_a_ready_handoff(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    with pytest.raises(NotReady, match="belong to the engine"):
        handoff.wait_released(0.1)
    assert not handoff.released


# ---- decline and reject ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["accept", "decline"])
def test_a_declined_request_lets_prefill_go_whichever_came_first(pair: Any, first: str) -> None:
    if first == "decline":
        pair.decode.decline("r", prefill=pair.prefill.address, reason="full prefix hit")
        # Frames of one session arrive in order: when the next one has, so has the decline.
        pair.hand_over("behind it", SOURCE, TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    if first == "accept":
        grant.write(FULL)
        pair.decode.decline("r", prefill=pair.prefill.address, reason="full prefix hit")
    assert grant.wait_released(10)
    assert isinstance(grant.error, Declined)
    assert "full prefix hit" in str(grant.error)


def test_a_reject_before_reserve_answers_the_reservation_with_code_and_message(pair: Any) -> None:
    pair.prefill.reject("r", "too_long", "9000 tokens, 4096 fit")
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(Rejected, match="9000 tokens, 4096 fit") as refused:
        handoff.wait(10)
    assert refused.value.details["code"] == "too_long"
    assert handoff.wait_released(10) and _free(pair)


def test_a_reject_after_reserve_ends_the_reservation_that_waits(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(TimeoutError):
        handoff.wait(0.05)
    pair.prefill.reject("r", "too_long", "does not fit")
    with pytest.raises(Rejected) as refused:
        handoff.wait(10)
    assert refused.value.details["code"] == "too_long"
    assert handoff.wait_released(10) and _free(pair)


def test_a_reject_ends_a_live_grant_too(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    pair.wait_offered(grant)
    pair.prefill.reject("r", "scheduler", "changed its mind")
    assert grant.wait_released(10)
    assert isinstance(grant.error, Rejected)
    with pytest.raises(Rejected, match="changed its mind"):
        handoff.wait(10)


def test_a_reject_is_remembered_for_its_time_and_forgotten_afterwards(pair: Any) -> None:
    pair.prefill.reject("remembered", "no", "not now", ttl_s=60)
    pair.prefill.reject("forgotten", "no", "not now", ttl_s=0.05)
    with pytest.raises(Rejected):
        pair.prefill.accept("remembered", timeout_s=10)
    time.sleep(0.06)  # the time itself is what is tested
    pair.hand_over("forgotten", SOURCE, TARGET, N_TOKENS)


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_a_reservation_that_nobody_serves_ends_at_its_deadline_and_its_pages_come_back(pair: Any) -> None:
    began = time.monotonic()
    handoff = pair.reserve("r", TARGET, N_TOKENS, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded) as late:
        handoff.wait(10)
    assert 0.2 <= time.monotonic() - began < 5
    assert late.value.retryable and late.value.reservation == handoff.reservation
    assert handoff.wait_released(10) and _free(pair)


def test_extend_moves_the_deadline(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS, timeout_s=0.2)
    handoff.extend(20)
    with pytest.raises(TimeoutError):
        handoff.wait(0.4)
    assert handoff.state == "reserved"
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    handoff.extend(1)  # it has ended: nothing


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_senseless_time_is_refused(pair: Any, seconds: float) -> None:
    with pytest.raises(GeometryError):
        pair.reserve("r", TARGET, N_TOKENS, timeout_s=seconds)
    with pytest.raises(GeometryError):
        pair.prefill.accept("r", timeout_s=seconds)
    with pytest.raises(GeometryError):
        pair.reserve("other", TARGET, N_TOKENS).extend(seconds)


def test_a_wait_that_ends_early_says_so_and_the_handoff_goes_on(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(DeadlineExceeded, match="still under way"):
        handoff.wait(0)
    assert handoff.error is None
    assert handoff.wait_released(0) is False
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)


def test_accepts_time_starts_at_commit_and_not_before(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=0.1)
    grant.write(FULL)
    time.sleep(0.3)  # longer than its time-out: nothing may happen
    assert grant.error is None and not grant.released
    grant.commit(N_TOKENS)
    assert grant.wait_released(10)
    assert isinstance(grant.error, DeadlineExceeded)


def test_a_reader_in_time_after_a_late_commit_is_served(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=0.5)
    grant.write(FULL)
    time.sleep(0.6)  # longer than its time-out, which has not begun
    grant.commit(N_TOKENS)
    pair.reserve("r", TARGET, N_TOKENS).wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)
