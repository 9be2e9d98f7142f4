"""Runs one side, or both in two processes, and puts the figures together."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.bench.c_stream import CACHED_WINDOW_BYTES, CStream, NoStream
from kvxfer.bench.content import U64, page_order
from kvxfer.bench.options import BenchOptions
from kvxfer.bench.sides import GROUP, DecodeSide, PrefillSide, Round
from kvxfer.control.keys import Keys
from kvxfer.errors import DeadlineExceeded, PeerLost
from kvxfer.pool import PagePool

START_TIMEOUT_S = 60.0
Advance = Callable[[], None]


@dataclass(slots=True)
class BenchResult:
    """Figures of one run. GB/s are 10**9 bytes a second."""

    options: BenchOptions
    rounds: list[Round]
    latencies_s: list[float]
    memcpy_s: list[float]
    stream_s: list[float]
    cached_stream_s: list[float]
    no_stream: str
    growth_bytes: int
    peer_growth_bytes: int
    bytes_checked: int
    bytes_checked_ok: bool
    extra: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        options, total = self.options, self.options.total_bytes
        speeds = sorted(_gbps(total, [one.seconds for one in self.rounds]))
        copies = sorted(_gbps(total, self.memcpy_s))
        document: dict[str, Any] = {
            "lane": options.lane,
            "verify": options.verify,
            "page_bytes": options.page_bytes,
            "pages": options.pages,
            "regions": options.regions,
            "chunks": options.chunks,
            "connections": options.connections,
            "copier_threads": options.connections,
            "memcpy_threads": options.connections,
            "repeat": options.repeat,
            "total_bytes": total,
            "gbps_median": _round(statistics.median(speeds)),
            "gbps_best": _round(speeds[-1]),
            "gbps_worst": _round(speeds[0]),
            "memcpy_gbps": _round(statistics.median(copies)),
            "memcpy_gbps_best": _round(copies[-1]),
            "memcpy_gbps_worst": _round(copies[0]),
            "ratio_to_memcpy": _round(statistics.median(speeds) / statistics.median(copies)),
            "latency_us": _latency(self.latencies_s),
            "latency_handoffs": len(self.latencies_s),
            "latency_bytes": options.page_bytes * options.regions,
            "stages_ms": stages_ms(self.rounds),
            "rss_beyond_pool_mib": _round(max(self.growth_bytes, self.peer_growth_bytes) / (1 << 20)),
            "rss_beyond_pool_mib_by_side": {
                "decode": _round(self.growth_bytes / (1 << 20)),
                "prefill": _round(self.peer_growth_bytes / (1 << 20)),
            },
            "bytes_checked": self.bytes_checked,
            "bytes_checked_ok": self.bytes_checked_ok,
            "isa": _native.isa(),
            "cpus": os.cpu_count(),
            **self.extra,
        }
        if options.lane == "tcp":
            document |= self._stream_figures(speeds)
        return document

    def _stream_figures(self, speeds: Sequence[float]) -> dict[str, Any]:
        if not self.stream_s:
            return {"c_stream_gbps": None, "ratio_to_c_stream": None, "c_stream_missing": self.no_stream}
        total = self.options.total_bytes
        stream = statistics.median(_gbps(total, self.stream_s))
        cached = statistics.median(_gbps(total, self.cached_stream_s))
        speed = statistics.median(speeds)
        return {
            "c_stream_gbps": _round(stream),
            "ratio_to_c_stream": _round(speed / stream),
            "c_stream_cached_gbps": _round(cached),
            "ratio_to_c_stream_cached": _round(speed / cached),
        }


def stages_ms(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians of a handoff's stages: ``reserve``, the call until RESERVE has left; ``wire``, from there to the last
    record; ``verify``, from there to READY. ``post`` is prefill's time in write and commit, within ``wire``."""
    stages = {
        "reserve": [one.reserve_s for one in rounds],
        "post": [one.post_s for one in rounds],
        "wire": [float(one.stats["transfer_s"]) for one in rounds],
        "verify": [float(one.stats["verify_s"]) for one in rounds],
        "total": [one.seconds for one in rounds],
    }
    return {name: _round(statistics.median(seconds) * 1e3) for name, seconds in stages.items()}


def run_prefill(
    options: BenchOptions,
    bind: str,
    *,
    keys: Keys | None = None,
    insecure: bool = False,
    first_timeout_s: float = 600.0,
    listening: Callable[[str], None] = lambda address: None,
    advance: Advance = lambda: None,
) -> None:
    """Prefill's side of one run; ``listening`` is told the address before anything is waited for."""
    side = PrefillSide(options, bind, keys=keys, insecure=insecure)
    try:
        listening(side.endpoint.address)
        side.run(first_timeout_s, advance)
    finally:
        side.close()


