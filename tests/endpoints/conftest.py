"""Two endpoints over one lane, in this process or with one of them in a child that can be stopped and killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer import DecodeEndpoint, Grant, GroupSpec, Handoff, PageGroup, PagePool, Pages, PrefillEndpoint, Ready
from kvxfer.pool import page_rows

from .waiting import until

TOKENS_PER_PAGE = 16
LAYERS = 2
PAGE_SHAPE = (TOKENS_PER_PAGE, 2, 8)  # tokens, heads, head size; float32: 1,024 bytes a page and layer
PAGES = 32
WAIT_S = 10.0

Array = npt.NDArray[Any]


class Side:
    """A pool and its arrays, by layer."""

    def __init__(self, *, mapped: bool = True, pages: int = PAGES, seed: int | None = None) -> None:
        if mapped:
            spec = GroupSpec("kv", LAYERS, PAGE_SHAPE, "float32", TOKENS_PER_PAGE, token_axis=1)
            self.pool = PagePool.allocate([spec], pages=pages)
            self.layers: list[Array] = [self.pool.tensor("kv", str(layer)) for layer in range(LAYERS)]
        else:
            self.layers = [np.zeros((pages, *PAGE_SHAPE), np.float32) for _ in range(LAYERS)]
            self.pool = PagePool([PageGroup("kv", self.layers, tokens_per_page=TOKENS_PER_PAGE, token_axis=1)])
        if seed is not None:
            self.fill(seed)

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for layer in self.layers:
            layer[:] = random.standard_normal(layer.shape, np.float32)

    def copy(self, pages: Sequence[int]) -> list[Array]:
        """The bytes of these pages now, one array a layer."""
        return [layer[list(pages)].copy() for layer in self.layers]


def n_pages(n_tokens: int) -> int:
    return -(-n_tokens // TOKENS_PER_PAGE)


def at(
    pages: Sequence[int], n_tokens: int | None = None, *, first_token: int | None = None, first_page: int = 0
) -> dict[str, Pages]:
    """``pages`` of the pool as logical pages ``first_page``, ``first_page + 1``, ... of the group "kv"."""
    logical = range(first_page, first_page + len(pages))
    return {"kv": Pages(logical, list(pages), first_token=first_token, n_tokens=n_tokens)}


class Pair:
    """One prefill and one decode in this process."""

    def __init__(self, lane: str, prefill_config: dict[str, Any], decode_config: dict[str, Any]) -> None:
        self.lane = lane
        kind = "tcp" if lane == "tcp" else "local"
        self.source = Side(mapped=lane != "local-read", seed=1)
        self.target = Side(mapped=True)
        self.prefill = PrefillEndpoint(self.source.pool, bind="127.0.0.1:0", **prefill_config)
        self.decode = DecodeEndpoint(self.target.pool, lane_kinds=(kind,), **decode_config)

    def reserve(
        self, request_id: str, pages: Sequence[int], n_tokens: int, *, timeout_s: float = WAIT_S, **more: Any
    ) -> Handoff:
        return self.decode.reserve(
            request_id, at(pages, n_tokens, first_token=0), prefill=self.prefill.address, timeout_s=timeout_s, **more
        )

    def send(self, request_id: str, pages: Sequence[int], n_tokens: int, *, aux: bytes = b"", **more: Any) -> Grant:
        """Accepts, writes all pages and commits."""
        grant = self.prefill.accept(request_id, timeout_s=WAIT_S, **more)
        grant.write(at(pages))
        grant.commit(n_tokens, aux)
        return grant

    @staticmethod
    def wait_offered(grant: Grant) -> None:
        """Until a first reader has reserved."""
        until(lambda: grant.first_token is not None)

    def hand_over(self, request_id: str, source: Sequence[int], target: Sequence[int], n_tokens: int) -> Ready:
        handoff = self.reserve(request_id, target, n_tokens)
        grant = self.send(request_id, source, n_tokens)
        ready = handoff.wait(WAIT_S)
        assert grant.wait_released(WAIT_S)
        return ready

    def assert_delivered(self, source: Sequence[int], target: Sequence[int], n_tokens: int) -> None:
        """Every token arrived where it belongs; slots past the last one are zero."""
        for sent, landed in zip(self.source.copy(source), self.target.copy(target), strict=True):
            flat_sent = sent.reshape(-1, *PAGE_SHAPE[1:])
            flat_landed = landed.reshape(-1, *PAGE_SHAPE[1:])
            np.testing.assert_array_equal(flat_landed[:n_tokens], flat_sent[:n_tokens])
            assert not flat_landed[n_tokens:].any()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(params=["local", "local-read", "tcp"])
def lane(request: pytest.FixtureRequest) -> str:
    """``local`` maps prefill's memfd, ``local-read`` reads its private memory, ``tcp`` is a socket."""
    return str(request.param)


