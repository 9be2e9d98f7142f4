"""The demo's worker processes: ``python -m kvxfer.demo.worker prefill|decode``. Commands come as lines of JSON.

The decode worker never sees the prompt: it is told how many tokens there are, and the rest arrives in pages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer import canary, page_map
from kvxfer.decode import DecodeEndpoint
from kvxfer.demo import layout
from kvxfer.demo.model import Model
from kvxfer.errors import KvxferError, VerificationFailed
from kvxfer.pages import Pages
from kvxfer.pool import PagePool
from kvxfer.prefill import PrefillEndpoint

HANDOFF_TIMEOUT_S = 30.0
MAP_WIDTH = 64


class _Worker:
    """What both roles share: the model, and one pool and endpoint for the lane under test."""

    def __init__(self) -> None:
        self._model: Model
        self._path: Path | None = None
        self._heads = self._dim = 0
        self._pool: PagePool

    def load(self, model: str | None, seed: int) -> dict[str, Any]:
        self._path = None if model is None else Path(model)
        self._model = Model(self._path, seed)
        self._heads, self._dim = self._model.page_shape()
        return {"vocabulary": self._model.vocabulary, "layers": self._model.layers}

    def _make_pool(self, pages: int) -> PagePool:
        self._pool = layout.make_pool(self._model.layers, self._heads, self._dim, pages)
        return self._pool


class PrefillWorker(_Worker):
    """Computes prompts and hands their pages over."""

    def open(self, lane: str, pages: int) -> dict[str, Any]:
        lanes: dict[str, Any] = {"local_lanes": 0, "tcp_lanes": 0, f"{lane}_lanes": 1}
        self._endpoint = PrefillEndpoint(self._make_pool(pages), bind="127.0.0.1:0", **lanes)
        return {"address": self._endpoint.address, "incarnation": self._endpoint.incarnation}

    def close(self) -> dict[str, Any]:
        self._endpoint.close()
        return {}

    def prefill(
        self, request_id: str, prompt: list[int], other_weights: int | None = None, first_token: int | None = None
    ) -> dict[str, Any]:
        """A prompt as it should be. ``other_weights``: its KV comes from a model with weights of that seed instead."""
        model = self._model if other_weights is None else Model.with_other_weights(self._path, other_weights)
        grant = self._endpoint.accept(request_id, readers=1, timeout_s=HANDOFF_TIMEOUT_S)
        began = time.perf_counter()
        layers, token = model.prefill(prompt)
        computed = time.perf_counter()
        pages = self._take(layout.pages_for(len(prompt)))
        layout.write_pages(self._pool, layers, pages)
        laid_out = time.perf_counter()
        grant.write({layout.GROUP: pages})
        grant.commit(len(prompt), (token if first_token is None else first_token).to_bytes(4, "little"))
        posted = time.perf_counter()
        return {
            "prefill": computed - began,
            "lay_out": laid_out - computed,
            "post": posted - laid_out,
            **self._end(grant, pages),
        }

    def placeholder(self, request_id: str, n_tokens: int, commit_tokens: int) -> dict[str, Any]:
        """The incident: the prompt was marked for rejection and became one token in one page, yet it is committed."""
        grant = self._endpoint.accept(request_id, readers=1, timeout_s=HANDOFF_TIMEOUT_S)
        layers, token = self._model.prefill([0])
        pages = self._take(1)
        layout.write_pages(self._pool, layers, pages)
        grant.write({layout.GROUP: pages})
        grant.commit(commit_tokens, token.to_bytes(4, "little"))
        return {"pages_written": 1, "pages_of_prompt": layout.pages_for(n_tokens), **self._end(grant, pages)}

    def _take(self, n_pages: int) -> Pages:
        return Pages(np.arange(n_pages), self._pool.take(n_pages, layout.GROUP, order="random", seed=n_pages))

    def _end(self, grant: Any, pages: Pages) -> dict[str, Any]:
        """Source pages go back to the allocator only once no lane reads them (S3)."""
        released = grant.wait_released(HANDOFF_TIMEOUT_S)
        if released:
            self._pool.give_back(pages.pool, layout.GROUP)
        return {"released": released}


class DecodeWorker(_Worker):
    """Reserves pages, waits until they are READY, and goes on from them."""

    def open(self, lane: str, pages: int) -> dict[str, Any]:
        self._endpoint = DecodeEndpoint(self._make_pool(pages), lane_kinds=(lane,))
        canary.plant_canaries(self._pool, np.arange(pages, dtype=np.uint64))
        return {"page_bytes": layout.page_bytes(self._pool), "pool_pages": pages}

    def close(self) -> dict[str, Any]:
        self._endpoint.close()
        return {}

    def decode(self, request_id: str, address: str, incarnation: str, n_tokens: int, n_new: int) -> dict[str, Any]:
        """One handoff and the tokens after it; or, where it is refused, why, and what the pages really hold."""
        n_pages = layout.pages_for(n_tokens)
        taken = self._pool.take(n_pages, layout.GROUP, order="random", seed=n_pages)
        canary.plant_canaries(self._pool, taken)
        began = time.perf_counter()
        handoff = self._endpoint.reserve(
            request_id,
            {layout.GROUP: Pages(np.arange(n_pages), taken, first_token=0, n_tokens=n_tokens)},
            prefill=address,
            incarnation=incarnation,
            timeout_s=HANDOFF_TIMEOUT_S,
        )
        try:
            ready = handoff.wait(HANDOFF_TIMEOUT_S)
        except VerificationFailed as error:
            refused = self._refused(error)
            if handoff.wait_released(HANDOFF_TIMEOUT_S):
                refused["stale_pages"] = _numbers(canary.find_canaries(self._pool, taken))
                refused["map"] = self._map(_numbers(taken), refused["stale_pages"])
                self._pool.give_back(taken, layout.GROUP)
            return {"accepted": False, "pages": n_pages, **refused}
        arrived = time.perf_counter()
        stale = _numbers(canary.find_canaries(self._pool, taken))
        layers = layout.read_pages(ready, self._model.layers, self._heads, self._dim)
        read = time.perf_counter()
        tokens = self._model.continue_from(layers, int.from_bytes(ready.aux, "little"), n_new)
        decoded = time.perf_counter()
        answer = {
            "accepted": True,
            "tokens": tokens,
            "pages": n_pages,
            "bytes": n_pages * layout.page_bytes(self._pool),
            "stale_pages": stale,
            "tail_is_zero": layout.tail_is_zero(ready, self._model.layers),
            "map": page_map.render(self._pool),
            "stats": dict(ready.stats),
            "handoff": arrived - began,
            "read": read - arrived,
            "decode": decoded - read,
        }
        self._pool.give_back(taken, layout.GROUP)
        return answer

    def _map(self, reserved: list[int], stale: list[int]) -> str:
        """The pool, a mark a page: what the request's pages really hold."""
        marks = ["·"] * self._pool.geometry.groups[0].n_pages
        for page in reserved:
            marks[page] = "✖" if page in stale else "█"
        rows = ["  " + "".join(marks[at : at + MAP_WIDTH]) for at in range(0, len(marks), MAP_WIDTH)]
        return "\n".join([*rows, "█ written for this request  ✖ reserved, holds older bytes  · not of this request"])

    @staticmethod
    def _refused(error: VerificationFailed) -> dict[str, Any]:
        details = error.details
        return {
            "error": error.message,
            "kind": details.get("kind"),
            "findings": details.get("findings", []),
            "pages_refused": details.get("pages_refused", 0),
            "logical_pages": details.get("logical_pages", {}).get(layout.GROUP, []),
            "pool_pages": details.get("pool_pages", {}).get(layout.GROUP, []),
            "retryable": error.retryable,
        }


def _numbers(pages: Any) -> list[int]:
    return [int(page) for page in pages]


def main() -> None:
    worker: _Worker = {"prefill": PrefillWorker, "decode": DecodeWorker}[sys.argv[1]]()
    # Answers go out on a descriptor of their own: whatever a library prints must not end up between them.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        arguments = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(worker, arguments.pop("command"))
        try:
            answer = method(**arguments)
        except KvxferError as error:
            answer = {"unexpected": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
