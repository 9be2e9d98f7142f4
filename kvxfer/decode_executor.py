"""Carries out what decode's core asks for: sockets, lanes, legs, fences, digests' reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer import _native, hosts
from kvxfer.control import codec
from kvxfer.control.client import ControlClient
from kvxfer.control.keys import Keys
from kvxfer.control.limits import Limits
from kvxfer.control.loopback import check_dial
from kvxfer.control.refused import Refused
from kvxfer.endpoint import Endpoint
from kvxfer.errors import KvxferError
from kvxfer.handoff import Handoff
from kvxfer.lanes.dial import Connected, connect_lanes
from kvxfer.pool import PagePool
from kvxfer.protocol import actions as act
from kvxfer.protocol.actions import Action, Audit, LegReport
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode import DecodeCore
from kvxfer.record_bounds import max_record_bytes
from kvxfer.shards import plan
from kvxfer.zero_tail import tail_runs

LANE_CONNECT_TIMEOUT_S = 5.0
_LONGEST_POLL_S = 3600.0
FENCE_RETRY_S = 1.0


@dataclass(slots=True)
class _Link:
    """One session's socket, and its lanes of the current generation."""

    session: int
    peer: str
    client: ControlClient
    receiver: _native.Receiver | None = None
    generation: int = -1
    wanted_generation: int = -1  # of the connection under way; -1: none is wanted
    kind: str = ""
    reasons: dict[str, str] = field(default_factory=dict)


