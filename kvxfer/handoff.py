"""Decode's view of one request: ``Handoff`` while it is under way, ``Ready`` once its pages may be read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from kvxfer.errors import Closed, DeadlineExceeded, KvxferError, NotReady
from kvxfer.pages import Pages

if TYPE_CHECKING:
    from kvxfer.decode import DecodeEndpoint

_MAKE = object()  # only the endpoint makes these objects: holding one is the proof that the state was reached


class _Sealed:
    """No subclasses, no copies, no pickles: an object of these classes is what the endpoint made, or it is nothing."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__mro__[1] is not _Sealed:
            raise TypeError(f"{cls.__mro__[1].__name__} cannot be subclassed")
        super().__init_subclass__(**kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} belongs to one process and cannot be copied or pickled")


@final
class Ready(_Sealed):
    """A handoff whose every byte has been confirmed and verified (S1).

    Attributes:
        pages: by group, the pages that may be read now (read-only mapping).
        n_tokens: tokens of the commit, counted from token 0.
        aux: the aux bytes of the commit.
        stats: stage times in seconds, bytes, lane kind and verify mode.

    Thread-safe. The engine owns the pages from here on; ``page`` refuses one as soon as it has been reserved again.
    """

    __slots__ = ("_endpoint", "_request_id", "_reservation", "aux", "n_tokens", "pages", "stats")

    def __init__(
        self,
        token: object,
        endpoint: DecodeEndpoint,
        reservation: int,
        request_id: str,
        pages: Mapping[str, Pages],
        n_tokens: int,
        aux: bytes,
        stats: Mapping[str, Any],
    ) -> None:
        if token is not _MAKE:
            raise NotReady("a Ready is made by its endpoint only; wait for the handoff", request_id=request_id)
        self._endpoint = endpoint
        self._reservation = reservation
        self._request_id = request_id
        self.pages: Mapping[str, Pages] = MappingProxyType(dict(pages))
        self.n_tokens = n_tokens
        self.aux = aux
        self.stats: Mapping[str, Any] = MappingProxyType(dict(stats))

    def page(self, group: str, layer: str | int, logical: int) -> npt.NDArray[np.uint8]:
        """The bytes of one page in one region, as a read-only uint8 view of shape [page_bytes].

        Raises NotReady for a page that is not of this handoff or has been reserved anew, Closed after ``close()``.
        """
        pages = self.pages.get(group)
        index = -1 if pages is None else int(np.searchsorted(pages.logical, logical))
        if pages is None or index >= len(pages.logical) or int(pages.logical[index]) != logical:
            raise NotReady(
                f"page {logical} of group {group!r} is not part of this handoff",
                reservation=self._reservation,
                request_id=self._request_id,
            )
        return self._endpoint._read_page(self._reservation, self._request_id, group, layer, int(pages.pool[index]))

    def __repr__(self) -> str:
        return f"Ready(request_id={self._request_id!r}, n_tokens={self.n_tokens}, reservation={self._reservation:016x})"


