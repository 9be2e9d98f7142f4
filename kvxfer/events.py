"""What an endpoint tells its engine: a queue of events with a file descriptor that is readable while one waits."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one handoff (decode) or grant (prefill); each kind at most once for each.

    Attributes:
        kind: ``offered`` (prefill: every reader has reserved), ``ready`` (decode: the pages may be read; prefill: every
            reader has them), ``failed`` (``error`` says why) or ``released`` (pages or sources may be reused).
        tag: what the caller gave to ``reserve`` or ``accept``.
        request_id: the engine's request id.
        error: the typed error of a ``failed`` event, else None.
    """

    kind: str
    tag: Any
    request_id: str
    error: KvxferError | None = None


class EventQueue:
    """Events in order of arrival. Thread-safe; nothing here blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: OrderedDict[tuple[int, str], Event] = OrderedDict()
        self._signalled = False  # the descriptor is readable
        self._closed = True
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def fileno(self) -> int:
        """A descriptor that is readable while events wait. It belongs to the queue."""
        return self._fd

    def push(self, key: int, event: Event) -> None:
        """Adds an event; ``announce`` makes the descriptor readable."""
        with self._lock:
            if not self._closed:
                self._events[key, event.kind] = event

    def announce(self) -> None:
        """Wakes who waits for the descriptor, where there are events that it does not yet know of."""
        with self._lock:
            if self._events and not self._signalled and not self._closed:
                self._signalled = True
                os.eventfd_write(self._fd, 1)

    def poll(self) -> list[Event]:
        """Takes all waiting events."""
        with self._lock:
            if not self._events:
                return []
            events = list(self._events.values())
            self._events.clear()
            self._drain()
            return events

    def consume(self, key: int, *kinds: str) -> None:
        """Drops events of one handoff or grant that a ``wait`` call has already told its caller."""
        with self._lock:
            if not self._events:
                return
            for kind in kinds:
                self._events.pop((key, kind), None)
            if not self._events:
                self._drain()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._events.clear()
                os.close(self._fd)

    def __del__(self) -> None:
        # Of an endpoint that could not be made: nobody holds the descriptor, and nobody will close it.
        self.close()

    def _drain(self) -> None:
        if self._signalled:
            self._signalled = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
