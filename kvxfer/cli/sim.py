"""``kvxfer sim``: the protocol's real code on simulated machines under faults, seed by seed."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.cli import exit_codes
from kvxfer.cli.output import CliError, Output, json_wanted
from kvxfer.sim.campaign import Report, campaign
from kvxfer.sim.scenario import DEFAULT_EVENTS, scenario
from kvxfer.sim.shrink import MAX_RUNS, Shrunk, describe, shrink
from kvxfer.sim.simulation import SETTLE_EVENTS, Result, run

DEFAULT_SEEDS = 2000
SEEDS_A_MINUTE = 1 << 20  # more than any machine runs: with --minutes alone the clock decides
TRACE_LINES = 60

SHOWN = (
    "request", "handoffs ready", "handoffs failed", "handoffs retried", "engine aborts", "engine preempts",
    "grants ready", "grants failed", "decode mismatch", "decode quarantine", "decode fence", "fence fails", "Revoke",
    "prefill relane", "lane breaks", "chunks sunk", "PAUSED", "KILLED", "fault: partition", "frames lost",
    "frames cut off", "frames forged", "frames replayed", "records forged", "prefill dropped", "decode refused",
    "reserve waits for pages", "reserve refused: CapacityError", "reserve refused: OwnershipError",
)  # fmt: skip
"""What the table shows of the counts; the JSON document has all of them."""


def command(
    context: typer.Context,
    seeds: Annotated[
        int | None, typer.Option(help=f"How many seeds; default {DEFAULT_SEEDS}, or as --minutes says.")
    ] = None,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long.")] = None,
    replay: Annotated[int | None, typer.Option(help="Run this seed alone, and print what happened.")] = None,
    events: Annotated[
        int, typer.Option(help="Events of a seed before its faults end and it settles.")
    ] = DEFAULT_EVENTS,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    trace: Annotated[int, typer.Option(help="Lines of a trace to print.")] = TRACE_LINES,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Run the protocol in a simulated world: lossy networks, late writes, crashes, pauses, hostile peers.

    Every seed is one world, and the rules S1-S8 are checked after every event in it. A seed that breaks one is printed
    with a trace and made smaller; the same seed always does the same. Ends with a status other than 0 if a rule broke.
    """
    output = Output(json_wanted(context, as_json))
    for name, value, least in (("seeds", seeds, 1), ("first", first, 0), ("events", events, 1), ("jobs", jobs, 0)):
        if value is not None and value < least:
            raise _usage(f"--{name} must be at least {least}")
    if minutes is not None and minutes <= 0:
        raise _usage("--minutes must be positive")
    if replay is not None:
        _replay(output, replay, events, max(1, trace))
        return
    count = seeds if seeds is not None else DEFAULT_SEEDS if minutes is None else SEEDS_A_MINUTE
    with output.progress("simulating", count) as advance:

        def done(number: int) -> None:
            for _ in range(number):
                advance()

        report = campaign(
            first,
            count,
            events=events,
            jobs=jobs or os.cpu_count() or 1,
            seconds=float("inf") if minutes is None else 60.0 * minutes,
            advance=done,
        )
    shrunk = _smallest(report, events, max(1, trace))
    output.result(_document(report, first, events, shrunk), lambda console: _render(console, report, events, shrunk))
    if report.found:
        raise typer.Exit(exit_codes.NOT_AS_PROMISED)


def _smallest(report: Report, events: int, trace: int) -> Shrunk | None:
    """The first seed found, made smaller."""
    return shrink(scenario(report.found[0].seed, events), keep=trace) if report.found else None


def _replay(output: Output, seed: int, events: int, trace: int) -> None:
    plan = scenario(seed, events)
    result = run(plan, trace)
    shrunk = shrink(plan, keep=trace) if result.kind is not None else None
    document = {
        "seed": seed,
        "ok": result.kind is None,
        "kind": result.kind,
        "violation": result.violation,
        "events": result.events,
        "simulated_s": result.simulated_s,
        "trace_hash": f"{result.trace_hash:016x}",
        "scenario": describe(plan),
        "trace": result.lines,
        "shrunk": _shrunk_document(shrunk),
    }
    output.result(document, lambda console: _render_replay(console, describe(plan), result, shrunk))
    if result.kind is not None:
        raise typer.Exit(exit_codes.NOT_AS_PROMISED)


def _document(report: Report, first: int, events: int, shrunk: Shrunk | None) -> dict[str, Any]:
    return {
        "ok": not report.found,
        "first": first,
        "seeds": report.seeds,
        "events": report.events,
        "events_limit": {"active": events, "settling": SETTLE_EVENTS},
        "seconds": round(report.seconds, 3),
        "events_per_second": round(report.events_per_second),
        "simulated_s": round(report.simulated_s),
        "counts": dict(sorted(report.counts.items())),
        "violations": [{"seed": found.seed, "kind": found.kind, "text": found.text} for found in report.found],
        "shrunk": _shrunk_document(shrunk),
    }


def _shrunk_document(shrunk: Shrunk | None) -> dict[str, Any] | None:
    if shrunk is None:
        return None
    return {
        "scenario": describe(shrunk.plan),
        "kind": shrunk.result.kind,
        "violation": shrunk.result.violation,
        "events": shrunk.result.events,
        "runs": shrunk.runs,
        "trace": shrunk.result.lines,
    }


def _render(console: Console, report: Report, events: int, shrunk: Shrunk | None) -> None:
    console.print(_counts(report.counts))
    hours = report.simulated_s / 3600
    console.print(
        f"{report.seeds} seeds of at most {events} events and their settling: {report.events} events in "
        f"{report.seconds:.1f} s, {report.events_per_second:,.0f} events/s, {hours:.1f} hours simulated"
    )
    if not report.found:
        console.print("[green]every rule held after every event[/green]")
        return
    for found in report.found:
        console.print(f"[bold red]seed {found.seed}[/bold red] {escape(f'{found.kind}: {found.text}')}")
    _render_shrunk(console, shrunk)
    console.print(f"the same again: kvxfer sim --replay {report.found[0].seed} --events {events}")


def _counts(counts: Counter[str]) -> Table:
    table = Table(title="what happened", show_header=False)
    shown = [(name, counts[name]) for name in SHOWN if counts[name]]
    half = -(-len(shown) // 2)
    for at in range(half):
        row = [*shown[at], *(shown[at + half] if at + half < len(shown) else ("", ""))]
        table.add_row(*map(str, row))
    return table


def _render_replay(console: Console, lines: list[str], result: Result, shrunk: Shrunk | None) -> None:
    for line in (*lines, "", *result.lines):
        console.print(escape(line), soft_wrap=True)
    console.print(
        f"\n{result.events} events, {result.simulated_s:.1f} s simulated, trace hash {result.trace_hash:016x}"
    )
    if result.kind is None:
        console.print("[green]every rule held after every event[/green]")
    else:
        console.print(f"[bold red]broken[/bold red] {escape(f'{result.kind}: {result.violation}')}")
        _render_shrunk(console, shrunk)


def _render_shrunk(console: Console, shrunk: Shrunk | None) -> None:
    if shrunk is None:
        return
    console.print(f"\n[bold]made smaller[/bold] ({shrunk.runs} of at most {MAX_RUNS} runs)")
    for line in (*describe(shrunk.plan), "", *shrunk.result.lines):
        console.print(escape(line), soft_wrap=True)


def _usage(message: str) -> CliError:
    return CliError(message, status=exit_codes.USAGE, kind="UsageError", hint="See kvxfer sim --help.")
