"""Decode's core: reservations, sessions and lanes as one sans-IO state machine under the rules S1-S8.

Every call that is not a getter returns the actions to carry out, in order. The caller serialises the calls (the
endpoint holds one lock), passes ``now`` in, and calls ``tick`` at ``next_deadline()``. Nothing here blocks, or raises
but where a method says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxfer.errors import (
    Aborted,
    CapacityError,
    Closed,
    DuplicateRequest,
    GeometryError,
    NotReady,
    PeerLost,
)
from kvxfer.protocol import decode_reservation as states
from kvxfer.protocol.actions import Action, Audit, LegReport, MarkPages
from kvxfer.protocol.decode_endings import REMEMBERED_OUTCOMES
from kvxfer.protocol.decode_inbox import DecodeInbox
from kvxfer.protocol.decode_offers import PageRequest
from kvxfer.protocol.decode_reservation import Outcome, Reservation
from kvxfer.protocol.decode_session import MAX_WAITING_DECLINES, Session
from kvxfer.protocol.messages import (
    Bye,
    Decline,
)

MAX_REQUEST_ID = 1024
MAX_LEGS = 4096


class DecodeCore(DecodeInbox):
    """See the module. ``plan`` is ``shards.plan``, ``random(n)`` gives n unpredictable bytes, ``host`` is this kernel.

    Raises CapacityError where the pool cannot hold ``config.max_context_tokens`` (S4).
    """

    _closing = False

    # ---- the engine's calls ------------------------------------------------------------------------------------------

    def reserve(
        self,
        now: float,
        *,
        request_id: str,
        pages: Mapping[int, PageRequest],
        prefill: Sequence[str],
        incarnation: Sequence[bytes | None] | bytes | None = None,
        readers: int = 1,
        rank: int = 0,
        timeout_s: float,
    ) -> tuple[int, list[Action]]:
        """Claims the pages and offers them as soon as every leg's session is up. Returns (reservation id, actions).

        ``pages``: group index -> (logical u64, pool u64, first_token or None, n_tokens or None). Raises Closed,
        GeometryError, DuplicateRequest, CapacityError, PeerRestarted (both where already known) and OwnershipError; the
        core is then as it was before.
        """
        if self._closing:
            raise Closed("this endpoint is closed; make a new one", request_id=request_id)
        expected = _check_call(request_id, prefill, incarnation, readers, rank, timeout_s)
        if (request_id, rank) in self._live_requests:
            raise DuplicateRequest(
                "this request already has a live reservation, which is untouched; abort it or use another request id",
                request_id=request_id,
                reservation=self._live_requests[request_id, rank],
            )
        groups, end, claim, n_pages = self._check_pages(request_id, pages)
        for peer, incarnation_wanted in expected.items():
            session = self._by_peer.get(peer)
            fault = None if session is None else self._peer_fault(session, incarnation_wanted, request_id, end)
            if session is not None and fault is not None:
                if not isinstance(fault, CapacityError):
                    self._ask_at_once(now, session)
                raise fault
        reservation = self._new_reservation(now, request_id, rank, readers, groups, end, n_pages, timeout_s, expected)
        self._ledger.claim(reservation.id, claim)
        self._reservations[reservation.id] = reservation
        self._live_requests[request_id, rank] = reservation.id
        out: list[Action] = [MarkPages(reservation.id, "reserved")]
        self._join_sessions(now, reservation, prefill, list(expected.values()), out)
        self._arm(reservation)
        return reservation.id, out

    def prepare(self, reservation: int) -> None:
        """Does ahead, while the peers work, what the judgement of a reservation that was offered will need."""
        found = self._reservations.get(reservation)
        if found is not None and found.state == states.OFFERED:
            for leg in found.legs:
                self._layout(leg)

    def extend(self, now: float, reservation: int, seconds: float) -> list[Action]:
        """Moves the deadline; nothing where the reservation has ended. Raises GeometryError for a senseless number."""
        if not 0 < seconds < float("inf"):
            raise GeometryError("a deadline is extended by a positive number of seconds", reservation=reservation)
        found = self._reservations.get(reservation)
        if found is not None and found.live and found.withdrawn is None:
            found.deadline += seconds
            self._arm(found)
        return []

    def abort(self, now: float, reservation: int, reason: str) -> list[Action]:
        """Gives the handoff up. Idempotent; nothing after READY.

        Prefill is told in any case: by ABORT where it was offered, else by DECLINE, so that no grant waits for a
        RESERVE that never comes.
        """
        out: list[Action] = []
        found = self._reservations.get(reservation)
        if found is not None:
            unoffered = found.state == states.WAITING
            self._fail(now, found, Aborted(f"decode gave the handoff up: {reason}", by="decode"), out)
            if unoffered:
                out += self.decline(now, found.request_id, list(found.expected), reason, found.rank)
        return out

    def decline(self, now: float, request_id: str, prefill: Sequence[str], reason: str, rank: int = 0) -> list[Action]:
        """Lets prefill's grant go without a handoff. Raises Closed, GeometryError."""
        if self._closing:
            raise Closed("this endpoint is closed; make a new one", request_id=request_id)
        expected = _check_call(request_id, prefill, None, rank + 1, rank, 1.0)
        out: list[Action] = []
        for peer in expected:
            session = self._session_for(now, peer, None, out)
            message = Decline(request_id, reason[:500], rank)
            if session.state == "open":
                session.send(message, out)
            elif len(session.declines) < MAX_WAITING_DECLINES:
                session.declines.append(message)
            else:
                out.append(Audit("refused", session.id, fields={"why": "too_many_declines", "request_id": request_id}))
        return out

    def close(self, now: float, reason: str) -> list[Action]:
        """Ends every handoff and fences every lane. ``is_closed`` once all fences have returned."""
        out: list[Action] = []
        if self._closing:
            return out
        self._closing = True
        for reservation in list(self._reservations.values()):
            self._fail(now, reservation, Closed(f"the endpoint was closed: {reason}"), out)
        for session in list(self._sessions.values()):
            if session.state == "open":
                session.send(Bye(reason[:500]), out)
            self._session_dead(now, session, PeerLost(f"closed: {reason}", peer=session.peer), out)
        return out

    # ---- what the lanes say ------------------------------------------------------------------------------------------

    def lane_up(
        self, now: float, session: int, generation: int, lane: int, kind: str, revocable: bool = True
    ) -> list[Action]:
        """One lane is connected and proven. ``revocable``: one leg's means to write can be taken away on it."""
        found = self._current(session, generation)
        out: list[Action] = []
        if found is not None and found.lane_up(now, lane, kind, revocable):
            self._lanes_are_up(now, found, out)
        return out

    def lane_down(self, now: float, session: int, generation: int, lane: int, cause: str) -> list[Action]:
        """A lane broke: its whole generation is fenced, and the peer is asked whether it lives."""
        found = self._current(session, generation)
        out: list[Action] = []
        if found is not None and found.can_be_written:
            out.append(Audit("lane_down", session, fields={"lane": lane, "generation": generation, "cause": cause}))
            found.suspect(now, out)
            self._fence(now, found, f"lane {lane}: {cause}", out)
            self._arm_session(found)
        return out

    def lanes_failed(self, now: float, session: int, generation: int, cause: str) -> list[Action]:
        """The lanes of a generation could not be connected."""
        found = self._current(session, generation)
        out: list[Action] = []
        if found is not None and found.lanes_state == "connecting":
            out.append(Audit("lanes_failed", session, fields={"generation": generation, "cause": cause}))
            self._lanes_did_not_connect(now, found, cause, out)
        return out

    # ---- answers to actions ------------------------------------------------------------------------------------------

    def revoked(self, now: float, session: int, reservation: int, leg: int) -> list[Action]:
        """Answers Revoke: nothing of this leg can land any more."""
        out: list[Action] = []
        owner = self._reservations.get(reservation)
        if owner is None or not 0 <= leg < len(owner.legs):
            return out
        found = owner.legs[leg]
        if not found.revoke_asked or found.session.id != session:
            return [Audit("refused", session, reservation, leg, {"why": "revoke_was_not_asked"})]
        if found.closed is None:
            found.closed = "revoked"
            self._release_if_silent(now, owner, out)
        return out

    def fenced(self, now: float, session: int, generation: int) -> list[Action]:
        """Answers Fence: nothing of this generation can land any more."""
        found = self._sessions.get(session)
        if found is None or found.lanes_state != "fencing" or found.generation != generation:
            return [Audit("refused", session, fields={"why": "fence_was_not_asked", "generation": generation})]
        out: list[Action] = []
        found.fenced(now, out)
        self._generation_is_silent(now, found, out)
        return out

    def verified(self, now: float, reservation: int, reports: Mapping[tuple[int, int], LegReport]) -> list[Action]:
        """Answers Verify. ``reports`` by (session, leg); a leg whose lanes are gone may be missing."""
        out: list[Action] = []
        owner = self._reservations.get(reservation)
        if owner is not None and owner.state == states.VERIFYING:
            self._judge_reports(now, owner, reports, out)
        elif owner is not None and owner.state == states.NAMING:
            self._landed_digests(now, owner, reports, out)
        return out

    def tail_zeroed(self, now: float, reservation: int) -> list[Action]:
        """Answers ZeroTail. A reservation that has failed meanwhile stays failed."""
        out: list[Action] = []
        found = self._reservations.get(reservation)
        if found is not None and found.state == states.VERIFYING and found.accepted is not None:
            self._ready(now, found, *found.accepted, out)
        return out

    # ---- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        out: list[Action] = []
        for number in self._session_timers.pop_due(now):
            session = self._sessions.get(number)
            if session is None:
                continue
            error = session.on_time(now, out)
            if error is not None:
                self._session_dead(now, session, error, out)
            if session.id in self._sessions:
                self._arm_session(session)
        for number in self._timers.pop_due(now):
            reservation = self._reservations.get(number)
            if reservation is not None:
                self._reservation_is_due(now, reservation, out)
        return out

    def next_deadline(self) -> float | None:
        """When ``tick`` wants to be called at the latest, or None."""
        first, second = self._timers.next(), self._session_timers.next()
        if first is None or second is None:
            return second if first is None else first
        return min(first, second)

    # ---- getters -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Closed, every lane fenced, and no page waits for a writer to fall silent."""
        return self._closing and not self._sessions and not self.outstanding()

    def outstanding(self) -> dict[int, int]:
        """Reservations whose pages are quarantined, and how many pages each."""
        return {r.id: r.n_pages for r in self._reservations.values() if r.state == states.QUARANTINED}

    def state(self, reservation: int) -> str:
        """waiting, offered, verifying, naming, ready, quarantined or released. Raises KeyError for what is over."""
        return self._find(reservation).state

    def released(self, reservation: int) -> bool:
        """True once a failed reservation's pages may be reused."""
        return self._find(reservation).released

    def ready(self, reservation: int) -> Outcome:
        """(n_tokens, aux, stats) of a READY reservation. Raises NotReady, KeyError."""
        found = self._find(reservation)
        if found.outcome is None:
            if found.state == states.READY:
                raise KeyError(reservation)  # taken long ago
            raise NotReady(
                f"the reservation is {found.state}: no page of it may be read",
                reservation=reservation,
                request_id=found.request_id,
            )
        self._taken.append(reservation)
        if len(self._taken) > REMEMBERED_OUTCOMES:
            oldest = self._ended.get(self._taken.popleft())
            if oldest is not None and oldest.id != reservation:
                oldest.outcome = None
        return found.outcome

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _find(self, reservation: int) -> Reservation:
        found = self._reservations.get(reservation)
        return self._ended[reservation] if found is None else found

    def _current(self, session: int, generation: int) -> Session | None:
        found = self._sessions.get(session)
        return found if found is not None and found.state == "open" and found.generation == generation else None

    def _ask_at_once(self, now: float, session: Session) -> None:
        """Somebody knows of another incarnation: the next tick pings, and a restarted peer will then say so."""
        session.next_ping = now
        self._arm_session(session)


