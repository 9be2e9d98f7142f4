"""The requests of a scenario, as a router would bring them to the engines: reserve, accept, abort, retry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError
from kvxfer.sim.decode_node import DecodeNode
from kvxfer.sim.prefill_node import PrefillNode
from kvxfer.sim.scenario import HONEST, RequestPlan
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.decode_engine import Handoff

PATIENCE = 6
"""How often a request that finds no pages is brought again."""


class Workload:
    """Keeps what became of every request. ``why``: the first error of a request, for reports."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self.succeeded: dict[int, set[int]] = {}  # serial -> ranks that are READY
        self.delivered: dict[int, set[str]] = {}  # serial -> prefill ranks that are ready
        self.excused: set[int] = set()  # serials that need not succeed
        self.begun: set[int] = set()
        self.why: dict[int, str] = {}
        self.pending = 0  # calls that are planned and have not been made
        self.closing = False  # the engines have no more work
        self._retried: dict[tuple[int, int], int] = {}

    def start(self) -> None:
        for plan in self.plan.requests:
            if plan.at_s <= self.plan.horizon_s:
                self.world.at(plan.at_s, lambda plan=plan: self._begin(plan))  # type: ignore[misc]

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def make() -> None:
            self.pending -= 1
            call()

        self.pending += 1
        self.world.later(delay_s, make)

    @property
    def _goes_on(self) -> bool:
        """Requests that did not get through may be tried again."""
        return not self.closing and (not self.world.healed or self.plan.fair)

    # ---- one request -------------------------------------------------------------------------------------------------

    def _begin(self, plan: RequestPlan) -> None:
        if self.world.healed:
            return
        self.begun.add(plan.serial)
        self.world.note("router", "request", f"{plan.request_id} {plan.kind} {plan.n_tokens} tokens", plan.serial)
        if plan.kind != HONEST or plan.abort_decode_after_s is not None or plan.abort_prefill_after_s is not None:
            self.excused.add(plan.serial)
        incarnation = self._incarnation(plan) if plan.expect_incarnation else None
        for rank in range(len(plan.decodes)):
            self._later(
                plan.reserve_after_s,
                lambda rank=rank: self._reserve(plan, rank, 0, PATIENCE, incarnation),  # type: ignore[misc]
            )
        for name in self._prefill(plan):
            self._later(plan.accept_after_s, lambda name=name: self._accept(plan, name, PATIENCE))  # type: ignore[misc]
        if plan.abort_prefill_after_s is not None:
            self._later(plan.accept_after_s + plan.abort_prefill_after_s, lambda: self._abort_prefill(plan))

    def _prefill(self, plan: RequestPlan) -> list[str]:
        return [f"prefill{plan.prefill}.{rank}" for rank in range(self.plan.ranks)]

    def _incarnation(self, plan: RequestPlan) -> list[bytes | None]:
        nodes = [self.world.nodes[name] for name in self._prefill(plan)]
        return [node.life for node in nodes if isinstance(node, PrefillNode)]

    def _at(self, name: str, what: str, call: Callable[[DecodeNode | PrefillNode], None]) -> None:
        """Calls an engine, if its process lives; a stopped one gets to it when it goes on."""
        node = self.world.nodes[name]
        assert isinstance(node, (DecodeNode, PrefillNode))

        def run() -> None:
            if not self.closing:
                call(node)

        node.deliver(what, run)

    def _reserve(
        self, plan: RequestPlan, rank: int, attempt: int, patience: int, incarnation: list[bytes | None] | None
    ) -> None:
        def call(node: DecodeNode | PrefillNode) -> None:
            assert isinstance(node, DecodeNode)
            if plan.kind == "decline":
                node.engine.decline(plan, rank, self._prefill(plan))
                return
            found = node.engine.reserve(plan, rank, attempt, self._prefill(plan), incarnation)
            if found == "later" and patience > 0 and self._goes_on:
                self.world.counts["reserve waits for pages"] += 1
                self._later(1.0, lambda: self._reserve(plan, rank, attempt, patience - 1, incarnation))
            elif isinstance(found, str):
                self.excused.add(plan.serial)
                self.why.setdefault(plan.serial, f"reserve: {found}")
                node.engine.decline(plan, rank, self._prefill(plan))
            elif plan.abort_decode_after_s is not None and attempt == 0:
                reservation = found.reservation
                self._later(
                    plan.abort_decode_after_s,
                    lambda: node.deliver("engine aborts", lambda: node.engine.abort(reservation)),
                )

        self._at(f"decode{plan.decodes[rank]}", "engine reserves", call)

    def _accept(self, plan: RequestPlan, name: str, patience: int) -> None:
        def call(node: DecodeNode | PrefillNode) -> None:
            assert isinstance(node, PrefillNode)
            if plan.kind == "reject":
                node.engine.reject(plan)
                return
            found = node.engine.accept(plan)
            if found == "later" and patience > 0 and self._goes_on:
                self.world.counts["accept waits"] += 1
                self._later(1.0, lambda: self._accept(plan, name, patience - 1))
            elif found != "accepted":
                self.excused.add(plan.serial)
                self.why.setdefault(plan.serial, f"accept: {found}")
                node.engine.reject(plan)

        self._at(name, "engine accepts", call)

    def _abort_prefill(self, plan: RequestPlan) -> None:
        for name in self._prefill(plan):

            def call(node: DecodeNode | PrefillNode) -> None:
                assert isinstance(node, PrefillNode)
                node.engine.abort(plan)

            self._at(name, "engine preempts", call)

    # ---- what became of it -------------------------------------------------------------------------------------------

    def ready(self, handoff: Handoff) -> None:
        self.world.counts["handoffs ready"] += 1
        self.succeeded.setdefault(handoff.plan.serial, set()).add(handoff.rank)

    def failed(self, handoff: Handoff, error: KvxferError) -> None:
        plan = handoff.plan
        self.world.counts["handoffs failed"] += 1
        self.world.counts[f"handoff failed: {type(error).__name__}"] += 1
        self.why.setdefault(plan.serial, f"{type(error).__name__}: {error.message}")
        key = plan.serial, handoff.rank
        if error.retryable and self._retried.get(key, 0) < plan.retries and self._goes_on:
            self._retried[key] = self._retried.get(key, 0) + 1
            self.world.counts["handoffs retried"] += 1
            self._later(1.0, lambda: self._reserve(plan, handoff.rank, handoff.attempt + 1, PATIENCE, None))
            for name in self._prefill(plan):
                self._later(1.0, lambda name=name: self._accept(plan, name, PATIENCE))  # type: ignore[misc]

    def sent(self, plan: RequestPlan, prefill: str) -> None:
        self.world.counts["grants ready"] += 1
        self.delivered.setdefault(plan.serial, set()).add(prefill)

    def not_sent(self, plan: RequestPlan, prefill: str, error: KvxferError) -> None:
        self.world.counts["grants failed"] += 1
        self.why.setdefault(plan.serial, f"grant: {type(error).__name__}: {error.message}")
