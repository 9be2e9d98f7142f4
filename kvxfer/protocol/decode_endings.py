"""How a reservation ends at decode: READY by S1, or failed and then released by S2."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np

from kvxfer.errors import DeadlineExceeded, KvxferError, LaneFailed, VerificationFailed
from kvxfer.geometry import PoolGeometry
from kvxfer.ledger import PageLedger, PageState
from kvxfer.protocol import decode_reservation as states
from kvxfer.protocol.acceptance import LegEvidence, accept, mismatching_folds
from kvxfer.protocol.actions import Action, Audit, ForgetLeg, LegReport, MarkPages, Notify, Revoke, Verify, ZeroTail
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode_reservation import Leg, Naming, Outcome, Reservation, name_chunks, reports_complete
from kvxfer.protocol.decode_session import Session
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import Abort, Digests, Done, FetchDigests, ReserveGroup
from kvxfer.protocol.timers import Timers

REMEMBERED = 4096
"""Ended reservations whose state can still be asked for."""

REMEMBERED_OUTCOMES = 64
"""Outcomes that were taken once and may be taken again."""

NAMED_CHUNKS_LIMIT = 1 << 16


class DecodeEndings:
    """The tables of decode's core, and the ways out of them. Not thread-safe."""

    def __init__(self, config: DecodeConfig, geometry: PoolGeometry, ledger: PageLedger) -> None:
        self.config = config
        self.geometry = geometry
        self.pages_low = False  # the engine may say so; a quarantined part of the pool says so by itself
        self._ledger = ledger
        self._n_pages = max(1, sum(ledger.sizes))
        self._group_names = tuple(group.name for group in geometry.groups)
        self._sessions: dict[int, Session] = {}
        self._by_peer: dict[str, Session] = {}
        self._reservations: dict[int, Reservation] = {}
        self._ended: OrderedDict[int, Reservation] = OrderedDict()
        self._taken: deque[int] = deque()
        self._live_requests: dict[tuple[str, int], int] = {}
        self._timers = Timers()
        self._session_timers = Timers()

    # ---- S1 ----------------------------------------------------------------------------------------------------------

    def _all_records_are_in(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        if reservation.withdrawn is not None:
            self._fail(now, reservation, reservation.withdrawn, out)
            return
        reservation.state = states.VERIFYING
        out.append(Verify(reservation.id, tuple((leg.session.id, leg.index) for leg in reservation.legs)))

    def _judge_reports(
        self, now: float, reservation: Reservation, reports: Mapping[tuple[int, int], LegReport], out: list[Action]
    ) -> None:
        if not reports_complete(reservation, reports):
            error = LaneFailed("the lanes were fenced before the handoff could be verified; retry the request")
            self._fail(now, reservation, error, out)
            return
        evidence = [
            LegEvidence(
                leg.index,
                leg.session.epoch,
                leg.generation,
                leg.lanes,
                leg.index == 0,
                self._layout(leg),
                leg.records,
                reports[leg.session.id, leg.index],
            )
            for leg in reservation.legs
        ]
        try:
            accepted = accept(reservation.offer, evidence)
        except VerificationFailed as error:
            out.append(Audit("mismatch", reservation=reservation.id, fields=_json(error)))
            if not self._start_naming(now, reservation, error, evidence, out):
                self._fail(now, reservation, error, out)
            return
        tail = self._groups_with_a_tail(reservation)
        if tail:
            # READY only once it has been zeroed: what lies past the last token may be an older prompt's.
            reservation.accepted = (accepted.aux, accepted.bytes_landed)
            out.append(ZeroTail(reservation.id, reservation.end_token, tail))
        else:
            self._ready(now, reservation, accepted.aux, accepted.bytes_landed, out)

    def _ready(self, now: float, reservation: Reservation, aux: bytes, nbytes: int, out: list[Action]) -> None:
        legs = reservation.legs
        stats = {
            "lane": legs[0].kind if all(leg.kind == legs[0].kind for leg in legs) else "mixed",
            "verify": self.config.verify,
            "legs": len(legs),
            "lanes": sum(len(leg.lanes) for leg in legs),
            "pages": reservation.n_pages,
            "chunks": sum(self._layout(leg).n_chunks for leg in legs),
            "bytes": nbytes,
            "reserved_at": reservation.reserved_at,
            "offered_at": reservation.offered_at,
            "first_record_at": reservation.first_record_at,
            "last_record_at": reservation.last_record_at,
            "ready_at": now,
            "connect_s": reservation.offered_at - reservation.reserved_at,
            "transfer_s": reservation.last_record_at - reservation.offered_at,
            "verify_s": now - reservation.last_record_at,
            "total_s": now - reservation.reserved_at,
        }
        # The records are the quiesce (S2): nothing more of this reservation is on its way, and the pages pass on.
        self._ledger.mark(reservation.id, PageState.READY)
        reservation.state = states.READY
        reservation.outcome = Outcome(reservation.end_token, aux, stats)
        self._live_requests.pop((reservation.request_id, reservation.rank), None)
        for leg in legs:
            leg.session.legs.pop(reservation.id, None)
            out.append(ForgetLeg(leg.session.id, reservation.id, leg.index))
        out.append(MarkPages(reservation.id, "ready"))
        out.append(Notify("ready", reservation.id, reservation.request_id))
        for leg in legs:
            if leg.session.state == "open":
                leg.session.send(Done(reservation.id, leg.index), out)
        out.append(Audit("ready", reservation=reservation.id, fields={"pages": reservation.n_pages, "bytes": nbytes}))
        self._arm(reservation)

    def _layout(self, leg: Leg) -> LegLayout:
        """The leg's numbering, made when it is first needed: the offer does not wait for it."""
        if leg.layout is None:
            assert leg.table is not None
            leg.layout = LegLayout(self.geometry.groups, leg.table, leg.groups, checked=True)
        return leg.layout

    def _groups_with_a_tail(self, reservation: Reservation) -> tuple[ReserveGroup, ...]:
        """Groups that hold the last token's page, where it has slots past that token and its token axis is known."""
        tail = []
        for reserve in reservation.groups:
            group = self.geometry.groups[reserve.group]
            if not group.tokens_per_page or not reserve.logical or not reservation.end_token % group.tokens_per_page:
                continue
            last = int.from_bytes(reserve.logical[-8:], "little")
            if last == reservation.end_token // group.tokens_per_page and any(r.token_rows for r in group.regions):
                tail.append(reserve)
        return tuple(tail)

    # ---- naming the chunk of a mismatch ------------------------------------------------------------------------------

    def _start_naming(
        self,
        now: float,
        reservation: Reservation,
        error: VerificationFailed,
        evidence: list[LegEvidence],
        out: list[Action],
    ) -> bool:
        """Asks both sides for the content digests behind the first fold that differs; False where that cannot help."""
        if error.details["kind"] != "digest":
            return False
        for leg, proof in zip(reservation.legs, evidence, strict=True):
            folds = mismatching_folds(proof)
            if not folds:
                continue
            chunks = proof.layout.fold_chunks(folds[0])
            if leg.session.state != "open" or len(chunks) > NAMED_CHUNKS_LIMIT:
                return False
            until = now + self.config.diagnosis_timeout_s
            reservation.naming = Naming(error, leg.index, chunks.start, len(chunks), until)
            reservation.state = states.NAMING
            leg.session.send(FetchDigests(reservation.id, leg.index, chunks.start, len(chunks)), out)
            out.append(Verify(reservation.id, ((leg.session.id, leg.index),), with_digests=True))
            self._arm(reservation)
            return True
        return False

    def _landed_digests(
        self, now: float, reservation: Reservation, reports: Mapping[tuple[int, int], LegReport], out: list[Action]
    ) -> None:
        naming = reservation.naming
        if naming is not None:
            report = reports.get((reservation.legs[naming.leg].session.id, naming.leg))
            if report is None or report.digests is None:
                self._finish_naming(now, reservation, out)
                return
            reservation.landed_digests = report.digests
            if reservation.sent_digests is not None:
                self._finish_naming(now, reservation, out)

    def _sent_digests(
        self, now: float, reservation: Reservation, leg: Leg, message: Digests, out: list[Action]
    ) -> None:
        naming = reservation.naming
        if naming is None or (leg.index, message.first) != (naming.leg, naming.first):
            self._refused(out, "unasked_digests", leg)
            return
        if len(message.content) != 8 * naming.n_chunks:
            self._refused(out, "digests_of_wrong_length", leg)
            return
        reservation.sent_digests = np.frombuffer(message.content, dtype="<u8")
        if reservation.landed_digests is not None:
            self._finish_naming(now, reservation, out)

    def _finish_naming(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        naming = reservation.naming
        assert naming is not None
        layout = self._layout(reservation.legs[naming.leg])
        landed, sent = reservation.landed_digests, reservation.sent_digests
        error = name_chunks(naming, layout, landed, sent, self._group_names)
        self._fail(now, reservation, error, out)

    # ---- failure -----------------------------------------------------------------------------------------------------

    def _fail(self, now: float, reservation: Reservation, cause: KvxferError, out: list[Action]) -> None:
        """FAILED at once; RELEASED only when every writer that was ever offered the pages is proven silent (S2)."""
        if not reservation.live:
            return
        if reservation.naming is not None and not isinstance(cause, VerificationFailed):
            cause = reservation.naming.error  # the mismatch came first, and says more
        error = _error_of(cause, reservation)
        reservation.state = states.QUARANTINED
        reservation.error = error
        reservation.failed_at = now
        self._live_requests.pop((reservation.request_id, reservation.rank), None)
        self._ledger.mark(reservation.id, PageState.QUARANTINED)
        out.append(Audit("failed", reservation=reservation.id, fields=_json(error)))
        offered = [leg for leg in reservation.legs if leg.offered]
        if offered:
            pages = {"pages": reservation.n_pages}
            out.append(Audit("quarantine", reservation=reservation.id, fields=pages))
            out.append(MarkPages(reservation.id, "quarantined"))
        out.append(Notify("failed", reservation.id, reservation.request_id, error))
        for leg in reservation.legs:
            leg.session.waiting.pop(reservation.id, None)
        for leg in offered:
            self._silence(leg, out)
        self._repeat_aborts(now, reservation, out)
        self._release_if_silent(now, reservation, out)

    def _silence(self, leg: Leg, out: list[Action]) -> None:
        """Takes away the leg's means to write where that can be done for the leg alone."""
        session = leg.session
        if leg.generation < session.fenced_below:
            leg.closed = "fenced"
        elif session.lanes_state == "up" and session.revocable:
            leg.revoke_asked = True
            out.append(Revoke(session.id, leg.reservation.id, leg.index))

    def _release_if_silent(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        """S2: the pages go back when *every* leg offered is quiesced, revoked or fenced; no clock is asked."""
        if reservation.state != states.QUARANTINED:
            return
        for leg in reservation.legs:
            # A revoke under way proves more than the sender's word: where it was asked for, its return is awaited.
            if leg.offered and leg.closed is None and not leg.revoke_asked and leg.quiesced:
                leg.closed = "quiesced"
        if any(leg.offered and leg.closed is None for leg in reservation.legs):
            self._arm(reservation)
            return
        how = {leg.index: leg.closed for leg in reservation.legs if leg.offered}
        reservation.state = states.RELEASED
        self._ledger.release(reservation.id)
        for leg in reservation.legs:
            leg.session.legs.pop(reservation.id, None)
            if leg.offered:
                out.append(ForgetLeg(leg.session.id, reservation.id, leg.index))
        out.append(MarkPages(reservation.id, "free"))
        out.append(Notify("released", reservation.id, reservation.request_id))
        fields = {"pages": reservation.n_pages, "legs": {str(leg): closed for leg, closed in how.items()}}
        out.append(Audit("released", reservation=reservation.id, fields=fields))
        self._arm(reservation)

    def _repeat_aborts(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        reservation.next_abort = now + self.config.abort_repeat_s
        reason = reservation.error.message if reservation.error is not None else ""
        for leg in reservation.aborts_wanted():
            abort = Abort(reservation.id, leg.number, leg.index, reservation.request_id, reason[:500])
            leg.session.send(abort, out)

    # ---- fences ------------------------------------------------------------------------------------------------------

    def _fence(self, now: float, session: Session, cause: str, out: list[Action]) -> None:
        """One fence serves every abort of these lanes; whatever had not arrived in full fails and may be retried."""
        if not session.fence(now, cause, out):
            return
        self._arm_session(session)
        for leg in list(session.legs.values()):
            if not leg.all_records:
                error = LaneFailed(f"a lane of the handoff was fenced: {cause}; retry the request", peer=session.peer)
                self._fail(now, leg.reservation, error, out)

    def _fence_if_overdue(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        """Waiting costs pages, fencing costs neighbours: a deadline decides which, and never releases anything."""
        waited = now - reservation.failed_at
        if waited < self.config.quiesce_timeout_s:
            return
        overdue = waited >= self.config.fence_hard_limit_s
        if not overdue and not self._pages_are_low():
            return
        for leg in reservation.legs:
            if leg.offered and leg.closed is None:
                self._fence(now, leg.session, "an aborted leg did not quiesce in time", out)

    def _pages_are_low(self) -> bool:
        quarantined = self._ledger.counts()[PageState.QUARANTINED]
        return self.pages_low or quarantined >= self.config.quarantine_low_fraction * self._n_pages

    def _generation_is_silent(self, now: float, session: Session, out: list[Action]) -> None:
        """The session's fence has returned: what it was awaited for goes on."""
        for leg in list(session.legs.values()):
            if leg.closed is None and leg.generation < session.fenced_below:
                leg.closed = "fenced"
                self._release_if_silent(now, leg.reservation, out)
        if session.state == "dead":
            self._drop_session(session, out)
        else:
            self._arm_session(session)

    def _drop_session(self, session: Session, out: list[Action]) -> None:
        session.close("closed", out)
        self._sessions.pop(session.id, None)
        self._session_timers.set(session.id, None)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _reservation_is_due(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        if reservation.live and now >= reservation.deadline:
            self._fail(now, reservation, self._too_late(reservation), out)
        elif reservation.state == states.OFFERED and now >= reservation.next_reserve:
            reservation.next_reserve = now + self.config.reserve_repeat_s
            for leg in reservation.legs:
                if not leg.answered and leg.reserve is not None and leg.session.state == "open":
                    leg.session.send(leg.reserve, out)
        elif reservation.naming is not None and reservation.live and now >= reservation.naming.until:
            self._finish_naming(now, reservation, out)
        elif not reservation.live and now >= reservation.next_abort:
            self._repeat_aborts(now, reservation, out)
            if reservation.state == states.QUARANTINED:
                self._fence_if_overdue(now, reservation, out)
        self._arm(reservation)

    def _too_late(self, reservation: Reservation) -> KvxferError:
        if reservation.withdrawn is not None:
            return reservation.withdrawn
        waiting_for = {
            leg.session.peer: (
                f"session {leg.session.state}, lanes {leg.session.lanes_state}"
                if not leg.offered
                else f"{len(leg.lanes) - len(leg.records)} of {len(leg.lanes)} commit records"
            )
            for leg in reservation.legs
            if not leg.all_records
        }
        return DeadlineExceeded(
            "the handoff did not become READY in time; retry the request or give it more time (timeout_s, extend)",
            peer=next(iter(waiting_for), None),
            waiting_for=waiting_for or "verification",
        )

    def _arm(self, reservation: Reservation) -> None:
        due = reservation.due(self.config.fence_hard_limit_s)
        self._timers.set(reservation.id, due)
        if due is None and not reservation.live and reservation.state != states.QUARANTINED:
            self._retire(reservation)

    def _arm_session(self, session: Session) -> None:
        session.timer = session.due()
        self._session_timers.set(session.id, session.timer)

    def _retire(self, reservation: Reservation) -> None:
        if self._reservations.pop(reservation.id, None) is not None:
            reservation.forget_details()
            self._ended[reservation.id] = reservation
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    # ---- S7, S8 ------------------------------------------------------------------------------------------------------

    def _refused(self, out: list[Action], why: str, leg: Leg) -> None:
        out.append(Audit("refused", leg.session.id, leg.reservation.id, leg.index, {"why": why}))


def _error_of(cause: KvxferError, reservation: Reservation) -> KvxferError:
    """The same error, saying which reservation it concerns; a session's error concerns many."""
    if cause.reservation == reservation.id:
        return cause
    return type(cause)(
        cause.message,
        reservation=reservation.id,
        request_id=reservation.request_id,
        peer=cause.peer,
        retryable=cause.retryable,
        **cause.details,
    )


def _json(error: KvxferError) -> dict[str, object]:
    return {"error": type(error).__name__, "message": error.message, "peer": error.peer, **error.details}
