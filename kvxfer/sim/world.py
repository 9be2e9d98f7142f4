"""The simulated world: one clock, one heap of what is still to happen, streams of chance, and the nodes by name."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.sim.scenario import Scenario
from kvxfer.sim.trace import Trace

if TYPE_CHECKING:
    from kvxfer.sim.lane_group import LaneGroup
    from kvxfer.sim.network import Network
    from kvxfer.sim.node import Node

KEPT_OF_A_TRACE = 400


class World:
    """Not thread-safe, and needs not be: one world is one thread of one process.

    Attributes:
        now: seconds since the beginning.
        nodes: living or stopped processes by name; a restart replaces the object.
        groups: lanes served, by (epoch, generation).
        events: how many events have happened.
        healed: faults and new requests are over; what is under way ends.
    """

    def __init__(self, plan: Scenario, keep: int = 0) -> None:
        self.plan = plan
        self.now = 0.0
        self.events = 0
        self.healed = False
        self.committed: dict[tuple[int, int], int] = {}  # (reservation, leg) -> tokens that its records speak of
        self.trace = Trace(keep)
        self.nodes: dict[str, Node] = {}
        self.groups: dict[tuple[bytes, int], LaneGroup] = {}
        self.network: Network
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._streams: dict[str, random.Random] = {}
        self.counts = self.trace.counts

    def chance(self, name: str) -> random.Random:
        """The stream of chance of this name."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = random.Random(f"{self.plan.seed}:{name}")
        return stream

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Events of one time happen in the order in which they were asked for."""
        self._order += 1
        heapq.heappush(self._todo, (when, self._order, what))

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay_s, what)

    def note(self, node: str, what: str, about: Any = None, number: int = 0) -> None:
        self.trace.note(self.now, node, what, about, number)

    def step(self) -> bool:
        """The next event; False when nothing is left to happen."""
        if not self._todo:
            return False
        when, _, what = heapq.heappop(self._todo)
        if when > self.now:
            self.now = when
        self.events += 1
        what()
        return True

    def next_at(self) -> float:
        """When the next event is, or infinity."""
        return self._todo[0][0] if self._todo else float("inf")
