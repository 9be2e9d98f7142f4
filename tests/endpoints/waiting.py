"""Waiting for what only polling shows."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 10.0


def until(reached: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Returns once ``reached`` holds; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.002)
