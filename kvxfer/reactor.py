"""Who waits for an endpoint's descriptors: a thread of its own, or a caller that has nothing else to do meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable

_LONGEST_WAIT_S = 3600.0
_LOG = logging.getLogger("kvxfer")


class Reactor:
    """Waits with epoll; calls ``on_wake(ready_fds)`` in its own thread. Thread-safe.

    ``on_wake`` returns the monotonic time at which it wants to be called again at the latest, or None.

    While a caller *leads*, it waits for the watched descriptors itself and the thread for deadlines and ``wake`` only:
    what arrives then is handled where it is waited for, without a change of threads.
    """

    def __init__(self, name: str, on_wake: Callable[[list[int]], float | None]) -> None:
        self._on_wake = on_wake
        self._sources = select.epoll()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rouse_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sources_fd = self._sources.fileno()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._sources_fd, select.EPOLLIN)
        self._sources.register(self._rouse_fd, select.EPOLLIN)
        self._roused = False
        self._stopping = False
        self._leader: int | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, fd: int) -> None:
        """Adds a descriptor; takes effect at once, also while somebody waits."""
        self._sources.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Removes a descriptor, before it is closed. One that is not watched is fine."""
        with contextlib.suppress(OSError, ValueError):
            self._sources.unregister(fd)

    def wake(self) -> None:
        """Makes the thread call ``on_wake`` soon."""
        if not self._stopping:
            os.eventfd_write(self._wake_fd, 1)

    def in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # ---- leading: begun, roused and ended under the endpoint's lock --------------------------------------------------

    @property
    def led(self) -> bool:
        return self._leader is not None

    def lead(self) -> bool:
        """The calling thread takes over the watched descriptors. False where another has them, or nobody any more."""
        if self._leader is not None or self._stopping:
            return False
        self._leader = threading.get_ident()
        self._epoll.modify(self._sources_fd, 0)
        return True

    def await_sources(self, timeout_s: float) -> list[int]:
        """The leader's wait, without the endpoint's lock: descriptors that are ready; none when roused or timed out."""
        ready = [fd for fd, _ in self._sources.poll(timeout_s)]
        if self._rouse_fd in ready:
            self._calm()
            ready.remove(self._rouse_fd)
        return ready

    def rouse(self) -> None:
        """Ends one wait of a leader in another thread."""
        if self._leader is not None and self._leader != threading.get_ident():
            self._roused = True
            os.eventfd_write(self._rouse_fd, 1)

    def follow(self) -> None:
        """The leader gives the descriptors back to the thread."""
        if self._roused:
            self._calm()
        self._leader = None
        self._epoll.modify(self._sources_fd, select.EPOLLIN)

    def _calm(self) -> None:
        self._roused = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._rouse_fd)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> None:
        """Ends the thread and closes its descriptors; must not be called from it, nor while somebody leads."""
        if not self._stopping:
            self.wake()
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._let_go()

    def _let_go(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            self._sources.close()
            os.close(self._wake_fd)
            os.close(self._rouse_fd)

    def __del__(self) -> None:
        # A started thread keeps its reactor alive; this one was never started, or has ended without a stop.
        self._let_go()

    def _run(self) -> None:
        deadline: float | None = None
        while not self._stopping:
            # epoll counts milliseconds in 31 bits; waking once an hour costs nothing.
            timeout_s = -1.0 if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S)
            found = [fd for fd, _ in self._epoll.poll(timeout_s)]
            if self._wake_fd in found:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if self._stopping:
                return
            ready = [fd for fd, _ in self._sources.poll(0)] if self._sources_fd in found else []
            try:
                deadline = self._on_wake(ready)
            except Exception:
                # One bad wake-up must not leave every other reservation without anybody to end it.
                _LOG.exception("kvxfer: an endpoint's wake-up failed; it goes on")
                deadline = time.monotonic() + 0.1
