"""Grants as the engine makes them and as readers join them; and what is kept for requests that have none.

Methods take the list of actions they add to. Nothing here looks at epochs or sequence numbers; that is the core's.
"""

from __future__ import annotations

import math

from kvxfer.errors import (
    AdmissionClosed,
    CapacityError,
    DuplicateRequest,
    GeometryError,
    KvxferError,
)
from kvxfer.errors import Rejected as RejectedError
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol import prefill_grant as state
from kvxfer.protocol.actions import Action, Attach, Audit
from kvxfer.protocol.messages import Granted
from kvxfer.protocol.prefill_checks import Refusal
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.protocol.prefill_grant import Grant
from kvxfer.protocol.prefill_leg import Leg, Sources
from kvxfer.protocol.prefill_legs import Legs
from kvxfer.protocol.prefill_memory import Declines, Offer, Offers, Refusals, Refused
from kvxfer.protocol.prefill_session import Session

_FINAL_STATES_KEPT = 4096


class Grants(Legs):
    """The engine's and the readers' side of all grants, and the requests that have none yet."""

    def __init__(self, config: PrefillConfig, geometry: PoolGeometry, sessions: dict[int, Session]) -> None:
        super().__init__(config, sessions)
        self._geometry = geometry
        self._last_grant = 0
        self.offers = Offers(config.max_offers, config.max_offer_bytes)
        self.refusals = Refusals(config.max_rejects)
        self.declines = Declines(config.max_declines)

    # ---- the engine --------------------------------------------------------------------------------------------------

    def accept(self, out: list[Action], now: float, request_id: str, readers: int | None, timeout_s: float) -> int:
        former = self._by_request.get(request_id)
        if former is not None and not former.released:
            raise DuplicateRequest(
                "this request has a live grant; abort it and wait for its release first", request_id=request_id
            )
        if (refused := self.refusals.get(now, request_id)) is not None:
            raise RejectedError(
                f"this request was rejected: {refused.message}", request_id=request_id, code=refused.code
            )
        if readers is not None and not 1 <= readers <= self._config.max_readers:
            raise GeometryError("readers is out of range", readers=readers, most=self._config.max_readers)
        if not 0 < timeout_s < math.inf:
            raise GeometryError("timeout_s must be a positive number of seconds", timeout_s=timeout_s)
        if len(self.live) >= self._config.max_grants:
            raise CapacityError("too many live grants; finish or abort some", most=self._config.max_grants)
        self._last_grant += 1
        grant = Grant(self._last_grant, request_id, readers, timeout_s)
        self.live[grant.id] = self._by_request[request_id] = grant
        for offer in list(self.offers.of(request_id).values()):
            self.drop_offer(offer)
            session = self._sessions[offer.session]
            try:
                self._check_reader(grant, offer)
            except Refusal as cause:
                self.refuse(out, session, offer.reserve, cause)
            else:
                self._attach(out, now, grant, session, offer)
        for rank, reason in self.declines.take(now, request_id).items():
            self._decline(grant, rank, reason)
        self.review(out, grant)
        return grant.id

    def reject(self, out: list[Action], now: float, request_id: str, code: str, message: str, ttl_s: float) -> None:
        self.refusals.add(now, request_id, Refused(code, message, now + ttl_s))
        cause = Refusal("rejected", message, reason=code)
        for offer in list(self.offers.of(request_id).values()):
            self.drop_offer(offer)
            self.refuse(out, self._sessions[offer.session], offer.reserve, cause)
        grant = self._by_request.get(request_id)
        if grant is not None and not grant.concluded:
            self.fail(out, now, grant, "rejected", RejectedError(message, request_id=request_id, code=code))

    def admitting(self, grant_id: int) -> Grant:
        """The grant, if it still takes writes. Raises AdmissionClosed."""
        grant = self.live.get(grant_id)
        if grant is None or not grant.admits:
            now_is = self.state(grant_id)
            raise AdmissionClosed(
                f"the grant is {now_is}; nothing more can be written to it or committed",
                request_id=None if grant is None else grant.request_id,
                state=now_is,
            )
        return grant

    def commit(self, out: list[Action], now: float, grant_id: int, n_tokens: int, aux_bytes: int) -> None:
        grant = self.admitting(grant_id)
        capacity = self._geometry.capacity_tokens
        if n_tokens < 0:
            raise GeometryError("n_tokens must not be negative", request_id=grant.request_id, n_tokens=n_tokens)
        if capacity and n_tokens > capacity:
            raise CapacityError(
                "more tokens committed than the pool holds",
                request_id=grant.request_id,
                needed=n_tokens,
                available=capacity,
            )
        if aux_bytes > self._config.max_aux_bytes:
            raise GeometryError(
                "aux is too long", request_id=grant.request_id, aux_bytes=aux_bytes, most=self._config.max_aux_bytes
            )
        grant.state = state.COMMITTED
        grant.committed = True
        if not grant.complete:
            grant.deadline = now + grant.timeout_s
            self.at(grant.deadline)
        for leg in grant.legs.values():
            self._time_transfer(now, leg)
        self.review(out, grant)

    def fail(self, out: list[Action], now: float, grant: Grant, cause: str, error: KvxferError) -> None:
        """Gives the grant up: every leg is told and drained. Of a concluded grant only what still runs is stopped."""
        for leg in grant.legs.values():
            if leg.outcome_known and leg.sources is not Sources.OPEN:
                continue
            if not leg.outcome_known:
                self._fail_leg(out, now, leg, cause, error)
            self._close_admission(out, now, leg)
        if not grant.concluded:
            self._conclude(out, grant, error)
        self.review(out, grant)

    def expire_offers(self, out: list[Action], now: float) -> None:
        cause = Refusal("timeout", "the engine did not accept the request in time")
        for offer in [offer for offer in self.offers if offer.deadline <= now]:
            self.drop_offer(offer)
            self.refuse(out, self._sessions[offer.session], offer.reserve, cause)

    # ---- readers -----------------------------------------------------------------------------------------------------

    def reserve(self, out: list[Action], now: float, session: Session, offer: Offer) -> None:
        """A RESERVE that passed every check of its own: attaches it or keeps it. Raises Refusal."""
        reserve = offer.reserve
        if (refused := self.refusals.get(now, reserve.request_id)) is not None:
            raise Refusal("rejected", refused.message, reason=refused.code)
        if len(session.legs) + len(session.offers) >= self._config.max_legs:
            raise Refusal("busy", "too many live reservations in this session", most=self._config.max_legs)
        grant = self._by_request.get(reserve.request_id)
        former = None if grant is None else grant.legs.get(reserve.rank)
        if grant is None or (former is not None and former.outcome_known):
            # No grant, or one that this reader has been through: the RESERVE is for the next accept.
            self._keep_offer(now, session, offer)
            out.append(session.send(Granted(reserve.reservation, reserve.leg)))
            return
        self._check_reader(grant, offer)
        self._attach(out, now, grant, session, offer)
        self.review(out, grant)

    def _check_reader(self, grant: Grant, offer: Offer) -> None:
        reserve = offer.reserve
        if reserve.rank in grant.legs:
            raise Refusal("duplicate", "this rank has a live reservation for the request", rank=reserve.rank)
        if grant.concluded:
            raise Refusal("ended", "the grant has failed and its sources are still read; retry", state=grant.state)
        if grant.readers is not None and reserve.readers != grant.readers:
            raise Refusal("readers", "numbers of readers disagree", ours=grant.readers, theirs=reserve.readers)
        if reserve.rank in grant.declined:
            raise Refusal("declined", "this rank has declined the request", rank=reserve.rank)

    def _keep_offer(self, now: float, session: Session, offer: Offer) -> None:
        reserve = offer.reserve
        others = self.offers.of(reserve.request_id)
        if reserve.rank in others:
            raise Refusal("duplicate", "this rank has a live reservation for the request", rank=reserve.rank)
        for other in others.values():
            if other.reserve.readers != reserve.readers:
                raise Refusal(
                    "readers", "numbers of readers disagree", ours=other.reserve.readers, theirs=reserve.readers
                )
        if self.declines.has(now, reserve.request_id, reserve.rank):
            raise Refusal("declined", "this rank has declined the request", rank=reserve.rank)
        if not self.offers.has_room(offer):
            raise Refusal("busy", "too many reservations wait for the engine; retry later", waiting=len(self.offers))
        self.offers.add(offer)
        session.offers[reserve.reservation] = offer
        self.at(offer.deadline)

    def drop_offer(self, offer: Offer) -> None:
        self.offers.remove(offer)
        del self._sessions[offer.session].offers[offer.reserve.reservation]

    def _attach(self, out: list[Action], now: float, grant: Grant, session: Session, offer: Offer) -> None:
        reserve = offer.reserve
        leg = Leg(grant.id, session.id, reserve, offer.layout, offer.given_up_at)
        if grant.readers is None:
            grant.readers = reserve.readers
            grant.declined = {rank: why for rank, why in grant.declined.items() if rank < reserve.readers}
        grant.legs[reserve.rank] = leg
        grant.attached += 1
        session.legs[reserve.reservation] = leg
        if grant.committed:
            self._time_transfer(now, leg)
        out.append(Attach(grant.id, session.id, reserve))
        if not grant.committed:
            # Else the records are on their way, which say more; should they be long in coming, RESERVE comes again.
            out.append(session.send(Granted(reserve.reservation, reserve.leg)))

    def decline(self, out: list[Action], now: float, session: Session, request_id: str, rank: int, reason: str) -> None:
        grant = self._by_request.get(request_id)
        if grant is None or grant.concluded:
            offer = self.offers.of(request_id).get(rank)
            if offer is None:
                self.declines.add(now, request_id, rank, reason, self._config.decline_ttl_s)
                return
        elif rank not in grant.legs and not (grant.readers is not None and rank >= grant.readers):
            self._decline(grant, rank, reason)
            self.review(out, grant)
            return
        # A rank with a live reservation ends it by ABORT; DECLINE could not wait for its drain.
        out.append(Audit("illegal", session.id, fields={"message": "Decline", "request_id": request_id, "rank": rank}))

    def _decline(self, grant: Grant, rank: int, reason: str) -> None:
        if rank in grant.legs or (grant.readers is not None and rank >= grant.readers):
            return
        grant.declined[rank] = reason
        if grant.readers is None and 0 in grant.declined:
            # Nobody has said how many readers there are; ranks of one decode find the same prefix and decline alike.
            grant.readers = max(grant.declined) + 1
