"""The two sides of a benchmark run. They agree on what comes next by handoffs alone, so they may be on two hosts.

For every step prefill first hands over a request of zero pages whose aux bytes say that its source is filled; that
keeps the filling out of decode's clock. Then decode reserves, and prefill writes and commits once it sees the offer.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.allocation import GroupSpec
from kvxfer.bench.content import U64, Contents, page_order
from kvxfer.bench.options import TOKENS_PER_PAGE, BenchOptions
from kvxfer.bench.resident import PeakSampler, private_bytes
from kvxfer.control.keys import Keys
from kvxfer.decode import DecodeEndpoint
from kvxfer.errors import DeadlineExceeded, GeometryError, KvxferError
from kvxfer.events import Event
from kvxfer.grant import Grant
from kvxfer.pages import Pages
from kvxfer.pool import PagePool
from kvxfer.prefill import PrefillEndpoint

GROUP = "kv"
STEP_TIMEOUT_S = 120.0
Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Step:
    """What both sides do next: ``kind`` is ``warm``, ``memory``, ``timed`` or ``latency``; ``number`` is a seed."""

    kind: str
    number: int


def steps(options: BenchOptions) -> Iterator[Step]:
    """The run, in order. The memory step samples memory instead of time: sampling would disturb the clock."""
    kinds = ["warm", "memory", *["timed"] * options.repeat, *(["latency"] if options.latency_handoffs else [])]
    return (Step(kind, number) for number, kind in enumerate(kinds))


def make_pool(options: BenchOptions) -> PagePool:
    """A pool that peers on this host can map, touched once so that no round pays for its page faults."""
    spec = GroupSpec(
        GROUP,
        layers=[f"region{index}" for index in range(options.regions)],
        page_shape=(options.page_bytes,),
        dtype="uint8",
        tokens_per_page=TOKENS_PER_PAGE,
    )
    pool = PagePool.allocate([spec], pages=options.pages)
    for region in range(options.regions):
        region_bytes(pool, region)[...] = 0
    return pool


def region_bytes(pool: PagePool, region: int) -> npt.NDArray[np.uint8]:
    """The engine's own view of a region, u8 [pages, page_bytes]."""
    memory = pool.tensor(GROUP, f"region{region}")
    return memory.view(np.uint8).reshape(len(memory), -1)


def whole(options: BenchOptions, order: U64) -> dict[str, Pages]:
    logical = np.arange(options.pages, dtype=np.uint64)
    return {GROUP: Pages(logical, order, first_token=0, n_tokens=options.pages * TOKENS_PER_PAGE)}


def one(page: int) -> dict[str, Pages]:
    return {GROUP: Pages([0], [page], first_token=0, n_tokens=TOKENS_PER_PAGE)}


def nothing() -> dict[str, Pages]:
    return {GROUP: Pages([], [], first_token=0, n_tokens=0)}


