"""What each message of a session does (S2, S7). A message that may not come now changes nothing and is audited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.geometry import PoolGeometry
from kvxfer.protocol import messages as m
from kvxfer.protocol.actions import Action, AnswerDigests, Audit, OpenLanes
from kvxfer.protocol.prefill_checks import Refusal, check_reserve
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.protocol.prefill_memory import Offer
from kvxfer.protocol.prefill_session import Session
from kvxfer.protocol.prefill_sessions import Sessions

_MAX_DEADLINE_S = 86400.0


class Handlers:
    """Carries out one message of a known session; epoch, route and sequence have been checked."""

    def __init__(
        self, config: PrefillConfig, geometry: PoolGeometry, random: Callable[[int], bytes], sessions: Sessions
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._random = random
        self._sessions = sessions
        self._grants = sessions.grants
        self._by_type: dict[type, Callable[[list[Action], float, Session, Any], None]] = {
            m.Reserve: self._on_reserve,
            m.Abort: self._on_abort,
            m.Done: self._on_done,
            m.Decline: self._on_decline,
            m.Relane: self._on_relane,
            m.FetchDigests: self._on_fetch_digests,
            m.Ping: self._on_ping,
            m.Pong: self._on_pong,
            m.Bye: self._on_bye,
        }

    def handle(self, out: list[Action], now: float, session: Session, message: m.Message) -> None:
        handler = self._by_type.get(type(message))
        if handler is None:
            self._illegal(out, session, message)
        else:
            handler(out, now, session, message)

    def _on_reserve(self, out: list[Action], now: float, session: Session, reserve: m.Reserve) -> None:
        if self._said_before(out, session, reserve):
            return
        highest, session.highest_number = session.highest_number, max(session.highest_number, reserve.number)
        given_up_at = now + min(max(reserve.deadline_s, 0.0), _MAX_DEADLINE_S)
        try:
            if reserve.number <= highest:
                raise Refusal("stale_number", "a later reservation or an abort came first", highest=highest)
            if self._sessions.closing:
                raise Refusal("closed", "this prefill is closing")
            if session.opened != session.generation:
                raise Refusal("generation", "the lanes are being replaced; wait for the new ones", ours=session.opened)
            layout = check_reserve(
                reserve,
                self._config,
                self._geometry,
                session.hello.pool,
                session.slice_table,
                session.generation,
                session.n_lanes,
                session.down,
            )
            offer = Offer(session.id, reserve, layout, given_up_at + self._config.offer_grace_s, given_up_at)
            self._grants.reserve(out, now, session, offer)
        except Refusal as cause:
            self._grants.refuse(out, session, reserve, cause)

    def _said_before(self, out: list[Action], session: Session, reserve: m.Reserve) -> bool:
        """Answers a RESERVE whose reservation is known, alive or ended. Nothing is ever done for it a second time."""
        leg, offer = session.legs.get(reserve.reservation), session.offers.get(reserve.reservation)
        if leg is not None or offer is not None:
            known = leg.reserve if leg is not None else offer.reserve if offer is not None else None
            if reserve != known:
                self._illegal(out, session, reserve)
            elif leg is not None and leg.failed is not None:
                out.append(session.send(leg.failed))
            else:
                out.append(session.send(m.Granted(reserve.reservation, reserve.leg)))
            return True
        if (answered := session.answers.get(reserve.reservation)) is not None:
            word = answered[1]
            if isinstance(word, m.Quiesced):
                text = "this reservation has ended"
                word = m.Rejected(word.reservation, word.leg, "stale_number", text, {}, word.posted)
            out.append(session.send(word))
            return True
        if reserve.number <= session.forgotten_failure:
            out.append(session.send(self._forgotten(session, reserve.reservation, reserve.leg)))
            return True
        return False

    @staticmethod
    def _forgotten(session: Session, reservation: int, leg: int) -> m.Failed:
        text = "this reservation may have failed on a lane and is no longer known; fence it"
        return m.Failed(reservation, leg, -1, session.generation, "lane", text)

    def _on_abort(self, out: list[Action], now: float, session: Session, abort: m.Abort) -> None:
        session.highest_number = max(session.highest_number, abort.number)
        leg, offer = session.legs.get(abort.reservation), session.offers.get(abort.reservation)
        known = leg.reserve if leg is not None else offer.reserve if offer is not None else None
        if known is not None and known.leg != abort.leg:
            self._illegal(out, session, abort)
        elif leg is not None:
            self._grants.abort_leg(out, now, leg, abort.reason)
        else:
            lanes = 0
            if offer is not None:
                self._grants.drop_offer(offer)
                lanes = len(offer.reserve.lanes)
            out.append(session.send(self._last_word(session, abort, lanes)))

    def _last_word(self, session: Session, abort: m.Abort, lanes: int) -> m.Quiesced | m.Failed:
        answered = session.answers.get(abort.reservation)
        if answered is None:
            if abort.number <= session.forgotten_failure:
                return self._forgotten(session, abort.reservation, abort.leg)
            # Never attached, and from now on never will be: the number says so.
            word = m.Quiesced(abort.reservation, abort.leg, (0,) * lanes)
            session.remember(abort.number, word, self._config.max_answers)
            return word
        last = answered[1]
        return m.Quiesced(last.reservation, last.leg, last.posted) if isinstance(last, m.Rejected) else last

    def _on_done(self, out: list[Action], now: float, session: Session, done: m.Done) -> None:
        leg = session.legs.get(done.reservation)
        if leg is None or leg.reserve.leg != done.leg:
            self._illegal(out, session, done)
        else:
            self._grants.done_leg(out, now, leg)

    def _on_decline(self, out: list[Action], now: float, session: Session, decline: m.Decline) -> None:
        self._grants.decline(out, now, session, decline.request_id, decline.rank, decline.reason)

    def _on_relane(self, out: list[Action], now: float, session: Session, relane: m.Relane) -> None:
        if relane.generation < session.generation or (
            relane.generation == session.generation == session.welcome.generation
        ):
            self._illegal(out, session, relane)
        elif relane.generation == session.generation and session.opened == session.generation:
            out.append(session.send(m.Lanes(session.generation, session.secret)))
        elif relane.generation > session.wanted:
            session.wanted = relane.generation
            if session.opened == session.generation:
                self._replace_lanes(out, session)

    def _replace_lanes(self, out: list[Action], session: Session) -> None:
        session.opened = session.wanted
        session.secret = self._random(32)
        for offer in list(session.offers.values()):
            self._grants.drop_offer(offer)
            self._grants.refuse(out, session, offer.reserve, Refusal("generation", "decode asked for new lanes"))
        self._grants.lanes_gone(out, list(session.legs.values()))
        out.append(OpenLanes(session.id, session.epoch, session.opened, session.secret))
        out.append(Audit("relane", session.id, fields={"generation": session.opened}))

    def serve(self, out: list[Action], now: float, session: Session) -> None:
        """The older lanes are destroyed: the new ones may be used."""
        session.generation = session.opened
        session.lanes_up.clear()
        session.down.clear()
        if session.wanted > session.opened:
            self._replace_lanes(out, session)
        else:
            out.append(session.send(m.Lanes(session.generation, session.secret)))

    def _on_fetch_digests(self, out: list[Action], now: float, session: Session, fetch: m.FetchDigests) -> None:
        leg = session.legs.get(fetch.reservation)
        if (
            leg is None
            or leg.reserve.leg != fetch.leg
            or leg.reserve.verify != "digest"
            or not self._grants.live[leg.grant].committed
            or not 0 < fetch.count <= self._config.max_fetched_digests
            or not 0 <= fetch.first <= leg.layout.n_chunks - fetch.count
        ):
            self._illegal(out, session, fetch)
            return
        out.append(AnswerDigests(leg.grant, session.id, fetch.reservation, fetch.leg, fetch.first, fetch.count))

    def _on_ping(self, out: list[Action], now: float, session: Session, ping: m.Ping) -> None:
        out.append(session.send(m.Pong(ping.token)))

    def _on_pong(self, out: list[Action], now: float, session: Session, pong: m.Pong) -> None:
        """A sign of life, like any other frame."""

    def _on_bye(self, out: list[Action], now: float, session: Session, bye: m.Bye) -> None:
        self._sessions.end(out, session, f"decode said goodbye: {bye.reason}")

    def _illegal(self, out: list[Action], session: Session, message: m.Message) -> None:
        reservation = getattr(message, "reservation", None)
        fields = {"message": type(message).__name__}
        out.append(Audit("illegal", session.id, reservation, getattr(message, "leg", None), fields))
