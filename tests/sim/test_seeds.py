"""The rules hold in simulated worlds under faults, and the worlds are rough enough to say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvxfer.sim.campaign import Report, run_seeds
from kvxfer.sim.scenario import scenario
from kvxfer.sim.simulation import run

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200

_REPORTS: list[Report] = []


def report() -> Report:
    """Of the first seeds; they are run once for all tests here."""
    if not _REPORTS:
        _REPORTS.append(run_seeds(0, SEEDS))
    return _REPORTS[0]


def test_every_rule_holds_after_every_event() -> None:
    assert [(found.seed, found.kind, found.text) for found in report().found] == []


def test_everything_that_is_simulated_happens() -> None:
    counts = report().counts
    for what in (
        "handoffs ready", "handoffs failed", "handoffs retried", "grants ready", "grants failed", "engine aborts",
        "engine preempts", "decode mismatch", "decode quarantine", "fence returns", "fence fails", "revoke returns",
        "prefill relane", "lane breaks", "chunks sunk", "PAUSED", "RESUMED", "KILLED", "RESTARTS", "fault: partition",
        "frames lost", "frames cut off", "frames forged", "frames replayed", "records forged", "prefill dropped",
        "decode refused", "engine reuses", "AnswerDigests", "ZeroTail", "reserve waits for pages",
        "reserve refused: CapacityError", "reserve refused: OwnershipError", "reserve refused: DuplicateRequest",
    ):  # fmt: skip
        assert counts[what] > 0, f"{what} never happened in {SEEDS} seeds"


def test_enough_handoffs_succeed_for_their_pages_to_be_judged() -> None:
    assert report().counts["handoffs ready"] > SEEDS


def test_a_seed_does_the_same_again() -> None:
    first, second = run(scenario(7)), run(scenario(7))
    assert first.trace_hash == second.trace_hash
    assert (first.events, first.simulated_s, first.counts) == (second.events, second.simulated_s, second.counts)


def test_a_seed_does_the_same_in_another_process_whatever_its_hash_seed_is() -> None:
    program = (
        "from kvxfer.sim.scenario import scenario\n"
        "from kvxfer.sim.simulation import run\n"
        "print(*[run(scenario(seed)).trace_hash for seed in (7, 8, 13)])"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert hashes == {" ".join(str(run(scenario(seed)).trace_hash) for seed in (7, 8, 13)) + "\n"}


def test_two_seeds_are_two_worlds() -> None:
    assert len({run(scenario(seed)).trace_hash for seed in range(20, 30)}) == 10


def test_keeping_the_trace_changes_nothing() -> None:
    quiet, kept = run(scenario(8)), run(scenario(8), keep=1000)
    assert quiet.trace_hash == kept.trace_hash
    assert quiet.lines == [] and len(kept.lines) == 1000


def test_more_events_are_not_taken_than_the_limit_allows() -> None:
    assert run(scenario(13, events=300)).events < run(scenario(13)).events
