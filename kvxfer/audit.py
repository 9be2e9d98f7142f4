"""S8: every refusal, mismatch, fence and quarantine becomes a count and a line."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from typing import Any

from kvxfer.protocol.actions import Audit

_LOG = logging.getLogger("kvxfer.audit")
_QUIET = frozenset({"ready", "released", "session_opened", "session_closed", "lane_up"})


class AuditTrail:
    """Counts every audit action by name, keeps the last lines, and writes them to the logger ``kvxfer.audit`` as JSON.

    What belongs to the good path is counted and kept but logged at DEBUG only. Thread-safe.
    """

    def __init__(self, side: str, keep: int = 1000) -> None:
        self._side = side
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        # Kept as it came: most lines are pushed out by later ones before anybody reads them.
        self._kept: deque[tuple[float, Audit]] = deque(maxlen=keep)

    def note(self, audit: Audit) -> None:
        event, now_s = audit.event, time.time()
        with self._lock:
            self._counts[event] += 1
            self._kept.append((now_s, audit))
        level = logging.DEBUG if event in _QUIET else logging.WARNING
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "%s", json.dumps(self._line(now_s, audit), default=str))

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def lines(self) -> list[dict[str, Any]]:
        """The last lines, oldest first."""
        with self._lock:
            kept = list(self._kept)
        return [self._line(time_s, audit) for time_s, audit in kept]

    def _line(self, time_s: float, audit: Audit) -> dict[str, Any]:
        line: dict[str, Any] = {"time_s": time_s, "side": self._side, "event": audit.event}
        if audit.session is not None:
            line["session"] = audit.session
        if audit.reservation is not None:
            line["reservation"] = f"{audit.reservation:016x}"
        if audit.leg is not None:
            line["leg"] = audit.leg
        return line | audit.fields
