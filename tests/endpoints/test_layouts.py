"""Every way an engine lays out its cache is handed over byte for byte, and no other page is touched.

The pools lie over tensors of the engine, which are no memfd: the lanes are those that can read such memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer import Memory, PageGroup, PagePool, Pages
from kvxfer.errors import OwnershipError
from kvxfer.pool import page_rows

N_TOKENS = 128
PAGES = 24
UNTOUCHED = 0xEE


@pytest.fixture(params=["local-read", "tcp"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def k_and_v_tensors_of_each_layer() -> PagePool:
    names = ["layer.0", "layer.0", "layer.1", "layer.1"]
    tensors = [np.zeros((PAGES, 16, 2, 8), np.float16) for _ in names]
    return PagePool([PageGroup("kv", tensors, tokens_per_page=16, token_axis=1, layers=names)])


def one_tensor_of_k_and_v_for_each_layer() -> PagePool:
    tensors = [torch.zeros((2, PAGES, 16, 2, 8), dtype=torch.bfloat16) for _ in range(3)]
    return PagePool([PageGroup("kv", tensors, tokens_per_page=16, page_axis=1, token_axis=2)])


def one_torch_tensor_for_all_layers() -> PagePool:
    tensor = torch.zeros((3, 2, PAGES, 16, 2, 8), dtype=torch.float16)
    return PagePool([PageGroup("kv", tensor, tokens_per_page=16, page_axis=2, layers=["a", "b", "c"])])


def one_tensor_with_all_layers_inside_the_page() -> PagePool:
    return PagePool([PageGroup("kv", torch.zeros((PAGES, 3, 2, 16, 16)), tokens_per_page=16, token_axis=3)])


def heads_around_the_pages() -> PagePool:
    return PagePool([PageGroup("kv", np.zeros((4, PAGES, 16, 8), np.float32), tokens_per_page=16, page_axis=1)])


def latents_and_their_indexer() -> PagePool:
    latents = [torch.zeros((PAGES, 64, 576), dtype=torch.bfloat16) for _ in range(2)]
    indexer = [torch.zeros((PAGES, 64 * 132), dtype=torch.uint8) for _ in range(2)]
    return PagePool(
        [
            PageGroup("latent", latents, tokens_per_page=64, token_axis=1, replicated=True),
            PageGroup("indexer", indexer, tokens_per_page=64, layout="packed tiles", replicated=True),
        ]
    )


def a_group_with_another_page_size() -> PagePool:
    return PagePool(
        [
            PageGroup("full", [np.zeros((PAGES, 16, 32), np.float16)], tokens_per_page=16),
            PageGroup("sliding", [np.zeros((PAGES, 64, 8), np.float32)], tokens_per_page=64, window=256),
        ]
    )


def a_recurrent_state_beside_attention() -> PagePool:
    return PagePool(
        [
            PageGroup("attention", [np.zeros((PAGES, 16, 32), np.float16)], tokens_per_page=16),
            PageGroup(
                "state", [np.zeros((PAGES, 4, 37), np.float32), np.zeros((PAGES, 5), np.uint8)], tokens_per_page=0
            ),
        ]
    )


def groups_over_the_same_bytes() -> PagePool:
    shared = np.zeros((PAGES, 16, 32), np.float16)
    return PagePool(
        [PageGroup("full", [shared], tokens_per_page=16), PageGroup("window", [shared], tokens_per_page=16)],
        shared_ids=True,
    )


def raw_pointers_with_padding_between_pages() -> PagePool:
    arena = np.zeros(PAGES * 512, np.uint8)
    _KEPT.append(arena)
    memory = Memory(arena.ctypes.data, arena.nbytes, 512, page_shape=(16, 25))
    return PagePool([PageGroup("kv", [memory], tokens_per_page=16, token_axis=1)])


def pages_of_one_byte() -> PagePool:
    return PagePool([PageGroup("kv", [np.zeros((N_TOKENS + 7, 1), np.uint8)], tokens_per_page=1)])


_KEPT: list[Any] = []
LAYOUTS: list[Callable[[], PagePool]] = [
    k_and_v_tensors_of_each_layer,
    one_tensor_of_k_and_v_for_each_layer,
    one_torch_tensor_for_all_layers,
    one_tensor_with_all_layers_inside_the_page,
    heads_around_the_pages,
    latents_and_their_indexer,
    a_group_with_another_page_size,
    a_recurrent_state_beside_attention,
    groups_over_the_same_bytes,
    raw_pointers_with_padding_between_pages,
    pages_of_one_byte,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_arrives_whole_and_touches_no_other_page(ends: Any, layout: Callable[[], PagePool]) -> None:
    source, target = ends.fill(layout(), seed=1), _blank(layout())
    from_pages, to_pages = _page_tables(source, seed=2), _page_tables(target, seed=3)
    _hand_over(ends, source, target, from_pages, to_pages)
    for index, group in enumerate(target.geometry.groups):
        sent, landed = from_pages[group.name].pool, to_pages[group.name].pool
        # Groups over the same bytes are each other's neighbours: what any group received is not "another page".
        received = [to_pages[g.name].pool for g in target.geometry.groups if g.id_space == group.id_space]
        others = np.setdiff1d(np.arange(group.n_pages), np.concatenate(received))
        for region in range(len(group.regions)):
            rows = page_rows(target, index, region)
            np.testing.assert_array_equal(rows[landed], page_rows(source, index, region)[sent])
            assert (rows[others] == UNTOUCHED).all()


@pytest.mark.parametrize("layout", [one_tensor_of_k_and_v_for_each_layer, one_tensor_with_all_layers_inside_the_page])
def test_slots_past_the_last_token_are_zeroed_wherever_the_token_axis_lies(
    ends: Any, layout: Callable[[], PagePool]
) -> None:
    source, target = ends.fill(layout(), seed=1), _blank(layout())
    tables = {"kv": Pages(range(2), [5, 9], first_token=0, n_tokens=21)}
    _hand_over(ends, source, target, tables, tables, n_tokens=21)
    for region, described in enumerate(target.geometry.groups[0].regions):
        sent = page_rows(source, 0, region)[9].reshape(described.token_rows, 16, -1)
        landed = page_rows(target, 0, region)[9].reshape(described.token_rows, 16, -1)
        np.testing.assert_array_equal(landed[:, :5], sent[:, :5])
        assert not landed[:, 5:].any()


def test_nothing_is_zeroed_inside_a_page_whose_token_axis_is_unknown(ends: Any) -> None:
    source, target = ends.fill(heads_around_the_pages(), seed=1), _blank(heads_around_the_pages())
    tables = {"kv": Pages([0], [5], first_token=0, n_tokens=3)}
    _hand_over(ends, source, target, tables, tables, n_tokens=3)
    for region in range(4):
        np.testing.assert_array_equal(page_rows(target, 0, region)[5], page_rows(source, 0, region)[5])


def test_two_overlaid_groups_that_claim_one_byte_are_refused_and_nothing_is_claimed(ends: Any) -> None:
    target = groups_over_the_same_bytes()
    prefill, decode = ends.prefill(groups_over_the_same_bytes()), ends.decode(target)
    pages = {"full": Pages(range(2), [3, 4], n_tokens=32), "window": Pages([1], [4])}
    with pytest.raises(OwnershipError, match="page 4"):
        decode.reserve("r", pages, prefill=prefill.address, timeout_s=10)
    assert not target.ledger.states(0).any()


def test_a_page_of_one_overlaid_group_cannot_be_reserved_through_the_other(ends: Any) -> None:
    prefill, decode = ends.prefill(groups_over_the_same_bytes()), ends.decode(groups_over_the_same_bytes())
    decode.reserve("first", {"full": Pages([0], [7], n_tokens=16)}, prefill=prefill.address, timeout_s=10)
    with pytest.raises(OwnershipError, match="page 7"):
        decode.reserve("second", {"window": Pages([0], [7], n_tokens=16)}, prefill=prefill.address, timeout_s=10)


def test_a_reservation_may_leave_groups_out(ends: Any) -> None:
    source, target = (
        ends.fill(a_recurrent_state_beside_attention(), seed=1),
        _blank(a_recurrent_state_beside_attention()),
    )
    from_pages = _page_tables(source, seed=2)
    _hand_over(ends, source, target, from_pages, {"attention": from_pages["attention"]})
    np.testing.assert_array_equal(page_rows(target, 0, 0)[from_pages["attention"].pool],
                                  page_rows(source, 0, 0)[from_pages["attention"].pool])  # fmt: skip
    assert (page_rows(target, 1, 0) == UNTOUCHED).all()


def test_a_group_announced_and_not_delivered_refuses_the_handoff(ends: Any) -> None:
    from kvxfer.errors import VerificationFailed

    source, target = ends.fill(a_recurrent_state_beside_attention(), seed=1), a_recurrent_state_beside_attention()
    tables = _page_tables(source, seed=2)
    prefill, decode = ends.prefill(source), ends.decode(target)
    handoff = decode.reserve("r", tables, prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"attention": tables["attention"]})
    grant.commit(N_TOKENS)
    with pytest.raises(VerificationFailed) as refused:
        handoff.wait(10)
    assert refused.value.details["kind"] == "coverage"
    assert refused.value.details["groups"] == ["state"]


def _blank(pool: PagePool) -> PagePool:
    for index, group in enumerate(pool.geometry.groups):
        for region in range(len(group.regions)):
            page_rows(pool, index, region)[:] = UNTOUCHED
    return pool


def _page_tables(pool: PagePool, *, seed: int) -> dict[str, Pages]:
    """Pages for N_TOKENS tokens in random order; overlaid groups get different ones."""
    random = np.random.default_rng(seed)
    free = {group.id_space: random.permutation(group.n_pages).tolist() for group in pool.geometry.groups}
    tables = {}
    for group in pool.geometry.groups:
        count = -(-N_TOKENS // group.tokens_per_page) if group.tokens_per_page else 1
        chosen = [free[group.id_space].pop() for _ in range(count)]
        tables[group.name] = Pages(range(count), chosen, first_token=0, n_tokens=N_TOKENS)
    return tables


def _hand_over(
    ends: Any,
    source: PagePool,
    target: PagePool,
    from_pages: dict[str, Pages],
    to_pages: dict[str, Pages],
    n_tokens: int = N_TOKENS,
) -> None:
    prefill, decode = ends.prefill(source), ends.decode(target)
    handoff = decode.reserve("r", to_pages, prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write(from_pages)
    grant.commit(n_tokens)
    assert handoff.wait(10).n_tokens == n_tokens
    assert grant.wait_released(10)
