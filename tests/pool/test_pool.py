"""A pool guards its pages: what is not confirmed is never shown, and its memory outlives whoever may still write it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from kvxfer import pool as pool_module
from kvxfer.errors import CapacityError, GeometryError, NotReady, OwnershipError
from kvxfer.ledger import PageState
from kvxfer.page_group import PageGroup
from kvxfer.pool import PagePool

A, B = 0xA, 0xB


@pytest.fixture
def pool() -> PagePool:
    kv = PageGroup(
        "kv",
        [np.arange(2 * 8 * 32, dtype=np.uint8).reshape(2, 8, 32)],
        tokens_per_page=4,
        page_axis=1,
        layers=["layer0"],
    )
    state = PageGroup("state", np.zeros((3, 10), np.uint8), tokens_per_page=0)
    return PagePool([kv, state])


def test_a_free_page_is_the_engines_to_read_and_write(pool: PagePool) -> None:
    pool.page("kv", 1, 2)[:] = 7
    assert pool.page("kv", "layer0.1", 2).tolist() == [7] * 32
    assert pool.page("kv", 0, 2).tolist() == list(range(64, 96))


@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.QUARANTINED])
def test_a_page_that_is_not_confirmed_is_never_shown(pool: PagePool, state: PageState) -> None:
    pool._ledger.claim(A, {0: [2]})
    pool._ledger.mark(A, state)
    with pytest.raises(NotReady) as caught:
        pool.page("kv", 0, 2)
    assert caught.value.reservation == A
    assert caught.value.details == {"page": 2, "state": state.name}
    assert pool.page("kv", 0, 3).shape == (32,)
    assert pool.page("state", 0, 2).shape == (10,), "page 2 of another id space is another page"


def test_a_ready_page_is_shown_read_only(pool: PagePool) -> None:
    pool._ledger.claim(A, {0: [2]})
    pool._ledger.mark(A, PageState.READY)
    view = pool.page("kv", 0, 2)
    assert view.tolist() == list(range(64, 96))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_a_page_that_is_not_confirmed_is_not_shown_to_another_thread_either(pool: PagePool) -> None:
    pool._ledger.claim(A, {0: [2]})
    seen: list[Any] = []

    def look() -> None:
        try:
            seen.append(pool.page("kv", 0, 2))
        except NotReady as error:
            seen.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert isinstance(seen[0], NotReady)


def test_a_pool_cannot_be_subclassed_nor_given_another_ledger(pool: PagePool) -> None:
    with pytest.raises(TypeError, match="subclassed"):
        type("Leaky", (PagePool,), {})
    with pytest.raises(AttributeError):
        pool.ledger = None  # type: ignore[misc,assignment]
    with pytest.raises(AttributeError):
        pool.page = None  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("state", list(PageState))
def test_a_page_cannot_be_opened_through_the_pools_ledger(pool: PagePool, state: PageState) -> None:
    pool._ledger.claim(A, {0: [2]})
    for change in ("mark", "release", "claim", "free_ready", "pin", "unpin"):
        with pytest.raises(AttributeError):
            getattr(pool.ledger, change)
    pool.ledger.states(0)[2] = state
    assert pool.ledger.state_of(0, 2) == PageState.RESERVED
    with pytest.raises(NotReady):
        pool.page("kv", 0, 2)


def test_a_page_that_is_being_sent_cannot_be_given_back() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pages = pool.take(2)
    pool._ledger.pin({0: pages[1:]})
    with pytest.raises(OwnershipError, match="being sent"):
        pool.give_back(pages)
    assert pool.n_free() == 2, "all of them or none"
    pool._ledger.unpin({0: pages[1:]})
    pool.give_back(pages)
    assert pool.n_free() == 4


def test_a_view_keeps_the_memory_alive() -> None:
    pool = PagePool([PageGroup("kv", np.full((4, 8), 9, np.uint8), tokens_per_page=1)])
    view = pool.page("kv", 0, 1)
    del pool
    gc.collect()
    assert view.tolist() == [9] * 8


@pytest.mark.parametrize(
    ("group", "region", "page"), [("kv", 0, 8), ("kv", 0, -1), ("kv", 2, 0), ("kv", "x", 0), ("x", 0, 0), (2, 0, 0)]
)
def test_what_the_pool_does_not_have_is_an_error(pool: PagePool, group: Any, region: Any, page: int) -> None:
    with pytest.raises(GeometryError):
        pool.page(group, region, page)


def test_layers_name_all_of_their_regions(pool: PagePool) -> None:
    assert pool.layers_of("kv") == ("layer0",)
    assert pool.regions_of("kv", "layer0").tolist() == [0, 1]
    assert pool.regions_of("kv", 0).tolist() == [0, 1]
    assert pool.regions_of("kv", "layer0.1").tolist() == [1]
    assert pool.region_index("state", "0") == 0
    assert pool.region_index("kv", np.int64(1)) == 1
    assert pool.regions_of("kv", 0).dtype == np.uint32
    with pytest.raises(GeometryError, match="2 regions"):
        pool.region_index("kv", "layer0")
    for layer in ("layer1", 1, -1):
        with pytest.raises(GeometryError, match="no layer"):
            pool.regions_of("kv", layer)


def test_region_memory_says_where_every_region_lies(pool: PagePool) -> None:
    first, second = pool.region_memory[0]
    assert second.ptr - first.ptr == 8 * 32
    assert (first.nbytes, first.fd) == (256, -1)


def test_pages_limits_the_pool_to_the_first_ones() -> None:
    def group(name: str) -> PageGroup:
        return PageGroup(name, np.zeros((10, 4), np.uint8), tokens_per_page=2)

    pool = PagePool([group("a"), group("b")], pages=6)
    assert [g.n_pages for g in pool.geometry.groups] == [6, 6]
    assert pool.region_memory[0][0].nbytes == 24
    pool = PagePool([group("a"), group("b")], pages={"b": 3})
    assert [g.n_pages for g in pool.geometry.groups] == [10, 3]
    with pytest.raises(GeometryError, match="no page 3"):
        pool.page("b", 0, 3)
    for bad in (11, 0, {"a": 11}, {"c": 1}):
        with pytest.raises(GeometryError):
            PagePool([group("a"), group("b")], pages=bad)  # type: ignore[arg-type]


def test_a_pool_needs_groups_of_distinct_names() -> None:
    group = PageGroup("a", np.zeros((4, 4), np.uint8), tokens_per_page=1)
    other = PageGroup("a", np.zeros((4, 4), np.uint8), tokens_per_page=1)
    for groups in ([], [group, other], [group, "b"]):
        with pytest.raises(GeometryError):
            PagePool(groups)  # type: ignore[arg-type]


def test_memory_of_a_dropped_pool_is_kept_while_a_writer_is_not_proven_silent() -> None:
    class Tracked(np.ndarray[Any, Any]):
        pass

    def dropped(state: PageState) -> weakref.ref[Any]:
        tensor = np.zeros((4, 8), np.uint8).view(Tracked)
        pool = PagePool([PageGroup("kv", tensor, tokens_per_page=1)])
        pool._ledger.claim(A, {0: [0]})
        pool._ledger.mark(A, state)
        return weakref.ref(tensor)

    kept = len(pool_module._KEPT)
    try:
        quarantined, reserved, ready = map(dropped, (PageState.QUARANTINED, PageState.RESERVED, PageState.READY))
        gc.collect()
        assert quarantined() is not None
        assert reserved() is not None
        assert ready() is None
    finally:
        del pool_module._KEPT[kept:]


# ---- the pool's own allocator ----------------------------------------------------------------------------------------


def test_taken_pages_are_distinct_and_lifo() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((8, 4), np.uint8), tokens_per_page=1)])
    first = pool.take(3)
    assert first.tolist() == [0, 1, 2]
    pool.give_back(first[1:])
    assert pool.take(2).tolist() == [1, 2]
    assert pool.n_free() == 5
    assert sorted(pool.take(5, "kv", order="random", seed=3).tolist()) == [3, 4, 5, 6, 7]
    assert pool.take(0).tolist() == []


def test_random_pages_are_no_run_and_the_same_for_the_same_seed() -> None:
    def taken(seed: int) -> list[int]:
        return (
            PagePool([PageGroup("kv", np.zeros((64, 1), np.uint8), tokens_per_page=1)])
            .take(64, order="random", seed=seed)
            .tolist()
        )

    assert taken(1) == taken(1)
    assert taken(1) != taken(2)
    assert sorted(taken(1)) == list(range(64))


def test_taking_more_than_there_are_is_refused_with_both_numbers() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pool.take(1)
    for order in ("lifo", "random"):
        with pytest.raises(CapacityError) as caught:
            pool.take(4, order=order)  # type: ignore[arg-type]
        assert (caught.value.details["needed"], caught.value.details["available"]) == (4, 3)
    assert pool.n_free() == 3
    with pytest.raises(GeometryError):
        pool.take(-1)


@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.QUARANTINED])
def test_a_page_that_may_still_be_written_cannot_be_given_back(state: PageState) -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pages = pool.take(3)
    pool._ledger.claim(A, {0: pages[:1]})
    pool._ledger.mark(A, state)
    with pytest.raises(OwnershipError, match="given back"):
        pool.give_back(pages)
    assert pool.n_free() == 1, "all of them or none"
    pool._ledger.release(A)
    pool.give_back(pages)
    assert sorted(pool.take(4).tolist()) == [0, 1, 2, 3]


def test_a_page_given_back_after_ready_is_free() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pages = pool.take(2)
    pool._ledger.claim(A, {0: pages})
    pool._ledger.mark(A, PageState.READY)
    pool.give_back(pages)
    assert pool.ledger.state_of(0, 0) == PageState.FREE


def test_pages_reserved_without_having_been_taken_are_not_handed_out() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pool._ledger.claim(A, {0: [0, 2]})
    assert pool.take(2).tolist() == [1, 3]
    with pytest.raises(CapacityError):
        pool.take(1)
    pool._ledger.release(A)
    assert sorted(pool.take(2).tolist()) == [0, 2]


def test_only_taken_pages_can_be_given_back_and_once() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((4, 4), np.uint8), tokens_per_page=1)])
    pages = pool.take(2)
    for wrong in ([3], [0, 0], [4], [-1], [0.5]):
        with pytest.raises(GeometryError):
            pool.give_back(wrong)
    pool.give_back(pages)
    with pytest.raises(GeometryError, match="was not taken"):
        pool.give_back(pages)


def test_each_page_numbering_has_its_own_allocator(pool: PagePool) -> None:
    assert pool.take(2, "kv").tolist() == [0, 1]
    assert pool.take(2, "state").tolist() == [0, 1]
    with pytest.raises(GeometryError, match="say which group"):
        pool.take(1)


def test_threads_that_take_and_give_back_never_get_the_same_page() -> None:
    pool = PagePool([PageGroup("kv", np.zeros((32, 1), np.uint8), tokens_per_page=1)])
    owner = np.zeros(32, np.int64)
    clashes: list[int] = []

    def work(me: int) -> None:
        for _ in range(100):
            pages = pool.take(8)
            if owner[pages].any():
                clashes.append(me)
            owner[pages] = me
            owner[pages] = 0
            pool.give_back(pages)

    threads = [threading.Thread(target=work, args=(me,)) for me in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert pool.n_free() == 32
