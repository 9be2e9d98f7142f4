"""One endpoint in a process of its own. First argument: JSON with role, lane, seed and the endpoint's configuration.
Then one JSON line a call on standard input, ``[name, args, kwargs]``, and one line an answer, ``{"result": ...}`` or
``{"error": ...}``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from kvxfer import DecodeEndpoint, Grant, Handoff, PrefillEndpoint
from kvxfer.errors import KvxferError

HERE = Path(__file__).parent


# The tests' fixtures are a module of a package to pytest, and must be one here.
sys.path.insert(0, str(HERE.parent))
support = importlib.import_module("endpoints.conftest")
WAIT_S = support.WAIT_S


class Gate:
    """An ``after`` event that another call opens."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def synchronize(self) -> None:
        if not self._open.wait(60):
            raise TimeoutError("the gate was never opened")


class Prefill:
    def __init__(
        self, lane: str, seed: int = 1, bind: str = "127.0.0.1:0", pages: int = support.PAGES, **config: Any
    ) -> None:
        self.side = support.Side(mapped=lane != "local-read", seed=seed, pages=pages)
        self.endpoint = PrefillEndpoint(self.side.pool, bind=bind, **config)
        self.grants: dict[str, Grant] = {}
        self.gates: dict[str, Gate] = {}

    def hello(self) -> dict[str, Any]:
        return {"address": self.endpoint.address, "port": self.endpoint.port, "incarnation": self.endpoint.incarnation}

    def accept(self, request_id: str, readers: int | None = None, timeout_s: float = WAIT_S) -> None:
        self.grants[request_id] = self.endpoint.accept(request_id, readers=readers, timeout_s=timeout_s)

    def write(
        self,
        request_id: str,
        pages: list[int],
        first_page: int = 0,
        layers: list[str] | None = None,
        gate: str | None = None,
    ) -> None:
        after = None if gate is None else self.gates.setdefault(gate, Gate())
        self.grants[request_id].write(support.at(pages, first_page=first_page), layers=layers, after=after)

    def open(self, gate: str) -> None:
        self.gates[gate].open()

    def commit(self, request_id: str, n_tokens: int, aux: str = "") -> None:
        self.grants[request_id].commit(n_tokens, aux.encode())

    def send(self, request_id: str, pages: list[int], n_tokens: int) -> None:
        self.accept(request_id)
        self.write(request_id, pages)
        self.commit(request_id, n_tokens)

    def abort(self, request_id: str, drain_timeout_s: float | None = None) -> bool:
        return self.grants[request_id].abort(drain_timeout_s=drain_timeout_s)

    def reject(self, request_id: str, code: str, message: str) -> None:
        self.endpoint.reject(request_id, code, message)

    def released(self, request_id: str, timeout_s: float = WAIT_S) -> bool:
        return self.grants[request_id].wait_released(timeout_s)

    def fill(self, pages: list[int], value: float) -> None:
        for layer in self.side.layers:
            layer[pages] = value

    def events(self) -> list[list[Any]]:
        return [[event.kind, event.request_id, event.error and str(event.error)] for event in self.endpoint.poll()]

    def offered(self, request_id: str) -> None:
        """Waits until every reader of the grant has reserved."""
        support.until(lambda: self.grants[request_id].first_token is not None)

    def counters(self) -> dict[str, int]:
        return self.endpoint.counters()


class Decode:
    def __init__(self, lane: str, pages: int = support.PAGES, without_readv: bool = False, **config: Any) -> None:
        """``without_readv``: the kernel forbids ``process_vm_readv``, and tcp lanes are taken too."""
        self.unavailable = _forbid_readv() if without_readv else ""
        self.side = support.Side(pages=pages)
        kinds = ("local", "tcp") if without_readv else ("tcp" if lane == "tcp" else "local",)
        self.endpoint = DecodeEndpoint(self.side.pool, lane_kinds=kinds, **config)
        self.handoffs: dict[str, Handoff] = {}

    def hello(self) -> dict[str, Any]:
        return {"unavailable": self.unavailable}

    def reserve(
        self, request_id: str, pages: list[int], n_tokens: int, prefill: str, timeout_s: float = WAIT_S, **more: Any
    ) -> None:
        self.handoffs[request_id] = self.endpoint.reserve(
            request_id, support.at(pages, n_tokens, first_token=0), prefill=prefill, timeout_s=timeout_s, **more
        )

    def wait(self, request_id: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        ready = self.handoffs[request_id].wait(timeout_s)
        return {"n_tokens": ready.n_tokens, "aux": ready.aux.decode(), "lane": ready.stats["lane"]}

    def abort(self, request_id: str) -> None:
        self.handoffs[request_id].abort()

    def released(self, request_id: str, timeout_s: float = WAIT_S) -> bool:
        return self.handoffs[request_id].wait_released(timeout_s)

    def counters(self) -> dict[str, int]:
        return self.endpoint.counters()

    def audit_lines(self) -> list[dict[str, Any]]:
        return self.endpoint.audit_lines()


def _forbid_readv() -> str:
    """Forbids the system call to this process; says why where that cannot be done."""
    filters = importlib.import_module("lanes.dial_without_readv")
    try:
        filters.forbid_process_vm_readv()
    except (OSError, KeyError) as cause:
        return str(cause)
    return ""


def main() -> None:
    options = json.loads(sys.argv[1])
    worker = {"prefill": Prefill, "decode": Decode}[options.pop("role")](**options)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    out.write(json.dumps({"result": worker.hello()}) + "\n")
    for line in sys.stdin:
        name, args, kwargs = json.loads(line)
        try:
            answer = {"result": getattr(worker, name)(*args, **kwargs)}
        except KvxferError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
