"""Several prefill ranks of one request: shards, pipeline stages, replicas, and ranks with nothing to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer import GroupSpec, PagePool, Pages, Shard
from kvxfer.errors import Aborted, GeometryError, IncompatiblePool, KvxferError, VerificationFailed

N_TOKENS = 64
HEADS = 8
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 12]


class Job:
    """One request from several prefill ranks to one or more decode ranks."""

    def __init__(self, ends: Any, sources: Sequence[PagePool], targets: Sequence[PagePool]) -> None:
        self.sources = [ends.fill(source, seed) for seed, source in enumerate(sources)]
        self.targets = list(targets)
        self.prefills = [ends.prefill(source) for source in self.sources]
        self.decodes = [ends.decode(target) for target in self.targets]
        self.addresses = [prefill.address for prefill in self.prefills]

    def reserve(self, rank: int = 0, request_id: str = "r", **more: Any) -> Any:
        options = {"prefill": self.addresses, "readers": len(self.targets), "rank": rank, "timeout_s": 10, **more}
        return self.decodes[rank].reserve(request_id, _tables(self.targets[rank], TARGET), **options)

    def accept(self) -> list[Any]:
        return [prefill.accept("r", timeout_s=10) for prefill in self.prefills]

    def write(self, leg: int, grant: Any) -> None:
        grant.write(_tables(self.sources[leg], SOURCE))

    def send(self) -> list[Any]:
        grants = self.accept()
        for leg, grant in enumerate(grants):
            self.write(leg, grant)
            grant.commit(N_TOKENS, f"aux of rank {leg}".encode())
        return grants


def heads(start: int, stop: int, **more: Any) -> PagePool:
    """Two layers with heads [start, stop) of HEADS."""
    shard = Shard(2, start, stop, HEADS)
    spec = GroupSpec("kv", 2, (16, stop - start, 4), "float32", 16, token_axis=1, shard=shard, **more)
    return PagePool.allocate([spec], pages=16)


def stage(*layers: str) -> PagePool:
    """A pipeline stage with some of the layers."""
    return PagePool.allocate([GroupSpec("kv", layers, (16, 2, 4), "float32", 16, token_axis=1)], pages=16)


def latent(*, replicated: bool = True) -> PagePool:
    return PagePool.allocate([GroupSpec("latent", 2, (64, 72), "bfloat16", 64, replicated=replicated)], pages=16)


def test_two_head_shards_make_one_whole_page(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.send()
    ready = handoff.wait(10)
    assert ready.aux == b"aux of rank 0"
    assert ready.stats["legs"] == 2
    for layer in range(2):
        sent = np.concatenate([source.tensor("kv", layer)[SOURCE] for source in job.sources], axis=2)
        np.testing.assert_array_equal(job.targets[0].tensor("kv", layer)[TARGET], sent)
    assert all(grant.wait_released(10) for grant in grants)


@pytest.mark.parametrize(
    ("prefill_splits", "decode_splits"),
    [
        ([(0, 4), (4, 8)], [(0, 4), (4, 8)]),
        ([(0, 3), (3, 8)], [(0, 5), (5, 8)]),
        ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 4), (4, 8)]),
        ([(0, 8)], [(0, 1), (1, 8)]),
    ],
    ids=["TP2-TP2", "uneven", "TP4-TP2", "TP1-TP2"],
)
def test_any_split_of_heads_reaches_any_other(
    ends: Any, prefill_splits: list[tuple[int, int]], decode_splits: list[tuple[int, int]]
) -> None:
    job = Job(ends, [heads(*split) for split in prefill_splits], [heads(*split) for split in decode_splits])
    handoffs = [job.reserve(rank) for rank in range(len(decode_splits))]
    grants = job.send()
    for handoff in handoffs:
        handoff.wait(10)
    for layer in range(2):
        sent = np.concatenate([source.tensor("kv", layer)[SOURCE] for source in job.sources], axis=2)
        landed = np.concatenate([target.tensor("kv", layer)[TARGET] for target in job.targets], axis=2)
        np.testing.assert_array_equal(landed, sent)
    assert all(grant.wait_released(10) for grant in grants)


def test_pipeline_stages_bring_their_layers(ends: Any) -> None:
    job = Job(ends, [stage("l0", "l1"), stage("l2")], [stage("l0", "l1", "l2")])
    handoff = job.reserve()
    job.send()
    handoff.wait(10)
    for leg, layer in ((0, "l0"), (0, "l1"), (1, "l2")):
        sent = job.sources[leg].tensor("kv", layer)[SOURCE]
        np.testing.assert_array_equal(job.targets[0].tensor("kv", layer)[TARGET], sent)


def test_replicas_elect_one_writer_a_region_and_every_rank_is_let_go(ends: Any) -> None:
    sources = [latent(), latent(), latent()]
    job = Job(ends, sources, [latent()])
    for source in sources:
        ends.fill(source, seed=7)  # replicas hold the same bytes
    handoff, grants = job.reserve(), job.send()
    ready = handoff.wait(10)
    # Two regions and three ranks: one rank had nothing to write, and its grant has ended like the others.
    assert ready.stats["chunks"] == 2 * len(ready.pages["latent"])
    for layer in range(2):
        landed = job.targets[0].tensor("latent", layer)[ready.pages["latent"].pool]
        np.testing.assert_array_equal(landed, sources[0].tensor("latent", layer)[SOURCE[:1]])
    assert all(grant.wait_released(10) and grant.error is None for grant in grants)


def test_a_leg_with_nothing_to_write_still_needs_its_commit(ends: Any) -> None:
    job = Job(ends, [latent(), latent(), latent()], [latent()])
    for source in job.sources:
        ends.fill(source, seed=7)
    handoff, grants = job.reserve(), job.accept()
    for leg, grant in enumerate(grants):
        job.write(leg, grant)
    for grant in grants[:2]:
        grant.commit(N_TOKENS)
    with pytest.raises(TimeoutError):
        handoff.wait(0.2)
    grants[2].commit(N_TOKENS)
    handoff.wait(10)


def test_ready_needs_every_leg(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.accept()
    job.write(0, grants[0])
    grants[0].commit(N_TOKENS)
    with pytest.raises(TimeoutError):
        handoff.wait(0.2)
    job.write(1, grants[1])
    grants[1].commit(N_TOKENS)
    handoff.wait(10)


def test_one_leg_that_wrote_less_refuses_the_whole(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.accept()
    job.write(0, grants[0])
    grants[1].write({"kv": Pages(range(3), SOURCE[:3])})
    for grant in grants:
        grant.commit(N_TOKENS)
    with pytest.raises(VerificationFailed) as refused:
        handoff.wait(10)
    assert refused.value.details["legs"] == [1]
    assert refused.value.details["logical_pages"] == {"kv": [3]}


def test_an_abort_at_decode_reaches_every_leg(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.accept()
    for leg, grant in enumerate(grants):
        job.write(leg, grant)
        ends.until(lambda grant=grant: grant.first_token is not None)
    handoff.abort("client went away")
    assert handoff.wait_released(10)
    for grant in grants:
        assert grant.wait_released(10)
        assert isinstance(grant.error, Aborted)


def test_an_abort_of_one_prefill_rank_ends_the_others(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.accept()
    job.write(0, grants[0])
    for grant in grants:
        ends.until(lambda grant=grant: grant.first_token is not None)
    grants[1].abort("preempted")
    with pytest.raises(Aborted, match="preempted"):
        handoff.wait(10)
    assert handoff.wait_released(10)
    for grant in grants:
        assert grant.wait_released(10)
        assert grant.error is not None


def test_a_prefill_rank_that_is_gone_fails_the_handoff_and_lets_the_others_go(ends: Any) -> None:
    job = Job(ends, [heads(0, 4), heads(4, 8)], [heads(0, 8)])
    handoff, grants = job.reserve(), job.accept()
    for grant in grants:
        ends.until(lambda grant=grant: grant.first_token is not None)
    job.prefills[1].close()
    with pytest.raises(KvxferError):
        handoff.wait(10)
    assert handoff.wait_released(10)
    assert all(grant.wait_released(10) for grant in grants)


@pytest.mark.parametrize(
    ("sources", "target", "field"),
    [
        ([lambda: heads(0, 4)], lambda: heads(0, 8), "shard"),
        ([lambda: stage("l0")], lambda: stage("l0", "l1"), "layers"),
        ([lambda: stage("l0"), lambda: stage("l0")], lambda: stage("l0"), "shard"),
    ],
    ids=["a shard is missing", "a layer is missing", "two ranks hold one layer"],
)
def test_ranks_that_do_not_make_a_whole_are_refused_with_the_field(
    ends: Any, sources: Any, target: Any, field: str
) -> None:
    job = Job(ends, [make() for make in sources], [target()])
    handoff = job.reserve()
    with pytest.raises(IncompatiblePool) as refused:
        handoff.wait(10)
    assert refused.value.details["field"] == field
    assert handoff.wait_released(10)


def test_a_rank_is_listed_once(ends: Any) -> None:
    job = Job(ends, [heads(0, 8)], [heads(0, 8)])
    with pytest.raises(GeometryError):
        job.reserve(prefill=job.addresses * 2)
    with pytest.raises(GeometryError):
        job.reserve(prefill=[])


def test_a_leg_that_had_arrived_whole_counts_although_its_prefill_is_gone_before_the_others_finish(ends: Any) -> None:
    job = Job(ends, [stage("l0", "l1"), stage("l2")], [stage("l0", "l1", "l2")])
    handoff = job.reserve()
    grants = job.accept()
    job.write(0, grants[0])
    grants[0].commit(N_TOKENS, b"aux")
    assert grants[0].wait_released(10)  # every byte and the record have left
    ends.until(lambda: _records(job.decodes[0], handoff) >= 1)
    job.prefills[0].close()
    ends.until(lambda: job.decodes[0].counters().get("fence", 0) >= 1)
    job.write(1, grants[1])
    grants[1].commit(N_TOKENS)
    assert handoff.wait(10).aux == b"aux"
    for leg, layer in ((0, "l0"), (0, "l1"), (1, "l2")):
        sent = job.sources[leg].tensor("kv", layer)[SOURCE]
        np.testing.assert_array_equal(job.targets[0].tensor("kv", layer)[TARGET], sent)


def _tables(pool: PagePool, pages: list[int]) -> dict[str, Pages]:
    tables = {}
    for group in pool.geometry.groups:
        count = N_TOKENS // group.tokens_per_page
        tables[group.name] = Pages(range(count), pages[:count], first_token=0, n_tokens=N_TOKENS)
    return tables


def _records(decode: Any, handoff: Any) -> int:
    """Records that decode has heard of, over all legs of a handoff."""
    legs = decode._core._reservations[handoff.reservation].legs
    return sum(len(leg.records) for leg in legs)
