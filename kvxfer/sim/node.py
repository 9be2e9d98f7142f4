"""A simulated process: a core with a clock of its own, that can be stopped, continued and killed.

It does what the endpoints' executors do: carries out actions in order and calls ``tick`` when it is due. A stopped
process does nothing; whatever reaches it waits. Of a killed one nothing is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvxfer.protocol.actions import Action
from kvxfer.sim.violation import Violation
from kvxfer.sim.world import World

Answer = Sequence[Action] | None


class Core(Protocol):
    """What both cores have in common."""

    def tick(self, now: float) -> list[Action]: ...

    def next_deadline(self) -> float | None: ...

    @property
    def is_closed(self) -> bool: ...


class Node(ABC):
    """One process. ``incarnation`` counts the lives of this name from 0."""

    core: Core

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self.handlers: dict[type, Callable[[Any], Answer]] = {}
        self._waiting: list[Callable[[], Answer]] = []  # what reached it while it was stopped
        self._actions: deque[Action] = deque()
        self._driving = False
        self._wake_at = float("inf")
        skew = world.plan.clock_skew
        dice = world.chance(f"clock:{name}:{incarnation}")
        self._rate = 1.0 + dice.uniform(-skew, skew)
        self._offset = dice.uniform(0.0, 1e6)

    # ---- time --------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self._offset + self.world.now * self._rate

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        when = max(self.world.now, (deadline - self._offset) / self._rate)
        if when < self._wake_at:
            self._wake_at = when
            self.world.at(when, self._timer)

    def _timer(self) -> None:
        if self.world.now < self._wake_at:
            return  # armed for an earlier time meanwhile, and again since
        self._wake_at = float("inf")
        if not self.alive or self.paused:
            return
        deadline = self.core.next_deadline()
        now = self.clock()
        if deadline is not None and deadline <= now + 1e-9:
            self.world.note(self.name, "tick")
            self._run(lambda: self.core.tick(max(now, deadline)))
            self.after_tick()
        else:
            self._arm()

    # ---- what reaches it ---------------------------------------------------------------------------------------------

    def deliver(self, what: str, call: Callable[[], Answer], about: Any = None, number: int = 0) -> None:
        """Something reaches the process: ``call`` is made now, or when it runs again."""
        if not self.alive:
            return
        if self.paused:
            self._waiting.append(lambda: self._noted(what, call, about, number))
            return
        self._run(lambda: self._noted(what, call, about, number))

    def _noted(self, what: str, call: Callable[[], Answer], about: Any, number: int) -> Answer:
        self.world.note(self.name, what, about, number)
        return call()

    def _run(self, call: Callable[[], Answer]) -> None:
        if not self.alive:
            return
        self.drive(self._safely(call) or ())
        self.check()
        self._arm()

    def _safely(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except Violation:
            raise
        except Exception as cause:
            raise Violation("S7-exception", f"{self.name}: {type(cause).__name__}: {cause}") from cause

    def drive(self, actions: Sequence[Action]) -> None:
        """Carries out actions in order, then those that their answers give."""
        self._actions.extend(actions)
        if self._driving:
            return
        self._driving = True
        try:
            while self._actions:
                action = self._actions.popleft()
                self.note_action(action)
                handler = self.handlers.get(type(action))
                if handler is None:
                    raise Violation("S7-order", f"{self.name} is asked for {type(action).__name__}")
                more = self._safely(lambda handler=handler, action=action: handler(action))  # type: ignore[misc]
                if more:
                    self._actions.extend(more)
        finally:
            self._driving = False

    def note_action(self, action: Action) -> None:
        self.world.note(self.name, type(action).__name__, action, getattr(action, "sequence", 0))

    # ---- stopping and killing ----------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self.alive and not self.paused:
            self.paused = True
            self.world.note(self.name, "PAUSED")

    def resume(self) -> None:
        """Continues: what waited and what is due happen in an order that chance decides."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        self.world.note(self.name, "RESUMED")
        if self.world.chance(f"resume:{self.name}").random() < 0.5:
            deadline = self.core.next_deadline()
            if deadline is not None and deadline <= self.clock():
                self._run(lambda: self.core.tick(self.clock()))
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._run(call)
        self._wake_at = float("inf")
        self._arm()
        self.resumed()

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.paused = False
            self._waiting.clear()
            self.world.note(self.name, "KILLED")
            self.killed()

    def after_tick(self) -> None:  # noqa: B027 - a hook that a node need not have
        """What must hold once everything that was due is done."""

    @abstractmethod
    def resumed(self) -> None:
        """The lanes' threads of this process go on."""

    @abstractmethod
    def killed(self) -> None:
        """The process is gone: its lanes and sockets with it."""

    @abstractmethod
    def check(self) -> None:
        """The invariants of this node, after every event. Raises Violation."""