def run_decode(
    options: BenchOptions,
    peer: str,
    *,
    keys: Keys | None = None,
    insecure: bool = False,
    advance: Advance = lambda: None,
) -> BenchResult:
    """Decode's side of one run, with memcpy and the C stream in between its rounds."""
    options.check_memory(copies=2)
    with ExitStack() as stack:
        side = DecodeSide(options, peer, keys=keys, insecure=insecure)
        stack.callback(side.close)
        copy = _Memcpy(side.pool, options)
        stack.callback(copy.close)
        streams = _Streams(options, stack)

        def between(order: U64) -> None:
            copy.round(order)
            streams.round()

        side.run(between, advance)
        return BenchResult(
            options=options,
            rounds=side.rounds,
            latencies_s=side.latencies_s,
            memcpy_s=copy.seconds,
            stream_s=streams.seconds,
            cached_stream_s=streams.cached_seconds,
            no_stream=streams.missing,
            growth_bytes=side.growth_bytes,
            peer_growth_bytes=side.peer_growth_bytes,
            bytes_checked=side.bytes_checked,
            bytes_checked_ok=side.bytes_checked_ok,
        )


def run_pair(options: BenchOptions, *, advance: Advance = lambda: None) -> BenchResult:
    """Both sides on this host: prefill in a process of its own, decode in this one."""
    options.check_memory(copies=3)
    with _PrefillProcess(options) as prefill:
        return run_decode(options, prefill.address, advance=advance)


class _PrefillProcess:
    """Another Python process that runs ``run_prefill`` on a free loopback port."""

    def __init__(self, options: BenchOptions) -> None:
        command = [sys.executable, "-m", "kvxfer.bench", json.dumps(asdict(options))]
        # A session of its own: Ctrl-C reaches this process only, which then ends the other.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self.address = ""

    def __enter__(self) -> _PrefillProcess:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            waiting, _, _ = select.select([stdout], [], [], START_TIMEOUT_S)
            line = stdout.readline() if waiting else ""
        except KeyboardInterrupt:
            self._interrupt()
            raise
        if not line:
            self._end()
            raise PeerLost(
                "the prefill process did not start; its own error is above",
                timeout_s=START_TIMEOUT_S,
                status=self._process.returncode,
            )
        self.address = json.loads(line)["address"]
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is KeyboardInterrupt:
            self._interrupt()
        else:
            self._end()

    def _interrupt(self) -> None:
        self._process.terminate()  # nobody waits for what it is about to do
        self._end()

    def _end(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()  # the child ends when this closes, however we end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
            raise DeadlineExceeded("the prefill process did not end and was killed") from None
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


class _Memcpy:
    """memcpy of the same pages, from memory like the peer's pool, with as many threads as the lane has copiers."""

    def __init__(self, pool: PagePool, options: BenchOptions) -> None:
        self._options = options
        self._source = _native.SharedMemory(options.total_bytes, "kvxfer-bench-memcpy")
        source = np.arange(options.chunks, dtype=np.uint64) * np.uint64(options.page_bytes)
        self._source_chunks = np.uint64(self._source.ptr) + source.reshape(options.regions, options.pages)
        self._bases = np.array([memory.ptr for memory in pool.region_memory[0]], np.uint64)
        self._stride = np.uint64(pool.geometry.groups[pool.geometry.group_index(GROUP)].regions[0].page_stride)
        self._destination_order = np.arange(options.pages, dtype=np.uint64)
        self.seconds: list[float] = []
        self._copy(self._destination_order)  # touches the source once

    def round(self, order: U64) -> None:
        self.seconds.append(self._copy(order))

    def _copy(self, order: U64) -> float:
        options = self._options
        source_order = page_order(options.pages, options.seed, len(self.seconds), "memcpy")
        source = np.ascontiguousarray(self._source_chunks[:, source_order]).reshape(-1)
        destination = (self._bases[:, None] + order[None, :] * self._stride).reshape(-1)
        began = time.perf_counter()
        _native.copy_scattered(destination, source, options.page_bytes, options.connections)
        return time.perf_counter() - began

    def close(self) -> None:
        self._source.close()


class _Streams:
    """The plain C streams, where the lane is tcp: one that walks through as much memory as the pool, one in cache."""

    def __init__(self, options: BenchOptions, stack: ExitStack) -> None:
        self.seconds: list[float] = []
        self.cached_seconds: list[float] = []
        self.missing = ""
        self._through_memory: CStream | None = None
        self._cached: CStream | None = None
        if options.lane != "tcp":
            return
        connections, total = options.connections, max(options.total_bytes, options.connections)
        try:
            self._through_memory = stack.enter_context(CStream(connections, total, total))
            self._cached = stack.enter_context(CStream(connections, total, connections * CACHED_WINDOW_BYTES))
            self._through_memory.round_seconds()
            self._cached.round_seconds()
        except NoStream as reason:
            self.missing = str(reason)
            self._through_memory = self._cached = None

    def round(self) -> None:
        if self._through_memory is not None and self._cached is not None:
            self.seconds.append(self._through_memory.round_seconds())
            self.cached_seconds.append(self._cached.round_seconds())


def _gbps(total_bytes: int, seconds: Sequence[float]) -> list[float]:
    return [total_bytes / one / 1e9 for one in seconds]


def _latency(latencies_s: Sequence[float]) -> dict[str, float | None]:
    if not latencies_s:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.array(latencies_s) * 1e6, [50, 99])
    return {"p50": _round(float(p50)), "p99": _round(float(p99))}


def _round(value: float) -> float:
    """Three significant decimals are more than such figures carry."""
    return round(value, 3)
