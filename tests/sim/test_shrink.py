"""A failing run is made smaller, and stays the same failure."""

from __future__ import annotations

import pytest

from kvxfer.sim.lane_group import LaneGroup
from kvxfer.sim.scenario import Scenario, scenario
from kvxfer.sim.shrink import describe, shrink
from kvxfer.sim.simulation import run


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """A world whose fences take nothing away, and that comes to harm by it."""
    monkeypatch.setattr(LaneGroup, "fence", lambda self: None)
    return next(plan for plan in map(scenario, range(200)) if run(plan).kind is not None)


def test_a_failure_is_made_smaller_and_stays_the_same(failing: Scenario) -> None:
    before = run(failing)
    found = shrink(failing, max_runs=120)
    assert found is not None
    assert found.result.kind == before.kind
    assert len(found.plan.requests) < len(failing.requests)
    assert found.result.events < before.events
    assert len(found.plan.faults) <= len(failing.faults)
    assert found.runs <= 120


def test_what_was_made_smaller_fails_again_by_itself(failing: Scenario) -> None:
    found = shrink(failing, max_runs=60)
    assert found is not None
    again = run(found.plan)
    assert (again.kind, again.trace_hash) == (found.result.kind, found.result.trace_hash)


def test_the_trace_of_a_failure_ends_with_it_and_names_time_node_and_action(failing: Scenario) -> None:
    found = shrink(failing, max_runs=60, keep=50)
    assert found is not None
    lines = found.result.lines
    assert "VIOLATION" in lines[-1] and str(found.result.kind) in lines[-1]
    assert 10 < len(lines) <= 50
    assert any("decode" in line for line in lines) and any("prefill" in line for line in lines)


def test_a_run_that_holds_is_not_shrunk() -> None:
    assert shrink(scenario(1)) is None


def test_a_scenario_is_described_request_by_request_and_fault_by_fault() -> None:
    plan = next(plan for plan in map(scenario, range(50)) if len(plan.faults) > 2)
    lines = describe(plan)
    assert len(lines) == 1 + len(plan.requests) + len(plan.faults)
    assert lines[0].startswith(f"seed {plan.seed}: ")
