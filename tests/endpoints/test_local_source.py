"""The local lane reads another process's memory: what that process does to it meanwhile may cost the handoff, and never
decode's life or a page of another request. Where it may not read, it falls back and says why."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import (
    DecodeEndpoint,
    GroupSpec,
    Memory,
    PageGroup,
    PagePool,
    Pages,
    PrefillEndpoint,
    decode_executor,
    hosts,
)
from kvxfer.errors import LaneFailed, VerificationFailed
from kvxfer.lanes import dial
from kvxfer.lanes.export import MemoryExport

from .fake_prefill import FakePrefill

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
SHAPE = (16, 2, 8)
PAGE_BYTES = 1024
REGION_BYTES = 32 * PAGE_BYTES


def wanted(n_tokens: int = N_TOKENS) -> dict[str, Pages]:
    return {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=n_tokens)}


@pytest.fixture(params=["local", "local-read"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)  # tcp lanes read no other process's memory


@pytest.fixture
def make_fake(lane: str, ends: Any) -> Iterator[Callable[..., FakePrefill]]:
    """A prefill by hand, over a pool that is mapped or read as the lane says."""
    made: list[FakePrefill] = []

    def make(pool: PagePool | None = None, **options: Any) -> FakePrefill:
        if pool is None and lane == "local":
            pool = PagePool.allocate([GroupSpec("kv", 2, SHAPE, "float32", 16, token_axis=1)], pages=32)
        elif pool is None:
            layers = [np.zeros((32, *SHAPE), np.float32) for _ in range(2)]
            pool = PagePool([PageGroup("kv", layers, tokens_per_page=16, token_axis=1)])
        made.append(FakePrefill(ends.fill(pool, seed=1), "local", **options))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def either(ends: Any, target: Any) -> DecodeEndpoint:
    """A decode that takes local lanes, or else tcp."""
    return ends.decode(target.pool, lane_kinds=("local", "tcp"))


def source_is_refused(decode: DecodeEndpoint, target: Any, handoff: Any) -> VerificationFailed:
    with pytest.raises(VerificationFailed) as caught:
        handoff.wait(10)
    assert caught.value.details["kind"] == "source" and caught.value.retryable
    assert handoff.wait_released(10)
    assert not target.pool.ledger.states(0).any()
    return caught.value


def fallback(decode: DecodeEndpoint) -> dict[str, Any]:
    """The one line that says why a kind of lane was not used."""
    (line,) = [line for line in decode.audit_lines() if line["event"] == "lane_fallback"]
    assert decode.counters()["lane_fallback"] == 1
    assert line["lane"] == "local" and line["used"] == "tcp"
    return line


# ---- sources that are reused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["digest", "coverage"])
@pytest.mark.parametrize("when", ["before the copies", "between two copies", "between the copies and the record"])
def test_a_source_that_was_let_go_is_never_accepted_whenever_that_was(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any, verify: str, when: str
) -> None:
    fake = make_fake()
    decode = ends.decode(target.pool, verify=verify, diagnosis_timeout_s=0.1)
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    first, second = leg.writes()
    record = leg.record()
    if when == "before the copies":
        fake.bump()
    fake.put(first)
    if when == "between two copies":
        landed(decode, handoff, 4)
        fake.bump()
    fake.put(second)
    if when == "between the copies and the record":
        landed(decode, handoff, 8)
        fake.bump()
    fake.rows(0)[leg.source] = 99  # the next request's bytes
    fake.put(record)
    source_is_refused(decode, target, handoff)


def landed(decode: Any, handoff: Any, n_chunks: int) -> None:
    """Waits until so many chunks of the handoff have been copied."""
    (link,) = decode._links.values()

    def count() -> int:
        bitmaps, *_ = link.receiver.report(handoff.reservation, 0)
        return sum(int.from_bytes(bitmap, "little").bit_count() for bitmap in bitmaps.values())

    for _ in range(5000):
        if count() == n_chunks:
            return
        decode._wait_until(lambda: False, 0.002)
    raise AssertionError(f"{count()} of {n_chunks} chunks landed")


@pytest.mark.parametrize("slot", [1, 511, 512, 2**61, 2**64 - 1])
def test_a_slot_that_does_not_vouch_for_the_source_refuses_the_handoff(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any, slot: int
) -> None:
    fake, decode = make_fake(), ends.decode(target.pool, diagnosis_timeout_s=0.1)
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    expected = 1 if slot < 512 else 0  # inside the table another value is expected than stands there
    fake.put(leg.write(0, 0, 4, slot=slot, expected=expected), leg.write(0, 1, 4), leg.record())
    source_is_refused(decode, target, handoff)


@pytest.mark.parametrize("page", [32, 2**40, 2**64 - 1])
def test_a_source_page_outside_prefills_pool_is_never_read(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any, page: int
) -> None:
    fake, decode = make_fake(), ends.decode(target.pool, diagnosis_timeout_s=0.1)
    before = target.copy(range(32))
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    fake.put(leg.write(0, 0, 4, source=[0, 1, page, 2]), leg.write(0, 1, 4), leg.record())
    with pytest.raises(VerificationFailed, match="bounds"):
        handoff.wait(10)
    assert handoff.wait_released(10)
    np.testing.assert_array_equal(before[0], target.layers[0])


# ---- memory that goes away -------------------------------------------------------------------------------------------


def test_prefills_memory_cannot_be_truncated_under_decode(ends: Any, target: Any) -> None:
    pool = ends.fill(PagePool.allocate([GroupSpec("kv", 2, SHAPE, "float32", 16, token_axis=1)], pages=32), seed=1)
    prefill, decode = ends.prefill(pool), ends.decode(target.pool)
    handoff = decode.reserve("r", wanted(), prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(2), SOURCE[:2])})
    with pytest.raises(PermissionError):  # in the middle of it
        os.ftruncate(pool.region_memory[0][0].fd, 0)
    grant.write({"kv": Pages([2, 3], SOURCE[2:])})
    grant.commit(N_TOKENS)
    assert handoff.wait(10).stats["lane"] == "local"


def unsealed_export(fd: int) -> Callable[[int], MemoryExport]:
    """What a prefill would say that hands out memory which it can still truncate."""
    regions = tuple((0, layer * REGION_BYTES, PAGE_BYTES, PAGE_BYTES, 32) for layer in range(2))
    return lambda table_fd: MemoryExport((regions,), [fd], table_fd)


def test_memory_that_may_still_be_truncated_is_not_mapped_and_tcp_is_used_with_the_reason(
    make_fake: Callable[..., FakePrefill], either: DecodeEndpoint
) -> None:
    fd = os.memfd_create("kvxfer-test-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * REGION_BYTES)
    fake = make_fake(export=unsealed_export(fd), fallback=True)
    handoff = either.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    os.ftruncate(fd, 0)
    fake.put(*leg.writes(), leg.record())
    assert handoff.wait(10).stats["lane"] == "tcp"
    assert "not sealed against shrinking" in fallback(either)["reason"]
    os.close(fd)


def test_a_description_that_reaches_beyond_its_memory_is_not_believed(
    make_fake: Callable[..., FakePrefill], either: DecodeEndpoint
) -> None:
    shared = PagePool.allocate([GroupSpec("kv", 1, SHAPE, "float32", 16)], pages=32)  # half of what is claimed
    fake = make_fake(export=unsealed_export(shared.region_memory[0][0].fd), fallback=True)
    handoff = either.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    fake.put(*leg.writes(), leg.record())
    assert handoff.wait(10).stats["lane"] == "tcp"
    assert "reaches to byte" in fallback(either)["reason"]


@pytest.mark.parametrize("lane", ["local-read"], indirect=True)
def test_memory_that_prefill_unmaps_in_mid_handoff_refuses_it_and_decode_lives(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any
) -> None:
    mapped = mmap.mmap(-1, 2 * REGION_BYTES)
    view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    at = ctypes.addressof(view)
    regions = [Memory(at + i * REGION_BYTES, REGION_BYTES, PAGE_BYTES, "cpu", "float32", SHAPE) for i in range(2)]
    fake = make_fake(PagePool([PageGroup("kv", regions, tokens_per_page=16, token_axis=1, layers=["0", "1"])]))
    decode = ends.decode(target.pool, diagnosis_timeout_s=0.1)
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    first, second = leg.writes()
    record = leg.record()
    fake.put(first)
    landed(decode, handoff, 4)
    del view
    mapped.close()
    fake.put(second, record)
    error = source_is_refused(decode, target, handoff)
    assert "process_vm_readv" in str(error)


# ---- processes that are not who they were ----------------------------------------------------------------------------


@pytest.fixture
def ended() -> Iterator[int]:
    """A pidfd of a process that is no more, as of a prefill whose pid another process may have by now."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    pidfd = os.pidfd_open(child.pid)
    child.wait()
    yield pidfd
    os.close(pidfd)


