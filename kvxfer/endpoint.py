"""What both endpoints share: one lock, one I/O thread, the events, and the loop that carries out a core's actions."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer import _native
from kvxfer.audit import AuditTrail
from kvxfer.errors import Closed, KvxferError
from kvxfer.events import Event, EventQueue
from kvxfer.pool import PagePool
from kvxfer.protocol.actions import Action, Audit, Notify
from kvxfer.reactor import Reactor

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("kvxfer")
DEFAULT_CLOSE_TIMEOUT_S = 10.0


class Endpoint(ABC):
    """Base of ``DecodeEndpoint`` and ``PrefillEndpoint``; not for subclassing elsewhere.

    Every public call is thread-safe and refuses with ``Closed`` after ``close()`` and in a forked child. Any thread may
    run the core and use the sockets under ``_lock``; the I/O thread does so for whatever arrives.
    """

    def __init__(self, pool: PagePool, side: str) -> None:
        self._pool = pool
        self._side = side
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events = EventQueue()
        self._trail = AuditTrail(side)
        self._completions = _native.CompletionQueue()
        self._completions_fd = self._completions.fileno()
        self._reactor = Reactor(f"kvxfer-{side}", self._on_wake)
        self._actions: deque[Action] = deque()
        self._driving = False
        self._news = False  # something was notified that nobody has been woken for
        self._wakes: list[Callable[[], object]] = []  # who else is woken for it
        self._closing = False
        self._closed = False
        self._handlers: dict[type, Callable[[Any], Sequence[Action] | None]] = {
            Audit: self._do_audit,
            Notify: self._do_notify,
        }

    # ---- public ------------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> PagePool:
        return self._pool

    def poll(self) -> list[Event]:
        """Takes all waiting events; never blocks. A ``wait`` call consumes the events that it reports itself."""
        self._check_process()
        return self._events.poll()

    def fileno(self) -> int:
        """A descriptor that is readable while events wait, for ``select``, ``epoll`` or an event loop."""
        self._check_process()
        return self._events.fileno()

    def counters(self) -> dict[str, int]:
        """Counts of everything that happened, by name (refusals, mismatches, fences, quarantines, ...)."""
        self._check_process()
        return self._trail.counts()

    def audit_lines(self) -> list[dict[str, Any]]:
        """The last audit lines, oldest first, JSON-serialisable. All of them go to the logger ``kvxfer.audit``."""
        self._check_process()
        return self._trail.lines()

    @abstractmethod
    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} belongs to one process and cannot be pickled")

    # ---- for the two endpoints ---------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Closed(
                "this object belongs to the process that made it; a forked child must make its own endpoint",
                owner_pid=self._pid,
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closing:
            raise Closed(f"the {self._side} endpoint is closed")

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    def _drive(self, actions: Sequence[Action]) -> None:
        """Carries out actions in order, then the actions that their answers give. The lock must be held."""
        self._actions.extend(actions)
        if self._driving:
            return
        self._driving = True
        try:
            while self._actions:
                action = self._actions.popleft()
                try:
                    more = self._handlers[type(action)](action)
                except Exception as cause:
                    # An action that cannot be carried out leaves its reservation to its deadline; the others go on.
                    _LOG.exception("kvxfer: %s failed", type(action).__name__)
                    more = [Audit("action_failed", fields={"action": type(action).__name__, "cause": repr(cause)})]
                if more:
                    self._actions.extend(more)
        finally:
            self._driving = False
        if self._news:
            self._announce()

    def _announce(self) -> None:
        """Wakes the engine, after all actions: it would only stand in line for the lock and the interpreter before."""
        self._news = False
        self._events.announce()
        self._reactor.rouse()
        for wake in self._wakes:
            wake()
        self._wakes.clear()
        self._changed.notify_all()

    def _do_audit(self, action: Audit) -> None:
        self._trail.note(action)

    def _do_notify(self, action: Notify) -> None:
        tag, told = self._settle(action)
        if not told:
            self._events.push(action.key, Event(action.kind, tag, action.request_id, action.error))
        self._news = True

    @abstractmethod
    def _settle(self, action: Notify) -> tuple[Any, bool]:
        """Tells the handoff or grant of its event; returns the caller's tag, and whether a wait call has told, or
        will tell, its caller."""

    @abstractmethod
    def _on_wake(self, ready: list[int]) -> float | None: ...

    def _wait_until(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for a condition over the core's state; False when the time is up."""
        with self._changed:
            # S6: as long as a lock can wait, and not at all for what is not a number.
            return self._changed.wait_for(reached, min(timeout_s, threading.TIMEOUT_MAX) if timeout_s > 0 else 0.0)


def as_error(cause: BaseException, text: str, **details: Any) -> KvxferError:
    """Any failure below the endpoints as a typed error."""
    if isinstance(cause, KvxferError):
        return cause
    return KvxferError(f"{text}: {cause}", **details)
