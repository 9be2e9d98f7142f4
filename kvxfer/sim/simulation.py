"""One run: builds a scenario's world, lets things happen, heals it, and demands that everything ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.prefill_config import PrefillConfig
from kvxfer.sim.decode_engine import DecodeEngine
from kvxfer.sim.decode_node import DecodeNode
from kvxfer.sim.ending import check_closed, check_ended, check_fair, quiet
from kvxfer.sim.faults import Faults
from kvxfer.sim.network import Network
from kvxfer.sim.pools import decode_geometry, prefill_geometry
from kvxfer.sim.prefill_engine import PrefillEngine
from kvxfer.sim.prefill_node import PrefillNode
from kvxfer.sim.scenario import Scenario
from kvxfer.sim.violation import Violation
from kvxfer.sim.workload import Workload
from kvxfer.sim.world import World

SETTLE_S = 400.0
"""Everything ends within this time after the last fault: the sum of the cores' own bounds, and some."""

SETTLE_EVENTS = 30_000
CLOSE_S = 200.0
LOOK_EVERY = 16


@dataclass(slots=True)
class Result:
    """What one seed came to. ``events``: all of them, those of settling included."""

    seed: int
    violation: str | None
    kind: str | None
    events: int
    simulated_s: float
    trace_hash: int
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


class Simulation:
    """Builds the world of ``plan``; ``run`` raises Violation."""

    def __init__(self, plan: Scenario, keep: int = 0) -> None:
        self.plan = plan
        self.world = World(plan, keep)
        self.world.network = Network(self.world)
        self.workload = Workload(self.world)
        self.faults = Faults(self.world, self._restart)
        self._lives: Counter[str] = Counter()
        for n in range(plan.decodes):
            self._boot(f"decode{n}")
        for n in range(plan.prefills):
            for rank in range(plan.ranks):
                self._boot(f"prefill{n}.{rank}")

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _boot(self, name: str) -> None:
        life = self._lives[name]
        self._lives[name] += 1
        if name.startswith("decode"):
            decode = DecodeNode(self.world, name, life, decode_geometry(self.plan), decode_config(self.plan))
            decode.engine = DecodeEngine(decode, self.workload)
            self.world.nodes[name] = decode
        else:
            rank = int(name.rpartition(".")[2])
            prefill = PrefillNode(self.world, name, life, prefill_geometry(self.plan, rank), prefill_config(self.plan))
            prefill.engine = PrefillEngine(prefill, self.workload)
            self.world.nodes[name] = prefill

    def _restart(self, name: str) -> None:
        if not self.world.nodes[name].alive:
            self.world.note(name, "RESTARTS")
            self._boot(name)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation."""
        world, plan = self.world, self.plan
        self.workload.start()
        self.faults.start()
        last_s = max([*(one.at_s for one in plan.requests), *(one.at_s for one in plan.faults)], default=0.0)
        active_s = min(last_s, plan.horizon_s) + 5.0
        while world.events < plan.events and world.next_at() <= active_s:
            world.step()
        self.faults.heal()
        self._until_quiet()
        check_ended(world)
        if plan.fair or plan.weather.ordered:
            check_fair(world, self.workload)
        self._close()

    def _until_quiet(self) -> None:
        world = self.world
        until_s, events = world.now + SETTLE_S, world.events
        while self.workload.pending or not quiet(world):
            for _ in range(LOOK_EVERY):
                if not world.step():
                    break
            if world.now > until_s or world.events - events > SETTLE_EVENTS or world.next_at() == float("inf"):
                check_ended(world)
                return

    def _close(self) -> None:
        world = self.world
        nodes = list(world.nodes.values())
        self.workload.closing = True
        reason = "the run is over"
        for node in nodes:
            assert isinstance(node, (DecodeNode, PrefillNode))
            node.deliver("closes", lambda node=node: node.core.close(node.clock(), reason))  # type: ignore[misc]
        until_s = world.now + CLOSE_S
        while not all(node.core.is_closed for node in nodes):
            if world.next_at() > until_s or not world.step():
                break
        check_closed(world)


def run(plan: Scenario, keep: int = 0) -> Result:
    """Runs one scenario to its end or to its first violation."""
    simulation = Simulation(plan, keep)
    world = simulation.world
    violation: Violation | None = None
    try:
        simulation.run()
    except Violation as found:
        violation = found
        world.note("", "VIOLATION", str(found))
    return Result(
        seed=plan.seed,
        violation=None if violation is None else violation.text,
        kind=None if violation is None else violation.kind,
        events=world.events,
        simulated_s=world.now,
        trace_hash=world.trace.hash & (1 << 64) - 1,
        counts=world.counts,
        lines=world.trace.lines(),
    )


def decode_config(plan: Scenario) -> DecodeConfig:
    kinds = ("local",) if plan.lane_kind == "local" else ("tcp",)
    if plan.hasty:
        return DecodeConfig(
            verify=plan.verify, lane_kinds=kinds, lanes=plan.lanes, heartbeat_s=4.0, dial_timeout_s=3.0,
            quiesce_timeout_s=0.5, fence_hard_limit_s=3.0, relane_backoff_max_s=1.0, quarantine_low_fraction=0.05,
        )  # fmt: skip
    return DecodeConfig(verify=plan.verify, lane_kinds=kinds, lanes=plan.lanes, heartbeat_s=12.0)


def prefill_config(plan: Scenario) -> PrefillConfig:
    if plan.hasty:
        return PrefillConfig(
            verify=plan.verify, heartbeat_s=2.0, heartbeat_timeout_s=5.0, drain_timeout_s=1.0, transfer_timeout_s=4.0,
            done_timeout_s=3.0, offer_grace_s=1.0, decline_ttl_s=3.0, close_grace_s=0.2, max_answers=2, max_offers=4,
            max_rejects=2, max_declines=2, max_legs=8,
        )  # fmt: skip
    return PrefillConfig(verify=plan.verify, heartbeat_s=6.0, heartbeat_timeout_s=20.0)
