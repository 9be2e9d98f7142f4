"""Who may open a CURVE connection: a ZAP handler (RFC 27) that knows a fixed set of public keys."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

_LOG = logging.getLogger("kvxfer")
_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvxfer"
_JOIN_TIMEOUT_S = 2.0


class KeyGuard:
    """Answers ZeroMQ's authentication requests of one context in a thread of its own.

    Make it before a socket with ``ZAP_ENFORCE_DOMAIN`` is bound: should this thread ever end, such a socket refuses
    everybody. ``on_denied(key, address)`` is called in that thread for each refusal.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        authorised: frozenset[bytes],
        on_denied: Callable[[str, str], None],
    ) -> None:
        self._authorised = authorised
        self._on_denied = on_denied
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kvxfer-key-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join(_JOIN_TIMEOUT_S)
        if self._stop_fd >= 0 and not self._thread.is_alive():
            os.close(self._stop_fd)
            self._stop_fd = -1

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop_fd in ready:
                    return
                self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            return
        except Exception:
            _LOG.exception("kvxfer: the key guard ended; no new peer is let in")
        finally:
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> None:
        version, request_id = (request[0], request[1]) if len(request) > 1 else (b"1.0", b"")
        allowed, key, address = False, "", ""
        if len(request) == 7 and version == b"1.0" and request[2] == DOMAIN and request[5] == b"CURVE":
            address = request[3].decode("ascii", "replace")
            encoded = z85.encode(request[6]) if len(request[6]) == 32 else b""
            key = encoded.decode("ascii", "replace")
            allowed = encoded in self._authorised
        status = (b"200", b"OK", key.encode()) if allowed else (b"400", b"not authorised", b"")
        self._socket.send_multipart([b"1.0", request_id, *status, b""])
        if not allowed:
            with contextlib.suppress(Exception):
                self._on_denied(key, address)
