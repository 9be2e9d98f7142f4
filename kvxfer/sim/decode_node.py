"""A decode process: the real ``DecodeCore`` and ``PageLedger`` with a simulated receiver, as ``decode_executor`` runs
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.geometry import PoolGeometry
from kvxfer.ledger import PageLedger, PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol.actions import Action
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode import DecodeCore
from kvxfer.protocol.messages import Message
from kvxfer.shards import plan as plan_shards
from kvxfer.sim.lane_group import LaneGroup
from kvxfer.sim.memory import DecodeMemory
from kvxfer.sim.node import Answer, Node
from kvxfer.sim.pools import LegPlaces
from kvxfer.sim.receiver import Receiver, ReceiverLeg
from kvxfer.sim.violation import Violation
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.decode_engine import DecodeEngine

CONNECT_TIMEOUT_S = 5.0
FENCE_RETRY_S = 1.0


class Link:
    """One session's socket and its lanes of the current generation. ``wanted``: the generation being connected."""

    __slots__ = ("group", "peer", "route", "wanted")

    def __init__(self, peer: str, route: bytes) -> None:
        self.peer = peer
        self.route = route
        self.group: LaneGroup | None = None
        self.wanted = -1


class DecodeNode(Node):
    """See the module. ``engine`` is whoever reserves pages and reads them."""

    core: DecodeCore
    engine: DecodeEngine

    def __init__(self, world: World, name: str, incarnation: int, geometry: PoolGeometry, config: DecodeConfig) -> None:
        super().__init__(world, name, incarnation)
        self.geometry = geometry
        self.memory = DecodeMemory(name)
        self.ledger = PageLedger([group.n_pages for group in geometry.groups])
        self.receiver = Receiver(self)
        self.links: dict[int, Link] = {}
        self.flipping: set[str] = set()  # prefills whose data arrives damaged, now and then
        self.slow_fence_s = 0.0
        self.fences_fail = False
        self._dice = world.chance(f"node:{name}:{incarnation}")
        self._completions: list[Callable[[], Sequence[Action]]] = []
        self._ended: dict[int, list[ReceiverLeg]] = {}  # legs whose tables went, until the engine is told why
        self.core = DecodeCore(config, geometry, self.ledger, self._dice.randbytes, plan_shards, "one-host")
        self.handlers = {
            act.Audit: self._audit,
            act.Notify: self._notify,
            act.Send: self._send,
            act.OpenSocket: self._open_socket,
            act.CloseSession: self._close_session,
            act.ConnectLanes: self._connect_lanes,
            act.OpenLeg: self._open_leg,
            act.Revoke: self._revoke,
            act.Fence: self._fence,
            act.Verify: self._verify,
            act.ForgetLeg: self._forget_leg,
            act.ZeroTail: self._zero_tail,
            act.MarkPages: self._nothing,
        }

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def frame(self, session: int, epoch: bytes, sequence: int, message: Message) -> None:
        self.deliver(
            "hears", lambda: self.core.message(self.clock(), session, epoch, sequence, message), message, sequence
        )

    def record(self, group: LaneGroup, lane: int, data: bytes, reservation: int) -> None:
        about = f"{reservation:x} g{group.generation} lane {lane}"
        self._completed(
            "record",
            lambda: self.core.record(self.clock(), group.decode_session, group.generation, lane, data),
            about,
        )

    def violation(self, group: LaneGroup, lane: int, reservation: int, leg: int, cause: str) -> None:
        self._completed(
            "violation",
            lambda: self.core.violation(
                self.clock(), group.decode_session, group.generation, lane, reservation, leg, cause
            ),
            f"{reservation:x} {cause}",
        )

    def lane_down(self, group: LaneGroup, lane: int, cause: str) -> None:
        self._completed(
            "lane down",
            lambda: self.core.lane_down(self.clock(), group.decode_session, group.generation, lane, cause),
            f"s{group.decode_session} g{group.generation} lane {lane}: {cause}",
        )

    def _completed(self, what: str, call: Callable[[], Sequence[Action]], about: str) -> None:
        """The completion queue: in order, and heard before a fence counts as returned."""

        def noted() -> Sequence[Action]:
            self.world.note(self.name, what, about)
            return call()

        self._completions.append(noted)
        self.world.later(0.0002, lambda: self.deliver("completions", self._take_completions))

    def _take_completions(self) -> Answer:
        taken, self._completions = self._completions, []
        for call in taken:
            self.drive(call())
        return None

    def flips(self, group: LaneGroup) -> bool:
        return group.prefill.name in self.flipping and self.world.chance("flip").random() < 0.2

    # ---- sockets -----------------------------------------------------------------------------------------------------

    def _open_socket(self, action: act.OpenSocket) -> Answer:
        route = self.world.network.route_of(action.session, self)
        self.links[action.session] = Link(action.peer, route)
        self.world.network.open(route, self, action.session)
        return None

    def _send(self, action: act.Send) -> Answer:
        link = self.links.get(action.session)
        if link is not None:
            self.world.network.to_prefill(
                self, action.session, link.peer, action.epoch, action.sequence, action.message
            )
        return None

    def _close_session(self, action: act.CloseSession) -> Answer:
        link = self.links.pop(action.session, None)
        if link is not None:
            self.world.network.close(link.route)
            if link.group is not None:
                link.group.fence()
        return None

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def _connect_lanes(self, action: act.ConnectLanes) -> Answer:
        link = self.links.get(action.session)
        if link is not None:
            link.wanted = action.generation
            self.world.later(0.001 + self._dice.random() * 0.05, lambda: self._dial_lanes(link, action))
        return None

    def _dial_lanes(self, link: Link, action: act.ConnectLanes) -> None:
        """The connecting thread: it runs while the process does, and asks whoever serves the lanes now."""
        if not self.alive:
            return
        group = self.world.groups.get((action.epoch, action.generation))
        failure = ""
        if self.world.network.is_cut(self.name, link.peer):
            failure = "timed out"
        elif group is None or group.destroyed or not group.prefill.alive or group.secret != action.secret:
            failure = "refused"
        elif group.prefill.paused or (not self.world.healed and self._dice.random() < 0.03):
            failure = "timed out" if not self.world.plan.fair else ""
        if failure or group is None:
            delay_s = CONNECT_TIMEOUT_S if failure == "timed out" else 0.001
            self.world.later(delay_s, lambda: self.deliver("lanes failed", lambda: self._failed(action, failure)))
            return
        if group.decode is None:
            group.connect(self, action.session)
        self.world.later(0.001, lambda: self.deliver("lanes connected", lambda: self._install(action, group)))

    def _failed(self, action: act.ConnectLanes, cause: str) -> Answer:
        link = self.links.get(action.session)
        if link is None or link.wanted != action.generation:
            return None
        return self.core.lanes_failed(self.clock(), action.session, action.generation, cause)

    def _install(self, action: act.ConnectLanes, group: LaneGroup) -> Answer:
        link = self.links.get(action.session)
        if link is None or link.wanted != action.generation:
            group.fence()
            return None
        if link.group is not None and link.group is not group:
            link.group.fence()
        link.group = group
        group.install()
        revocable = group.kind != "verbs"
        kind = "local" if group.kind == "local" else "tcp"
        for lane in group.lanes[: self.core.config.lanes]:
            self.drive(self.core.lane_up(self.clock(), action.session, action.generation, lane.index, kind, revocable))
        return None

    def _open_leg(self, action: act.OpenLeg) -> Answer:
        spec = action.spec
        link = self.links.get(spec.session)
        if link is None or link.group is None or link.group.generation != spec.generation:
            raise Violation("S7-order", f"{self.name} offers a leg on lanes that are not there: {spec.reservation:x}")
        places = LegPlaces(self.geometry, spec.slices, spec.groups)
        self.receiver.legs[spec.session, spec.reservation, spec.leg] = ReceiverLeg(link.group, spec, places)
        return None

    def _revoke(self, action: act.Revoke) -> Answer:
        def returned() -> Sequence[Action]:
            leg = self.receiver.legs.get((action.session, action.reservation, action.leg))
            if leg is not None:
                leg.live = False
            return self.core.revoked(self.clock(), action.session, action.reservation, action.leg)

        if self._dice.random() < 0.3:  # somebody places a piece of the leg just now
            self.world.later(self._dice.random() * 0.01, lambda: self.deliver("revoke returns", returned))
            return None
        return returned()

    def _fence(self, action: act.Fence) -> Answer:
        link = self.links.get(action.session)
        if link is not None and link.wanted <= action.generation:
            link.wanted = -1
        if link is None or link.group is None or link.group.generation != action.generation:
            return self.core.fenced(self.clock(), action.session, action.generation)
        self._fence_later(link, link.group, action)
        return None

    def _fence_later(self, link: Link, group: LaneGroup, action: act.Fence) -> None:
        delay_s = 0.001 + self._dice.random() * (self.slow_fence_s if not self.world.healed else 0.0)
        self.world.later(delay_s, lambda: self.deliver("fence returns", lambda: self._fenced(link, group, action)))

    def _fenced(self, link: Link, group: LaneGroup, action: act.Fence) -> Answer:
        if self.fences_fail and not self.world.healed:
            self.world.note(self.name, "fence fails", f"s{action.session} g{action.generation}")
            self.world.later(FENCE_RETRY_S, lambda: self._fence_later(link, group, action))
            return None
        group.fence()
        self._take_completions()
        self.drive(self.core.fenced(self.clock(), action.session, action.generation))
        if link.group is group:
            link.group = None
        return None

    # ---- legs --------------------------------------------------------------------------------------------------------

    def _verify(self, action: act.Verify) -> Answer:
        def report() -> Sequence[Action]:
            return self.core.verified(self.clock(), action.reservation, self.receiver.reports(action))

        if self._dice.random() < 0.2:
            self.world.later(self._dice.random() * 0.2, lambda: self.deliver("verified", report))
            return None
        return report()

    def _forget_leg(self, action: act.ForgetLeg) -> Answer:
        """Its tables go because nothing can land any more, whether the leg was accepted or its pages are released."""
        key = action.session, action.reservation, action.leg
        leg = self.receiver.legs.get(key)
        if leg is None:
            return None
        if self.receiver.can_be_written(*key):
            raise Violation(
                "S2-still-writable",
                f"{self.name}: {action.reservation:x} leg {action.leg} ends while its prefill may still write",
            )
        del self.receiver.legs[key]
        self._ended.setdefault(action.reservation, []).append(leg)
        return None

    def _zero_tail(self, action: act.ZeroTail) -> Answer:
        """Decode itself writes, and only where the reservation is still the owner."""
        for group in action.groups:
            page = group.group, int.from_bytes(group.pool_pages[-8:], "little")
            if self.memory.holder.get(page) != action.reservation:
                raise Violation("S2-late-write", f"{self.name}: the tail of {action.reservation:x} is zeroed too late")
        self.memory.zeroed.add(action.reservation)
        return self.core.tail_zeroed(self.clock(), action.reservation)

    def _nothing(self, action: act.Action) -> Answer:
        return None

    def _audit(self, action: act.Audit) -> Answer:
        self.world.counts[f"decode {action.event}"] += 1
        return None

    def _notify(self, action: act.Notify) -> Answer:
        legs = self._ended.pop(action.key, []) if action.kind in ("ready", "released") else []
        if action.kind == "released" and any(key[1] == action.key for key in self.receiver.legs):
            raise Violation("S2-still-writable", f"{self.name}: {action.key:x} is released while it still has legs")
        self.engine.told(action, legs)
        return None

    def after_tick(self) -> None:
        self.engine.check_deadlines()

    # ---- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The ledger counts what the engine was told."""
        counts = self.ledger.counts()
        memory = self.memory
        if counts[PageState.RESERVED] != memory.reserved_pages:
            raise Violation(
                "S5-lost",
                f"{self.name}: {counts[PageState.RESERVED]} pages are RESERVED, {memory.reserved_pages} should be",
            )
        if counts[PageState.QUARANTINED] != memory.quarantined_pages:
            raise Violation(
                "S5-lost",
                f"{self.name}: {counts[PageState.QUARANTINED]} pages are QUARANTINED, "
                f"{memory.quarantined_pages} should be",
            )

    def resumed(self) -> None:
        for link in self.links.values():
            if link.group is not None:
                link.group.kick()

    def killed(self) -> None:
        """The kernel closes sockets and takes the adapter's keys away."""
        for link in self.links.values():
            self.world.network.close(link.route)
            if link.group is not None:
                link.group.fence()
        self.links.clear()