def _check_call(
    request_id: str,
    prefill: Sequence[str],
    incarnation: Sequence[bytes | None] | bytes | None,
    readers: int,
    rank: int,
    timeout_s: float,
) -> dict[str, bytes | None]:
    """Expected incarnation by prefill address, in the order of the legs. Raises GeometryError."""
    if not request_id or len(request_id) > MAX_REQUEST_ID:
        raise GeometryError(f"a request id has 1 to {MAX_REQUEST_ID} characters", request_id=request_id[:64])
    if isinstance(prefill, str) or not 1 <= len(prefill) <= MAX_LEGS or len(set(prefill)) != len(prefill):
        raise GeometryError("prefill must list each rank's address once, in order", request_id=request_id)
    if not 0 <= rank < readers:
        raise GeometryError("rank must lie below readers", request_id=request_id, rank=rank, readers=readers)
    if not 0 < timeout_s < float("inf"):
        raise GeometryError("timeout_s must be a positive number of seconds", request_id=request_id)
    given = [incarnation] * len(prefill) if incarnation is None or isinstance(incarnation, bytes) else list(incarnation)
    if len(given) != len(prefill):
        raise GeometryError("give one incarnation, or one a prefill rank", request_id=request_id)
    return dict(zip(prefill, given, strict=True))
