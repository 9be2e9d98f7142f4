"""Makes a failing scenario smaller: fewer faults, requests, nodes and mishaps, with the same violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvxfer.sim.scenario import HONEST, Scenario, Weather
from kvxfer.sim.simulation import Result, run

T = TypeVar("T")
MAX_RUNS = 400


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest scenario found, what it does, and how many were tried."""

    plan: Scenario
    result: Result
    runs: int


def shrink(plan: Scenario, max_runs: int = MAX_RUNS, keep: int = 200) -> Shrunk | None:
    """None where the scenario does not fail. Deterministic. ``keep``: lines of the trace in the result."""
    first = run(plan)
    if first.kind is None:
        return None
    search = _Search(plan, first, max_runs)
    search.run()
    return Shrunk(search.best, run(search.best, keep), search.runs)


class _Search:
    def __init__(self, plan: Scenario, result: Result, max_runs: int) -> None:
        self.best = plan
        self.runs = 0
        self._result = result
        self._max_runs = max_runs

    def run(self) -> None:
        """Passes over all kinds of reduction until none of them helps."""
        self._try(replace(self.best, horizon_s=self._result.simulated_s))
        while True:
            before = self.best
            self._thin(lambda plan: plan.faults, lambda plan, faults: replace(plan, faults=faults))
            self._thin(lambda plan: plan.requests, lambda plan, requests: replace(plan, requests=requests))
            for simpler in (_calmer, _plainer, _fewer_nodes):
                for candidate in simpler(self.best):
                    self._try(candidate)
            self._try(replace(self.best, horizon_s=self._result.simulated_s))
            if self.best is before or self.runs >= self._max_runs:
                return

    def _try(self, candidate: Scenario) -> bool:
        if candidate == self.best or self.runs >= self._max_runs:
            return False
        self.runs += 1
        result = run(candidate)
        if result.kind != self._result.kind:
            return False
        self.best, self._result = candidate, result
        return True

    def _thin(
        self, items: Callable[[Scenario], tuple[T, ...]], put: Callable[[Scenario, tuple[T, ...]], Scenario]
    ) -> None:
        """Takes out halves, quarters and so on, down to single ones."""
        size = max(1, len(items(self.best)) // 2)
        while size:
            at = 0
            while at < len(items(self.best)):
                now = items(self.best)
                if not self._try(put(self.best, now[:at] + now[at + size :])):
                    at += size
            size //= 2


def _calmer(plan: Scenario) -> Iterator[Scenario]:
    yield replace(plan, weather=Weather(ordered=True))
    yield replace(plan, weather=replace(plan.weather, duplicate=0.0))
    yield replace(plan, weather=replace(plan.weather, slow=0.0))
    yield replace(plan, weather=replace(plan.weather, loss=0.0))
    yield replace(plan, clock_skew=0.0)
    yield replace(plan, lane_step_s=0.004)
    yield replace(plan, hasty=False)
    yield replace(plan, eager_completion=False)


def _plainer(plan: Scenario) -> Iterator[Scenario]:
    """Each request on its own is made as plain as it can be."""
    for at, request in enumerate(plan.requests):
        for change in (
            {"abort_decode_after_s": None},
            {"abort_prefill_after_s": None},
            {"retries": 0, "extend_s": 0.0, "expect_incarnation": False},
            {"kind": HONEST},
            {"first_token": 0},
            {"batches": 1, "batch_gap_s": 0.0},
            {"decodes": request.decodes[:1]},
            {"n_tokens": min(request.n_tokens, 16), "first_token": min(request.first_token, 15)},
        ):
            plain = replace(request, **change)
            if plain != request:
                yield replace(plan, requests=_with(plan.requests, at, plain))


def _fewer_nodes(plan: Scenario) -> Iterator[Scenario]:
    """Nodes that nobody uses go; then everything moves to as few as possible."""
    if all(name.endswith(".0") or name.startswith("decode") for name in plan.disturbed):
        yield replace(plan, ranks=1)
    yield replace(plan, lanes=1)
    used = [n for request in plan.requests for n in request.decodes]
    named = [int(name[6:]) for name in plan.disturbed if name.startswith("decode")]
    yield replace(plan, decodes=max([*used, *named], default=0) + 1)
    used = [request.prefill for request in plan.requests]
    named = [int(name[7:].partition(".")[0]) for name in plan.disturbed if name.startswith("prefill")]
    yield replace(plan, prefills=max([*used, *named], default=0) + 1)


def _with(items: Sequence[T], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def describe(plan: Scenario) -> list[str]:
    """The scenario in a few lines for people."""
    weather = ", ".join(
        f"{name} {getattr(plan.weather, name)}"
        for name in Weather.__dataclass_fields__
        if getattr(plan.weather, name) != getattr(Weather(), name)
    )
    lines = [
        f"seed {plan.seed}: {plan.decodes} decode, {plan.prefills} prefill of {plan.ranks} ranks ({plan.sharding}), "
        f"{plan.lanes} {plan.lane_kind} lanes, verify {plan.verify}, {plan.decode_pages}/{plan.prefill_pages} pages"
        + (", hasty" if plan.hasty else "")
        + (f", weather: {weather}" if weather else "")
    ]
    for request in plan.requests:
        extras = "".join(
            f", {name} {getattr(request, name)}"
            for name in ("abort_decode_after_s", "abort_prefill_after_s", "retries", "extend_s")
            if getattr(request, name)
        )
        lines.append(
            f"  {request.at_s:8.3f} s  request {request.request_id}: {request.kind}, tokens "
            f"[{request.first_token}, {request.n_tokens}), prefill{request.prefill} -> decode "
            f"{','.join(map(str, request.decodes))}{extras}"
        )
    lines += [
        f"  {fault.at_s:8.3f} s  fault {fault.kind}: {fault.target}, {fault.duration_s} s" for fault in plan.faults
    ]
    return lines
