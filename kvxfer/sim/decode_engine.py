"""The engine of a simulated decode worker: gives pages to requests, reads them when READY, and reuses them at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import CapacityError, DuplicateRequest, OwnershipError, PeerRestarted
from kvxfer.protocol.actions import Notify
from kvxfer.sim.content import chunk_content, page_content
from kvxfer.sim.memory import PageId
from kvxfer.sim.pools import KV, STATE
from kvxfer.sim.receiver import ReceiverLeg
from kvxfer.sim.scenario import TOKENS_PER_PAGE, RequestPlan
from kvxfer.sim.violation import Violation

if TYPE_CHECKING:
    from kvxfer.sim.decode_node import DecodeNode
    from kvxfer.sim.workload import Workload

SLACK_S = 0.01


class Handoff:
    """One reservation as the engine knows it. ``deadline`` by this machine's clock."""

    __slots__ = ("attempt", "deadline", "failed", "pages", "plan", "rank", "reservation")

    def __init__(
        self, plan: RequestPlan, rank: int, attempt: int, reservation: int, pages: tuple[PageId, ...], deadline: float
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.attempt = attempt
        self.reservation = reservation
        self.pages = pages
        self.deadline = deadline
        self.failed = False


class DecodeEngine:
    """Pages that come back are given out first, so that whoever may still write them is found out."""

    def __init__(self, node: DecodeNode, workload: Workload) -> None:
        self.node = node
        self.workload = workload
        self.free: list[list[int]] = [list(range(group.n_pages)) for group in node.geometry.groups]
        self.handoffs: dict[int, Handoff] = {}  # live, and failed ones whose pages are not back
        self.reading = 0  # pages that are being read
        self._deadlines: list[tuple[float, int]] = []

    # ---- calls -------------------------------------------------------------------------------------------------------

    def reserve(
        self, plan: RequestPlan, rank: int, attempt: int, prefill: Sequence[str], incarnation: list[bytes | None] | None
    ) -> Handoff | str:
        """The handoff; or "later" where pages are short, or "refused"."""
        node = self.node
        first, last = plan.first_token // TOKENS_PER_PAGE, (plan.n_tokens - 1) // TOKENS_PER_PAGE
        n_pages = last - first + 1
        oversize = n_pages > node.geometry.groups[KV].n_pages
        with_state = plan.serial % 5 != 0 and not oversize
        if not oversize and (len(self.free[KV]) < n_pages or (with_state and not self.free[STATE])):
            return "later"
        kv = list(range(n_pages)) if oversize else self.free[KV][-n_pages:]
        held = next((page for group, page in node.memory.holder if group == KV), None)
        if plan.kind == "greedy" and held is not None:
            kv[0] = held
        logical = np.arange(first, last + 1, dtype=np.uint64)
        first_token = plan.first_token or None
        request = {KV: (logical, np.array(kv, np.uint64), first_token, plan.n_tokens - plan.first_token)}
        pages: list[PageId] = [(KV, page) for page in kv]
        if with_state:
            state = self.free[STATE][-1]
            where = np.array([state], np.uint64)
            request[STATE] = (np.zeros(1, np.uint64), where, first_token, None)  # type: ignore[assignment]
            pages.append((STATE, state))
        try:
            reservation, actions = node.core.reserve(
                node.clock(),
                request_id=plan.request_id,
                pages=request,
                prefill=prefill,
                incarnation=incarnation,
                readers=len(plan.decodes),
                rank=rank,
                timeout_s=plan.reserve_timeout_s,
            )
        except (CapacityError, DuplicateRequest, OwnershipError, PeerRestarted) as refused:
            node.world.counts[f"reserve refused: {type(refused).__name__}"] += 1
            if isinstance(refused, OwnershipError) and plan.kind != "greedy":
                raise Violation("S5-lost", f"{node.name}: a page that is free is refused: {refused}") from refused
            return "refused"
        del self.free[KV][-n_pages:]
        if with_state:
            self.free[STATE].pop()
        node.memory.claim(reservation, pages)
        deadline = node.clock() + plan.reserve_timeout_s
        handoff = Handoff(plan, rank, attempt, reservation, tuple(pages), deadline)
        self.handoffs[reservation] = handoff
        node.world.note(node.name, "reserves", f"{plan.request_id} {reservation:x} pages {pages}", reservation)
        node.drive(actions)
        if plan.extend_s and not handoff.failed and reservation in self.handoffs:
            node.drive(node.core.extend(node.clock(), reservation, plan.extend_s))
            handoff.deadline += plan.extend_s
        heapq.heappush(self._deadlines, (handoff.deadline, reservation))
        return handoff

    def abort(self, reservation: int) -> None:
        self.node.drive(self.node.core.abort(self.node.clock(), reservation, "the engine aborts"))

    def decline(self, plan: RequestPlan, rank: int, prefill: Sequence[str]) -> None:
        self.node.drive(self.node.core.decline(self.node.clock(), plan.request_id, prefill, "not wanted", rank))

    # ---- what it is told ---------------------------------------------------------------------------------------------

    def told(self, event: Notify, legs: Sequence[ReceiverLeg]) -> None:
        memory = self.node.memory
        handoff = self.handoffs.get(event.key)
        if handoff is None:
            raise Violation("S8-twice", f"{self.node.name}: {event.kind} of {event.key:x}, which is over")
        if event.kind == "ready":
            self._read(handoff, legs)
            memory.ready(event.key)
            del self.handoffs[event.key]
            self.reading += len(handoff.pages)
            self.workload.ready(handoff)
            self.node.world.later(
                handoff.plan.hold_s, lambda: self.node.deliver("engine frees", lambda: self._free(handoff))
            )
        elif event.kind == "failed":
            if event.error is None:
                raise Violation("S8-twice", f"{self.node.name}: {event.key:x} fails without a reason")
            handoff.failed = True
            memory.failed(event.key)
            self.workload.failed(handoff, event.error)
        elif event.kind == "released":
            memory.released(event.key)
            del self.handoffs[event.key]
            self._reuse(handoff.pages)
        else:
            raise Violation("S8-twice", f"{self.node.name}: decode is told {event.kind}")

    def _read(self, handoff: Handoff, legs: Sequence[ReceiverLeg]) -> None:
        """The engine reads every page: S1."""
        plan = handoff.plan
        outcome = self.node.core.ready(handoff.reservation)
        if outcome.n_tokens != plan.n_tokens:
            raise Violation("S1-tokens", f"{handoff.reservation:x}: {outcome.n_tokens} tokens of {plan.n_tokens}")
        if plan.n_tokens % TOKENS_PER_PAGE and handoff.reservation not in self.node.memory.zeroed:
            raise Violation("S1-unconfirmed", f"{handoff.reservation:x} is READY before its last page's tail is zeroed")
        seen: set[PageId] = set()
        for leg in legs:
            committed = self.node.world.committed.get((handoff.reservation, leg.spec.leg))
            if committed != plan.n_tokens:
                raise Violation(
                    "S1-tokens",
                    f"{handoff.reservation:x} is READY with {plan.n_tokens} tokens, leg {leg.spec.leg} committed "
                    f"{committed}",
                )
            places = leg.places.places
            truths = [
                chunk_content(page_content(plan.prompt, 0, *place.truth), place.unit, place.units) for place in places
            ]
            self.node.memory.check_readable(handoff.reservation, leg.spec.leg, leg.group.epoch, places, truths)
            seen.update(place.page for place in places)
        if seen != set(handoff.pages):
            raise Violation("S1-unconfirmed", f"{handoff.reservation:x}: READY speaks of {len(seen)} pages only")

    def _free(self, handoff: Handoff) -> None:
        self.reading -= len(handoff.pages)
        self.node.memory.given_back(handoff.pages)
        if handoff.reservation % 2:  # some engines give pages back, others just offer them again
            for group in (KV, STATE):
                pages = [page for space, page in handoff.pages if space == group]
                self.node.ledger.free_ready(group, np.array(pages, np.uint64))
        self._reuse(handoff.pages)

    def _reuse(self, pages: Sequence[PageId]) -> None:
        for group, page in pages:
            self.free[group].append(page)

    # ---- invariants --------------------------------------------------------------------------------------------------

    def check_deadlines(self) -> None:
        """S6: what is due has ended."""
        now = self.node.clock()
        while self._deadlines and self._deadlines[0][0] < now - SLACK_S:
            _, reservation = heapq.heappop(self._deadlines)
            handoff = self.handoffs.get(reservation)
            if handoff is not None and not handoff.failed:
                raise Violation(
                    "S6-deadline", f"{self.node.name}: {reservation:x} is live {now - handoff.deadline:.3f} s too long"
                )

    def check_pages(self) -> None:
        """S5, when nothing is under way: every page is free, or being read."""
        total = sum(group.n_pages for group in self.node.geometry.groups)
        free = sum(len(pages) for pages in self.free)
        held = sum(len(handoff.pages) for handoff in self.handoffs.values())
        if free + held + self.reading != total:
            raise Violation(
                "S5-lost", f"{self.node.name}: {free} pages are free, {held} held, {self.reading} read, of {total}"
            )
