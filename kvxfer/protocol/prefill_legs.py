"""The legs of all grants: draining, failing, ending, and what that makes of their grant (S2, S3, S6).

Methods take the list of actions they add to. Nothing here looks at epochs or sequence numbers; that is the core's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvxfer.errors import Aborted, DeadlineExceeded, KvxferError, LaneFailed, SourceChanged
from kvxfer.errors import Rejected as RejectedError
from kvxfer.protocol import prefill_grant as state
from kvxfer.protocol.actions import Action, Audit, CloseAdmission, DetachLeg, Notify, ReleaseGrant
from kvxfer.protocol.messages import Failed, Rejected, Reserve
from kvxfer.protocol.prefill_checks import Refusal
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.protocol.prefill_grant import Grant
from kvxfer.protocol.prefill_leg import Leg, Sources
from kvxfer.protocol.prefill_session import Session

_FINAL_STATES_KEPT = 4096


class Legs:
    """Live grants, and everything that can happen to their legs. ``sessions`` is the core's table, shared."""

    def __init__(self, config: PrefillConfig, sessions: dict[int, Session]) -> None:
        self._config = config
        self._sessions = sessions
        self._by_request: dict[str, Grant] = {}
        self._final_states: OrderedDict[int, str] = OrderedDict()
        self.live: dict[int, Grant] = {}
        self.wake_at = math.inf  # no deadline lies before it

    def at(self, deadline: float) -> None:
        """Makes sure that ``tick`` looks around at ``deadline``."""
        if deadline < self.wake_at:
            self.wake_at = deadline

    def state(self, grant_id: int) -> str:
        grant = self.live.get(grant_id)
        return self._final_states.get(grant_id, state.ENDED) if grant is None else grant.state

    # ---- the grant's own events --------------------------------------------------------------------------------------

    def review(self, out: list[Action], grant: Grant) -> None:
        """Tells the engine what has become true of the grant. Called after every change of a leg or a reader."""
        if not grant.concluded:
            if grant.complete:
                grant.deadline = math.inf
                if grant.legs and not grant.offered:
                    grant.offered = True
                    out.append(Notify("offered", grant.id, grant.request_id))
            if grant.outcome_known:
                self._conclude(out, grant, grant.outcome())
        freed = grant.settled and not grant.released
        if freed:
            grant.released = True
        if grant.concluded and grant.released:
            if grant.state == state.DRAINING:
                grant.state = grant.end_state()
            if self._by_request.get(grant.request_id) is grant:
                del self._by_request[grant.request_id]
            if grant.attached == 0 and self.live.pop(grant.id, None) is not None:
                self._final_states[grant.id] = grant.state
                if len(self._final_states) > _FINAL_STATES_KEPT:
                    self._final_states.popitem(last=False)
                out.append(ReleaseGrant(grant.id))
        if freed:
            out.append(Notify("released", grant.id, grant.request_id))
            fields = {"grant": grant.id, "request_id": grant.request_id, "state": grant.state}
            out.append(Audit("released", fields=fields))

    def _conclude(self, out: list[Action], grant: Grant, error: KvxferError | None) -> None:
        grant.concluded = True
        grant.error = error
        grant.deadline = math.inf
        fields: dict[str, object] = {"grant": grant.id, "request_id": grant.request_id}
        if error is None:
            grant.state = state.DONE
            out.append(Notify("ready", grant.id, grant.request_id))
            out.append(Audit("ready", fields=fields))
        else:
            grant.state = state.DRAINING
            out.append(Notify("failed", grant.id, grant.request_id, error))
            fields |= {"error": type(error).__name__, "message": error.message}
            out.append(Audit("failed", fields=fields))

    # ---- what is said of one leg -------------------------------------------------------------------------------------

    def abort_leg(self, out: list[Action], now: float, leg: Leg, reason: str) -> None:
        """Decode's ABORT: close admission, drain, answer. Asked again, it answers again."""
        leg.aborted = leg.heard = True
        if not leg.outcome_known:
            leg.error = leg.cause or Aborted(f"decode aborted: {reason}", **self._names(leg))
        if leg.settled or leg.sources is Sources.BROKEN:
            out.append(self._sessions[leg.session].send(leg.last_word))
        self._close_admission(out, now, leg)
        self._end_if_over(out, leg)
        self.review(out, self.live[leg.grant])

    def done_leg(self, out: list[Action], now: float, leg: Leg) -> None:
        grant = self.live[leg.grant]
        if not grant.committed:
            out.append(Audit("illegal", leg.session, leg.reserve.reservation, leg.reserve.leg, {"message": "Done"}))
            return
        leg.heard = True
        if leg.error is None:
            leg.done = True
        if leg.sources is Sources.OPEN:
            leg.deadline = now + self._config.drain_timeout_s
            self.at(leg.deadline)
        self._end_if_over(out, leg)
        self.review(out, grant)

    def drained(self, out: list[Action], now: float, leg: Leg, posted: Sequence[int]) -> None:
        grant = self.live[leg.grant]
        if not (leg.sources is Sources.CLOSING or (leg.sources is Sources.OPEN and grant.committed)):
            # An error completion is never drained, and admission that is open has nothing to be drained of.
            out.append(
                Audit("illegal", leg.session, leg.reserve.reservation, leg.reserve.leg,
                      {"event": "drained", "sources": leg.sources.value})
            )  # fmt: skip
            return
        leg.sources = Sources.DRAINED
        leg.posted = tuple(posted)
        self._settle_leg(out, now, leg)

    def failed(self, out: list[Action], now: float, leg: Leg, cause: str, lane: int) -> None:
        """An error completion. Its sources are free only once its lanes are destroyed, however quiet they are."""
        kind, _, text = cause.partition(":")
        if kind == "attach":
            self._never_attached(out, leg, text.strip())
            return
        if leg.settled or leg.sources is Sources.BROKEN:
            return
        leg.sources = Sources.BROKEN
        leg.deadline = now + self._config.drain_timeout_s
        self.at(leg.deadline)
        if kind == "source_changed":
            error: KvxferError = SourceChanged(f"the source changed after write(): {text.strip()}", **self._names(leg))
        else:
            kind = "lane"
            error = LaneFailed(f"a lane of the leg failed: {text.strip() or cause}", **self._names(leg))
        if kind == "lane" and self.live[leg.grant].committed:
            # The lane may have failed behind the last record: whether decode has everything is decode's to say.
            leg.cause = error
        elif not leg.outcome_known:
            leg.error = error
        if not leg.done:
            self._tell(out, now, leg, kind, cause, lane)
        self.review(out, self.live[leg.grant])

    def _never_attached(self, out: list[Action], leg: Leg, message: str) -> None:
        if leg.sources not in (Sources.OPEN, Sources.CLOSING):
            return
        session = self._sessions[leg.session]
        code = "busy" if message.startswith("busy") else "geometry"
        leg.sources = Sources.DRAINED
        leg.heard = True
        leg.error = leg.error or RejectedError(
            f"the leg could not be attached: {message}", code=code, **self._names(leg)
        )
        if not session.closing:
            self.refuse(out, session, leg.reserve, Refusal(code, message))
        self._end_if_over(out, leg)
        self.review(out, self.live[leg.grant])

    def destroyed(self, out: list[Action], now: float, legs: Sequence[Leg]) -> None:
        """Our ends of these legs' lanes are gone: nothing reads their sources any more."""
        for leg in legs:
            if not leg.settled:
                leg.sources = Sources.DESTROYED
                self._settle_leg(out, now, leg)

    def lanes_gone(self, out: list[Action], legs: Sequence[Leg]) -> None:
        """Decode fenced these legs' lanes. What was not committed cannot have arrived; decode judges the rest."""
        for leg in legs:
            if leg.outcome_known:
                continue
            error = LaneFailed("decode fenced the lanes of this generation", **self._names(leg))
            if self.live[leg.grant].committed:
                leg.cause = error
            else:
                leg.error = error
                leg.heard = True
            self.review(out, self.live[leg.grant])

    def lose(self, out: list[Action], legs: Sequence[Leg], error: KvxferError) -> None:
        """Their session is dead: there is nobody left to ask or tell."""
        for leg in legs:
            leg.heard = True
            if not leg.outcome_known:
                leg.error = leg.cause or error
            self._end_if_over(out, leg)
            self.review(out, self.live[leg.grant])

    def _settle_leg(self, out: list[Action], now: float, leg: Leg) -> None:
        session = self._sessions[leg.session]
        if leg.aborted and not session.closing:
            out.append(session.send(leg.last_word))
        if not leg.heard:
            if leg.cause is not None:
                leg.deadline = now + self._config.drain_timeout_s
            elif leg.error is not None:
                leg.deadline = now + self._config.done_timeout_s
            else:
                # Other legs of the reservation may still be written: decode's word takes as long as they do.
                leg.deadline = max(now, leg.given_up_at) + self._config.done_timeout_s
            self.at(leg.deadline)
        self._end_if_over(out, leg)
        self.review(out, self.live[leg.grant])

    def _end_if_over(self, out: list[Action], leg: Leg) -> None:
        session = self._sessions[leg.session]
        if not leg.ended or session.legs.pop(leg.reserve.reservation, None) is None:
            return
        self.live[leg.grant].attached -= 1
        if leg.reserve.reservation not in session.answers:
            session.remember(leg.reserve.number, leg.last_word, self._config.max_answers)
        out.append(DetachLeg(leg.grant, leg.session, leg.reserve.reservation))

    def refuse(self, out: list[Action], session: Session, reserve: Reserve, cause: Refusal) -> None:
        """Answers a RESERVE of which nothing was ever posted with REJECTED."""
        rejected = Rejected(
            reserve.reservation, reserve.leg, cause.code, cause.message, dict(cause.details), (0,) * len(reserve.lanes)
        )
        session.remember(reserve.number, rejected, self._config.max_answers)
        out.append(session.send(rejected))
        fields = {**cause.details, "code": cause.code, "message": cause.message}
        out.append(Audit("refused", session.id, reserve.reservation, reserve.leg, fields))

    def _close_admission(self, out: list[Action], now: float, leg: Leg) -> None:
        if leg.sources is Sources.OPEN:
            leg.sources = Sources.CLOSING
            leg.deadline = now + self._config.drain_timeout_s
            self.at(leg.deadline)
            out.append(CloseAdmission(leg.grant, leg.session, leg.reserve.reservation))

    def _fail_leg(self, out: list[Action], now: float, leg: Leg, cause: str, error: KvxferError) -> None:
        if leg.sources is Sources.BROKEN:
            leg.error = leg.cause or error  # decode has been told of the lane, which is the graver news
            return
        leg.error = error
        self._tell(out, now, leg, cause, error.message, -1)

    def _tell(self, out: list[Action], now: float, leg: Leg, cause: str, message: str, lane: int) -> None:
        reserve = leg.reserve
        session = self._sessions[leg.session]
        leg.failed = Failed(reserve.reservation, reserve.leg, lane, reserve.generation, cause, message)
        fields = {"cause": cause, "message": message, "lane": lane, "generation": reserve.generation}
        out.append(Audit("leg_failed", leg.session, reserve.reservation, reserve.leg, fields))
        if not session.closing:
            out.append(session.send(leg.failed))
            leg.repeat_at = now + self._config.failed_repeat_s
            self.at(leg.repeat_at)

    def _time_transfer(self, now: float, leg: Leg) -> None:
        if leg.sources is Sources.OPEN:
            leg.deadline = max(now + self._config.transfer_timeout_s, leg.given_up_at)
            self.at(leg.deadline)

    @staticmethod
    def _names(leg: Leg) -> dict[str, Any]:
        return {"reservation": leg.reserve.reservation, "request_id": leg.reserve.request_id}

    # ---- time --------------------------------------------------------------------------------------------------------

    def expire_legs(self, out: list[Action], now: float, legs: Sequence[Leg]) -> Leg | None:
        """Carries out what is due. Returns a leg that could not be drained in time: its session's lanes must go."""
        stuck = None
        for leg in legs:
            if leg.repeat_at <= now:
                self._repeat(out, now, leg)
            if leg.deadline > now:
                continue
            if leg.sources is Sources.OPEN:
                if not leg.outcome_known:
                    error = DeadlineExceeded("the pages did not leave in time", **self._names(leg))
                    self._fail_leg(out, now, leg, "timeout", error)
                self._close_admission(out, now, leg)
            elif not leg.settled:
                # S2, S3: a deadline does not free anything; it only ends the wait for the drain.
                stuck = leg
                continue
            else:
                leg.heard = True
                if not leg.outcome_known:
                    leg.error = leg.cause or DeadlineExceeded(
                        "decode never said whether the pages arrived whole: delivery is unknown", **self._names(leg)
                    )
                self._end_if_over(out, leg)
            self.review(out, self.live[leg.grant])
        return stuck

    def _repeat(self, out: list[Action], now: float, leg: Leg) -> None:
        session = self._sessions[leg.session]
        if leg.heard or leg.failed is None or session.closing:
            leg.repeat_at = math.inf
            return
        leg.repeat_at = now + self._config.failed_repeat_s
        out.append(session.send(leg.failed))

    def expire_grants(self, out: list[Action], now: float) -> None:
        """Readers that never came: the grant fails, those that came complete, and the sources wait for them only."""
        for grant in [grant for grant in self.live.values() if grant.deadline <= now]:
            came = len(grant.legs) + len(grant.declined)
            error = DeadlineExceeded(
                "not every reader reserved in time after the commit",
                request_id=grant.request_id,
                came=came,
                readers=grant.readers,
                timeout_s=grant.timeout_s,
            )
            self._conclude(out, grant, error)
            self.review(out, grant)
