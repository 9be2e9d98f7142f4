"""S5 and S2 under load: many handoffs at once between two prefills and two decodes, a fifth of them aborted."""

from __future__ import annotations

import gc
import random
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import DecodeEndpoint, GroupSpec, PagePool, Pages, PrefillEndpoint
from kvxfer.errors import Aborted, KvxferError

from .waiting import until

PAGES = 256
HANDOFFS = 200
TOKENS = 16


class Sides:
    """Two prefills and two decodes over pools whose pages are all numbered by content."""

    def __init__(self, lane: str) -> None:
        spec = GroupSpec("kv", 2, (TOKENS, 8), "float32", TOKENS, token_axis=1)
        kind = "tcp" if lane == "tcp" else "local"
        self.sources = [PagePool.allocate([spec], pages=PAGES) for _ in range(2)]
        self.targets = [PagePool.allocate([spec], pages=PAGES) for _ in range(2)]
        for number, pool in enumerate(self.sources):
            for layer in range(2):
                pages = pool.tensor("kv", str(layer))
                pages[:] = (np.arange(PAGES) + 1000 * layer + 10_000 * (number + 1))[:, None, None]
        self.prefills = [PrefillEndpoint(pool, bind="127.0.0.1:0") for pool in self.sources]
        self.decodes = [DecodeEndpoint(pool, lane_kinds=(kind,)) for pool in self.targets]

    def close(self) -> None:
        for endpoint in (*self.decodes, *self.prefills):
            endpoint.close()


@pytest.fixture
def sides(lane: str) -> Iterator[Sides]:
    made = Sides(lane)
    yield made
    made.close()


def one_handoff(sides: Sides, number: int, seed: int) -> str:
    """Returns how it ended; raises where anything is not as it must be."""
    chance = random.Random(seed * 1_000_003 + number)
    prefill, decode = chance.randrange(2), chance.randrange(2)
    n_tokens = chance.randint(1, 12 * TOKENS)
    n = -(-n_tokens // TOKENS)
    source = chance.sample(range(PAGES), n)
    target = [int(page) for page in sides.targets[decode].take(n, "kv")]
    request_id = f"r{seed}-{number}"
    abort = chance.choice([None, None, None, None, "decode"] if number % 2 else [None, None, None, None, "prefill"])
    grant = sides.prefills[prefill].accept(request_id, timeout_s=30)
    handoff = sides.decodes[decode].reserve(
        request_id,
        {"kv": Pages(range(n), target, first_token=0, n_tokens=n_tokens)},
        prefill=sides.prefills[prefill].address,
        timeout_s=30,
    )
    try:
        if abort == "decode":
            handoff.abort("chance")
        grant.write({"kv": Pages(range(n), source)})
        if abort == "prefill":
            # Aborting a grant that was never offered leaves nothing behind, and decode would wait: that is what reject
            # is for.
            until(lambda: grant.first_token is not None)
            grant.abort("chance")
        else:
            grant.commit(n_tokens, request_id.encode())
    except KvxferError:
        assert abort == "decode"  # the abort came first: admission is closed
    try:
        ready = handoff.wait(30)
    except Aborted:
        assert abort is not None
        assert handoff.wait_released(30)
        sides.targets[decode].give_back(target, "kv")
        assert grant.wait_released(30)
        return "aborted"
    assert abort != "prefill"
    assert ready.aux == request_id.encode()
    for layer in range(2):
        landed = sides.targets[decode].tensor("kv", str(layer))[target].reshape(-1, 8)[:n_tokens]
        expected = np.repeat(np.array(source) + 1000 * layer + 10_000 * (prefill + 1), TOKENS)[:n_tokens]
        np.testing.assert_array_equal(landed, np.broadcast_to(expected[:, None], landed.shape))
    sides.targets[decode].give_back(target, "kv")
    assert grant.wait_released(30)
    return "ready"


def run(sides: Sides, seed: int) -> list[str]:
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(lambda number: one_handoff(sides, number, seed), range(HANDOFFS)))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_two_hundred_handoffs_with_aborts_deliver_every_byte_to_its_own_request(sides: Sides) -> None:
    outcomes = run(sides, seed=1)
    assert len(outcomes) == HANDOFFS
    assert outcomes.count("ready") >= HANDOFFS // 2
    assert outcomes.count("aborted") >= HANDOFFS // 20
    for pool in sides.targets:
        states = {state.name: count for state, count in pool.ledger.counts().items()}
        assert states.get("RESERVED", 0) == 0 and states.get("QUARANTINED", 0) == 0


def test_memory_and_descriptors_stay_flat_over_many_handoffs(sides: Sides) -> None:
    run(sides, seed=2)
    run(sides, seed=3)
    for endpoint in (*sides.prefills, *sides.decodes):
        endpoint.poll()
    gc.collect()
    before, open_before = resident_bytes(), descriptors()
    for seed in range(4, 8):
        run(sides, seed)
        for endpoint in (*sides.prefills, *sides.decodes):
            endpoint.poll()
    gc.collect()
    assert descriptors() <= open_before
    assert resident_bytes() - before < 8 << 20


def test_a_page_is_never_given_to_two_live_reservations(sides: Sides) -> None:
    prefill, decode = sides.prefills[0], sides.decodes[0]
    wins: list[int] = []
    refused: list[int] = []
    handoffs: list[Any] = []

    def contend(number: int) -> None:
        try:
            handoffs.append(
                decode.reserve(
                    f"r{number}",
                    {"kv": Pages([0, 1], [7, 8], first_token=0, n_tokens=20)},
                    prefill=prefill.address,
                    timeout_s=30,
                )
            )
            wins.append(number)
        except KvxferError as error:
            assert type(error).__name__ == "OwnershipError"
            refused.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(wins), len(refused)) == (1, 7)
