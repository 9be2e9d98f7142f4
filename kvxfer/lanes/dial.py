"""Decode's side of connecting lanes: dial, prove, see whether the peer's memory can be read, and only then take it."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer import _native
from kvxfer.errors import ConfigurationError, KvxferError, LaneFailed, ProtocolViolation
from kvxfer.hosts import join_host_port, parse_address
from kvxfer.lanes import handshake as hs
from kvxfer.lanes.contract import LOCAL, TCP
from kvxfer.lanes.export import MAX_DESCRIPTION_BYTES, MAX_FDS, MemoryClaims, parse_claims
from kvxfer.lanes.sockets import peer_credentials, peer_pidfd, prepare_tcp
from kvxfer.protocol.messages import LaneOffer

MAX_LANES = 64
_INT = array.array("i").itemsize


class Connected:
    """One connected lane. Owns its descriptor until ``detach`` or ``close``.

    Attributes:
        kind: ``local`` or ``tcp``.
        peer_memory: how this lane reads prefill's pool; None on tcp.
    """

    def __init__(self, kind: str, sock: socket.socket, peer_memory: _native.PeerMemory | None) -> None:
        self.kind = kind
        self.peer_memory = peer_memory
        self._sock = sock

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def detach(self) -> int:
        """The descriptor (non-blocking, close-on-exec), which is the caller's from now on."""
        return self._sock.detach()

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True)
class _Dial:
    """What all lanes of one generation share."""

    epoch: bytes
    generation: int
    secret: bytes
    deadline: float


def connect_lane(
    kind: str,
    addresses: Sequence[str],
    *,
    epoch: bytes,
    generation: int,
    lane: int,
    secret: bytes,
    timeout_s: float,
) -> Connected:
    """Connects one lane; blocks up to ``timeout_s``.

    Raises LaneFailed (why it could not be connected or proven; its ``details['reason']`` says it for people).
    """
    dial = _Dial(epoch, generation, secret, time.monotonic() + timeout_s)
    connected = _prove(kind, addresses, lane, dial, want_memory=True)
    _take([connected])
    return connected


def connect_lanes(
    offers: Sequence[LaneOffer],
    accept_kinds: Sequence[str],
    *,
    epoch: bytes,
    generation: int,
    secret: bytes,
    timeout_s: float,
    control_host: str | None = None,
) -> tuple[str, list[Connected], dict[str, str]]:
    """Connects all lanes of the first offered kind that works; blocks up to ``timeout_s``.

    Args:
        offers: prefill's, best first.
        accept_kinds: what decode accepts; other kinds are passed over.
        control_host: the host by which the control plane reached prefill: tried last at the offered tcp ports, because
            a prefill that listens on all of its addresses cannot know which of them decode can reach.

    Returns:
        The kind, its lanes in order, and for each kind that was tried before, or not acceptable, the reason.

    Raises:
        LaneFailed: no kind works; ``details['reasons']`` says why, by kind.
    """
    deadline = time.monotonic() + timeout_s
    reasons: dict[str, str] = {}
    tried = [offer for offer in offers if offer.kind in accept_kinds]
    for left, offer in zip(range(len(tried), 0, -1), tried, strict=True):
        # A kind that hangs must leave time for those that follow it.
        share_s = (deadline - time.monotonic()) / left
        dial = _Dial(epoch, generation, secret, time.monotonic() + share_s)
        try:
            return offer.kind, _connect_all(_with_host(offer, control_host), dial), reasons
        except LaneFailed as cause:
            reasons[offer.kind] = str(cause.details.get("reason", cause.message))
    for kind in accept_kinds:
        reasons.setdefault(kind, "not offered by the peer")
    raise LaneFailed("no kind of lane could be connected; see the reasons", generation=generation, reasons=reasons)


def _with_host(offer: LaneOffer, host: str | None) -> LaneOffer:
    if offer.kind != TCP or not host:
        return offer
    more = []
    for address in offer.addresses:
        with contextlib.suppress(ConfigurationError):
            more.append(join_host_port(host, parse_address(address).port))
    return LaneOffer(offer.kind, tuple(dict.fromkeys((*offer.addresses, *more))), offer.lanes)


def _connect_all(offer: LaneOffer, dial: _Dial) -> list[Connected]:
    if not 0 < offer.lanes <= MAX_LANES:
        raise _failed(f"{offer.lanes} lanes were offered; 1 to {MAX_LANES} are possible")
    connected: list[Connected] = []
    try:
        for lane in range(offer.lanes):
            connected.append(_prove(offer.kind, offer.addresses, lane, dial, want_memory=lane == 0))
            connected[-1].peer_memory = connected[0].peer_memory
        _take(connected)
    except BaseException:
        for lane_connected in connected:
            lane_connected.close()
        raise
    return connected


def _failed(reason: str) -> LaneFailed:
    return LaneFailed(f"the lane could not be connected: {reason}", reason=reason)


# ---- one lane --------------------------------------------------------------------------------------------------------


def _prove(kind: str, addresses: Sequence[str], lane: int, dial: _Dial, *, want_memory: bool) -> Connected:
    """A lane that is proven but not taken yet: prefill waits for Go."""
    if kind not in (LOCAL, TCP):
        raise _failed(f"{kind} lanes are not known here")
    sock = _open(kind, addresses, dial)
    try:
        if kind == LOCAL:
            return Connected(kind, sock, _prove_local(sock, lane, dial, want_memory=want_memory))
        prepare_tcp(sock)
        _exchange(sock, kind, lane, dial, want_memory=False)
        return Connected(kind, sock, None)
    except (KvxferError, OSError, RuntimeError) as cause:
        sock.close()
        if isinstance(cause, LaneFailed):
            raise
        raise _failed(cause.message if isinstance(cause, KvxferError) else str(cause)) from cause
    except BaseException:
        sock.close()
        raise


