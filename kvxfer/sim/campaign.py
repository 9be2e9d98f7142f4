"""Many seeds on several processes, and what they came to."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvxfer.sim.scenario import DEFAULT_EVENTS, scenario
from kvxfer.sim.simulation import run

CHUNK = 8
"""Seeds that one task of a worker runs."""


@dataclass(slots=True)
class Found:
    """One seed that broke a rule."""

    seed: int
    kind: str
    text: str


@dataclass(slots=True)
class Report:
    """``simulated_s``: of all worlds together. ``counts``: what happened, by name."""

    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds if self.seconds else 0.0

    def add(self, other: Report) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.counts.update(other.counts)
        self.found += other.found


def run_seeds(first: int, count: int, events: int = DEFAULT_EVENTS) -> Report:
    """Runs seeds ``[first, first + count)`` in this process."""
    report = Report()
    for seed in range(first, first + count):
        result = run(scenario(seed, events))
        report.seeds += 1
        report.events += result.events
        report.simulated_s += result.simulated_s
        report.counts.update(result.counts)
        if result.kind is not None:
            report.found.append(Found(seed, result.kind, result.violation or ""))
    return report


def campaign(
    first: int,
    count: int,
    *,
    events: int = DEFAULT_EVENTS,
    jobs: int = 1,
    seconds: float = float("inf"),
    most_found: int = 10,
    advance: Callable[[int], None] = lambda seeds: None,
) -> Report:
    """Runs ``count`` seeds from ``first`` on ``jobs`` processes, for no longer than ``seconds``; stops early after
    ``most_found`` broken ones. ``advance`` is told how many seeds are done."""
    report = Report()
    began = time.monotonic()
    tasks = [(at, min(CHUNK, first + count - at), events) for at in range(first, first + count, CHUNK)]
    for part in _parts(tasks, jobs):
        report.add(part)
        report.seconds = time.monotonic() - began
        advance(part.seeds)
        if report.seconds >= seconds or len(report.found) >= most_found:
            break
    report.found.sort(key=lambda found: found.seed)
    return report


def _parts(tasks: list[tuple[int, int, int]], jobs: int) -> Iterator[Report]:
    if jobs <= 1:
        for task in tasks:
            yield run_seeds(*task)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_task, tasks)


def _run_task(task: tuple[int, int, int]) -> Report:
    return run_seeds(*task)
