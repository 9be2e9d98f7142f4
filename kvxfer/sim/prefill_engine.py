"""The engine of a simulated prefill rank: computes prompts into source pages, writes them in batches, commits; and
makes
the mistakes that a request's plan asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import AdmissionClosed, DuplicateRequest, Rejected
from kvxfer.protocol.actions import Notify
from kvxfer.sim.content import page_content
from kvxfer.sim.pools import KV, LAYERS, STATE
from kvxfer.sim.scenario import TOKENS_PER_PAGE, RequestPlan
from kvxfer.sim.sender_leg import AUX
from kvxfer.sim.sources import SourceGrant
from kvxfer.sim.violation import Violation

if TYPE_CHECKING:
    from kvxfer.sim.prefill_node import PrefillNode
    from kvxfer.sim.workload import Workload

Page = tuple[int, int, int, int]
"""Group, region, logical page, pool page, as this rank numbers them."""


class Job:
    """One accepted request: its pages by group, and the batches that are still to be written."""

    __slots__ = ("batches", "done", "grant", "pages", "plan")

    def __init__(
        self, plan: RequestPlan, grant: SourceGrant, pages: list[list[int]], batches: list[list[Page]]
    ) -> None:
        self.plan = plan
        self.grant = grant
        self.pages = pages
        self.batches = batches
        self.done = False


class PrefillEngine:
    """Source pages are reused as soon as ``released`` says so, last come, first used."""

    def __init__(self, node: PrefillNode, workload: Workload) -> None:
        self.node = node
        self.workload = workload
        self.jobs: dict[int, Job] = {}

    def accept(self, plan: RequestPlan) -> str:
        """ "accepted", "later" where it cannot be now, or "rejected"."""
        node = self.node
        n_tokens = 1 if plan.kind == "placeholder" else plan.n_tokens
        n_pages = (n_tokens - 1) // TOKENS_PER_PAGE + 1
        counts = [n_pages if group.name == "kv" else 1 for group in node.geometry.groups]
        if any(count > group.n_pages for count, group in zip(counts, node.geometry.groups, strict=True)):
            return "rejected"
        pages = node.sources.take(counts)
        if pages is None:
            return "later"
        try:
            grant_id, actions = node.core.accept(
                node.clock(), plan.request_id, readers=len(plan.decodes) if plan.serial % 2 else None,
                timeout_s=plan.accept_timeout_s,
            )  # fmt: skip
        except (DuplicateRequest, Rejected) as refused:
            node.sources.give_back(pages)
            return "rejected" if isinstance(refused, Rejected) else "later"
        grant = SourceGrant(grant_id, plan.request_id)
        grant.doubles = plan.kind == "double"
        node.grants[grant_id] = grant
        job = Job(plan, grant, pages, self._batches(plan, pages))
        self.jobs[grant_id] = job
        node.world.note(node.name, "accepts", f"{plan.request_id} grant {grant_id} {plan.kind}", grant_id)
        node.drive(actions)
        self._step(job)
        return "accepted"

    def reject(self, plan: RequestPlan) -> None:
        self.node.drive(self.node.core.reject(self.node.clock(), plan.request_id, "no", "not today", 5.0))

    def abort(self, plan: RequestPlan) -> None:
        for job in [job for job in self.jobs.values() if job.plan.serial == plan.serial]:
            job.done = True
            self.node.drive(self.node.core.abort(self.node.clock(), job.grant.id, "preempted"))

    # ---- computing and writing ---------------------------------------------------------------------------------------

    def _batches(self, plan: RequestPlan, pages: list[list[int]]) -> list[list[Page]]:
        """What is written, layer by layer, in as many calls as the plan says."""
        variant = 1 if plan.kind == "placeholder" else 0
        written: list[Page] = []
        cells = self.node.sources.cells
        for index, group in enumerate(self.node.geometry.groups):
            kind = KV if group.name == "kv" else STATE
            for number, region in enumerate(group.regions):
                layer = LAYERS if kind == STATE else int(region.layer[5:])
                for logical, page in enumerate(pages[index]):
                    cells[index, number, page] = page_content(plan.prompt, variant, kind, layer, logical)
                    written.append((index, number, logical, page))
        if plan.kind == "partial":
            last = len(pages[0]) - 1  # decode has reserved the last page, whatever its prefix hits are
            missing = [page for page in written if page[2] == last or len(pages[page[0]]) == 1]
            written.remove(missing[plan.serial % len(missing)])
        size = -(-len(written) // plan.batches) if written else 1
        return [written[at : at + size] for at in range(0, len(written), size)]

    def _step(self, job: Job) -> None:
        """The next batch, or the commit."""
        node, plan = self.node, job.plan
        if job.done:
            return
        try:
            if job.batches:
                node.write(job.grant, job.batches.pop(0))
            elif plan.kind == "silent":
                job.done = True
            else:
                job.done = True
                node.commit(job.grant, self._committed_tokens(plan), AUX)
                if plan.kind == "careless":
                    node.world.later(0.002, lambda: node.deliver("engine reuses", lambda: self._reuse_early(job)))
        except AdmissionClosed:
            job.done = True
        if not job.done:
            gap_s = plan.batch_gap_s * node.world.chance(f"job:{plan.serial}:{node.name}").random()
            node.world.later(gap_s, lambda: node.deliver("engine writes", lambda: self._step(job)))

    @staticmethod
    def _committed_tokens(plan: RequestPlan) -> int:
        if plan.kind == "placeholder":
            return 1
        return max(1, plan.n_tokens - 1) if plan.kind == "placeholder-in-page" else plan.n_tokens

    def _reuse_early(self, job: Job) -> None:
        """S3 broken by the engine: digests must find it."""
        if not job.grant.freed and job.pages[0]:
            self.node.sources.cells[0, 0, job.pages[0][0]] ^= 1
            self.node.world.note(self.node.name, "engine reuses", f"a page of grant {job.grant.id}")

    # ---- what it is told ---------------------------------------------------------------------------------------------

    def told(self, event: Notify, grant: SourceGrant) -> None:
        job = self.jobs[grant.id]
        if event.kind == "released":
            self.node.sources.give_back(job.pages)
        if event.kind == "ready":
            self.workload.sent(job.plan, self.node.name)
        elif event.kind == "failed":
            if event.error is None:
                raise Violation("S8-twice", f"{self.node.name}: grant {grant.id} fails without a reason")
            self.workload.not_sent(job.plan, self.node.name, event.error)
        if event.kind in ("ready", "failed"):
            job.done = True
        if "released" in grant.told and grant.told & {"ready", "failed"}:
            del self.jobs[grant.id]
