"""S3: a source is released only when nothing reads it any more, a write in another thread included."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from kvxfer import GroupSpec, PagePool, Pages, PrefillEndpoint
from kvxfer.errors import AdmissionClosed

PAGES = 64


def test_abort_is_drained_only_when_a_write_of_another_thread_has_let_go() -> None:
    pool = PagePool.allocate([GroupSpec("kv", 1, (1 << 20,), "uint8", 16)], pages=PAGES)
    layer = pool.tensor("kv", "0")
    with PrefillEndpoint(pool, bind="127.0.0.1:0") as prefill:
        for round_number in range(20):
            layer[:] = 1
            grant = prefill.accept(f"r{round_number}", timeout_s=10)
            under_way = threading.Event()

            def write(grant: Any = grant, under_way: threading.Event = under_way) -> None:
                under_way.set()
                with contextlib.suppress(AdmissionClosed):
                    grant.write({"kv": Pages(range(PAGES), np.arange(PAGES))})

            thread = threading.Thread(target=write)
            thread.start()
            under_way.wait(10)
            assert grant.abort("preempted", drain_timeout_s=10)
            # Drained: the digesting thread may still be returning to Python, but reads no page any more.
            written = grant._source.written()
            layer[:] = 2
            thread.join(10)
            assert grant._source.written() == written
