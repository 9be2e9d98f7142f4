"""Canaries show whether a page still holds what it held before; the page map shows whose it is."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.canary import find_canaries, plant_canaries
from kvxfer.errors import GeometryError, NotReady
from kvxfer.ledger import PageState
from kvxfer.page_group import PageGroup
from kvxfer.page_map import render, styled
from kvxfer.pool import PagePool


def make_pool(page_bytes: int = 100, pages: int = 16) -> PagePool:
    layers = [np.zeros((pages, page_bytes), np.uint8) for _ in range(2)]
    return PagePool([PageGroup("kv", layers, tokens_per_page=1)])


@pytest.mark.parametrize("page_bytes", [8, 15, 16, 100, 4096])
def test_planted_pages_are_found_and_only_those(page_bytes: int) -> None:
    pool = make_pool(page_bytes)
    assert find_canaries(pool).tolist() == []
    assert plant_canaries(pool, [3, 9]).tolist() == [3, 9]
    assert find_canaries(pool).tolist() == [3, 9]
    assert find_canaries(pool, [2, 9]).tolist() == [9]


def test_all_free_pages_are_planted_and_others_left_alone() -> None:
    pool = make_pool()
    pool._ledger.claim(1, {0: [5]})
    planted = plant_canaries(pool)
    assert planted.tolist() == [page for page in range(16) if page != 5]
    pool._ledger.release(1)
    assert not pool.page("kv", 0, 5).any()


def test_a_page_that_was_written_only_in_part_still_carries_its_canary() -> None:
    pool = make_pool()
    plant_canaries(pool)
    for region in range(2):
        pool.page("kv", region, 4)[:] = 1
        pool.page("kv", region, 6)[:80] = 1
        if region:
            pool.page("kv", region, 8)[:] = 1
    found = find_canaries(pool).tolist()
    assert 4 not in found
    assert 6 in found
    assert 8 in found, "its other region was never written"


def test_pages_and_seeds_have_different_canaries() -> None:
    pool = make_pool()
    plant_canaries(pool, seed=1)
    assert pool.page("kv", 0, 0).tobytes() != pool.page("kv", 0, 1).tobytes()
    assert find_canaries(pool, seed=2).tolist() == []
    pool.page("kv", 0, 0)[:] = pool.page("kv", 0, 1)
    pool.page("kv", 1, 0)[:] = 0
    assert 0 not in find_canaries(pool, seed=1), "a neighbour's canary is not this page's"


@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.QUARANTINED])
def test_pages_that_may_still_be_written_are_neither_planted_nor_looked_at(state: PageState) -> None:
    pool = make_pool()
    pool._ledger.claim(1, {0: [5]})
    pool._ledger.mark(1, state)
    with pytest.raises(NotReady):
        plant_canaries(pool, [4, 5])
    with pytest.raises(NotReady):
        find_canaries(pool, [5])
    assert not pool.page("kv", 0, 4).any(), "a refused call must plant nothing"


def test_a_ready_page_is_looked_at_but_never_planted() -> None:
    pool = make_pool()
    plant_canaries(pool)
    pool._ledger.claim(1, {0: [5]})
    pool._ledger.mark(1, PageState.READY)
    assert find_canaries(pool, [5]).tolist() == [5]
    with pytest.raises(NotReady):
        plant_canaries(pool, [5])


def test_a_pool_with_several_page_numberings_needs_the_group() -> None:
    groups = [PageGroup(name, np.zeros((4 + n, 32), np.uint8), tokens_per_page=1) for n, name in enumerate("ab")]
    pool = PagePool(groups)
    with pytest.raises(GeometryError, match="say which group"):
        plant_canaries(pool)
    assert plant_canaries(pool, group="b").tolist() == [0, 1, 2, 3, 4]
    assert find_canaries(pool, group="a").tolist() == []
    with pytest.raises(GeometryError):
        plant_canaries(pool, [4], "a")


def test_an_overlay_is_planted_once() -> None:
    tensor = np.zeros((4, 64), np.uint8)
    pool = PagePool(
        [PageGroup("a", tensor, tokens_per_page=1), PageGroup("b", tensor, tokens_per_page=2)], shared_ids=True
    )
    plant_canaries(pool, [1])
    assert find_canaries(pool).tolist() == [1]


# ---- page map --------------------------------------------------------------------------------------------------------


def test_the_map_shows_each_pages_state() -> None:
    pool = make_pool(pages=8)
    pool._ledger.claim(1, {0: [1]})
    pool._ledger.claim(2, {0: [2]})
    pool._ledger.mark(2, PageState.READY)
    pool._ledger.claim(3, {0: [7]})
    pool._ledger.mark(3, PageState.QUARANTINED)
    assert render(pool).splitlines() == [
        "kv: 8 pages",
        "  ·▒█····✖",
        "· free 5  ▒ reserved 1  █ ready 1  ✖ quarantined 1",
    ]
    assert render(pool, width=4).splitlines()[1:3] == ["  ·▒█·", "  ···✖"]
    assert styled(pool).plain == render(pool)


def test_in_a_large_map_a_mark_shows_the_worst_of_its_pages() -> None:
    pool = make_pool(page_bytes=1, pages=1000)
    pool._ledger.claim(1, {0: [999]})
    pool._ledger.mark(1, PageState.QUARANTINED)
    lines = render(pool, width=50, max_rows=2).splitlines()
    assert lines[0] == "kv: 1000 pages, a mark is 10 pages"
    assert lines[2] == "  " + "·" * 49 + "✖"
    with pytest.raises(GeometryError):
        render(pool, width=0)
