"""The faults of a scenario: stops, kills, partitions, broken lanes, slow fences, damaged bytes, forged frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.sim.decode_node import DecodeNode
from kvxfer.sim.forgery import forge
from kvxfer.sim.prefill_node import PrefillNode
from kvxfer.sim.scenario import FaultPlan
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.node import Node


class Faults:
    """``restart`` makes a new process of a name whose last one was killed."""

    def __init__(self, world: World, restart: Callable[[str], None]) -> None:
        self._world = world
        self._restart = restart
        self._by_kind: dict[str, Callable[[FaultPlan], None]] = {
            "pause": self._pause,
            "crash": self._crash,
            "partition": self._partition,
            "lane": self._lane,
            "forge": self._forge,
            "flip": self._flip,
            "slow-fence": self._slow_fence,
            "dead-fence": self._dead_fence,
        }

    def start(self) -> None:
        for fault in self._world.plan.faults:
            if fault.at_s <= self._world.plan.horizon_s:
                self._world.at(fault.at_s, lambda fault=fault: self._happen(fault))  # type: ignore[misc]

    def heal(self) -> None:
        """Everything runs, and everybody reaches everybody."""
        world = self._world
        world.healed = True
        world.network.mend_all()
        for name, node in list(world.nodes.items()):
            if not node.alive:
                self._restart(name)
            node.resume()
            if isinstance(node, DecodeNode):
                node.flipping.clear()
        for group in world.groups.values():
            group.kick()

    def _happen(self, fault: FaultPlan) -> None:
        if not self._world.healed:
            self._world.note("world", f"fault: {fault.kind}", f"{fault.target} {fault.duration_s} s")
            self._by_kind[fault.kind](fault)

    def _node(self, name: str) -> Node:
        return self._world.nodes[name]

    def _pair(self, fault: FaultPlan) -> tuple[DecodeNode, PrefillNode]:
        one, other = (self._world.nodes[name] for name in fault.target.split())
        assert isinstance(one, DecodeNode) and isinstance(other, PrefillNode)
        return one, other

    def _unless_healed(self, delay_s: float, what: Callable[[], None]) -> None:
        self._world.later(delay_s, lambda: None if self._world.healed else what())

    def _pause(self, fault: FaultPlan) -> None:
        node = self._node(fault.target)
        node.pause()
        self._unless_healed(fault.duration_s, node.resume)

    def _crash(self, fault: FaultPlan) -> None:
        node = self._node(fault.target)
        if node.alive:
            node.kill()
            self._unless_healed(min(fault.duration_s, 20.0), lambda: self._restart(fault.target))

    def _partition(self, fault: FaultPlan) -> None:
        one, other = fault.target.split()
        network = self._world.network
        network.cut(one, other, keeps=self._world.chance("partition").random() < 0.5)

        def mend() -> None:
            network.mend(one, other)
            for group in self._world.groups.values():
                group.kick()

        self._unless_healed(fault.duration_s, mend)

    def _lane(self, fault: FaultPlan) -> None:
        """Breaks a lane of the pair; the shorter the duration, the likelier decode sees it as well."""
        decode, prefill = self._pair(fault)
        dice = self._world.chance("lanes")
        for group in list(prefill.groups.values()):
            if group.decode is decode:
                busiest = max(group.lanes, key=lambda lane: len(lane.wire))
                lane = busiest if dice.random() < 0.7 else dice.choice(group.lanes)
                group.break_lane(lane.index, seen_by_decode=dice.random() < 0.5)

    def _forge(self, fault: FaultPlan) -> None:
        """A hostile or confused peer speaks for a while: forged frames, and old ones again."""
        decode, prefill = self._pair(fault)
        dice = self._world.chance("forge")
        for _ in range(dice.randint(1, 6)):
            self._unless_healed(dice.random() * min(fault.duration_s, 3.0), lambda: forge(self._world, decode, prefill))

    def _flip(self, fault: FaultPlan) -> None:
        decode, prefill = self._pair(fault)
        decode.flipping.add(prefill.name)
        self._unless_healed(fault.duration_s, lambda: decode.flipping.discard(prefill.name))

    def _slow_fence(self, fault: FaultPlan) -> None:
        node = self._node(fault.target)
        if isinstance(node, DecodeNode):
            node.slow_fence_s = fault.duration_s

    def _dead_fence(self, fault: FaultPlan) -> None:
        node = self._node(fault.target)
        if isinstance(node, DecodeNode):
            node.fences_fail = True

            def work_again() -> None:
                node.fences_fail = False

            self._unless_healed(fault.duration_s, work_again)