class EventWaiter:
    """Waits on an endpoint's descriptor for one event of one request; its only reader of events. Not thread-safe."""

    def __init__(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        self._endpoint = endpoint
        self._poller = select.poll()
        self._poller.register(endpoint.fileno(), select.POLLIN)
        self._seen: dict[tuple[str, str], Event] = {}

    def wait(self, kind: str, request_id: str, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Returns when the event has come. Raises the error of a ``failed`` event, or DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        while (kind, request_id) not in self._seen:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(f"no {kind!r} event came", request_id=request_id, timeout_s=timeout_s)
            self._poller.poll(remaining_s * 1e3)
            for event in self._endpoint.poll():
                if event.kind == "failed":
                    raise event.error or KvxferError("the handoff failed", request_id=event.request_id)
                self._seen[event.kind, event.request_id] = event
        del self._seen[kind, request_id]

    def forget(self) -> None:
        """Drops events nobody waited for."""
        self._seen.clear()


# ---- prefill ---------------------------------------------------------------------------------------------------------


class PrefillSide:
    """Serves one benchmark run, then ends."""

    def __init__(self, options: BenchOptions, bind: str, *, keys: Keys | None, insecure: bool) -> None:
        options.check_memory(copies=1)
        self._options = options
        self._pool = make_pool(options)
        self._baseline_bytes = private_bytes()
        lanes: dict[str, Any] = {"local_lanes": 0, "tcp_lanes": 0, f"{options.lane}_lanes": options.connections}
        self.endpoint = PrefillEndpoint(
            self._pool, bind=bind, keys=keys, insecure=insecure, verify=options.verify, **lanes
        )
        self._events = EventWaiter(self.endpoint)
        self._report: dict[str, Any] = {"fingerprint": options.fingerprint}

    def run(self, first_timeout_s: float, advance: Advance) -> None:
        """Serves all steps; the first peer must come within ``first_timeout_s``."""
        timeout_s = first_timeout_s
        for step in steps(self._options):
            orders = self._fill(step)
            early = self._write_latency(step, orders) if step.kind == "latency" else []
            self._announce(step, timeout_s)
            if step.kind == "latency":
                self._settle(early)
            else:
                self._serve(step, orders)
            timeout_s = STEP_TIMEOUT_S
            advance()
        self._announce(Step("end", -1), STEP_TIMEOUT_S)

    def close(self) -> None:
        self.endpoint.close()

    def _fill(self, step: Step) -> U64:
        options = self._options
        contents = Contents(options.page_bytes, options.seed, step.number)
        order = page_order(options.pages, options.seed, step.number, "prefill")
        for region in range(options.regions):
            contents.fill(region, region_bytes(self._pool, region), order)
        return order

    def _announce(self, step: Step, timeout_s: float) -> None:
        request_id = f"ready-{step.kind}-{step.number}"
        grant = self.endpoint.accept(request_id, readers=1, timeout_s=timeout_s)
        grant.commit(0, json.dumps(self._report).encode())
        self._events.wait("ready", request_id, timeout_s)
        self._events.forget()

    def _serve(self, step: Step, order: U64) -> None:
        options, request_id = self._options, f"{step.kind}-{step.number}"
        grant = self.endpoint.accept(request_id, readers=1, timeout_s=STEP_TIMEOUT_S)
        self._events.wait("offered", request_id)
        sampler = PeakSampler(self._baseline_bytes) if step.kind == "memory" else None
        if sampler is not None:
            with sampler:
                self._write(grant, order)
                self._events.wait("ready", request_id)
            self._report["growth_bytes"] = sampler.growth_bytes
        else:
            self._report["post_s"] = self._write(grant, order)
            self._events.wait("ready", request_id)
        if not grant.wait_released(STEP_TIMEOUT_S):
            raise DeadlineExceeded("the source pages were not released", request_id=request_id, pages=options.pages)
        self._events.forget()

    def _write(self, grant: Grant, order: U64) -> float:
        began = time.perf_counter()
        grant.write(whole(self._options, order))
        grant.commit(self._options.pages * TOKENS_PER_PAGE)
        return time.perf_counter() - began

    def _write_latency(self, step: Step, order: U64) -> list[Grant]:
        """Everything is written and committed before decode reserves: what is timed is the handoff, not the digest."""
        grants = []
        for number in range(self._options.latency_handoffs):
            grant = self.endpoint.accept(f"latency-{number}", readers=1, timeout_s=STEP_TIMEOUT_S)
            grant.write(one(int(order[number % self._options.pages])))
            grant.commit(TOKENS_PER_PAGE)
            grants.append(grant)
        return grants

    def _settle(self, grants: list[Grant]) -> None:
        for grant in grants:
            if not grant.wait_released(STEP_TIMEOUT_S):
                raise DeadlineExceeded("a source page was not released", request_id=grant.request_id)
        self._events.forget()


# ---- decode ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Round:
    """One timed handoff. Times in seconds."""

    seconds: float
    reserve_s: float
    stats: dict[str, Any]
    post_s: float = 0.0


class DecodeSide:
    """Runs the steps against one prefill, checks every byte, and keeps the figures."""

    def __init__(self, options: BenchOptions, peer: str, *, keys: Keys | None, insecure: bool) -> None:
        self._options = options
        self._peer = peer
        self.pool = make_pool(options)
        self._baseline_bytes = private_bytes()
        self.endpoint = DecodeEndpoint(
            self.pool,
            keys=keys,
            insecure=insecure,
            verify=options.verify,
            lane_kinds=(options.lane,),
            lanes=options.connections,
        )
        self._events = EventWaiter(self.endpoint)
        self.rounds: list[Round] = []
        self.latencies_s: list[float] = []
        self._timed = False  # the step before this one
        self.growth_bytes = 0
        self.peer_growth_bytes = 0
        self.bytes_checked_ok = True
        self.bytes_checked = 0

    def run(self, between: Callable[[U64], None], advance: Advance) -> None:
        """Runs all steps; ``between`` is called with the page order before every timed round (memcpy, the C stream)."""
        for step in steps(self._options):
            self._take(self._await_peer(step))
            order = page_order(self._options.pages, self._options.seed, step.number, "decode")
            if step.kind == "latency":
                self._latency(step, order)
            elif step.kind == "memory":
                with PeakSampler(self._baseline_bytes) as sampler:
                    self._handoff(step, order)
                self.growth_bytes = sampler.growth_bytes
                self._check(step, order)
            else:
                if step.kind == "timed":
                    between(order)
                round_ = self._handoff(step, order)
                if step.kind == "timed":
                    self.rounds.append(round_)
                self._check(step, order)
            self._timed = step.kind == "timed"
            advance()
        self._take(self._await_peer(Step("end", -1)))

    def close(self) -> None:
        self.endpoint.close()

    def _take(self, report: dict[str, Any]) -> None:
        """A report tells of the step before the one that it announces."""
        self.peer_growth_bytes = max(self.peer_growth_bytes, int(report.get("growth_bytes", 0)))
        if self._timed:
            self.rounds[-1].post_s = float(report["post_s"])

    def _await_peer(self, step: Step) -> dict[str, Any]:
        request_id = f"ready-{step.kind}-{step.number}"
        handoff = self.endpoint.reserve(request_id, nothing(), prefill=self._peer, timeout_s=STEP_TIMEOUT_S)
        report: dict[str, Any] = json.loads(handoff.wait(STEP_TIMEOUT_S).aux)
        if report["fingerprint"] != self._options.fingerprint:
            raise GeometryError("the two sides were given different options; start both with the same ones")
        self._events.forget()
        return report

    def _handoff(self, step: Step, order: U64) -> Round:
        request_id, pages = f"{step.kind}-{step.number}", whole(self._options, order)
        began = time.perf_counter()
        handoff = self.endpoint.reserve(request_id, pages, prefill=self._peer, timeout_s=STEP_TIMEOUT_S)
        reserve_s = time.perf_counter() - began
        self._events.wait("ready", request_id)
        seconds = time.perf_counter() - began
        return Round(seconds, reserve_s, dict(handoff.wait(0).stats))

    def _latency(self, step: Step, order: U64) -> None:
        options = self._options
        for number in range(options.latency_handoffs):
            request_id, page = f"latency-{number}", int(order[number % options.pages])
            pages = one(page)
            began = time.perf_counter()
            handoff = self.endpoint.reserve(request_id, pages, prefill=self._peer, timeout_s=STEP_TIMEOUT_S)
            handoff.wait(STEP_TIMEOUT_S)
            self.latencies_s.append(time.perf_counter() - began)
        n_landed = min(options.latency_handoffs, options.pages)
        self._compare(step, order[:n_landed], n_landed)

    def _check(self, step: Step, order: U64) -> None:
        self._compare(step, order, self._options.pages)

    def _compare(self, step: Step, order: U64, n_pages: int) -> None:
        options = self._options
        contents = Contents(options.page_bytes, options.seed, step.number)
        for region in range(options.regions):
            if not contents.matches(region, region_bytes(self.pool, region), order):
                self.bytes_checked_ok = False
        self.bytes_checked += n_pages * options.page_bytes * options.regions
