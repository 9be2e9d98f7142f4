"""Where prefill's lanes are dialled: one thread that proves connections and hands them to the sender's core."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.errors import Closed, ConfigurationError
from kvxfer.hosts import WILDCARDS, join_host_port, outward_ip
from kvxfer.lanes.contract import LOCAL, TCP
from kvxfer.lanes.export import MemoryExport
from kvxfer.lanes.pending import PendingLane, Refusal, Want
from kvxfer.lanes.registry import LaneRegistry
from kvxfer.lanes.sockets import peer_credentials, prepare_tcp
from kvxfer.protocol.messages import LaneOffer

_LOG = logging.getLogger("kvxfer")
_BACKLOG = 1024  # beyond it the kernel drops connections, and a real peer waits a second to try again
_ACCEPT_BATCH = 32
_GRACE_S = 0.1
_PAUSE_S = 0.1
_JOIN_TIMEOUT_S = 5.0

TcpHost = str | tuple[str, str]
"""A host to bind; or that and the host to offer instead, where the bound one cannot be dialled."""


@dataclass(frozen=True, slots=True)
class LaneConnection:
    """A proven connection. Whoever receives it owns ``fd`` (non-blocking, close-on-exec)."""

    session: int
    generation: int
    lane: int
    kind: str
    fd: int
    peer: str


class LaneListener:
    """Accepts and proves the connections of all sessions' lanes. Thread-safe.

    A connection that does not prove itself within ``handshake_timeout_s`` is closed without a word. At most
    ``max_pending`` wait at a time. Beyond that the oldest unproven connection of the peer that has the most of them
    makes room, once it has had 100 ms, so that silent connections never keep a real one out.

    Args:
        tcp_hosts: hosts to bind for tcp lanes, at one port; empty: no tcp lanes.
        port: the TCP port; 0 takes a free one.
        local: also listen on an abstract Unix socket for processes of this user in this network namespace.
        memory: what local lanes hand out; closed with the listener.
        on_lane: called in the listener's thread with each proven connection; owns its descriptor from then on. After
            ``withdraw`` one call may still be under way, so the callee checks the generation itself.
        on_refused: called in the listener's thread as (reason, peer, cause) for each connection that was refused.

    Raises:
        ConfigurationError: no host could be bound.
    """

    def __init__(
        self,
        *,
        tcp_hosts: Sequence[TcpHost],
        port: int = 0,
        local: bool,
        memory: MemoryExport | None,
        on_lane: Callable[[LaneConnection], None],
        on_refused: Callable[[str, str, str], None],
        max_pending: int = 64,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self._memory = memory
        self._on_lane = on_lane
        self._on_refused = on_refused
        self._max_pending = max_pending
        self._handshake_timeout_s = handshake_timeout_s
        self._registry = LaneRegistry()
        self._pending: dict[int, PendingLane] = {}  # by descriptor, oldest first
        self._refusals: deque[tuple[str, str, str]] = deque()
        self._listening: dict[int, tuple[socket.socket, str]] = {}
        self._accept_again_at: float | None = None
        self._addresses: dict[str, tuple[str, ...]] = {LOCAL: (), TCP: ()}
        self._closed = False
        self._ending = threading.Lock()  # whoever wakes the thread must find its descriptor, and not somebody else's
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            if tcp_hosts:
                self._addresses[TCP] = self._listen_tcp(tcp_hosts, port)
            if local:
                self._addresses[LOCAL] = (self._listen_local(),)
        except BaseException:
            self._close_descriptors()
            raise
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._resume()
        self._thread = threading.Thread(target=self._run, name="kvxfer-lanes", daemon=True)
        self._thread.start()

    # ---- public ------------------------------------------------------------------------------------------------------

    def addresses(self, kind: str) -> tuple[str, ...]:
        """What a peer dials for this kind of lane: ``host:port``, or ``@name`` for an abstract Unix socket."""
        return self._addresses.get(kind, ())

    def offers(self, lanes: Mapping[str, int]) -> tuple[LaneOffer, ...]:
        """One offer for each kind that is served and has lanes, in the order of ``lanes``."""
        return tuple(
            LaneOffer(kind, self.addresses(kind), n) for kind, n in lanes.items() if n and self.addresses(kind)
        )

    def serve(self, session: int, epoch: bytes, generation: int, secret: bytes, lanes: Mapping[str, int]) -> None:
        """Takes connections for these lanes (kind -> how many) from now on, each lane once, instead of what was served
        for the session before."""
        if self._closed:
            raise Closed("the lane listener is closed")
        self._registry.serve(session, epoch, generation, secret, lanes)

    def withdraw(self, session: int, up_to_generation: int) -> None:
        """No further connection of these generations is taken. Unknown sessions are fine."""
        self._registry.withdraw(session, up_to_generation)

    def close(self) -> None:
        """Closes all listening and unproven sockets and ends the thread. Idempotent."""
        if self._closed:
            return
        with self._ending:
            self._closed = True
            if not self._ended:
                os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    # ---- listening sockets -------------------------------------------------------------------------------------------

    def _listen_tcp(self, hosts: Sequence[TcpHost], port: int) -> tuple[str, ...]:
        offered: list[str] = []
        failures: list[str] = []
        for host in hosts:
            bound, advertised = host if isinstance(host, tuple) else (host, host)
            if advertised in WILDCARDS:
                advertised = outward_ip()
            try:
                sock = _tcp_socket(bound, port)
            except OSError as cause:
                failures.append(f"{bound}: {cause.strerror or cause}")
                continue
            self._listening[sock.fileno()] = (sock, TCP)
            port = sock.getsockname()[1]
            offered.append(join_host_port(advertised, port))
        if not offered:
            raise ConfigurationError(f"cannot listen for tcp lanes: {'; '.join(failures)}", port=port)
        return tuple(dict.fromkeys(offered))

    def _listen_local(self) -> str:
        name = f"kvxfer-{os.urandom(16).hex()}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening[sock.fileno()] = (sock, LOCAL)
        sock.setblocking(False)
        sock.bind(b"\0" + name.encode())
        sock.listen(_BACKLOG)
        return f"@{name}"

    def _resume(self) -> None:
        self._accept_again_at = None
        for fd in self._listening:
            self._selector.register(fd, selectors.EVENT_READ)

    def _pause(self, until: float) -> None:
        self._accept_again_at = until
        for fd in self._listening:
            self._selector.unregister(fd)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                ready = [key.fd for key, _ in self._selector.select(self._timeout_s())]
                # Proofs first: a flood of new connections must not starve those that are about to be proven.
                for fd in ready:
                    if fd in self._pending:
                        self._advance(self._pending[fd])
                for fd in ready:
                    if fd in self._listening:
                        self._accept(*self._listening[fd])
                self._expire()
                self._report()
        except Exception:
            if not self._closed:
                _LOG.exception("kvxfer: the lane listener ended; no new lane is taken")
        finally:
            with self._ending:
                self._ended = True
                self._close_descriptors()

    def _timeout_s(self) -> float | None:
        deadlines = [pending.deadline for pending in self._pending.values()]
        if self._accept_again_at is not None:
            deadlines.append(self._accept_again_at)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, listening: socket.socket, kind: str) -> None:
        for _ in range(_ACCEPT_BATCH):
            victim = self._who_makes_room()
            if self._accept_again_at is not None:
                return
            try:
                sock, address = listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as cause:
                # Out of descriptors or memory: waiting connections stay in the kernel's queue for a moment.
                self._refusals.append(("no_descriptor", "", str(cause)))
                self._pause(time.monotonic() + _PAUSE_S)
                return
            if victim is not None:
                self._drop(victim, "evicted", "made room for others, after it had not proven itself")
            try:
                self._take(sock, kind, address)
            except (Refusal, OSError) as cause:
                sock.close()
                reason = cause.reason if isinstance(cause, Refusal) else "closed_early"
                self._refusals.append((reason, _peer_name(kind, address), str(cause)))

    def _take(self, sock: socket.socket, kind: str, address: object) -> None:
        sock.setblocking(False)
        peer = _peer_name(kind, address)
        if kind == TCP:
            prepare_tcp(sock)
        else:
            pid, uid = peer_credentials(sock)
            peer = f"pid {pid}"
            if uid != os.geteuid():
                raise Refusal("foreign_user", f"user {uid} is not ours")
        now = time.monotonic()
        pending = PendingLane(sock, kind, peer, os.urandom(32), now, now + self._handshake_timeout_s, self._memory)
        self._selector.register(sock, _events(pending.start()))
        self._pending[sock.fileno()] = pending

    def _oldest_of_the_most(self) -> PendingLane | None:
        """The oldest unproven connection of the peer that has the most of them."""
        unproven = [pending for pending in self._pending.values() if pending.proven is None]
        if not unproven:
            return None
        (heaviest, _), *_ = Counter(pending.peer for pending in unproven).most_common(1)
        return next(pending for pending in unproven if pending.peer == heaviest)

    def _who_makes_room(self) -> PendingLane | None:
        """The connection to be dropped for the next one, None if there is room; pauses where nobody can be dropped."""
        if self._accept_again_at is not None or len(self._pending) < self._max_pending:
            return None
        victim = self._oldest_of_the_most()
        now = time.monotonic()
        if victim is None or now < victim.since + _GRACE_S:
            # Those that are waiting have not had their chance yet; newcomers wait in the kernel's queue.
            self._pause(now + _PAUSE_S if victim is None else victim.since + _GRACE_S)
            return None
        return victim

    def _advance(self, pending: PendingLane) -> None:
        try:
            want = pending.on_ready(self._registry.judge)
            if want is not Want.HAND_OVER:
                self._selector.modify(pending.sock, _events(want))
                return
            assert pending.proven is not None
            self._registry.claim(pending.proven)
        except Refusal as refusal:
            self._drop(pending, refusal.reason, refusal.cause)
            return
        except Exception as cause:
            # A fault of ours ends this handshake, and no other.
            _LOG.exception("kvxfer: a lane's handshake failed")
            self._drop(pending, "fault", repr(cause))
            return
        self._forget(pending)
        claim = pending.proven.claim
        connection = LaneConnection(
            pending.proven.session, claim.generation, claim.lane, claim.kind, pending.sock.detach(), pending.peer
        )
        try:
            self._on_lane(connection)
        except Exception:
            _LOG.exception("kvxfer: a proven lane could not be handed over")

    def _expire(self) -> None:
        now = time.monotonic()
        for pending in [pending for pending in self._pending.values() if pending.deadline <= now]:
            self._drop(pending, "timeout", "the peer did not prove itself in time")
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._resume()

    def _drop(self, pending: PendingLane, reason: str, cause: str) -> None:
        self._forget(pending)
        pending.sock.close()
        self._refusals.append((reason, pending.peer, cause))

    def _forget(self, pending: PendingLane) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock.fileno()]

    def _report(self) -> None:
        while self._refusals:
            refusal = self._refusals.popleft()
            try:
                self._on_refused(*refusal)
            except Exception:
                _LOG.exception("kvxfer: a refused lane could not be reported")

    def _close_descriptors(self) -> None:
        for pending in self._pending.values():
            pending.sock.close()
        for sock, _ in self._listening.values():
            sock.close()
        self._pending.clear()
        self._listening.clear()
        self._selector.close()
        with contextlib.suppress(OSError):
            os.close(self._wake_fd)
        if self._memory is not None:
            self._memory.close()


def _tcp_socket(host: str, port: int) -> socket.socket:
    wildcard = host in WILDCARDS
    family, _, _, _, address = socket.getaddrinfo(
        None if wildcard else host,
        port,
        family=socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC if not wildcard else socket.AF_INET6,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE,
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if wildcard else 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _events(want: Want) -> int:
    return selectors.EVENT_WRITE if want is Want.WRITE else selectors.EVENT_READ


def _peer_name(kind: str, address: object) -> str:
    # The address alone, without the port: bounds count by host.
    return str(address[0]) if kind == TCP and isinstance(address, tuple) else ""
