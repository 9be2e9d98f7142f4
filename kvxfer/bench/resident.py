"""How much private memory the process holds beyond what it held before. A pool from ``allocate`` is shared memory."""

from __future__ import annotations

import os
import threading
from types import TracebackType

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_INTERVAL_S = 0.004


def private_bytes() -> int:
    """Resident anonymous memory: not the pool, nor files, nor the peer's pool where it is mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * PAGE_BYTES


class PeakSampler:
    """Samples private memory between enter and exit; ``growth_bytes`` is the peak above ``baseline_bytes``."""

    def __init__(self, baseline_bytes: int) -> None:
        self._baseline = baseline_bytes
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-bench-memory", daemon=True)

    @property
    def growth_bytes(self) -> int:
        return max(0, self._peak - self._baseline)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, private_bytes())

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._peak = max(self._peak, private_bytes())
