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
        self._lines: deque[dict[str, Any]] = deque(maxlen=keep)

    def note(self, audit: Audit) -> None:
        line: dict[str, Any] = {"time_s": time.time(), "side": self._side, "event": audit.event}
        if audit.session is not None:
            line["session"] = audit.session
        if audit.reservation is not None:
            line["reservation"] = f"{audit.reservation:016x}"
        if audit.leg is not None:
            line["leg"] = audit.leg
        line.update(audit.fields)
        with self._lock:
            self._counts[audit.event] += 1
            self._lines.append(line)
        level = logging.DEBUG if audit.event in _QUIET else logging.WARNING
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "%s", json.dumps(line, default=str))

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def lines(self) -> list[dict[str, Any]]:
        """The last lines, oldest first."""
        with self._lock:
            return list(self._lines)