@final
class Handoff(_Sealed):
    """One reservation on its way. Made by ``DecodeEndpoint.reserve``. Thread-safe; may be awaited.

    It holds no pages that could be read: those come with ``Ready``, from ``wait`` or ``await``.
    """

    __slots__ = (
        "_callbacks",
        "_endpoint",
        "_error",
        "_pages",
        "_ready",
        "_released",
        "_reservation",
        "_waiters",
        "request_id",
        "tag",
    )

    def __init__(
        self,
        token: object,
        endpoint: DecodeEndpoint,
        reservation: int,
        request_id: str,
        tag: Any,
        pages: Mapping[str, Pages],
    ) -> None:
        if token is not _MAKE:
            raise TypeError("a Handoff is made by DecodeEndpoint.reserve only")
        self._endpoint = endpoint
        self._reservation = reservation
        self.request_id = request_id
        self.tag = tag
        self._pages = pages
        self._ready: Ready | None = None
        self._error: KvxferError | None = None
        self._released = False
        self._callbacks: list[Callable[[], None]] = []
        self._waiters: list[threading.Lock] = []  # one for each wait call under way, held until the end comes

    @property
    def reservation(self) -> int:
        """The 64-bit id that names this handoff in errors, audit lines and at the peer."""
        return self._reservation

    @property
    def state(self) -> str:
        """``reserved``, ``ready``, ``quarantined`` (failed, pages not yet safe) or ``released``."""
        if self._ready is not None:
            return "ready"
        if self._released:
            return "released"
        return "reserved" if self._error is None else "quarantined"

    @property
    def error(self) -> KvxferError | None:
        """Why it failed, or None."""
        return self._error

    @property
    def released(self) -> bool:
        """True once a failed handoff's pages may be reused (S2)."""
        return self._released

    def wait(self, timeout_s: float) -> Ready:
        """Waits until READY and returns the pages; blocks with the interpreter lock released.

        Raises the handoff's error if it failed, DeadlineExceeded if it is still under way after ``timeout_s`` seconds
        (the handoff goes on: wait again, or abort), Closed after ``close()``.
        """
        self._endpoint._check_process()
        if not self._final() and not self._await_end(timeout_s):
            raise DeadlineExceeded(
                "the handoff is still under way; wait again or abort it",
                reservation=self._reservation,
                request_id=self.request_id,
                timeout_s=timeout_s,
            )
        return self._outcome()

    def __await__(self) -> Generator[Any, None, Ready]:
        return self._as_future().__await__()

    def extend(self, seconds: float) -> None:
        """Moves the deadline (``timeout_s`` of ``reserve``) by ``seconds``; nothing where it has ended.

        Raises GeometryError for a number that is not positive, Closed.
        """
        self._endpoint._extend(self._reservation, seconds)

    def abort(self, reason: str = "aborted by the engine") -> None:
        """Gives the handoff up; returns at once. ``failed`` follows, then ``released``.

        Idempotent; nothing after READY.
        """
        self._endpoint._abort(self._reservation, reason)

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until a failed handoff's pages may be reused; False if they may not yet. Raises NotReady where the
        handoff is READY: its pages belong to the engine and no release follows."""
        endpoint = self._endpoint
        endpoint._check_process()
        reached = endpoint._wait_until(lambda: self._released or self._ready is not None, timeout_s)
        if self._ready is not None:
            raise NotReady(
                "the handoff is READY: its pages belong to the engine, no release follows",
                reservation=self._reservation,
                request_id=self.request_id,
            )
        if reached:
            endpoint._events.consume(self._reservation, "failed", "released")
        return reached

    def _await_end(self, timeout_s: float) -> bool:
        """False when the time is up. The first who waits handles what arrives meanwhile; others wait for a lock of
        their own, so that an end wakes no more callers than it concerns."""
        endpoint = self._endpoint
        waiter = threading.Lock()
        waiter.acquire()
        lock = endpoint._lock
        with lock:
            if self._final():
                return True
            if timeout_s <= 0:
                return False
            leads = endpoint._reactor.lead()
            self._waiters.append(waiter)
        try:
            if leads:
                endpoint._lead(self._final, timeout_s)
            elif waiter.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                return True
        finally:
            # Also where a signal handler raised: a waiter that is left behind counts as somebody who was told.
            with lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        with lock:
            return self._final()

    def _take_wakes(self) -> list[Callable[[], object]]:
        """Whom to wake now that the outcome is known. The endpoint's lock must be held."""
        wakes: list[Callable[[], object]] = [*(waiter.release for waiter in self._waiters), *self._callbacks]
        self._waiters.clear()
        self._callbacks.clear()
        return wakes

    def _final(self) -> bool:
        return self._ready is not None or self._error is not None

    def _outcome(self) -> Ready:
        self._endpoint._events.consume(self._reservation, "ready", "failed")
        if self._error is not None:
            raise self._error
        if self._ready is None:
            raise NotReady("the handoff has not ended", reservation=self._reservation, request_id=self.request_id)
        if self._endpoint._closing:
            raise Closed("the decode endpoint is closed", reservation=self._reservation, request_id=self.request_id)
        return self._ready

    async def _as_future(self) -> Ready:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody is there to be told
                loop.call_soon_threadsafe(finish)

        self._endpoint._check_process()
        with self._endpoint._lock:
            if self._final():
                finish()
            else:
                self._callbacks.append(notify)
        await arrived
        return self._outcome()

    def __repr__(self) -> str:
        return f"Handoff(request_id={self.request_id!r}, state={self.state!r}, reservation={self._reservation:016x})"
