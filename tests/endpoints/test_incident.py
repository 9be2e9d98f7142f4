"""S1: what prefill did not write, or wrote for something else, is refused, and the refusal says what is wrong with
which pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import DecodeEndpoint, GroupSpec, PagePool, Pages, PrefillEndpoint
from kvxfer.errors import AdmissionClosed, DuplicateWrite, GeometryError, VerificationFailed

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


def refusal(handoff: Any) -> VerificationFailed:
    with pytest.raises(VerificationFailed) as caught:
        handoff.wait(10)
    assert caught.value.reservation == handoff.reservation
    assert caught.value.request_id == handoff.request_id
    return caught.value


def test_a_placeholder_of_one_token_in_the_reserved_page_is_refused_by_its_token_count(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET[:1], 10)
    pair.send("r", SOURCE[:1], 1)
    error = refusal(handoff)
    assert error.details["kind"] == "tokens"
    assert "1 token" in str(error) and "10" in str(error)


def test_a_placeholder_of_one_page_committed_as_the_whole_prompt_is_refused_with_the_missing_pages(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages([0], SOURCE[:1])})
    grant.commit(N_TOKENS)
    error = refusal(handoff)
    assert error.details["kind"] == "coverage"
    assert error.details["logical_pages"] == {"kv": [1, 2, 3]}
    assert sorted(error.details["pool_pages"]["kv"]) == sorted(TARGET[1:])


def test_the_pages_of_a_refused_handoff_come_back(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE[:1], 1)
    refusal(handoff)
    assert handoff.wait_released(10)
    pair.hand_over("r2", SOURCE, TARGET, N_TOKENS)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


@pytest.mark.parametrize("missing", range(4))
def test_all_pages_but_one_are_not_enough(pair: Any, missing: int) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    written = [page for page in range(4) if page != missing]
    grant.write({"kv": Pages(written, [SOURCE[page] for page in written])})
    grant.commit(N_TOKENS)
    error = refusal(handoff)
    assert (error.details["kind"], error.details["logical_pages"]) == ("coverage", {"kv": [missing]})


def test_all_pages_but_one_layer_of_one_page_are_not_enough(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)}, layers="0")
    grant.write({"kv": Pages(range(3), SOURCE[:3])}, layers="1")
    grant.commit(N_TOKENS)
    assert refusal(handoff).details["logical_pages"] == {"kv": [3]}


def test_one_page_written_twice_does_not_stand_for_another(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(3), SOURCE[:3])})
    with pytest.raises(DuplicateWrite):
        grant.write({"kv": Pages([2], SOURCE[3:])})
    grant.commit(N_TOKENS)
    assert refusal(handoff).details["logical_pages"] == {"kv": [3]}


def test_a_second_write_of_a_page_raises_and_the_first_one_counts(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    with pytest.raises(DuplicateWrite):
        grant.write({"kv": Pages([1], [20])})
    grant.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_write_after_commit_raises_and_changes_nothing(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    with pytest.raises(AdmissionClosed):
        grant.write({"kv": Pages([0], [20])})
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_a_write_after_commit_of_missing_pages_does_not_complete_the_handoff(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(3), SOURCE[:3])})
    grant.commit(N_TOKENS)
    with pytest.raises(AdmissionClosed):
        grant.write({"kv": Pages([3], SOURCE[3:])})
    assert refusal(handoff).details["kind"] == "coverage"


def test_a_second_commit_raises_and_the_first_one_counts(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.send("r", SOURCE, N_TOKENS, aux=b"one")
    with pytest.raises(AdmissionClosed):
        grant.commit(N_TOKENS, b"two")
    assert handoff.wait(10).aux == b"one"


@pytest.mark.parametrize("committed", [49, 51, 33, 64, 0])
def test_a_commit_of_another_number_of_tokens_is_refused(pair: Any, committed: int) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(-(-committed // 16)), SOURCE[: -(-committed // 16)])})
    grant.commit(committed)
    assert refusal(handoff).details["kind"] == "tokens"


def test_a_written_page_beyond_the_committed_tokens_is_refused_at_the_call(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    with pytest.raises(GeometryError):
        grant.commit(48)
    grant.commit(49)


def test_a_page_outside_the_reservation_never_leaves_the_sender(pair: Any) -> None:
    before = pair.target.copy(range(32))
    handoff = pair.decode.reserve(
        "r", {"kv": Pages([2, 3], TARGET[:2], first_token=32, n_tokens=18)}, prefill=pair.prefill.address, timeout_s=10
    )
    grant = pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    after = pair.target.copy(range(32))
    others = [page for page in range(32) if page not in TARGET[:2]]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[others], new[others])
        assert new[TARGET[0]].any()
    assert grant.wait_released(10)


def test_pages_outside_the_pool_are_refused_at_the_call(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    with pytest.raises(GeometryError):
        grant.write({"kv": Pages([0], [32])})
    with pytest.raises(GeometryError):
        pair.reserve("r", [32], 10)


def test_the_aux_of_another_request_never_arrives_with_this_one(pair: Any) -> None:
    first, second = pair.reserve("a", TARGET[:1], 16), pair.reserve("b", TARGET[1:2], 16)
    pair.send("b", SOURCE[1:2], 16, aux=b"of b")
    pair.send("a", SOURCE[:1], 16, aux=b"of a")
    assert (first.wait(10).aux, second.wait(10).aux) == (b"of a", b"of b")


def test_a_group_that_was_announced_and_not_delivered_refuses_the_handoff(lane: str) -> None:
    specs = [
        GroupSpec("full", 2, (16, 8), "float32", 16, token_axis=1),
        GroupSpec("state", 1, (100,), "float32", 0),
    ]
    source, target = PagePool.allocate(specs, pages=8), PagePool.allocate(specs, pages=8)
    wanted = {"full": Pages([0, 1], [4, 2], first_token=0, n_tokens=20), "state": Pages([0], [6])}
    kind = "tcp" if lane == "tcp" else "local"
    with PrefillEndpoint(source, bind="127.0.0.1:0") as prefill, DecodeEndpoint(target, lane_kinds=(kind,)) as decode:
        handoff = decode.reserve("r", wanted, prefill=prefill.address, timeout_s=10)
        grant = prefill.accept("r", timeout_s=10)
        grant.write({"full": Pages([0, 1], [1, 2])})
        grant.commit(20)
        error = refusal(handoff)
        assert error.details["kind"] == "coverage"
        assert "state" in str(error)
