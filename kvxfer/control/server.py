"""Prefill's end of the control plane: one ROUTER socket for all its sessions."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from itertools import islice

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvxfer.control.inbox import (
    MAX_BATCH,
    Received,
    judge,
    readable,
    receive_parts,
    set_common_options,
    watch_connections,
)
from kvxfer.control.keys import Keys
from kvxfer.control.limits import Limits
from kvxfer.control.loopback import bind_addresses
from kvxfer.control.refused import Refused
from kvxfer.control.zap import DOMAIN, KeyGuard
from kvxfer.errors import Closed, ConfigurationError, PeerLost
from kvxfer.hosts import Address, outward_ip

_HWM = 1024
_BIND_ATTEMPTS = 16
# A key that is not authorised is reported by the guard, which knows it; these peers did not even come so far.
_BROKEN_HANDSHAKES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the connection ended during the security handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer does not speak our security, or has no key that it proves",
}
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class ControlServer:
    """Not thread-safe: call it under one lock. ``fileno()`` is edge-triggered, so after ``receive`` or ``send`` ask
    ``pending()`` before waiting for it again.

    Args:
        bind: ``host:port``, ``tcp://host:port``, ``[::1]:port``, ``*:port`` or ``ipc://path``. Port 0 or none: any
            free one.
        keys: our CURVE keys; only ``keys.authorised`` can connect.
        insecure: allow a bind beyond loopback without keys.
        limits: bounds of what may arrive.
        advertise_host: the host that peers shall dial, where it is not the one that is bound.

    Raises:
        InsecureEndpoint: the loopback rule forbids ``bind``.
        ConfigurationError: the address is malformed or cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: Keys | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        advertise_host: str | None = None,
    ) -> None:
        self._limits = limits if limits is not None else Limits()
        self._denied: deque[Refused] = deque(maxlen=MAX_BATCH)
        addresses = bind_addresses(bind, keys, insecure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard: KeyGuard | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            if keys is not None:
                self._guard = KeyGuard(self._context, keys.authorised, self._on_denied)
            self._socket, self._bound = self._open(addresses, keys, bind)
            self._monitor = watch_connections(self._socket, sum(_BROKEN_HANDSHAKES))
        except BaseException:
            self.close()
            raise
        self._advertise_host = advertise_host

    @property
    def port(self) -> int:
        """The bound TCP port; 0 for ``ipc://``."""
        return self._bound[0].port

    @property
    def bound(self) -> tuple[Address, ...]:
        """What is bound, port filled in."""
        return self._bound

    @property
    def address(self) -> str:
        """What peers dial, for ``DecodeEndpoint.reserve(prefill=...)``."""
        first = self._bound[0]
        if first.scheme == "ipc":
            return str(first)
        host = self._advertise_host or (outward_ip() if first.wildcard else first.host)
        return str(first.with_host(host))

    @property
    def lane_hosts(self) -> tuple[tuple[str, str], ...]:
        """Where lanes are to listen, next to this socket: (host to bind, host to offer)."""
        if self._bound[0].scheme == "ipc":
            return (("127.0.0.1", "127.0.0.1"),)
        return tuple((bound.host, self._advertise_host or bound.host) for bound in self._bound)

    def fileno(self) -> int:
        return int(self._require().getsockopt(zmq.FD))

    def monitor_fileno(self) -> int:
        """Readable, in the same way, when ``broken_handshakes`` would return something."""
        self._require()
        assert self._monitor is not None
        return int(self._monitor.getsockopt(zmq.FD))

    def broken_handshakes(self) -> list[Refused]:
        """At most 64 peers that failed the security handshake; never blocks. Fewer than 64: there are no more."""
        found: list[Refused] = []
        while self._monitor is not None and len(found) < MAX_BATCH and readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event in _BROKEN_HANDSHAKES:
                found.append(Refused("handshake", b"", _BROKEN_HANDSHAKES[event]))
        return found

    def pending(self) -> bool:
        """True if ``receive`` would return something now."""
        return bool(self._denied) or readable(self._require())

    def frames(self) -> Iterator[Received | Refused]:
        """Messages and refusals until none waits; never blocks.

        The socket is asked for the next one only when the last one has been dealt with, so that at the end nothing is
        left, whatever was sent meanwhile.
        """
        while self._denied:
            yield self._denied.popleft()
        socket = self._require()
        while readable(socket):
            parts = receive_parts(socket)
            if parts is None:
                return
            yield judge(parts[1:], parts[0], self._limits)

    def receive(self) -> list[Received | Refused]:
        """At most 64 messages and refusals that wait now; never blocks."""
        return list(islice(self.frames(), MAX_BATCH))

    def send(self, route: bytes, frame: bytes) -> bool:
        """Hands a frame to the socket. False: the peer's queue is full, so the frame is lost, as any frame may be.

        Raises PeerLost where nobody is connected under ``route``.
        """
        try:
            socket = self._require()
            socket.send(route, _MORE)
            socket.send(frame, _DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as cause:
            if cause.errno == zmq.EHOSTUNREACH:
                raise PeerLost("the peer is no longer connected", peer=route.hex()) from cause
            raise
        return True

    def close(self) -> None:
        """Closes the socket with no linger and ends the key guard. Idempotent."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None and self._socket is not None:
            self._socket.disable_monitor()
            monitor.close(0)
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if not self._context.closed:
            self._context.term()

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _require(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise Closed("the control server is closed")
        return self._socket

    def _on_denied(self, key: str, address: str) -> None:
        self._denied.append(Refused("unauthorised", b"", f"key {key or '?'} from {address or '?'}"))

    def _open(
        self, addresses: tuple[Address, ...], keys: Keys | None, bind: str
    ) -> tuple[zmq.Socket[bytes], tuple[Address, ...]]:
        for attempt in range(_BIND_ATTEMPTS):
            socket = self._context.socket(zmq.ROUTER)
            try:
                self._configure(socket, keys)
                return socket, _bind_all(socket, addresses)
            except zmq.ZMQError as cause:
                socket.close(0)
                # A free port of the first address may be taken on the second one: another free one is tried.
                taken_elsewhere = cause.errno == zmq.EADDRINUSE and addresses[0].port == 0 and len(addresses) > 1
                if not taken_elsewhere or attempt == _BIND_ATTEMPTS - 1:
                    raise ConfigurationError(
                        f"cannot bind: {cause.strerror}; choose another address or port", address=bind
                    ) from cause
        raise AssertionError("the loop returns or raises")

    def _configure(self, socket: zmq.Socket[bytes], keys: Keys | None) -> None:
        set_common_options(socket, self._limits, _HWM)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that reconnects after a broken connection keeps its random name, also while the old one lingers.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _bind_all(socket: zmq.Socket[bytes], addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    """Binds all addresses at one port. Of a name's addresses those that this host does not have are passed over."""
    bound: list[Address] = []
    port = addresses[0].port
    last: zmq.ZMQError | None = None
    for address in addresses:
        try:
            bound.append(_bind_one(socket, Address(address.scheme, address.host, port, address.path)))
        except zmq.ZMQError as cause:
            if cause.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV):
                raise
            last = cause
            continue
        port = bound[-1].port
    if not bound:
        assert last is not None
        raise last
    return tuple(bound)


def _bind_one(socket: zmq.Socket[bytes], address: Address) -> Address:
    if address.scheme == "ipc":
        socket.bind(str(address))
        return address
    hosts = ["::", "0.0.0.0"] if address.host in ("*", "") else [address.host]
    for host in hosts:
        try:
            socket.bind(str(address.with_host(host)))
        except zmq.ZMQError:
            if host == hosts[-1]:
                raise
            continue
        last_endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last_endpoint, bytes)
        port = int(last_endpoint.rstrip(b"\0").rpartition(b":")[2])
        return Address("tcp", host, port)
    raise AssertionError("the loop returns or raises")