def test_what_is_read_after_prefill_has_ended_is_never_accepted(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pid in use belongs to a process that lives; only the pidfd tells that it is another one.
    monkeypatch.setattr(dial, "peer_pidfd", lambda sock, pid: (os.dup(ended), True))
    fake, decode = make_fake(), ends.decode(target.pool, diagnosis_timeout_s=0.1)
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    fake.put(*leg.writes(), leg.record())
    error = source_is_refused(decode, target, handoff)
    assert "is dead" in str(error)


def test_a_process_that_ended_before_it_was_proven_is_not_read_and_tcp_is_used(
    ends: Any, either: DecodeEndpoint, lane: str, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "peer_pidfd", lambda sock, pid: (os.dup(ended), False))
    hand_over_by_tcp(ends.prefill(_pool(ends, lane)), either)
    assert "is not the one that answered" in fallback(either)["reason"]


def _pool(ends: Any, lane: str) -> PagePool:
    if lane == "local":
        return ends.fill(PagePool.allocate([GroupSpec("kv", 2, SHAPE, "float32", 16, token_axis=1)], pages=32), seed=1)
    layers = [np.zeros((32, *SHAPE), np.float32) for _ in range(2)]
    return ends.fill(PagePool([PageGroup("kv", layers, tokens_per_page=16, token_axis=1)]), seed=1)


def hand_over_by_tcp(prefill: PrefillEndpoint, decode: DecodeEndpoint) -> None:
    handoff = decode.reserve("r", wanted(), prefill=prefill.address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    ready = handoff.wait(10)
    assert ready.stats["lane"] == "tcp"
    assert ready.page("kv", "0", 0).any()


# ---- where it may not be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["local-read"], indirect=True)
def test_where_process_vm_readv_is_forbidden_tcp_is_used_with_the_reason(start_worker: Any, ends: Any) -> None:
    prefill = ends.prefill(_pool(ends, "local-read"))
    decode = start_worker("decode", without_readv=True)
    if decode.hello.get("unavailable"):
        pytest.skip(f"system calls cannot be filtered here: {decode.hello['unavailable']}")
    decode.call("reserve", "r", TARGET, N_TOKENS, prefill.address)
    grant = prefill.accept("r", timeout_s=10)
    grant.write({"kv": Pages(range(4), SOURCE)})
    grant.commit(N_TOKENS)
    assert decode.call("wait", "r")["lane"] == "tcp"
    (line,) = [line for line in decode.call("audit_lines") if line["event"] == "lane_fallback"]
    assert (line["lane"], line["used"]) == ("local", "tcp")
    assert "process_vm_readv" in line["reason"] and "not permitted" in line["reason"]


def test_where_only_a_local_lane_is_wanted_and_it_cannot_be_the_handoff_fails_with_the_reason(
    make_fake: Callable[..., FakePrefill], ends: Any, target: Any
) -> None:
    fd = os.memfd_create("kvxfer-test-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * REGION_BYTES)
    fake = make_fake(export=unsealed_export(fd))
    decode = ends.decode(target.pool, lane_kinds=("local",), relane_attempts=2)
    handoff = decode.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    with pytest.raises(LaneFailed, match="not sealed against shrinking"):
        handoff.wait(10)
    assert handoff.wait_released(10)
    os.close(fd)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Decode runs on another host; the kinds of lane that it tries are noted."""
    tried: list[str] = []
    connect = decode_executor.connect_lanes

    def noted(offers: Any, *args: Any, **kwargs: Any) -> Any:
        tried.extend(offer.kind for offer in offers)
        return connect(offers, *args, **kwargs)

    monkeypatch.setattr(decode_executor, "connect_lanes", noted)
    monkeypatch.setattr(hosts, "host_identity", lambda: "another host")
    return tried


def test_a_local_lane_is_never_tried_across_hosts(
    make_fake: Callable[..., FakePrefill], elsewhere: list[str], either: DecodeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "host_identity", lambda: "prefill's host")
    fake = make_fake(fallback=True)
    handoff = either.reserve("r", wanted(), prefill=fake.address, timeout_s=10)
    leg = fake.reserved("r")
    fake.put(*leg.writes(), leg.record())
    assert handoff.wait(10).stats["lane"] == "tcp"
    assert elsewhere == ["tcp"]


def test_where_only_local_lanes_are_wanted_another_host_is_refused_and_nothing_is_tried(
    ends: Any, lane: str, target: Any, elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ends.decode(target.pool, lane_kinds=("local",))
    monkeypatch.setattr(hosts, "host_identity", lambda: "prefill's host")
    prefill = ends.prefill(_pool(ends, lane))
    handoff = decode.reserve("r", wanted(), prefill=prefill.address, timeout_s=10)
    with pytest.raises(LaneFailed) as caught:
        handoff.wait(10)
    assert caught.value.details["same_host"] is False
    assert elsewhere == []
    assert handoff.wait_released(10)
