"""What reaches decode's core from its peers: control frames, records and refused frames. Nothing is believed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.errors import (
    Aborted,
    CapacityError,
    DeadlineExceeded,
    KvxferError,
    LaneFailed,
    PeerLost,
    ProtocolViolation,
    Rejected,
    SourceChanged,
    VerificationFailed,
)
from kvxfer.protocol import decode_reservation as states
from kvxfer.protocol.actions import Action, Audit
from kvxfer.protocol.decode_offers import DecodeOffers
from kvxfer.protocol.decode_reservation import Leg, Reservation
from kvxfer.protocol.decode_session import Session
from kvxfer.protocol.messages import (
    Abort,
    Bye,
    Digests,
    Done,
    Failed,
    Granted,
    Lanes,
    Message,
    Ping,
    Pong,
    Quiesced,
    Refuse,
    Welcome,
)
from kvxfer.protocol.messages import (
    Rejected as RejectedMessage,
)
from kvxfer.protocol.record import COMMIT, Record, address, parse

_FAILED_CAUSES: dict[str, type[KvxferError]] = {
    "lane": LaneFailed,
    "source_changed": SourceChanged,
    "aborted": Aborted,
    "rejected": Rejected,
    "timeout": DeadlineExceeded,
}
# "duplicate" and "ended": a former reservation of the request has not ended at prefill yet. It may be this decode's
# own,
# whose ABORT is late or whose session died unnoticed there.
_RETRYABLE_REJECTIONS = frozenset({"stale_number", "closed", "generation", "busy", "duplicate", "ended"})
_OWN_FIELDS = frozenset({"message", "reservation", "request_id", "peer", "retryable", "code", "cause"})


class DecodeInbox(DecodeOffers):
    """Adds the peers' side to the tables: whatever they send can at worst be refused and audited (S7, S8)."""

    # ---- what the peers say ------------------------------------------------------------------------------------------

    def message(self, now: float, session: int, epoch: bytes, sequence: int, message: Message) -> list[Action]:
        """One control frame. A frame of another epoch, or out of order, changes nothing (S7)."""
        out: list[Action] = []
        found = self._sessions.get(session)
        if found is None:
            return [Audit("refused", session, fields={"why": "unknown_session"})]
        why = found.refuses(epoch, sequence, message)
        if why is not None:
            return [Audit("refused", session, fields={"why": why, "message": type(message).__name__})]
        handler = _HANDLERS.get(type(message))
        if handler is None:
            return [Audit("refused", session, fields={"why": "not_for_decode", "message": type(message).__name__})]
        if not isinstance(message, Refuse):
            found.heard(now, sequence)
        handler(self, now, found, message, out)
        if found.id in self._sessions:
            self._arm_session(found)
        return out

    def socket_failed(self, now: float, session: int, cause: str) -> list[Action]:
        out: list[Action] = []
        found = self._sessions.get(session)
        if found is not None:
            error = PeerLost(f"the control connection failed: {cause}", peer=found.peer)
            self._session_dead(now, found, error, out)
        return out

    def record(self, now: float, session: int, generation: int, lane: int, data: bytes) -> list[Action]:
        """A record came on a lane; everything posted on that lane before it has landed."""
        found = self._sessions.get(session)
        if found is None:
            return [Audit("refused", session, fields={"why": "record_of_unknown_session"})]
        out: list[Action] = []
        try:
            record = parse(data)
        except ProtocolViolation as error:
            self._malformed_record(now, found, generation, lane, data, error, out)
            return out
        if record.kind != COMMIT:
            return out
        reservation = self._reservations.get(record.reservation)
        leg = None if reservation is None else reservation.leg(record.leg, found)
        why = _wrong_record(leg, found, generation, lane, record)
        if leg is None or why is not None:
            fields = {"why": why or "record_of_unknown_leg", "lane": lane, "generation": generation}
            out.append(Audit("refused", session, record.reservation, record.leg, fields))
            return out
        self._record_counts(now, leg, lane, record, data, out)
        return out

    def violation(
        self, now: float, session: int, generation: int, lane: int, reservation: int, leg: int, cause: str
    ) -> list[Action]:
        """The core refused a frame. Where it named a leg of this very generation, that leg can never become READY."""
        fields = {"why": "violation", "lane": lane, "generation": generation, "cause": cause}
        out: list[Action] = [Audit("refused", session, reservation, leg, fields)]
        found = self._sessions.get(session)
        owner = self._reservations.get(reservation)
        named = None if found is None or owner is None else owner.leg(leg, found)
        if named is not None and named.generation == generation:
            named.violated = True
            kind = cause.split(":", 1)[0]
            error = VerificationFailed(
                f"the handoff was refused: {cause}; retry under a new reservation",
                peer=named.session.peer,
                kind=kind if kind in ("source", "record", "digest", "tokens") else "coverage",
                leg=leg,
                lane=lane,
                cause=cause,
                retryable=True,
            )
            refused = named.reservation
            if kind != "source" or refused.state != states.OFFERED:
                self._fail(now, refused, error, out)
            elif refused.withdrawn is None:
                # Prefill lets go of sources when it ends a leg, and its reason is on the way by the slower path.
                refused.withdrawn = error
                refused.deadline = min(refused.deadline, now + self.config.diagnosis_timeout_s)
                self._arm(refused)
        return out

    def _record_counts(self, now: float, leg: Leg, lane: int, record: Record, data: bytes, out: list[Action]) -> None:
        reservation = leg.reservation
        if lane in leg.records:
            fields = {"why": "record_replayed", "lane": lane}
            out.append(Audit("refused", leg.session.id, reservation.id, leg.index, fields))
            if leg.digests[lane] != data[-8:]:
                leg.violated = True
                error = VerificationFailed(
                    "the handoff was refused: two different commit records came on one lane",
                    kind="record",
                    leg=leg.index,
                    lane=lane,
                )
                self._fail(now, reservation, error, out)
            return
        leg.records[lane] = record
        leg.digests[lane] = data[-8:]
        leg.answered = True
        if reservation.state == states.OFFERED:
            reservation.last_record_at = now
            if not reservation.first_record_at:
                reservation.first_record_at = now
            if all(each.all_records for each in reservation.legs):
                self._all_records_are_in(now, reservation, out)
        else:
            self._release_if_silent(now, reservation, out)

    def _malformed_record(
        self,
        now: float,
        session: Session,
        generation: int,
        lane: int,
        data: bytes,
        error: ProtocolViolation,
        out: list[Action],
    ) -> None:
        """Nothing in it is believed but, on the leg's own lane, that this leg cannot be completed any more."""
        claimed = address(data)
        fields = {"why": "malformed_record", "lane": lane, "generation": generation, "cause": error.message}
        owner = None if claimed is None else self._reservations.get(claimed.reservation)
        leg = None if claimed is None or owner is None else owner.leg(claimed.leg, session)
        named = leg is not None and leg.generation == generation and lane in leg.lanes and lane not in leg.records
        if leg is None or not named:
            out.append(Audit("refused", session.id, fields=fields))
            return
        out.append(Audit("refused", session.id, leg.reservation.id, leg.index, fields))
        failure = VerificationFailed(
            f"the handoff was refused: its commit record is damaged ({error.message}); retry under a new reservation",
            peer=session.peer,
            kind="record",
            leg=leg.index,
            lane=lane,
            retryable=True,
        )
        self._fail(now, leg.reservation, failure, out)

    def _on_reservation_message(self, now: float, session: Session, message: Any, out: list[Action]) -> None:
        """Granted, Rejected, Failed, Quiesced, Digests: of a live leg of this session, or late, or not ours at all."""
        reservation = self._reservations.get(message.reservation)
        if reservation is None:
            self._on_ended(now, session, message, out)
            return
        leg = reservation.leg(message.leg, session)
        if leg is None:
            fields = {"why": "no_such_leg", "message": type(message).__name__}
            out.append(Audit("refused", session.id, message.reservation, message.leg, fields))
            return
        _LEG_HANDLERS[type(message)](self, now, reservation, leg, message, out)

    def _on_ended(self, now: float, session: Session, message: Any, out: list[Action]) -> None:
        """Late words about ended reservations are ignored; a prefill that still asks is told how it ended."""
        if isinstance(message, Failed):
            ended = self._ended.get(message.reservation)
            leg = None if ended is None else ended.leg(message.leg, session)
            if ended is None or leg is None:
                return
            if ended.state == states.READY:
                session.send(Done(ended.id, leg.index), out)
            elif now >= leg.next_word:
                # A prefill that knows answers ABORT with FAILED. Rarer each time, or the two would never fall silent.
                leg.next_word = now + max(self.config.abort_repeat_s, now - ended.failed_at)
                session.send(Abort(ended.id, leg.number, leg.index, ended.request_id, "it has ended"), out)

    def _on_granted(self, now: float, reservation: Reservation, leg: Leg, message: Any, out: list[Action]) -> None:
        if not leg.answered:
            leg.answered = True
            if reservation.state == states.OFFERED:
                self._arm(reservation)

    def _on_rejected(
        self, now: float, reservation: Reservation, leg: Leg, message: RejectedMessage, out: list[Action]
    ) -> None:
        leg.answered = True
        if not reservation.live:
            leg.abort_answered = True
            return
        details: dict[str, Any] = {key: value for key, value in message.details.items() if key not in _OWN_FIELDS}
        kind: type[KvxferError] = CapacityError if message.code == "capacity" else Rejected
        error = kind(
            f"prefill refused the reservation ({message.code}): {message.message}",
            peer=leg.session.peer,
            retryable=message.code in _RETRYABLE_REJECTIONS,
            code=details.pop("reason", message.code) if message.code == "rejected" else message.code,
            **details,
        )
        out.append(Audit("rejected", leg.session.id, reservation.id, leg.index, {"code": message.code}))
        self._fail(now, reservation, error, out)

    def _on_failed(self, now: float, reservation: Reservation, leg: Leg, message: Failed, out: list[Action]) -> None:
        if message.generation != leg.generation:
            self._refused(out, "failed_of_another_generation", leg)
            return
        leg.answered = True
        if not reservation.live:
            leg.abort_answered = True
            return
        kind = _FAILED_CAUSES.get(message.cause, LaneFailed)
        error = kind(
            f"prefill failed the handoff ({message.cause}): {message.message}",
            peer=leg.session.peer,
            cause=message.cause,
            lane=message.lane,
            leg=leg.index,
        )
        if message.cause == "lane" and not leg.session.revocable and leg.generation == leg.session.generation:
            # An error completion never counts as drained: only the fence makes this leg silent.
            leg.violated = True
            self._fail(now, reservation, error, out)
            self._fence(now, leg.session, "prefill saw an error completion", out)
            return
        self._fail(now, reservation, error, out)

    def _on_quiesced(
        self, now: float, reservation: Reservation, leg: Leg, message: Quiesced, out: list[Action]
    ) -> None:
        if reservation.live:
            self._refused(out, "quiesced_without_abort", leg)
            return
        leg.abort_answered = True
        leg.posted = message.posted
        self._release_if_silent(now, reservation, out)
        self._arm(reservation)

    def _on_digests(self, now: float, reservation: Reservation, leg: Leg, message: Digests, out: list[Action]) -> None:
        if reservation.state == states.NAMING:
            self._sent_digests(now, reservation, leg, message, out)

    def _on_lanes(self, now: float, session: Session, message: Lanes, out: list[Action]) -> None:
        if not session.relaned(message, out):
            out.append(Audit("refused", session.id, fields={"why": "lanes_without_relane"}))

    def _on_ping(self, now: float, session: Session, message: Ping, out: list[Action]) -> None:
        session.send(Pong(message.token), out)

    def _on_pong(self, now: float, session: Session, message: Pong, out: list[Action]) -> None:
        """That it came is all that counts, and ``Session.heard`` has noted it."""

    def _on_bye(self, now: float, session: Session, message: Bye, out: list[Action]) -> None:
        error = PeerLost(f"prefill closed the session: {message.reason}", peer=session.peer)
        self._session_dead(now, session, error, out)


