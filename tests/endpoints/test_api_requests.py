"""Request ids, capacity, incarnations, and pools or modes that do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvxfer import GroupSpec, PagePool, Pages
from kvxfer.errors import (
    CapacityError,
    ConfigurationError,
    DuplicateRequest,
    GeometryError,
    IncompatiblePool,
    KvxferError,
    OwnershipError,
    PeerLost,
    PeerRestarted,
)

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


def pool(pages: int = 32, *, tokens: int = 16, dtype: str = "float32", heads: int = 2, layout: str = "") -> PagePool:
    spec = GroupSpec("kv", 2, (tokens, heads, 8), dtype, tokens, layout=layout)
    return PagePool.allocate([spec], pages=pages)


# ---- request ids -----------------------------------------------------------------------------------------------------


def test_a_live_request_id_is_refused_at_decode_and_the_first_goes_on(pair: Any) -> None:
    first = pair.reserve("r", TARGET, N_TOKENS)
    with pytest.raises(DuplicateRequest) as refused:
        pair.reserve("r", [20, 21, 22, 23], N_TOKENS)
    assert refused.value.reservation == first.reservation
    assert not pair.target.pool.ledger.states_of(0, [20, 21, 22, 23]).any()
    pair.send("r", SOURCE, N_TOKENS)
    first.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_live_request_id_is_refused_at_prefill_and_the_first_goes_on(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    first = pair.prefill.accept("r", timeout_s=10)
    with pytest.raises(DuplicateRequest):
        pair.prefill.accept("r", timeout_s=10)
    first.write({"kv": Pages(range(4), SOURCE)})
    first.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_request_id_may_be_used_again_once_it_has_ended(pair: Any) -> None:
    for number in range(3):
        pair.source.fill(number)
        pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
        pair.assert_delivered(SOURCE, TARGET, N_TOKENS)
    aborted = pair.reserve("r", TARGET, N_TOKENS)
    aborted.abort()
    assert aborted.wait_released(10)
    pair.hand_over("another", [0], [0], 16)  # prefill hears in order: now it has heard of the abort
    pair.hand_over("r", SOURCE, TARGET, N_TOKENS)


@pytest.mark.parametrize("request_id", ["x" * 513, "ü" * 257, "\ud800"], ids=["long", "long in bytes", "no text"])
def test_a_request_id_that_cannot_travel_is_refused_on_both_sides(pair: Any, request_id: str) -> None:
    for call in (
        lambda: pair.reserve(request_id, TARGET, N_TOKENS),
        lambda: pair.decode.decline(request_id, prefill=pair.prefill.address),
        lambda: pair.prefill.accept(request_id, timeout_s=10),
        lambda: pair.prefill.reject(request_id, "no", "no"),
    ):
        with pytest.raises(ConfigurationError, match="request id"):
            call()
    assert not pair.target.pool.ledger.states(0).any()


def test_a_request_needs_an_id(pair: Any) -> None:
    with pytest.raises(GeometryError, match="request id"):
        pair.reserve("", TARGET, N_TOKENS)


@pytest.mark.parametrize("request_id", ["x" * 512, "ü" * 256])
def test_the_longest_request_id_travels(pair: Any, request_id: str) -> None:
    pair.hand_over(request_id, SOURCE, TARGET, N_TOKENS)


def test_a_request_id_may_be_any_text(pair: Any) -> None:
    pair.hand_over("chatcmpl-ü/漢字 \n\0", SOURCE, TARGET, N_TOKENS)


def test_pages_of_a_live_reservation_are_refused_to_another(pair: Any) -> None:
    pair.reserve("first", TARGET, N_TOKENS)
    with pytest.raises(OwnershipError, match="page 11"):
        pair.reserve("second", [20, 11], 32)
    assert not pair.target.pool.ledger.states_of(0, [20]).any()


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_a_request_larger_than_decodes_pool_is_refused_at_once_with_both_numbers(ends: Any) -> None:
    prefill, decode = ends.prefill(pool(64)), ends.decode(pool(8))
    with pytest.raises(CapacityError) as refused:
        _reserve(decode, prefill, n_tokens=160)
    assert (refused.value.details["needed_pages"], refused.value.details["available_pages"]) == (10, 8)
    assert not decode.pool.ledger.states(0).any()


def test_tokens_beyond_decodes_pool_are_refused_however_few_pages_are_wanted(ends: Any) -> None:
    prefill, decode = ends.prefill(pool(64)), ends.decode(pool(8))
    with pytest.raises(CapacityError) as refused:
        decode.reserve("r", {"kv": Pages([9], [0], n_tokens=160)}, prefill=prefill.address, timeout_s=10)
    assert (refused.value.details["needed_tokens"], refused.value.details["available_tokens"]) == (160, 128)


def test_a_request_larger_than_prefills_pool_is_refused_before_anything_is_offered(ends: Any) -> None:
    prefill, decode = ends.prefill(pool(8)), ends.decode(pool(64))
    handoff = _reserve(decode, prefill, n_tokens=160)
    with pytest.raises(CapacityError) as refused:
        handoff.wait(10)
    assert (refused.value.details["needed_tokens"], refused.value.details["available_tokens"]) == (160, 128)
    assert handoff.wait_released(10)
    # The session is open now: the next one need not even be an event.
    with pytest.raises(CapacityError):
        _reserve(decode, prefill, n_tokens=160)
    assert not decode.pool.ledger.states(0).any()
    assert "quarantine" not in decode.counters()


def test_a_commit_of_more_tokens_than_prefills_pool_holds_is_refused(ends: Any) -> None:
    grant = ends.prefill(pool(8)).accept("r", timeout_s=10)
    with pytest.raises(CapacityError) as refused:
        grant.commit(129)
    assert (refused.value.details["needed"], refused.value.details["available"]) == (129, 128)
    grant.commit(128)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_pool_that_cannot_hold_one_full_context_is_refused_with_both_numbers(ends: Any, side: str) -> None:
    sizes = {"prefill": 64, "decode": 64, side: 8}
    with pytest.raises(CapacityError) as refused:
        decode = ends.decode(pool(sizes["decode"]), max_context_tokens=1000)
        _reserve(decode, ends.prefill(pool(sizes["prefill"])), n_tokens=16).wait(10)
    assert {1000, 128} <= set(refused.value.details.values())


def test_a_smaller_pool_is_taken_where_both_sides_say_so(ends: Any) -> None:
    prefill = ends.prefill(pool(8), max_context_tokens=1000, accept_smaller_capacity=True)
    decode = ends.decode(pool(64), max_context_tokens=1000, accept_smaller_capacity=True)
    handoff = _reserve(decode, prefill, n_tokens=16)
    _send(prefill, n_tokens=16)
    handoff.wait(10)


# ---- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "make_source"),
    [
        ("tokens_per_page", lambda: pool(tokens=32)),
        ("dtype", lambda: pool(dtype="float16", heads=4)),
        ("layout", lambda: pool(layout="packed tiles")),
        ("page_bytes", lambda: pool(heads=4)),
        ("groups", lambda: PagePool.allocate([GroupSpec("other", 1, (16, 2), "float32", 16)], pages=8)),
    ],
    ids=["tokens_per_page", "dtype", "layout", "heads", "group"],
)
def test_pools_that_cannot_exchange_pages_are_refused_with_the_field_and_both_values(
    ends: Any, field: str, make_source: Callable[[], PagePool]
) -> None:
    prefill, decode = ends.prefill(make_source()), ends.decode(pool())
    handoff = _reserve(decode, prefill, n_tokens=32)
    with pytest.raises(IncompatiblePool) as refused:
        handoff.wait(10)
    details = refused.value.details
    assert details["field"] == field
    assert details["ours"] != details["theirs"]
    assert refused.value.peer is not None and not refused.value.retryable
    assert handoff.wait_released(10)


@pytest.mark.parametrize(("prefill_mode", "decode_mode"), [("coverage", "digest"), ("digest", "coverage")])
def test_coverage_asked_for_on_one_side_only_is_refused(ends: Any, prefill_mode: str, decode_mode: str) -> None:
    prefill, decode = ends.prefill(pool(), verify=prefill_mode), ends.decode(pool(), verify=decode_mode)
    with pytest.raises(KvxferError, match="verify"):
        _reserve(decode, prefill, n_tokens=16).wait(10)


@pytest.mark.parametrize("mode", ["coverage", "digest"])
def test_the_verify_mode_shows_in_the_handoff(make_pair: Any, mode: str) -> None:
    pair = make_pair(prefill={"verify": mode}, decode={"verify": mode})
    assert pair.hand_over("r", SOURCE, TARGET, N_TOKENS).stats["verify"] == mode
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_digest_is_what_one_gets_without_asking(pair: Any) -> None:
    assert pair.hand_over("r", SOURCE, TARGET, N_TOKENS).stats["verify"] == "digest"


def test_a_verify_mode_that_does_not_exist_is_refused(ends: Any) -> None:
    for start in (ends.prefill, ends.decode):
        with pytest.raises(KvxferError, match="verify"):
            start(pool(), verify="none")


# ---- incarnations ----------------------------------------------------------------------------------------------------


def test_the_incarnation_that_came_with_the_request_is_accepted(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS, incarnation=pair.prefill.incarnation)
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)


def test_another_incarnation_fails_as_restarted_and_the_pages_come_back(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS, incarnation="00" * 8)
    with pytest.raises(PeerRestarted) as refused:
        handoff.wait(10)
    assert refused.value.retryable
    assert handoff.wait_released(10)
    assert not pair.target.pool.ledger.states(0).any()


def test_another_incarnation_is_refused_at_the_call_once_the_session_is_open(pair: Any) -> None:
    pair.hand_over("first", SOURCE, TARGET, N_TOKENS)
    with pytest.raises(PeerRestarted):
        pair.reserve("r", TARGET, N_TOKENS, incarnation="00" * 8)
    pair.hand_over("r", SOURCE, TARGET, N_TOKENS)


@pytest.mark.parametrize("incarnation", ["no hex", ["00" * 8, None]])
def test_an_incarnation_that_cannot_be_one_is_refused(pair: Any, incarnation: Any) -> None:
    with pytest.raises(GeometryError, match="incarnation"):
        pair.reserve("r", TARGET, N_TOKENS, incarnation=incarnation)


def test_a_prefill_that_does_not_answer_is_lost_at_its_deadline(ends: Any) -> None:
    decode = ends.decode(pool(), dial_timeout_s=0.2)
    handoff = decode.reserve("r", {"kv": Pages([0], [0], n_tokens=16)}, prefill="127.0.0.1:1", timeout_s=10)
    with pytest.raises(PeerLost) as lost:
        handoff.wait(10)
    assert lost.value.retryable and "127.0.0.1:1" in str(lost.value)
    assert handoff.wait_released(10)


def _reserve(decode: Any, prefill: Any, *, n_tokens: int) -> Any:
    count = -(-n_tokens // 16)
    pages = {"kv": Pages(range(count), range(count), first_token=0, n_tokens=n_tokens)}
    return decode.reserve("r", pages, prefill=prefill.address, timeout_s=10)


def _send(prefill: Any, *, n_tokens: int) -> None:
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(-(-n_tokens // 16)), range(-(-n_tokens // 16)))})
    grant.commit(n_tokens)