class DecodeExecutor(Endpoint):
    """The half of ``DecodeEndpoint`` that acts; the other half is its public face."""

    def __init__(
        self,
        pool: PagePool,
        *,
        keys: Keys | None = None,
        insecure: bool = False,
        sidecar: str | None = None,
        **config: Any,
    ) -> None:
        if sidecar is not None:
            raise NotImplementedError("the sidecar is not available yet; leave sidecar=None to embed the endpoint")
        self._config = DecodeConfig(**config)
        super().__init__(pool, "decode")
        self._keys = keys
        self._insecure = insecure
        self._limits = Limits.for_pool(pool.geometry)
        self._handoffs: dict[int, Handoff] = {}
        self._links: dict[int, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        # The receiver that a leg was opened on: it outlives its fence, for the report of a leg that had landed whole.
        self._legs: dict[tuple[int, int, int], _native.Receiver] = {}
        self._used: set[int] = set()  # sessions whose sockets were used since they were last asked for frames
        self._max_record_bytes = max_record_bytes(pool.geometry)
        self._fences = ThreadPoolExecutor(1, thread_name_prefix="kvxfer-fence")
        self._core = DecodeCore(self._config, pool.geometry, pool._ledger, os.urandom, plan, hosts.host_identity())
        self._next_tick: float | None = None
        self._failed_fences: list[act.Fence] = []
        self._fence_again_at = 0.0
        self._handlers |= {
            act.OpenSocket: self._open_socket,
            act.Send: self._send,
            act.CloseSession: self._close_session,
            act.ConnectLanes: self._connect_lanes,
            act.OpenLeg: self._open_leg,
            act.Revoke: self._revoke,
            act.Fence: self._fence,
            act.Verify: self._verify,
            act.ZeroTail: self._zero_tail,
            act.ForgetLeg: self._forget_leg,
            act.MarkPages: self._mark_pages,
        }
        self._reactor.watch(self._completions.fileno())
        self._reactor.start()

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def _on_wake(self, ready: list[int]) -> float | None:
        with self._lock:
            if self._closed:
                return None
            now = self._now()
            self._arrived(now, ready)
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= now:
                self._drive(self._core.tick(now))
                self._flush(now)
                deadline = self._core.next_deadline()
            if self._failed_fences:
                self._fence_again(now)
                deadline = self._fence_again_at if deadline is None else min(deadline, self._fence_again_at)
            self._next_tick = deadline
            if self._closing:
                self._changed.notify_all()
            return deadline

    def _lead(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Handles arrivals in the calling thread, which leads the reactor, until ``reached`` or the time is up.

        Deadlines stay with the I/O thread.
        """
        until = self._now() + timeout_s
        try:
            while not reached() and (left_s := until - self._now()) > 0:
                ready = self._reactor.await_sources(min(left_s, _LONGEST_POLL_S))
                with self._lock:
                    if ready and not self._closed:
                        self._arrived(self._now(), ready)
                        self._rearm()
        finally:
            with self._lock:
                self._reactor.follow()
                self._changed.notify_all()

    def _arrived(self, now: float, ready: Sequence[int]) -> None:
        for fd in ready:
            if fd == self._completions_fd:
                for completion in self._completions.poll():
                    self._complete(now, *completion)
            elif (link := self._by_fd.get(fd)) is not None:
                self._receive(now, link)
        self._flush(now)

    def _flush(self, now: float) -> None:
        # A send may swallow the edge that announced a frame: ask every socket that was used.
        while self._used:
            link = self._links.get(self._used.pop())
            if link is not None:
                self._receive(now, link)

    def _rearm(self) -> None:
        """After a call from the engine's thread: the I/O thread may have less time than it thinks, or frames to
        read."""
        deadline = self._core.next_deadline()
        sooner = deadline is not None and (self._next_tick is None or deadline < self._next_tick)
        if sooner or any(session in self._links and self._links[session].client.pending() for session in self._used):
            self._next_tick = deadline
            self._reactor.wake()
        else:
            self._used.clear()

    def _receive(self, now: float, link: _Link) -> None:
        for frame in link.client.frames():
            if isinstance(frame, Refused):
                self._trail.note(
                    Audit("refused_frame", session=link.session, fields={"kind": frame.kind, "detail": frame.detail})
                )
                continue
            epoch, sequence, message = frame
            self._drive(self._core.message(now, link.session, epoch, sequence, message))
            if link.session not in self._links:
                return
        self._used.discard(link.session)

    def _complete(
        self, now: float, kind: int, session: int, generation: int, lane: int, reservation: int, leg: int, data: bytes
    ) -> None:
        if kind == _native.RECORD:
            self._drive(self._core.record(now, session, generation, lane, data))
        elif kind == _native.VIOLATION:
            cause = data.decode(errors="replace")
            self._drive(self._core.violation(now, session, generation, lane, reservation, leg, cause))
        elif kind == _native.LANE_DOWN:
            self._drive(self._core.lane_down(now, session, generation, lane, data.decode(errors="replace")))

    # ---- sockets -----------------------------------------------------------------------------------------------------

    def _check_peer(self, peer: str) -> None:
        check_dial(peer, keys=self._keys, insecure=self._insecure)

    def _open_socket(self, action: act.OpenSocket) -> Sequence[Action]:
        try:
            client = ControlClient(action.peer, keys=self._keys, insecure=self._insecure, limits=self._limits)
        except (KvxferError, OSError) as cause:
            return self._core.socket_failed(self._now(), action.session, str(cause))
        link = _Link(action.session, action.peer, client)
        self._links[action.session] = link
        self._by_fd[client.fileno()] = link
        self._reactor.watch(client.fileno())
        return ()

    def _send(self, action: act.Send) -> None:
        link = self._links.get(action.session)
        if link is not None:
            link.client.send(codec.encode(action.epoch, action.sequence, action.message))
            self._used.add(action.session)

    def _close_session(self, action: act.CloseSession) -> None:
        link = self._links.pop(action.session, None)
        if link is None:
            return
        fd = link.client.fileno()
        self._by_fd.pop(fd, None)
        self._reactor.forget(fd)
        link.client.close()
        if link.receiver is not None:
            link.receiver.fence()
            link.receiver = None

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def _connect_lanes(self, action: act.ConnectLanes) -> None:
        link = self._links.get(action.session)
        if link is None:
            return
        link.wanted_generation = action.generation
        thread = threading.Thread(
            target=self._connect, args=(action, link.client.address.host), name="kvxfer-connect", daemon=True
        )
        thread.start()

    def _connect(self, action: act.ConnectLanes, control_host: str) -> None:
        """Runs in a thread of its own: connecting and proving may take a network's time."""
        connected: list[Connected] = []
        failure = ""
        kind = ""
        reasons: dict[str, str] = {}
        try:
            kind, connected, reasons = connect_lanes(
                action.offers,
                self._config.lane_kinds,
                epoch=action.epoch,
                generation=action.generation,
                secret=action.secret,
                timeout_s=LANE_CONNECT_TIMEOUT_S,
                control_host=control_host,
            )
        except (KvxferError, OSError, RuntimeError) as cause:
            failure = str(cause)
        with self._lock:
            link = self._links.get(action.session)
            if link is None or self._closed or link.wanted_generation != action.generation:
                for lane in connected:
                    lane.close()
                return
            now = self._now()
            if failure:
                self._drive(self._core.lanes_failed(now, action.session, action.generation, failure))
            else:
                self._install(now, link, action, kind, connected, reasons)
            self._rearm()
            self._reactor.wake()

    def _install(
        self,
        now: float,
        link: _Link,
        action: act.ConnectLanes,
        kind: str,
        connected: Sequence[Connected],
        reasons: dict[str, str],
    ) -> None:
        receiver = _native.Receiver(
            self._completions,
            self._pool.native,
            action.session,
            action.epoch,
            action.generation,
            self._max_record_bytes,
        )
        if link.receiver is not None:
            link.receiver.fence()
        link.receiver, link.generation, link.kind, link.reasons = receiver, action.generation, kind, reasons
        for fallen, reason in reasons.items():
            self._trail.note(
                Audit("lane_fallback", action.session, fields={"lane": fallen, "used": kind, "reason": reason})
            )
        for number, lane in enumerate(connected):
            receiver.add_lane(number, kind, lane.detach(), lane.peer_memory)
        for number in range(len(connected)):
            self._drive(self._core.lane_up(now, action.session, action.generation, number, kind))

    def _open_leg(self, action: act.OpenLeg) -> None:
        spec = action.spec
        link = self._links.get(spec.session)
        if link is None or link.receiver is None:
            return
        receiver = link.receiver
        self._legs[spec.session, spec.reservation, spec.leg] = receiver
        groups = [
            (
                group.group,
                self._pool.geometry.groups[group.group].tokens_per_page,
                np.frombuffer(group.logical, np.uint64),
                np.frombuffer(group.pool_pages, np.uint64),
            )
            for group in spec.groups
        ]
        receiver.open_leg(spec.reservation, spec.leg, spec.verify == "digest", spec.slices, groups)

    def _revoke(self, action: act.Revoke) -> Sequence[Action]:
        receiver = self._legs.get((action.session, action.reservation, action.leg))
        if receiver is not None:  # else it was never opened: nothing was offered
            receiver.revoke(action.reservation, action.leg)
        return self._core.revoked(self._now(), action.session, action.reservation, action.leg)

    def _fence(self, action: act.Fence) -> Sequence[Action] | None:
        link = self._links.get(action.session)
        if link is not None and link.wanted_generation <= action.generation:
            link.wanted_generation = -1
        if link is None or link.receiver is None or link.generation != action.generation:
            # A session's socket closes only after its receiver was fenced, and a generation that was never installed
            # has no means to write.
            return self._core.fenced(self._now(), action.session, action.generation)
        self._fences.submit(self._fence_now, link, link.receiver, action)
        return None

    def _fence_now(self, link: _Link, receiver: _native.Receiver, action: act.Fence) -> None:
        """Runs in the fence thread: joining a copier may take as long as one copy."""
        try:
            receiver.fence()
        except RuntimeError as cause:
            # S2: a fence that cannot be made leaves the pages quarantined; close() and the counters say so.
            self._trail.note(
                Audit("fence_failed", action.session, fields={"generation": action.generation, "cause": str(cause)})
            )
            with self._lock:
                self._failed_fences.append(action)
                self._fence_again_at = self._now() + FENCE_RETRY_S
                self._reactor.wake()
            return
        with self._lock:
            # What landed and was announced before the fence counts; nothing lands after it.
            for completion in self._completions.poll():
                self._complete(self._now(), *completion)
            self._drive(self._core.fenced(self._now(), action.session, action.generation))
            if link.receiver is receiver:
                link.receiver = None
            self._rearm()
            self._reactor.wake()

    def _fence_again(self, now: float) -> None:
        if now >= self._fence_again_at:
            self._fence_again_at = now + FENCE_RETRY_S
            failed, self._failed_fences = self._failed_fences, []
            for action in failed:
                self._drive([action])

    # ---- legs --------------------------------------------------------------------------------------------------------

    def _verify(self, action: act.Verify) -> Sequence[Action]:
        reports: dict[tuple[int, int], LegReport] = {}
        for session, leg in action.legs:
            receiver = self._legs.get((session, action.reservation, leg))
            if receiver is None:
                continue
            bitmaps, folds, violations, bytes_landed = receiver.report(action.reservation, leg)
            digests = receiver.digests(action.reservation, leg) if action.with_digests else None
            reports[session, leg] = LegReport(bitmaps, folds, violations, bytes_landed, digests)
        return self._core.verified(self._now(), action.reservation, reports)

    def _zero_tail(self, action: act.ZeroTail) -> Sequence[Action]:
        for bases, runs, stride, nbytes in tail_runs(self._pool, action.n_tokens, action.groups):
            _native.zero_runs(bases, runs, stride, nbytes)
        return self._core.tail_zeroed(self._now(), action.reservation)

    def _forget_leg(self, action: act.ForgetLeg) -> None:
        receiver = self._legs.pop((action.session, action.reservation, action.leg), None)
        if receiver is not None:
            receiver.forget(action.reservation, action.leg)

    def _mark_pages(self, action: act.MarkPages) -> None:
        """The ledger already holds the states; nothing else in this process keeps a copy."""

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Everything is fenced: lets go of threads, sockets, descriptors. A thread that still connects a lane ends by
        itself and closes what it gets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for session in list(self._links):
                self._close_session(act.CloseSession(session, "closed"))
        if not self._reactor.in_thread():
            self._reactor.stop(5.0)
        self._fences.shutdown(wait=True)
        self._events.close()