_Handler = Callable[[DecodeInbox, float, Session, Any, "list[Action]"], None]
_LegHandler = Callable[[DecodeInbox, float, Reservation, Leg, Any, "list[Action]"], None]

_HANDLERS: dict[type, _Handler] = {
    Welcome: DecodeInbox._welcome,
    Refuse: DecodeInbox._refuse,
    Granted: DecodeInbox._on_reservation_message,
    RejectedMessage: DecodeInbox._on_reservation_message,
    Failed: DecodeInbox._on_reservation_message,
    Quiesced: DecodeInbox._on_reservation_message,
    Digests: DecodeInbox._on_reservation_message,
    Lanes: DecodeInbox._on_lanes,
    Ping: DecodeInbox._on_ping,
    Pong: DecodeInbox._on_pong,
    Bye: DecodeInbox._on_bye,
}

_LEG_HANDLERS: dict[type, _LegHandler] = {
    Granted: DecodeInbox._on_granted,
    RejectedMessage: DecodeInbox._on_rejected,
    Failed: DecodeInbox._on_failed,
    Quiesced: DecodeInbox._on_quiesced,
    Digests: DecodeInbox._on_digests,
}


def _wrong_record(leg: Leg | None, session: Session, generation: int, lane: int, record: Record) -> str | None:
    """S1: a record counts only on a lane of its own leg, in its own epoch and generation."""
    if leg is None:
        return "record_of_unknown_leg"
    if record.epoch != session.epoch:
        return "record_of_another_epoch"
    if record.generation != leg.generation or generation != leg.generation:
        return "record_of_another_generation"
    if leg.generation < session.fenced_below:
        return "record_after_the_fence"
    if record.lane != lane or lane not in leg.lanes or record.n_lanes != len(leg.lanes):
        return "record_on_another_lane"
    return None
