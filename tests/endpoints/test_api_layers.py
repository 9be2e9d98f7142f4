"""Writing layer by layer: by name, by number, for a batch, with progress records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import PageGroup, PagePool, Pages
from kvxfer.errors import AdmissionClosed, DuplicateWrite, GeometryError, VerificationFailed
from kvxfer.pool import page_rows

NAMES = ["model.0", "model.0", "model.1", "model.1"]  # K and V of two layers
N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 12]


@pytest.fixture
def source(ends: Any) -> PagePool:
    pool: PagePool = ends.fill(_pool(), seed=1)
    return pool


@pytest.fixture
def target() -> PagePool:
    return _pool()


def test_a_layer_name_means_all_regions_of_that_layer(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    grant.write(_table(SOURCE), layers="model.1")
    grant.write(_table(SOURCE), layers=["model.0"])
    _finish(handoff, grant, source, target)


def test_a_layer_number_counts_layers_and_not_regions(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    for number in range(2):
        grant.write(_table(SOURCE), layers=number)
    with pytest.raises(GeometryError, match="2"):
        grant.write(_table(SOURCE), layers=2)
    _finish(handoff, grant, source, target)


def test_a_regions_own_name_means_that_region_alone(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    for region in ("model.1.1", "model.0.0", "model.1.0", "model.0.1"):
        grant.write(_table(SOURCE), layers=region)
    _finish(handoff, grant, source, target)


def test_whatever_names_a_layer_writes_what_the_pool_says_it_means(ends: Any, source: PagePool) -> None:
    prefill = ends.prefill(source)
    regions = {"model.0", "model.1", "model.0.0", "model.0.1", "model.1.0", "model.1.1", 0, 1}
    for layer in regions:
        ((_, _, _, chosen),) = prefill._batches("r", _table(SOURCE), layer)
        np.testing.assert_array_equal(chosen, source.regions_of("kv", layer))


def test_half_a_layer_is_no_layer(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    grant.write(_table(SOURCE), layers=["model.0", "model.1.0"])
    grant.commit(N_TOKENS)
    with pytest.raises(VerificationFailed) as refused:
        handoff.wait(10)
    assert refused.value.details["kind"] == "coverage"


@pytest.mark.parametrize("again", ["model.0", 0, "model.0.1", None])
def test_a_layer_is_written_once_whatever_it_is_called(
    ends: Any, source: PagePool, target: PagePool, again: str | int | None
) -> None:
    handoff, grant = _begin(ends, source, target)
    grant.write(_table(SOURCE), layers="model.0")
    with pytest.raises(DuplicateWrite):
        grant.write(_table(SOURCE), layers=again)
    grant.write(_table(SOURCE), layers="model.1")
    _finish(handoff, grant, source, target)


def test_an_unknown_layer_is_refused_and_nothing_is_written(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    with pytest.raises(GeometryError, match=r"model\.7"):
        grant.write(_table(SOURCE), layers=["model.0", "model.7"])
    grant.write(_table(SOURCE))
    _finish(handoff, grant, source, target)


@pytest.mark.parametrize("before_reserve", [True, False])
def test_progress_records_change_nothing_about_what_arrives(
    ends: Any, source: PagePool, target: PagePool, before_reserve: bool
) -> None:
    prefill, decode = ends.prefill(source), ends.decode(target)
    grant = prefill.accept("r", timeout_s=10)
    if before_reserve:
        grant.write(_table(SOURCE), layers=0, progress=True)
    handoff = decode.reserve("r", _table(TARGET), prefill=prefill.address, timeout_s=10)
    if not before_reserve:
        grant.write(_table(SOURCE), layers=0, progress=True)
    grant.write(_table(SOURCE), layers=1, progress=True)
    _finish(handoff, grant, source, target)


def test_chunked_prefill_may_write_pages_in_any_number_of_calls(ends: Any, source: PagePool, target: PagePool) -> None:
    handoff, grant = _begin(ends, source, target)
    for logical in (2, 0, 3, 1):
        grant.write({"kv": Pages([logical], [SOURCE[logical]])}, progress=True)
    _finish(handoff, grant, source, target)


def test_a_plan_writes_a_layer_of_every_request_in_one_call(ends: Any, source: PagePool, target: PagePool) -> None:
    prefill, decode = ends.prefill(source), ends.decode(target)
    handoffs, entries = [], []
    for number in range(4):
        pages = {"kv": Pages([0], [TARGET[number]], first_token=0, n_tokens=16)}
        handoffs.append(decode.reserve(f"r{number}", pages, prefill=prefill.address, timeout_s=10))
        entries.append((prefill.accept(f"r{number}", timeout_s=10), {"kv": Pages([0], [SOURCE[number]])}))
    plan = prefill.plan(entries)
    plan.write("model.1", progress=True)
    plan.write("model.0")
    for grant, _ in entries:
        grant.commit(16)
    for handoff in handoffs:
        handoff.wait(10)
    _assert_delivered(source, target)


def test_a_plan_passes_over_a_grant_that_has_ended_and_serves_the_others(
    ends: Any, source: PagePool, target: PagePool
) -> None:
    prefill, decode = ends.prefill(source), ends.decode(target)
    ended, living = (prefill.accept(name, timeout_s=10) for name in ("ended", "living"))
    plan = prefill.plan([(ended, _table([0, 1, 2, 6])), (living, _table(SOURCE))])
    plan.write(0)
    ended.abort()
    plan.write(1)
    living.commit(N_TOKENS)
    decode.reserve("living", _table(TARGET), prefill=prefill.address, timeout_s=10).wait(10)
    with pytest.raises(AdmissionClosed):
        ended.write(_table([0, 1, 2, 6]), layers=1)
    _assert_delivered(source, target)


def test_a_plan_writes_a_layer_once_and_knows_only_layers_of_its_groups(ends: Any, source: PagePool) -> None:
    prefill = ends.prefill(source)
    plan = prefill.plan([(prefill.accept("r", timeout_s=10), _table(SOURCE))])
    plan.write("model.0")
    for same in ("model.0", 0):
        with pytest.raises(DuplicateWrite):
            plan.write(same)
    with pytest.raises(GeometryError, match=r"model\.9"):
        plan.write("model.9")


def test_a_plan_is_refused_before_anything_is_written(ends: Any, source: PagePool) -> None:
    prefill, other = ends.prefill(source), ends.prefill(_pool())
    grant, foreign = prefill.accept("r", timeout_s=10), other.accept("r", timeout_s=10)
    for entry in ((grant, _table([99])), (grant, {"no such group": Pages([0], [1])}), (foreign, _table(SOURCE))):
        with pytest.raises(GeometryError):
            prefill.plan([(grant, _table(SOURCE)), entry])
    assert grant.state == "offered"


def test_an_empty_plan_writes_nothing(ends: Any, source: PagePool) -> None:
    ends.prefill(source).plan([]).write("model.0")


def _pool() -> PagePool:
    tensors = [np.zeros((16, 16, 2, 8), np.float32) for _ in NAMES]
    return PagePool([PageGroup("kv", tensors, tokens_per_page=16, token_axis=1, layers=NAMES)])


def _table(pages: list[int]) -> dict[str, Pages]:
    return {"kv": Pages(range(len(pages)), pages, first_token=0, n_tokens=16 * len(pages))}


def _begin(ends: Any, source: PagePool, target: PagePool) -> tuple[Any, Any]:
    prefill, decode = ends.prefill(source), ends.decode(target)
    handoff = decode.reserve("r", _table(TARGET), prefill=prefill.address, timeout_s=10)
    return handoff, prefill.accept("r", timeout_s=10)


def _finish(handoff: Any, grant: Any, source: PagePool, target: PagePool) -> None:
    grant.commit(N_TOKENS)
    handoff.wait(10)
    assert grant.wait_released(10)
    _assert_delivered(source, target)


def _assert_delivered(source: PagePool, target: PagePool) -> None:
    for region in range(len(NAMES)):
        np.testing.assert_array_equal(page_rows(target, 0, region)[TARGET], page_rows(source, 0, region)[SOURCE])
