"""A prefill process (one rank): the real ``PrefillCore`` with a simulated sender, as ``prefill_executor`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.compatibility import compatible
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol import actions as act
from kvxfer.protocol.actions import Action
from kvxfer.protocol.messages import LaneOffer, Message, Reserve
from kvxfer.protocol.prefill import PrefillCore
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.sim.lane_group import LaneGroup
from kvxfer.sim.node import Answer, Node
from kvxfer.sim.pools import LegPlaces
from kvxfer.sim.sender_leg import SenderLeg
from kvxfer.sim.sources import SourceGrant, Sources
from kvxfer.sim.violation import Violation
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.prefill_engine import PrefillEngine


class PrefillNode(Node):
    """See the module. ``engine`` is whoever computes prompts."""

    core: PrefillCore
    engine: PrefillEngine

    def __init__(
        self, world: World, name: str, incarnation: int, geometry: PoolGeometry, config: PrefillConfig
    ) -> None:
        super().__init__(world, name, incarnation)
        self.geometry = geometry
        self.sources = Sources(geometry)
        self.grants: dict[int, SourceGrant] = {}
        self.groups: dict[int, LaneGroup] = {}
        self._by_reservation: dict[tuple[int, int], SenderLeg] = {}
        self._dice = world.chance(f"node:{name}:{incarnation}")
        self.life = self._dice.randbytes(8)
        self._completions: list[Callable[[], Sequence[Action]]] = []
        kind = "local" if world.plan.lane_kind == "local" else "tcp"
        offers = (LaneOffer(kind, (name,), world.plan.lanes),)
        self.core = PrefillCore(
            config,
            geometry,
            self.life,
            self._dice.randbytes,
            offers,
            "one-host",
            lambda pool: compatible(pool, geometry),
        )
        self.handlers = {
            act.Audit: self._audit,
            act.Notify: self._notify,
            act.Send: self._send,
            act.OpenLanes: self._open_lanes,
            act.CloseSession: self._close_session,
            act.Attach: self._attach,
            act.CloseAdmission: self._close_admission,
            act.DetachLeg: self._detach_leg,
            act.AnswerDigests: self._answer_digests,
            act.ReleaseGrant: self._nothing,
        }

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def frame(self, route: bytes, epoch: bytes, sequence: int, message: Message) -> None:
        self.deliver(
            "hears", lambda: self.core.message(self.clock(), route, epoch, sequence, message), message, sequence
        )

    def lane_event(self, what: str, group: LaneGroup, lane: int, cause: str = "") -> None:
        if what == "lane_up":
            self._completed(
                "lane up", lambda: self.core.lane_up(self.clock(), group.session, group.generation, lane), ""
            )
        else:
            self._completed(
                "lane down",
                lambda: self.core.lane_down(self.clock(), group.session, group.generation, lane, cause),
                cause,
            )

    def leg_reported(self, leg: SenderLeg) -> None:
        reserve = leg.reserve
        if leg.end == "fail":
            self._completed(
                "leg failed",
                lambda: self.core.leg_failed(self.clock(), leg.group.session, reserve.reservation, leg.cause),
                f"{reserve.reservation:x} {leg.cause}",
            )
        else:
            posted = tuple(leg.posted[lane].bit_count() for lane in reserve.lanes)
            self._completed(
                "leg drained",
                lambda: self.core.leg_drained(self.clock(), leg.group.session, reserve.reservation, posted),
                f"{reserve.reservation:x} {posted}",
            )

    def _completed(self, what: str, call: Callable[[], Sequence[Action]], about: str) -> None:
        def noted() -> Sequence[Action]:
            self.world.note(self.name, what, about)
            return call()

        self._completions.append(noted)
        self.world.later(
            0.0002 + self._dice.random() * 0.01, lambda: self.deliver("completions", self._take_completions)
        )

    def _take_completions(self) -> Answer:
        taken, self._completions = self._completions, []
        for call in taken:
            self.drive(call())
        return None

    # ---- sessions and lanes ------------------------------------------------------------------------------------------

    def _send(self, action: act.Send) -> Answer:
        self.world.network.to_decode(self.name, action.route, action.epoch, action.sequence, action.message)
        return None

    def _open_lanes(self, action: act.OpenLanes) -> Answer:
        older = self.groups.get(action.session)
        group = LaneGroup(
            self.world, self, action.session, action.epoch, action.generation, action.secret, self.world.plan.lanes
        )
        self.groups[action.session] = group
        self.world.groups[action.epoch, action.generation] = group
        return None if older is None else self._destroy(older)

    def _close_session(self, action: act.CloseSession) -> Answer:
        group = self.groups.pop(action.session, None)
        return None if group is None else self._destroy(group)

    def _destroy(self, group: LaneGroup) -> Answer:
        """Answers lanes_closed once prefill's ends are gone, which may take a while."""

        def destroyed() -> Sequence[Action]:
            group.destroy()
            # What the lanes reported before they ended is heard first: a leg that had drained did drain.
            self._take_completions()
            return self.core.lanes_closed(self.clock(), group.session, group.generation)

        if self._dice.random() < 0.3:
            self.world.later(self._dice.random() * 2.0, lambda: self.deliver("lanes destroyed", destroyed))
            return None
        return destroyed()

    # ---- legs --------------------------------------------------------------------------------------------------------

    def _attach(self, action: act.Attach) -> Answer:
        reserve: Reserve = action.reserve
        group = self.groups.get(action.session)
        if group is None or group.destroyed or group.generation != reserve.generation:
            cause = "attach: closed: the lanes of the generation are gone"
            return self.core.leg_failed(self.clock(), action.session, reserve.reservation, cause)
        if self.world.plan.hasty and not self.world.healed and self._dice.random() < 0.02:
            cause = "attach: busy: no generation slot is free"
            return self.core.leg_failed(self.clock(), action.session, reserve.reservation, cause)
        key = action.session, reserve.reservation
        if key in self._by_reservation:
            raise Violation("S5-owner", f"{self.name} attaches {reserve.reservation:x} twice")
        grant = self.grants[action.grant]
        if grant.freed:
            raise Violation("S3-read", f"{self.name} attaches {reserve.reservation:x} to a grant that is released")
        places = LegPlaces(self.core.decode_geometry(action.session), reserve.slices, reserve.groups)
        leg = SenderLeg(grant, group, reserve, places)
        self._by_reservation[key] = leg
        grant.legs[key] = leg
        grant.ever.append(leg)
        group.legs[reserve.reservation] = leg
        for source in grant.written:
            leg.publish(source)
        if any(lane.broken for lane in group.lanes if lane.index in reserve.lanes):
            leg.close("fail", "lane: a lane of the leg is down")
        leg.settle()
        group.kick()
        return None

    def _close_admission(self, action: act.CloseAdmission) -> Answer:
        leg = self._by_reservation.get((action.session, action.reservation))
        if leg is not None:
            leg.close("drain")
        return None

    def _detach_leg(self, action: act.DetachLeg) -> Answer:
        self._detach((action.session, action.reservation))
        return None

    def _detach(self, key: tuple[int, int]) -> None:
        leg = self._by_reservation.pop(key, None)
        if leg is not None:
            if not leg.reported:
                leg.reported = True
                leg.end = leg.end or "drain"
                leg.queue.clear()
                leg.slot_valid = False
            leg.grant.legs.pop(key, None)
            leg.group.legs.pop(key[1], None)

    def _answer_digests(self, action: act.AnswerDigests) -> Answer:
        leg = self._by_reservation.get((action.session, action.reservation))
        if leg is None:
            return None
        content = [leg.content.get(k, 0) for k in range(action.first, action.first + action.count)]
        return self.core.digests(
            self.clock(),
            action.session,
            action.reservation,
            action.leg,
            action.first,
            np.array(content, "<u8").tobytes(),
        )

    def _nothing(self, action: act.Action) -> Answer:
        return None

    def _audit(self, action: act.Audit) -> Answer:
        self.world.counts[f"prefill {action.event}"] += 1
        return None

    def _notify(self, action: act.Notify) -> Answer:
        """S3 and S8 at every event that the engine is told."""
        grant = self.grants.get(action.key)
        if grant is None or action.kind in grant.told:
            raise Violation("S8-twice", f"{self.name}: {action.kind} of grant {action.key}, which has had it")
        grant.told.add(action.kind)
        if {"ready", "failed"} <= grant.told:
            raise Violation("S8-twice", f"{self.name}: grant {action.key} is both ready and failed")
        if action.kind == "released":
            for leg in grant.ever:
                if leg.may_read:
                    raise Violation(
                        "S3-still-readable",
                        f"{self.name}: grant {grant.id} is released while a lane reads it for "
                        f"{leg.reserve.reservation:x}",
                    )
            grant.freed = True
        self.engine.told(action, grant)
        if "released" in grant.told and grant.told & {"ready", "failed"}:
            del self.grants[grant.id]
            for key in list(grant.legs):
                self._detach(key)
        return None

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, grant: SourceGrant, pages: Sequence[tuple[int, int, int, int]]) -> None:
        """``pages``: (group, region, logical page, pool page). Raises AdmissionClosed."""
        self.core.check_write(grant.id)
        self.drive(self.core.note_written(grant.id))
        for group, region, logical, page in pages:
            source = group, region, logical
            grant.written[source] = page, self.sources.cells[group, region, page]
            for leg in grant.legs.values():
                leg.publish(source)
        self._kick(grant)

    def commit(self, grant: SourceGrant, n_tokens: int, aux: bytes) -> None:
        """Raises AdmissionClosed."""
        self.drive(self.core.commit(self.clock(), grant.id, n_tokens, len(aux)))
        grant.commit = n_tokens, aux
        for leg in list(grant.legs.values()):
            leg.settle()
        self._kick(grant)

    def _kick(self, grant: SourceGrant) -> None:
        for leg in grant.legs.values():
            leg.group.kick()

    # ---- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold of prefill is checked where its engine is told of it and where a lane reads."""

    def resumed(self) -> None:
        for group in self.groups.values():
            group.kick()

    def killed(self) -> None:
        for group in self.groups.values():
            group.destroy()
        self.groups.clear()