def _take(connected: Sequence[Connected]) -> None:
    for lane in connected:
        try:
            lane._sock.sendall(hs.GO)
            lane._sock.setblocking(False)
        except OSError as cause:
            lane.close()
            raise _failed(f"the connection broke: {cause}") from cause


def _open(kind: str, addresses: Sequence[str], dial: _Dial) -> socket.socket:
    failures: list[str] = []
    for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
        timeout_s = max(0.001, (dial.deadline - time.monotonic()) / left)
        try:
            return _open_local(address, timeout_s) if kind == LOCAL else _open_tcp(address, timeout_s)
        except (OSError, ConfigurationError) as cause:
            text = cause.strerror or str(cause) if isinstance(cause, OSError) else cause.message
            failures.append(f"{address}: {text}")
    raise _failed("; ".join(failures) or "no address was offered")


def _open_tcp(address: str, timeout_s: float) -> socket.socket:
    where = parse_address(address)
    return socket.create_connection((where.host, where.port), timeout_s)


def _open_local(address: str, timeout_s: float) -> socket.socket:
    if not address.startswith("@"):
        raise ConfigurationError("a local lane's address begins with @", address=address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(b"\0" + address[1:].encode())
    except ConnectionRefusedError as cause:
        sock.close()
        raise ConfigurationError(
            "nobody listens on this local socket: the peer has closed, or runs on another host or network namespace",
            address=address,
        ) from cause
    except BaseException:
        sock.close()
        raise
    return sock


def _exchange(
    sock: socket.socket, kind: str, lane: int, dial: _Dial, *, want_memory: bool, keep_fds: list[int] | None = None
) -> None:
    nonce = hs.parse_challenge(_receive(sock, hs.CHALLENGE_BYTES, dial.deadline))
    claim = hs.Claim(kind, dial.epoch, dial.generation, lane, os.urandom(hs.NONCE_BYTES), want_memory)
    sock.settimeout(_left(dial.deadline))
    sock.sendall(hs.pack_proof(dial.secret, claim, nonce))
    mac = _receive(sock, hs.ACCEPT_BYTES, dial.deadline, keep_fds)
    if not hs.accepts(dial.secret, claim, nonce, mac):
        raise ProtocolViolation("the peer did not prove the session's secret")


def _prove_local(sock: socket.socket, lane: int, dial: _Dial, *, want_memory: bool) -> _native.PeerMemory | None:
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise ProtocolViolation(f"the listening process belongs to user {uid}, not to ours")
    pidfd, vouched = peer_pidfd(sock, pid)
    fds: list[int] = []
    try:
        _exchange(sock, LOCAL, lane, dial, want_memory=want_memory, keep_fds=fds)
        if not want_memory:
            return None
        length = int.from_bytes(_receive(sock, 4, dial.deadline), "little")
        if length > MAX_DESCRIPTION_BYTES:
            raise ProtocolViolation(f"the peer's memory is described in {length} bytes, more than is allowed")
        claims = parse_claims(_receive(sock, length, dial.deadline))
        if not vouched and (claims.pid != pid or _has_ended(pidfd)):
            raise ProtocolViolation(f"process {pid} is not the one that answered")
        return _peer_memory(claims, fds, pid, pidfd)
    finally:
        for fd in (*fds, pidfd):
            os.close(fd)


def _peer_memory(claims: MemoryClaims, fds: Sequence[int], pid: int, pidfd: int) -> _native.PeerMemory:
    if len(fds) != claims.n_fds + 1:
        raise ProtocolViolation(f"{len(fds)} descriptors came where {claims.n_fds + 1} were announced")
    return _native.PeerMemory(pid, pidfd, claims.regions, fds[:-1], fds[-1], claims.probe_ptr, claims.probe)


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


# ---- bytes with a deadline -------------------------------------------------------------------------------------------


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise _failed("the peer did not answer in time")
    return left_s


def _receive(sock: socket.socket, n_bytes: int, deadline: float, keep_fds: list[int] | None = None) -> bytes:
    """Exactly ``n_bytes``; descriptors that come along go to ``keep_fds``, or are closed if there is no such list."""
    received = bytearray()
    while len(received) < n_bytes:
        sock.settimeout(_left(deadline))
        try:
            data, fds = _receive_some(sock, n_bytes - len(received))
        except TimeoutError as cause:
            raise _failed("the peer did not answer in time") from cause
        if keep_fds is None:
            for fd in fds:
                os.close(fd)
        else:
            keep_fds.extend(fds)
        if not data:
            raise _failed("the peer closed the connection; it does not accept this session's proof, or is closing")
        received += data
    return bytes(received)


def _receive_some(sock: socket.socket, n_bytes: int) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return sock.recv(n_bytes), []
    room = socket.CMSG_SPACE((MAX_FDS + 1) * _INT)
    data, ancillary, flags, _ = sock.recvmsg(n_bytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % _INT])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise ProtocolViolation("more descriptors came than a pool may have, or none could be opened for them")
    return data, list(fds)
