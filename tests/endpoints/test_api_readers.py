"""Several decode ranks of one request: one Grant, one source, as many reservations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import GroupSpec, PagePool, Pages, Shard
from kvxfer.errors import Aborted, DeadlineExceeded, Declined, KvxferError, Rejected

N_TOKENS = 64
HEADS = 4
SOURCE, FIRST, SECOND = [5, 3, 9, 7], [2, 11, 4, 12], [1, 0, 15, 8]


class Readers:
    """A prefill that holds all heads and two decode ranks that hold half of them each."""

    def __init__(self, ends: Any) -> None:
        self.source = ends.fill(_pool(None), seed=1)
        self.targets = [_pool(Shard(2, 2 * rank, 2 * rank + 2, HEADS)) for rank in range(2)]
        self.prefill = ends.prefill(self.source)
        self.decodes = [ends.decode(target) for target in self.targets]

    def reserve(self, rank: int, *, first_page: int = 0, **more: Any) -> Any:
        pages = (FIRST, SECOND)[rank][first_page:]
        table = Pages(range(first_page, 4), pages, first_token=16 * first_page, n_tokens=N_TOKENS - 16 * first_page)
        options = {"readers": 2, "rank": rank, "timeout_s": 10, **more}
        return self.decodes[rank].reserve("r", {"kv": table}, prefill=self.prefill.address, **options)

    def accept(self, **more: Any) -> Any:
        return self.prefill.accept("r", **{"timeout_s": 10, **more})

    def send(self, **more: Any) -> Any:
        grant = self.accept(**more)
        grant.write({"kv": Pages(range(4), SOURCE)})
        grant.commit(N_TOKENS, b"for both")
        return grant

    def assert_delivered(self, rank: int, first_page: int = 0) -> None:
        heads = slice(2 * rank, 2 * rank + 2)
        for layer in range(2):
            sent = self.source.tensor("kv", layer)[SOURCE[first_page:]][:, :, heads]
            landed = self.targets[rank].tensor("kv", layer)[(FIRST, SECOND)[rank][first_page:]]
            np.testing.assert_array_equal(landed, sent)


@pytest.fixture
def ranks(ends: Any) -> Readers:
    return Readers(ends)


@pytest.mark.parametrize("readers", [None, 2])
def test_each_rank_gets_its_heads_of_one_source(ranks: Readers, readers: int | None) -> None:
    handoffs = [ranks.reserve(rank) for rank in range(2)]
    grant = ranks.send(readers=readers)
    for rank, handoff in enumerate(handoffs):
        assert handoff.wait(10).aux == b"for both"
        ranks.assert_delivered(rank)
    assert grant.wait_released(10)
    assert grant.error is None


def test_readers_that_ask_for_different_ranges_each_get_theirs(ranks: Readers, ends: Any) -> None:
    handoffs = [ranks.reserve(0, first_page=3), ranks.reserve(1, first_page=1)]
    grant = ranks.accept()
    grant.write({"kv": Pages(range(4), SOURCE)})
    ends.until(lambda: "offered" in _kinds(ranks.prefill))
    assert grant.first_token == 16
    grant.commit(N_TOKENS)
    for handoff in handoffs:
        handoff.wait(10)
    ranks.assert_delivered(0, first_page=3)
    ranks.assert_delivered(1, first_page=1)


def test_one_rank_that_aborts_does_not_end_the_other(ranks: Readers, ends: Any) -> None:
    handoffs = [ranks.reserve(rank) for rank in range(2)]
    grant = ranks.accept()
    grant.write({"kv": Pages(range(4), SOURCE)}, layers=0)
    ends.until(lambda: "offered" in _kinds(ranks.prefill))
    handoffs[0].abort("this rank ran out of memory")
    assert handoffs[0].wait_released(10)
    grant.write({"kv": Pages(range(4), SOURCE)}, layers=1)
    grant.commit(N_TOKENS)
    handoffs[1].wait(10)
    ranks.assert_delivered(1)
    assert grant.wait_released(10)
    ends.until(lambda: grant.error is not None)  # the sources may be free before the outcome is known
    assert isinstance(grant.error, Aborted)
    assert grant.error.details["readers_failed"] == [0]
    assert grant.error.details["readers_done"] == [1]


def test_the_source_stays_pinned_until_the_last_reader_has_ended(ranks: Readers) -> None:
    first = ranks.reserve(0)
    grant = ranks.send()
    first.wait(10)
    assert not grant.wait_released(0.2)
    second = ranks.reserve(1)
    second.wait(10)
    assert grant.wait_released(10)
    ranks.assert_delivered(1)


def test_a_grant_is_offered_only_when_all_readers_have_reserved(ranks: Readers, ends: Any) -> None:
    grant = ranks.accept()
    ranks.reserve(0)
    ends.until(lambda: grant.first_token is not None)
    assert _kinds(ranks.prefill) == []
    ranks.reserve(1)
    seen: list[str] = []
    ends.until(lambda: bool(seen.extend(_kinds(ranks.prefill)) or seen))
    assert seen == ["offered"]


def test_an_abort_at_prefill_reaches_every_reader(ranks: Readers, ends: Any) -> None:
    handoffs = [ranks.reserve(rank) for rank in range(2)]
    grant = ranks.accept()
    ends.until(lambda: "offered" in _kinds(ranks.prefill))
    grant.write({"kv": Pages(range(4), SOURCE)})
    assert grant.abort("preempted", drain_timeout_s=10)
    for handoff in handoffs:
        with pytest.raises(Aborted, match="preempted"):
            handoff.wait(10)
        assert handoff.wait_released(10)


def test_a_reader_that_never_comes_fails_the_grant_after_the_commit_and_the_other_is_served(ranks: Readers) -> None:
    first = ranks.reserve(0)
    grant = ranks.send(timeout_s=0.3)
    first.wait(10)
    ranks.assert_delivered(0)
    assert grant.wait_released(10)
    assert isinstance(grant.error, DeadlineExceeded)
    assert (grant.error.details["came"], grant.error.details["readers"]) == (1, 2)


def test_a_rank_that_declines_counts_as_come(ranks: Readers) -> None:
    ranks.decodes[1].decline("r", prefill=ranks.prefill.address, reason="full hit", rank=1)
    first = ranks.reserve(0)
    grant = ranks.send()
    first.wait(10)
    assert grant.wait_released(10)
    assert grant.error is None


def test_a_request_that_every_rank_declines_ends_as_declined(ranks: Readers) -> None:
    grant = ranks.accept(readers=2)
    for rank in range(2):
        ranks.decodes[rank].decline("r", prefill=ranks.prefill.address, reason="full hit", rank=rank)
    assert grant.wait_released(10)
    assert isinstance(grant.error, Declined)


def test_a_rank_that_counts_other_readers_is_refused(ranks: Readers) -> None:
    grant = ranks.accept(readers=1)
    stranger = ranks.reserve(1)
    with pytest.raises(Rejected) as refused:
        stranger.wait(10)
    assert (refused.value.details["ours"], refused.value.details["theirs"]) == (1, 2)
    assert not grant.released


def test_a_second_reservation_of_a_rank_is_refused_and_the_first_is_served(ranks: Readers, ends: Any) -> None:
    first, other_rank = ranks.reserve(0), ranks.reserve(1)
    grant = ranks.accept()
    ends.until(lambda: "offered" in _kinds(ranks.prefill))
    twin = ends.decode(_pool(Shard(2, 0, 2, HEADS)))
    table = {"kv": Pages(range(4), FIRST, first_token=0, n_tokens=N_TOKENS)}
    second = twin.reserve("r", table, prefill=ranks.prefill.address, readers=2, rank=0, timeout_s=10)
    with pytest.raises(KvxferError, match="live reservation"):
        second.wait(10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    for handoff in (first, other_rank):
        handoff.wait(10)
    ranks.assert_delivered(0)


def _pool(shard: Shard | None) -> PagePool:
    heads = HEADS if shard is None else shard.stop - shard.start
    shard = Shard(2, 0, HEADS, HEADS) if shard is None else shard
    spec = GroupSpec("kv", 2, (16, heads, 8), "float32", 16, token_axis=1, shard=shard)
    return PagePool.allocate([spec], pages=16)


def _kinds(endpoint: Any) -> list[str]:
    return [event.kind for event in endpoint.poll()]
