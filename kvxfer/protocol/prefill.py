"""Prefill's core, as its executor sees it: the engine's calls, the executor's reports, time, getters.

Events in, actions out; time and randomness are passed in. Not thread-safe: whoever drives it holds one lock, carries
out the actions in order, and calls back what an action *answers*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvxfer.errors import Aborted, Closed
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol import messages as m
from kvxfer.protocol.actions import Action, Audit
from kvxfer.protocol.prefill_checks import Refusal
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.protocol.prefill_handlers import Handlers
from kvxfer.protocol.prefill_leg import Leg
from kvxfer.protocol.prefill_sessions import Sessions

__all__ = ["PrefillConfig", "PrefillCore"]


class PrefillCore:
    """The protocol at prefill.

    Args:
        config: bounds and time-outs.
        geometry: our pool.
        incarnation: 8 bytes that name this life of the worker.
        random: gives that many random bytes; secrets and epochs come from it.
        offers: the lanes we serve.
        host: identifies this kernel, as in HELLO.
        compatible: raises IncompatiblePool for a decode's geometry that cannot exchange pages with ours.
    """

    def __init__(
        self,
        config: PrefillConfig,
        geometry: PoolGeometry,
        incarnation: bytes,
        random: Callable[[int], bytes],
        offers: tuple[m.LaneOffer, ...],
        host: str,
        compatible: Callable[[PoolGeometry], None],
    ) -> None:
        self._config = config
        self._sessions = Sessions(config, geometry, incarnation, random, offers, host, compatible)
        self._grants = self._sessions.grants
        self._handlers = Handlers(config, geometry, random, self._sessions)
        self._close_at = math.inf

    # ---- the engine --------------------------------------------------------------------------------------------------

    def accept(self, now: float, request_id: str, *, readers: int | None, timeout_s: float) -> tuple[int, list[Action]]:
        """A new grant and what follows from readers that came already. ``timeout_s`` starts at ``commit``.

        A request that all its readers have declined gives a grant that fails at once.
        Raises DuplicateRequest, Rejected (``reject`` is remembered), GeometryError, CapacityError, Closed.
        """
        if self._sessions.closing:
            raise Closed("the prefill endpoint is closed", request_id=request_id)
        out: list[Action] = []
        return self._grants.accept(out, now, request_id, readers, timeout_s), out

    def reject(self, now: float, request_id: str, code: str, message: str, ttl_s: float) -> list[Action]:
        """Refuses a request for ``ttl_s``: readers that wait, a grant that lives, and readers still to come."""
        out: list[Action] = []
        self._grants.reject(out, now, request_id, code, message, ttl_s)
        return self._swept(out, now)

    def check_write(self, grant: int) -> None:
        """Raises AdmissionClosed after commit, abort, rejection or failure."""
        self._grants.admitting(grant)

    def note_written(self, grant: int) -> list[Action]:
        """The engine is writing. A grant that has ended meanwhile stays as it is."""
        live = self._grants.live.get(grant)
        if live is None or not live.admits:
            return [Audit("illegal", fields={"event": "written", "grant": grant, "state": self.state(grant)})]
        live.state = "writing"
        return []

    def commit(self, now: float, grant: int, n_tokens: int, aux_bytes: int) -> list[Action]:
        """Closes admission. Raises AdmissionClosed, GeometryError, CapacityError; nothing has changed then."""
        out: list[Action] = []
        self._grants.commit(out, now, grant, n_tokens, aux_bytes)
        return out

    def abort(self, now: float, grant: int, reason: str) -> list[Action]:
        """Gives a grant up in any state; the sources are free at ``released``. Idempotent."""
        out: list[Action] = []
        live = self._grants.live.get(grant)
        if live is not None and not live.released:
            error = Aborted(f"prefill aborted: {reason}", request_id=live.request_id)
            self._grants.fail(out, now, live, "aborted", error)
        return self._swept(out, now)

    def close(self, now: float, reason: str) -> list[Action]:
        """Aborts what is not committed; the rest gets ``close_grace_s`` to arrive. A second call ends that wait."""
        out: list[Action] = []
        if self._sessions.closing:
            self._close_at = now
        else:
            self._sessions.closing = True
            self._close_at = now + self._config.close_grace_s
            for offer in list(self._grants.offers):
                self._grants.drop_offer(offer)
                self._grants.refuse(out, self._sessions.by_id[offer.session], offer.reserve, Refusal("closed", reason))
            for grant in list(self._grants.live.values()):
                if not (grant.committed and grant.complete):
                    self._grants.fail(out, now, grant, "aborted", Aborted(reason, request_id=grant.request_id))
        self._grants.at(self._close_at)
        return self._swept(out, now)

    # ---- what the executor reports -----------------------------------------------------------------------------------

    def message(self, now: float, route: bytes, epoch: bytes, sequence: int, message: m.Message) -> list[Action]:
        """A frame from the peer that the ROUTER calls ``route``. What it may not say changes nothing (S7)."""
        if isinstance(message, m.Hello):
            return self._sessions.hello(now, route, epoch, sequence, message)
        session = self._sessions.by_epoch.get(epoch)
        if session is None:
            if isinstance(message, m.Bye):
                return []
            return self._sessions.refuse(
                now, route, epoch, Refusal("unknown_epoch", "this prefill does not know the session; dial again")
            )
        if session.route != route or sequence <= session.received:
            cause = "route" if session.route != route else "sequence"
            return [Audit("dropped", session.id, fields={"cause": cause, "message": type(message).__name__})]
        session.received = sequence
        session.heard_at = now
        out: list[Action] = []
        self._handlers.handle(out, now, session, message)
        return self._swept(out, now)

    def leg_drained(self, now: float, session: int, reservation: int, posted: Sequence[int]) -> list[Action]:
        """Every write of the leg completed successfully; ``posted``: chunks on each of its lanes."""
        out: list[Action] = []
        if (leg := self._leg(session, reservation)) is not None:
            self._grants.drained(out, now, leg, posted)
        return self._swept(out, now)

    def leg_failed(self, now: float, session: int, reservation: int, cause: str, lane: int = -1) -> list[Action]:
        """``cause``: "lane: ...", "source_changed: ...", or "attach: ..." where it could not be attached at all."""
        out: list[Action] = []
        if (leg := self._leg(session, reservation)) is not None:
            self._grants.failed(out, now, leg, cause, lane)
        return self._swept(out, now)

    def lane_up(self, now: float, session: int, generation: int, lane: int) -> list[Action]:
        found = self._sessions.by_id.get(session)
        if found is not None and generation == found.generation:
            found.lanes_up.add(lane)
        return []

    def lane_down(self, now: float, session: int, generation: int, lane: int, cause: str) -> list[Action]:
        """New reservations on this lane are refused; its legs fail by ``leg_failed``, decode asks for new lanes."""
        found = self._sessions.by_id.get(session)
        if found is None or generation != found.generation or found.closing:
            return []
        found.lanes_up.discard(lane)
        found.down.add(lane)
        return [Audit("lane_down", session, fields={"lane": lane, "generation": generation, "cause": cause})]

    def lanes_closed(self, now: float, session: int, generation: int) -> list[Action]:
        """Our ends of all lanes up to and including ``generation`` are destroyed (OpenLanes, CloseSession)."""
        found = self._sessions.by_id.get(session)
        if found is None:
            return []
        out: list[Action] = []
        gone = [leg for leg in found.legs.values() if leg.reserve.generation <= generation]
        self._grants.destroyed(out, now, gone)
        if found.closing:
            if generation >= found.opened:
                del self._sessions.by_id[session]
        elif found.generation <= generation < found.opened:
            self._handlers.serve(out, now, found)
        return self._swept(out, now)

    def digests(self, now: float, session: int, reservation: int, leg: int, first: int, content: bytes) -> list[Action]:
        """Answers AnswerDigests: ``content`` is packed little-endian u64."""
        found = self._sessions.by_id.get(session)
        if found is None or found.closing or reservation not in found.legs:
            return []
        return [found.send(m.Digests(reservation, leg, first, content))]

    def tick(self, now: float) -> list[Action]:
        """Carries out every deadline that has passed."""
        if now < self._grants.wake_at:
            return []
        out: list[Action] = []
        for session in list(self._sessions.by_id.values()):
            if session.closing:
                continue
            if now >= session.heard_at + self._config.heartbeat_timeout_s:
                self._sessions.end(out, session, "decode fell silent")
                continue
            stuck = self._grants.expire_legs(out, now, list(session.legs.values()))
            if stuck is not None:
                reason = f"a leg did not drain in time (reservation {stuck.reserve.reservation:016x})"
                self._sessions.end(out, session, reason)
        self._grants.expire_offers(out, now)
        self._grants.expire_grants(out, now)
        self._swept(out, now)
        self._plan_tick(now)
        return out

    # ---- getters -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When ``tick`` is due, or None."""
        wake_at = self._grants.wake_at
        return None if wake_at == math.inf else wake_at

    @property
    def is_closed(self) -> bool:
        """Closed, with no lane left and no source that may be read."""
        return self._sessions.closing and not self._sessions.by_id and not self._grants.live

    def outstanding(self) -> tuple[str, ...]:
        """What keeps ``is_closed`` false, one line each."""
        grants = [
            f"grant {grant.id} of request {grant.request_id}: {grant.state}, {grant.attached} legs"
            for grant in self._grants.live.values()
        ]
        sessions = [
            f"session {session.id}: {'closing' if session.closing else 'open'}, {len(session.legs)} legs"
            for session in self._sessions.by_id.values()
        ]
        return tuple(grants + sessions)

    def state(self, grant: int) -> str:
        """offered, writing, committed, done, draining, ended or fenced."""
        return self._grants.state(grant)

    def released(self, grant: int) -> bool:
        """No lane reads the sources any more, and none will. True of a grant that is gone."""
        live = self._grants.live.get(grant)
        return live is None or live.released

    def first_token(self, grant: int) -> int | None:
        """The lowest token a reader asked for, over those that have reserved; None before the first of them."""
        live = self._grants.live.get(grant)
        if live is None:
            return None
        return min((g.first_token for leg in live.legs.values() for g in leg.reserve.groups), default=None)

    def readers(self, grant: int) -> int | None:
        """How many decode ranks read this grant; None until that is known."""
        live = self._grants.live.get(grant)
        return None if live is None else live.readers

    def route(self, session: int) -> bytes:
        """The ROUTER's name of the peer. Raises KeyError."""
        return self._sessions.by_id[session].route

    def decode_geometry(self, session: int) -> PoolGeometry:
        """The peer's pool. Raises KeyError."""
        return self._sessions.by_id[session].hello.pool

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _swept(self, out: list[Action], now: float) -> list[Action]:
        """While closing: a session goes as soon as no committed leg of it is under way, and all of them in the end."""
        if self._sessions.closing:
            for session in list(self._sessions.by_id.values()):
                under_way = any(leg.error is None for leg in session.legs.values())
                if not session.closing and (not under_way or now >= self._close_at):
                    self._sessions.end(out, session, "prefill closes")
        return out

    def _plan_tick(self, now: float) -> None:
        """The next deadline of anything that lives. In between, deadlines only ever bring it forward."""
        grants = self._grants
        grants.wake_at = math.inf
        for session in self._sessions.by_id.values():
            if session.closing:
                continue
            grants.at(session.heard_at + self._config.heartbeat_timeout_s)
            for leg in session.legs.values():
                grants.at(leg.deadline)
                grants.at(leg.repeat_at)
        for offer in grants.offers:
            grants.at(offer.deadline)
        for grant in grants.live.values():
            grants.at(grant.deadline)
        if self._close_at > now:
            grants.at(self._close_at)

    def _leg(self, session: int, reservation: int) -> Leg | None:
        """The leg an event speaks of; None for one that has ended, whose late events mean nothing."""
        found = self._sessions.by_id.get(session)
        return None if found is None else found.legs.get(reservation)
