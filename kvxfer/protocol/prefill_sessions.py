"""All sessions with decodes: how they open by HELLO, are refused, and end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from kvxfer.errors import PeerLost
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol import messages as m
from kvxfer.protocol.actions import Action, Audit, CloseSession, OpenLanes, Send
from kvxfer.protocol.prefill_checks import Refusal, check_hello
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.protocol.prefill_grants import Grants
from kvxfer.protocol.prefill_session import FIRST_GENERATION, Session

_STRANGERS_KEPT = 1024
# A REFUSE to somebody without a session must pass for new whatever decode heard from a former prefill at this address.
_FIRST_STRAY_SEQUENCE = 1 << 63


class Sessions:
    """Sessions by id, epoch and route. ``by_id`` also holds those whose lanes are still being destroyed."""

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
        self._geometry = geometry
        self._incarnation = incarnation
        self._random = random
        self._lane_offers = offers
        self._host = host
        self._compatible = compatible
        self.by_id: dict[int, Session] = {}
        self.by_epoch: dict[bytes, Session] = {}
        self._by_route: dict[bytes, Session] = {}
        self.grants = Grants(config, geometry, self.by_id)
        self.closing = False  # the endpoint is
        self._last_session = 0
        self._strangers: OrderedDict[bytes, float] = OrderedDict()
        self._stray_sequence = _FIRST_STRAY_SEQUENCE

    def hello(self, now: float, route: bytes, epoch: bytes, sequence: int, hello: m.Hello) -> list[Action]:
        known = self._by_route.get(route)
        if known is not None:
            if hello != known.hello or sequence <= known.received:
                return [Audit("dropped", known.id, fields={"cause": "hello", "message": "Hello"})]
            known.received = sequence
            known.heard_at = now
            return [known.send(known.welcome)]
        if epoch != hello.nonce + bytes(8):
            return [Audit("dropped", fields={"cause": "epoch", "message": "Hello"})]
        try:
            if self.closing:
                raise Refusal("closed", "this prefill is closing")
            if len(self.by_id) >= self._config.max_sessions:
                raise Refusal("busy", "this prefill has as many sessions as it may", most=self._config.max_sessions)
            offers = check_hello(
                hello, self._config, self._geometry, self._incarnation, self._lane_offers, self._compatible
            )
        except Refusal as cause:
            return self.refuse(now, route, epoch, cause)
        welcome = m.Welcome(
            nonce=self._fresh_nonce(hello.nonce),
            incarnation=self._incarnation,
            pool=self._geometry,
            max_context_tokens=self._config.max_context_tokens,
            offers=offers,
            secret=self._random(32),
            generation=FIRST_GENERATION,
            host=self._host,
            heartbeat_s=self._config.heartbeat_s,
        )
        self._last_session += 1
        session = Session(self._last_session, route, hello, welcome, now)
        session.received = sequence
        self.by_id[session.id] = self.by_epoch[session.epoch] = self._by_route[route] = session
        self.grants.at(now + self._config.heartbeat_timeout_s)
        return [
            OpenLanes(session.id, session.epoch, session.generation, session.secret),
            session.send(welcome),
            Audit("session_opened", session.id, fields={"host": hello.host, "epoch": session.epoch.hex()}),
        ]

    def _fresh_nonce(self, theirs: bytes) -> bytes:
        while theirs + (nonce := self._random(8)) in self.by_epoch or nonce == bytes(8):
            pass
        return nonce

    def refuse(self, now: float, route: bytes, epoch: bytes, cause: Refusal) -> list[Action]:
        """REFUSE to somebody without a session, and no more often than the rate allows."""
        audit = Audit("refused", fields={**cause.details, "code": cause.code, "message": cause.message})
        last = self._strangers.pop(route, -math.inf)
        silent = now < last + self._config.refusal_interval_s
        self._strangers[route] = last if silent else now
        if len(self._strangers) > _STRANGERS_KEPT:
            self._strangers.popitem(last=False)
        if silent:
            return [audit]
        self._stray_sequence += 1
        refuse = m.Refuse(cause.code, cause.message, dict(cause.details))
        return [Send(-1, refuse, epoch, self._stray_sequence, route), audit]

    def end(self, out: list[Action], session: Session, reason: str) -> None:
        """The epoch is dead at once. Its legs' sources are free when ``lanes_closed`` says that the lanes are gone."""
        out.append(session.send(m.Bye(reason)))
        out.append(CloseSession(session.id, reason))
        out.append(Audit("session_closed", session.id, fields={"reason": reason, "legs": len(session.legs)}))
        session.closing = True
        del self.by_epoch[session.epoch]
        del self._by_route[session.route]
        for offer in list(session.offers.values()):
            self.grants.drop_offer(offer)
        error = PeerLost(f"the session with decode ended: {reason}", session=session.id)
        self.grants.lose(out, list(session.legs.values()), error)
