"""Which tokens and pages a reader asks for: prefix hits, sparse tables, ranges by group, nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import GroupSpec, PagePool, Pages
from kvxfer.errors import GeometryError, VerificationFailed
from kvxfer.pool import page_rows

N_TOKENS = 64
SOURCE = [5, 3, 9, 7]


def test_a_reader_that_reserved_only_the_tail_gets_the_tail(pair: Any) -> None:
    handoff = _reserve(pair, range(2, 4), [20, 21], first_token=32, n_tokens=32)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    assert handoff.wait(10).n_tokens == N_TOKENS
    pair.assert_delivered(SOURCE[2:], [20, 21], 32)


@pytest.mark.parametrize("early", [True, False])
def test_pages_of_a_prefix_hit_are_skipped_and_counted(pair: Any, early: bool) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    if early:
        grant.write({"kv": Pages(range(4), SOURCE)})
    _reserve(pair, [3], [20], first_token=48, n_tokens=16)
    pair.wait_offered(grant)
    if not early:
        grant.write({"kv": Pages(range(4), SOURCE)})
    assert grant.skipped_chunks == 3 * len(pair.source.layers)


def test_prefill_that_knows_of_the_prefix_hit_writes_the_tail_only(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    assert grant.first_token is None
    handoff = _reserve(pair, range(2, 4), [20, 21], first_token=40, n_tokens=24)
    pair.wait_offered(grant)
    assert grant.first_token == 40
    grant.write({"kv": Pages(range(2, 4), SOURCE[2:])})
    grant.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE[2:], [20, 21], 32)


def test_a_hole_in_the_page_table_is_not_waited_for(pair: Any) -> None:
    handoff = _reserve(pair, [0, 3], [20, 21], first_token=0, n_tokens=N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS)
    ready = handoff.wait(10)
    pair.assert_delivered([SOURCE[0], SOURCE[3]], [20, 21], 32)
    assert ready.pages["kv"].logical.tolist() == [0, 3]


def test_the_order_in_which_pages_are_named_does_not_matter(pair: Any) -> None:
    handoff = _reserve(pair, [2, 0, 3, 1], [22, 20, 23, 21], first_token=0, n_tokens=N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages([1, 3, 0, 2], [SOURCE[1], SOURCE[3], SOURCE[0], SOURCE[2]])})
    grant.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE, [20, 21, 22, 23], N_TOKENS)


def test_each_group_has_its_own_token_range_and_all_end_at_one_token(ends: Any) -> None:
    source, target = ends.fill(_two_groups(), seed=1), _two_groups()
    prefill, decode = ends.prefill(source), ends.decode(target)
    pages = {
        "full": Pages(range(1, 4), [1, 2, 3], first_token=16, n_tokens=48),
        "sliding": Pages([7], [9], first_token=56),  # inherits the end: token 64
    }
    handoff = decode.reserve("r", pages, prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"full": Pages(range(4), SOURCE), "sliding": Pages(range(5, 8), [4, 5, 6])})
    grant.commit(N_TOKENS)
    assert handoff.wait(10).n_tokens == N_TOKENS
    np.testing.assert_array_equal(page_rows(target, 0, 0)[[1, 2, 3]], page_rows(source, 0, 0)[SOURCE[1:]])
    np.testing.assert_array_equal(page_rows(target, 1, 0)[9], page_rows(source, 1, 0)[6])


def test_groups_that_end_at_different_tokens_are_refused_at_once(ends: Any) -> None:
    prefill, decode = ends.prefill(_two_groups()), ends.decode(_two_groups())
    pages = {"full": Pages([0], [1], n_tokens=16), "sliding": Pages([0, 1], [1, 2], n_tokens=15)}
    with pytest.raises(GeometryError, match="one token"):
        decode.reserve("r", pages, prefill=prefill.address, timeout_s=10)


@pytest.mark.parametrize(
    ("logical", "pool", "first_token", "n_tokens"),
    [
        ([4], [1], 0, 64),  # begins after the last token
        ([0], [1], 16, 16),  # ends before the first
        ([0], [32], 0, 16),  # not a page of the pool
        ([0, 1], [1, 1], 0, 32),  # one page for two
        ([0], [1], 0, None),  # no end
    ],
)
def test_pages_that_cannot_be_are_refused_at_once(
    pair: Any, logical: list[int], pool: list[int], first_token: int, n_tokens: int | None
) -> None:
    with pytest.raises(GeometryError):
        _reserve(pair, logical, pool, first_token=first_token, n_tokens=n_tokens)
    assert not pair.target.pool.ledger.states(0).any()


def test_a_commit_of_other_tokens_than_reserved_is_refused_by_their_number(pair: Any) -> None:
    handoff = _reserve(pair, range(4), [20, 21, 22, 23], first_token=0, n_tokens=63)
    pair.send("r", SOURCE, N_TOKENS)
    with pytest.raises(VerificationFailed) as refused:
        handoff.wait(10)
    assert refused.value.details["kind"] == "tokens"


def test_pages_beyond_the_committed_tokens_are_refused_at_commit(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    with pytest.raises(GeometryError, match="beyond"):
        grant.commit(48)
    grant.commit(49)


def test_pages_outside_the_source_pool_are_refused_and_nothing_is_sent(pair: Any) -> None:
    handoff = _reserve(pair, range(4), [20, 21, 22, 23], first_token=0, n_tokens=N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    with pytest.raises(GeometryError, match="outside"):
        grant.write({"kv": Pages(range(4), [5, 3, 9, 32])})
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE, [20, 21, 22, 23], N_TOKENS)


def test_a_full_prefix_hit_reserves_no_page_and_still_needs_a_commit(pair: Any) -> None:
    handoff = _reserve(pair, [], [], first_token=N_TOKENS, n_tokens=0)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    with pytest.raises(TimeoutError):
        handoff.wait(0.05)
    grant.commit(N_TOKENS, b"next: 9")
    ready = handoff.wait(10)
    assert (ready.n_tokens, ready.aux, len(ready.pages["kv"])) == (N_TOKENS, b"next: 9", 0)


def _two_groups() -> PagePool:
    return PagePool.allocate(
        [GroupSpec("full", 1, (16, 8), "float32", 16), GroupSpec("sliding", 1, (8, 8), "float32", 8, window=16)],
        pages=16,
    )


def _reserve(pair: Any, logical: Any, pool: list[int], *, first_token: int, n_tokens: int | None) -> Any:
    pages = {"kv": Pages(logical, pool, first_token=first_token, n_tokens=n_tokens)}
    return pair.decode.reserve("r", pages, prefill=pair.prefill.address, timeout_s=10)
