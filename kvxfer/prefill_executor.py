"""Carries out what prefill's core asks for: the control socket, lanes, legs, sources, and writes that wait for
events."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer import _native, hosts
from kvxfer.compatibility import compatible
from kvxfer.control import codec
from kvxfer.control.inbox import MAX_BATCH
from kvxfer.control.keys import Keys
from kvxfer.control.limits import Limits
from kvxfer.control.refused import Refused
from kvxfer.control.server import ControlServer
from kvxfer.endpoint import Endpoint, as_error
from kvxfer.errors import AdmissionClosed, KvxferError, PeerLost
from kvxfer.grant import Batch, Grant
from kvxfer.lanes.export import export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener
from kvxfer.pool import PagePool
from kvxfer.protocol import actions as act
from kvxfer.protocol.actions import Action, Audit
from kvxfer.protocol.messages import Reserve
from kvxfer.protocol.prefill import PrefillCore
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.region_table import regions_by_layer

_LOG = logging.getLogger("kvxfer")
DEFAULT_LOCAL_LANES = 1
DEFAULT_TCP_LANES = 2


class PrefillExecutor(Endpoint):
    """The half of ``PrefillEndpoint`` that acts; the other half is its public face."""

    def __init__(
        self,
        pool: PagePool,
        *,
        bind: str,
        advertise_host: str | None = None,
        keys: Keys | None = None,
        insecure: bool = False,
        sidecar: str | None = None,
        local_lanes: int = DEFAULT_LOCAL_LANES,
        tcp_lanes: int = DEFAULT_TCP_LANES,
        **config: Any,
    ) -> None:
        if sidecar is not None:
            raise NotImplementedError("the sidecar is not available yet; leave sidecar=None to embed the endpoint")
        self._config = PrefillConfig(**config)
        super().__init__(pool, "prefill")
        self._limits = Limits.for_pool(pool.geometry)
        self._grants: dict[int, Grant] = {}
        self._attached: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # grant -> (session, reservation)
        self._by_reservation: dict[tuple[int, int], int] = {}  # (session, reservation) -> grant
        self._generations: dict[int, int] = {}  # session -> generation served
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._next_tick: float | None = None
        self._regions = {
            group.name: (index, regions_by_layer(pool, index), group.n_pages)
            for index, group in enumerate(pool.geometry.groups)
        }
        self._incarnation = os.urandom(8)
        self._lane_counts = {kind: n for kind, n in (("local", local_lanes), ("tcp", tcp_lanes)) if n > 0}
        self._server = ControlServer(
            bind, keys=keys, insecure=insecure, limits=self._limits, advertise_host=advertise_host
        )
        try:
            self._start(pool, tcp_lanes, local_lanes)
        except BaseException:
            # A control socket that is left open would hold up the next garbage collection for ever.
            self._server.close()
            raise

    def _start(self, pool: PagePool, tcp_lanes: int, local_lanes: int) -> None:
        self._sender = _native.Sender(self._completions, pool.native)
        self._listener = LaneListener(
            tcp_hosts=self._server.lane_hosts if tcp_lanes > 0 else (),
            local=local_lanes > 0,
            memory=export_memory(pool.region_memory, pool.geometry, self._sender.generation_table_fd),
            on_lane=self._take_lane,
            on_refused=self._refuse_lane,
        )
        self._core = PrefillCore(
            self._config,
            pool.geometry,
            self._incarnation,
            os.urandom,
            self._listener.offers(self._lane_counts),
            hosts.host_identity(),
            lambda decode: compatible(decode, pool.geometry),
        )
        self._handlers |= {
            act.Send: self._send,
            act.OpenLanes: self._open_lanes,
            act.CloseSession: self._close_session,
            act.Attach: self._attach,
            act.CloseAdmission: self._close_admission,
            act.DetachLeg: self._detach_leg,
            act.AnswerDigests: self._answer_digests,
            act.ReleaseGrant: self._release_grant,
        }
        self._reactor.watch(self._completions.fileno())
        self._reactor.watch(self._server.fileno())
        self._monitor_fd = self._server.monitor_fileno()
        self._more_broken_handshakes = False
        self._reactor.watch(self._monitor_fd)
        self._reactor.start()

    # ---- public ------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What decode passes as ``prefill=``: "host:port"."""
        return self._server.address

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def incarnation(self) -> str:
        """Names this life of the worker; hexadecimal."""
        return self._incarnation.hex()

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def _on_wake(self, ready: list[int]) -> float | None:
        with self._lock:
            if self._closed:
                return None
            now = self._now()
            if self._completions_fd in ready:
                for completion in self._completions.poll():
                    self._complete(now, *completion)
            if self._monitor_fd in ready or self._more_broken_handshakes:
                self._note_broken_handshakes()
            self._receive(now)
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= now:
                self._drive(self._core.tick(now))
                self._receive(now)
                deadline = self._core.next_deadline()
            self._next_tick = deadline
            if self._closing:
                self._changed.notify_all()
            return deadline

    def _rearm(self) -> None:
        """After a call from the engine's thread: the I/O thread may have less time, or frames to read."""
        deadline = self._core.next_deadline()
        sooner = deadline is not None and (self._next_tick is None or deadline < self._next_tick)
        if sooner or self._server.pending():
            self._next_tick = deadline
            self._reactor.wake()

    def _receive(self, now: float) -> None:
        for frame in self._server.frames():
            if isinstance(frame, Refused):
                self._refuse_frame(frame)
                continue
            route, epoch, sequence, message = frame
            self._drive(self._core.message(now, route, epoch, sequence, message))

    def _note_broken_handshakes(self) -> None:
        broken = self._server.broken_handshakes()
        for refused in broken:
            self._refuse_frame(refused)
        # Whoever knocks without end must not keep us from the others, and the descriptor does not speak twice.
        self._more_broken_handshakes = len(broken) == MAX_BATCH
        if self._more_broken_handshakes:
            self._reactor.wake()

    def _refuse_frame(self, refused: Refused) -> None:
        self._trail.note(Audit("refused_frame", fields={"kind": refused.kind, "detail": refused.detail}))

    def _complete(
        self, now: float, kind: int, session: int, generation: int, lane: int, reservation: int, leg: int, data: bytes
    ) -> None:
        if kind == _native.LEG_DRAINED:
            posted = struct.unpack(f"<{len(data) // 8}Q", data)
            self._drive(self._core.leg_drained(now, session, reservation, posted))
        elif kind == _native.LEG_FAILED:
            self._drive(self._core.leg_failed(now, session, reservation, data.decode(errors="replace")))
        elif kind == _native.LANE_UP:
            self._drive(self._core.lane_up(now, session, generation, lane))
        elif kind == _native.LANE_DOWN:
            self._drive(self._core.lane_down(now, session, generation, lane, data.decode(errors="replace")))
        elif kind == _native.VIOLATION:
            self._trail.note(Audit("violation", session, reservation, leg, {"cause": data.decode(errors="replace")}))

    def _take_lane(self, lane: LaneConnection) -> None:
        """Called in the listener's thread, after the peer has proven the session's secret."""
        try:
            self._sender.add_lane(lane.session, lane.generation, lane.lane, lane.kind, lane.fd)
        except (RuntimeError, ValueError) as cause:
            os.close(lane.fd)
            self._refuse_lane("stale", "", str(cause))

    def _refuse_lane(self, kind: str, peer: str, cause: str) -> None:
        self._trail.note(Audit("refused_lane", fields={"kind": kind, "peer": peer, "cause": cause}))

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _send(self, action: act.Send) -> None:
        try:
            self._server.send(action.route, codec.encode(action.epoch, action.sequence, action.message))
        except PeerLost:
            # The peer's socket is gone; heartbeats and lanes notice, and whatever must arrive is repeated until then.
            self._trail.note(Audit("unroutable", action.session))

    def _open_lanes(self, action: act.OpenLanes) -> Sequence[Action] | None:
        older = self._generations.get(action.session)
        if older is not None:
            self._listener.withdraw(action.session, older)
            self._sender.close_session(action.session, older)
        self._generations[action.session] = action.generation
        self._sender.open_session(
            action.session, action.epoch, action.generation, max(self._lane_counts.values(), default=0)
        )
        self._listener.serve(action.session, action.epoch, action.generation, action.secret, self._lane_counts)
        return None if older is None else self._lanes_closed(action.session, older)

    def _close_session(self, action: act.CloseSession) -> Sequence[Action] | None:
        generation = self._generations.pop(action.session, None)
        if generation is None:
            return None
        self._listener.withdraw(action.session, generation)
        self._sender.close_session(action.session, generation)
        return self._lanes_closed(action.session, generation)

    def _lanes_closed(self, session: int, generation: int) -> Sequence[Action]:
        # What the lanes reported before they ended is heard first: a leg that had drained did drain.
        now = self._now()
        for completion in self._completions.poll():
            self._complete(now, *completion)
        return self._core.lanes_closed(now, session, generation)

    def _attach(self, action: act.Attach) -> Sequence[Action] | None:
        reserve: Reserve = action.reserve
        grant = self._grants[action.grant]
        key = (action.session, reserve.reservation)
        groups = [
            (
                group.group,
                self._core.decode_geometry(action.session).groups[group.group].tokens_per_page,
                group.first_token,
                np.frombuffer(group.logical, np.uint64),
            )
            for group in reserve.groups
        ]
        self._by_reservation[key] = action.grant
        self._attached[action.grant].add(key)
        try:
            grant._source.attach(
                action.session,
                reserve.generation,
                reserve.reservation,
                reserve.leg,
                reserve.verify == "digest",
                reserve.carries_aux,
                reserve.lanes,
                reserve.slices,
                groups,
            )
        except (ValueError, RuntimeError) as cause:
            return self._core.leg_failed(self._now(), action.session, reserve.reservation, f"attach: {cause}")
        return None

    def _source(self, session: int, reservation: int) -> _native.SourceGrant | None:
        grant = self._grants.get(self._by_reservation.get((session, reservation), -1))
        return None if grant is None else grant._source

    def _close_admission(self, action: act.CloseAdmission) -> None:
        source = self._source(action.session, action.reservation)
        if source is not None:
            source.close_admission(action.session, action.reservation)

    def _detach_leg(self, action: act.DetachLeg) -> None:
        source = self._source(action.session, action.reservation)
        if source is not None:
            source.detach(action.session, action.reservation)

    def _answer_digests(self, action: act.AnswerDigests) -> Sequence[Action] | None:
        source = self._source(action.session, action.reservation)
        if source is None:
            return None
        content = source.digests(action.session, action.reservation, action.first, action.count)
        return self._core.digests(
            self._now(), action.session, action.reservation, action.leg, action.first, content.tobytes()
        )

    def _release_grant(self, action: act.ReleaseGrant) -> None:
        """No leg is left. The grant's tables go with its last event, see ``_drop_grant``."""

    def _drop_grant(self, grant_id: int) -> None:
        """Its last event has been told: nothing about it is needed any more."""
        grant = self._grants.pop(grant_id)
        grant._source.close()
        for key in self._attached.pop(grant_id, ()):
            self._by_reservation.pop(key, None)

    def _check_write(self, grant: Grant) -> None:
        self._core.check_write(grant._id)
        if grant._committing:
            raise AdmissionClosed(
                "the grant has been committed; nothing more can be written", request_id=grant.request_id
            )

    # ---- writes that wait for an event -------------------------------------------------------------------------------

    def _write_after(self, grant: Grant, batches: Sequence[Batch], after: Any, progress: bool) -> None:
        self._write_entries_after([(grant, batches)], after, progress)

    def _write_entries_after(
        self, entries: Sequence[tuple[Grant, Sequence[Batch]]], after: Any, progress: bool
    ) -> None:
        """Pins now, writes after the event. Admission is checked now, so that the caller hears of it."""
        with self._lock:
            self._check_open()
            alive = []
            for grant, batches in entries:
                try:
                    self._check_write(grant)
                except AdmissionClosed:
                    if len(entries) == 1:
                        raise
                    continue
                self._pin(grant, batches)
                self._core.note_written(grant._id)
                grant._pending += 1
                alive.append((grant, batches))
            self._submit(lambda: self._write_when_there(alive, after, progress))

    def _pin(self, grant: Grant, batches: Sequence[Batch]) -> None:
        """S3, S5: until the release no reservation of this pool gets these pages, and what a reservation still waits
        for
        is not sent on. Raises OwnershipError."""
        pages: dict[int, npt.NDArray[np.uint64]] = {}
        for group, _, pool, _ in batches:
            space = self._pool.geometry.groups[group].id_space
            pages[space] = np.concatenate([pages[space], pool]) if space in pages else pool
        self._pool._ledger.pin(pages)
        grant._pins.append(pages)

    def _unpin(self, grant: Grant) -> None:
        for pages in grant._pins:
            self._pool._ledger.unpin(pages)
        grant._pins.clear()

    def _write_when_there(self, entries: Sequence[tuple[Grant, Sequence[Batch]]], after: Any, progress: bool) -> None:
        failure: KvxferError | None = None
        try:
            after.synchronize()
        except Exception as cause:
            failure = as_error(cause, "the event that a write waited for failed")
        for grant, batches in entries:
            error = failure
            if error is None:
                try:
                    self._post(grant, batches, progress)
                except AdmissionClosed:
                    pass  # ended meanwhile: its own event has said so
                except KvxferError as cause:
                    error = cause
            with self._lock:
                grant._pending -= 1
                if error is not None:
                    self._drive(self._core.abort(self._now(), grant._id, str(error)))
                    self._rearm()

    @abstractmethod
    def _post(self, grant: Grant, batches: Sequence[Batch], progress: bool) -> None:
        """Digests and queues in the calling thread."""

    def _commit_after_pending(self, grant: Grant, n_tokens: int, aux: bytes) -> None:
        """The worker carries out jobs in order: when it comes to this one, the grant's earlier writes are done."""
        grant._committing = True
        self._submit(lambda: self._commit_later(grant, n_tokens, aux))

    def _commit_later(self, grant: Grant, n_tokens: int, aux: bytes) -> None:
        try:
            self._check_within(grant, n_tokens)
            self._commit_now(grant, n_tokens, aux)
        except AdmissionClosed:
            pass
        except KvxferError as cause:
            with self._lock:
                self._drive(self._core.abort(self._now(), grant._id, str(cause)))
                self._rearm()

    @abstractmethod
    def _check_within(self, grant: Grant, n_tokens: int) -> None:
        """Raises GeometryError where a written page lies beyond ``n_tokens``."""

    def _commit_now(self, grant: Grant, n_tokens: int, aux: bytes) -> None:
        """Closes admission under the lock; the core's record follows outside of it, behind a write of another
        thread."""
        with self._lock:
            self._drive(self._core.commit(self._now(), grant._id, n_tokens, len(aux)))
            self._rearm()
        with contextlib.suppress(RuntimeError):  # ended meanwhile: its own event says so
            grant._source.commit(n_tokens, aux)

    def _submit(self, job: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="kvxfer-after", daemon=True)
            self._worker.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # Its own grant is left to its deadline; the writes of every other grant must go on.
                _LOG.exception("kvxfer: a write or commit behind an event failed")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reactor.forget(self._server.fileno())
            self._reactor.forget(self._monitor_fd)
            self._server.close()
        self._listener.close()
        self._sender.close()
        if self._worker is not None:
            self._jobs.put(None)
        if not self._reactor.in_thread():
            self._reactor.stop(5.0)
        self._events.close()
