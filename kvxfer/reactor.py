"""One thread that waits for descriptors and deadlines on behalf of an endpoint, and hands each wake-up to it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger("kvxfer")


class Reactor:
    """Waits with epoll; calls ``on_wake(ready_fds)`` in its own thread. Thread-safe.

    ``on_wake`` returns the monotonic time at which it wants to be called again at the latest, or None.
    """

    def __init__(self, name: str, on_wake: Callable[[list[int]], float | None]) -> None:
        self._on_wake = on_wake
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, fd: int) -> None:
        """Adds a descriptor; takes effect at once, also while the thread waits."""
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Removes a descriptor, before it is closed. One that is not watched is fine."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Makes the thread call ``on_wake`` soon."""
        if not self._stopping:
            os.eventfd_write(self._wake_fd, 1)

    def in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> None:
        """Ends the thread and closes its descriptors; must not be called from it."""
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
            os.close(self._wake_fd)

    def __del__(self) -> None:
        # A started thread keeps its reactor alive; this one was never started, or has ended without a stop.
        self._let_go()

    def _run(self) -> None:
        deadline: float | None = None
        while not self._stopping:
            timeout_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [fd for fd, _ in self._epoll.poll(timeout_s)]
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                ready.remove(self._wake_fd)
            if self._stopping:
                return
            try:
                deadline = self._on_wake(ready)
            except Exception:
                # One bad wake-up must not leave every other reservation without anybody to end it.
                _LOG.exception("kvxfer: an endpoint's wake-up failed; it goes on")
                deadline = time.monotonic() + 0.1
