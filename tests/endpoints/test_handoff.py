"""The good path through the public API."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import Declined

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


def test_every_token_arrives_and_the_slots_past_the_last_one_are_zero(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    assert ready.n_tokens == N_TOKENS
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_write_before_reserve_is_normal(pair: Any) -> None:
    pair.send("r", SOURCE, N_TOKENS, aux=b"first token: 7")
    ready = pair.reserve("r", TARGET, N_TOKENS).wait(10)
    assert ready.aux == b"first token: 7"
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_page_can_be_handed_over_again_and_again(pair: Any) -> None:
    for number in range(30):
        pair.source.fill(number)
        pair.hand_over(f"r{number}", SOURCE, TARGET, N_TOKENS)
        pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_prefill_in_another_process_delivers_the_same(start_worker: Any, decode: Any, target: Any, lane: str) -> None:
    prefill = start_worker("prefill", seed=1)
    handoff = decode.reserve(
        "r", _at(TARGET), prefill=prefill.hello["address"], incarnation=prefill.hello["incarnation"], timeout_s=10
    )
    prefill.call("send", "r", SOURCE, N_TOKENS)
    ready = handoff.wait(10)
    assert ready.stats["lane"] == ("tcp" if lane == "tcp" else "local")
    assert all(layer[TARGET].any() for layer in target.layers)
    assert prefill.call("released", "r")


def test_zero_pages_of_a_zero_token_handoff_still_need_a_commit(pair: Any) -> None:
    handoff = pair.reserve("r", [], 0)
    with pytest.raises(TimeoutError):
        handoff.wait(0.1)
    pair.send("r", [], 0)
    assert handoff.wait(10).n_tokens == 0


def _at(pages: list[int]) -> dict[str, Any]:
    from kvxfer import Pages

    return {"kv": Pages(range(len(pages)), pages, first_token=0, n_tokens=N_TOKENS)}


def test_a_handoff_given_up_before_it_was_offered_lets_prefill_go(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=30)
    with pair.decode._lock:  # no answer is heard in between: the session is not up yet, and nothing was offered
        pair.reserve("r", TARGET, N_TOKENS).abort("the client went away")
    assert grant.wait_released(10)
    assert isinstance(grant.error, Declined)