@pytest.fixture
def make_pair(lane: str) -> Iterator[Callable[..., Pair]]:
    """``make_pair(prefill={...}, decode={...})``: configuration fields of each side."""
    pairs: list[Pair] = []

    def make(*, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Pair:
        pairs.append(Pair(lane, prefill or {}, decode or {}))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


class Worker:
    """An endpoint in a child process, driven by one JSON line a call: see ``worker.py``."""

    def __init__(self, role: str, lane: str, **options: Any) -> None:
        script = Path(__file__).with_name("worker.py")
        arguments = json.dumps({"role": role, "lane": lane, **options})
        self._process = subprocess.Popen(
            [sys.executable, str(script), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._unread = b""
        self.hello = self._answer()
        self.pid = self._process.pid

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``name`` of the child's worker; returns its JSON result, raises RuntimeError with its error's text."""
        self.post(name, *args, **kwargs)
        return self._answer()

    def post(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """The same without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, args, kwargs]) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = WAIT_S) -> Any:
        """The answer to an earlier ``post``."""
        return self._answer(timeout_s)

    def stop(self) -> None:
        """SIGSTOP; returns when the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_S
        while Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def end(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.kill()
        self._process.wait(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _answer(self, timeout_s: float = WAIT_S) -> Any:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the worker gave no answer")
            piece = os.read(fd, 65536)
            if not piece:
                raise RuntimeError("the worker has ended")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


@pytest.fixture
def start_worker(lane: str) -> Iterator[Callable[..., Worker]]:
    """``start_worker("prefill" | "decode", **options)``: a child with one endpoint over this test's lane."""
    workers: list[Worker] = []

    def start(role: str, **options: Any) -> Worker:
        workers.append(Worker(role, lane, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def target() -> Side:
    return Side()


@pytest.fixture
def big_target() -> Side:
    """A pool of two thousand pages."""
    return Side(pages=2000)


@pytest.fixture
def decode(lane: str, target: Side) -> Iterator[DecodeEndpoint]:
    """A decode endpoint of this process over ``target``, for tests whose prefill is a worker."""
    endpoint = DecodeEndpoint(target.pool, lane_kinds=("tcp" if lane == "tcp" else "local",))
    yield endpoint
    endpoint.close()


class Ends:
    """Endpoints over pools of the test's own, any number on each side; closed when the test ends."""

    def __init__(self, lane: str) -> None:
        self._kinds = ("tcp" if lane == "tcp" else "local",)
        self._prefills: list[PrefillEndpoint] = []
        self._decodes: list[DecodeEndpoint] = []

    def prefill(self, pool: PagePool, **config: Any) -> PrefillEndpoint:
        self._prefills.append(PrefillEndpoint(pool, **{"bind": "127.0.0.1:0", **config}))
        return self._prefills[-1]

    def decode(self, pool: PagePool, **config: Any) -> DecodeEndpoint:
        self._decodes.append(DecodeEndpoint(pool, **{"lane_kinds": self._kinds, **config}))
        return self._decodes[-1]

    @staticmethod
    def until(reached: Callable[[], bool]) -> None:
        """See ``until``."""
        until(reached)

    @staticmethod
    def fill(pool: PagePool, seed: int) -> PagePool:
        """Random bytes in every page; returns the pool."""
        random = np.random.default_rng(seed)
        for index, group in enumerate(pool.geometry.groups):
            for region in range(len(group.regions)):
                rows = page_rows(pool, index, region)
                rows[:] = random.integers(0, 256, rows.shape, np.uint8)
        return pool

    def close(self) -> None:
        for endpoint in (*self._decodes, *self._prefills):
            endpoint.close()


@pytest.fixture
def ends(lane: str) -> Iterator[Ends]:
    """``ends.prefill(pool, ...)`` and ``ends.decode(pool, ...)``: endpoints over this test's lane."""
    made = Ends(lane)
    yield made
    made.close()

