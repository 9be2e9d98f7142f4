"""``kvxfer sim`` says what it ran, and fails loudly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.cli import exit_codes
from kvxfer.cli.app import main
from kvxfer.sim.lane_group import LaneGroup
from kvxfer.sim.scenario import scenario
from kvxfer.sim.simulation import run


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_the_document_counts_seeds_events_and_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run_command(capsys, "--seeds", "5", "--first", "3", "--jobs", "1", "--json")
    document: dict[str, Any] = json.loads(text)
    assert status == exit_codes.OK
    assert (document["ok"], document["first"], document["seeds"], document["violations"]) == (True, 3, 5, [])
    assert document["events"] == sum(run(scenario(seed)).events for seed in range(3, 8))
    assert document["events_per_second"] > 0 and document["counts"]["request"] > 0


def test_several_processes_come_to_the_same_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    documents = [json.loads(run_command(capsys, "--seeds", "20", "--jobs", jobs, "--json")[1]) for jobs in ("1", "2")]
    for name in ("seeds", "events", "simulated_s", "counts", "violations"):
        assert documents[0][name] == documents[1][name]


def test_a_broken_rule_is_printed_with_its_seed_trace_and_a_smaller_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaneGroup, "fence", lambda self: None)
    bad = next(seed for seed in range(200) if run(scenario(seed)).kind is not None)
    status, text = run_command(capsys, "--seeds", "1", "--first", str(bad), "--jobs", "1", "--trace", "20", "--json")
    document = json.loads(text)
    assert status == exit_codes.NOT_AS_PROMISED
    assert not document["ok"] and document["violations"][0]["seed"] == bad
    assert document["shrunk"]["kind"] == document["violations"][0]["kind"]
    assert len(document["shrunk"]["trace"]) <= 20


def test_replay_prints_the_scenario_and_the_last_events(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run_command(capsys, "--replay", "7", "--trace", "30")
    assert status == exit_codes.OK
    assert text.startswith("seed 7: ") and f"{run(scenario(7)).trace_hash:016x}" in text
    assert "every rule held after every event" in text


def test_the_clock_ends_a_run_that_is_given_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run_command(capsys, "--minutes", "0.01", "--jobs", "1", "--json")
    document = json.loads(text)
    assert 0 < document["seeds"] < 2000 and document["seconds"] < 10


@pytest.mark.parametrize("arguments", [("--seeds", "0"), ("--events", "0"), ("--minutes", "-1"), ("--first", "-1")])
def test_a_senseless_number_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]) -> None:
    assert run_command(capsys, *arguments)[0] == exit_codes.USAGE
