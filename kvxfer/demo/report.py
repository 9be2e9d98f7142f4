"""The demonstration on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.demo.layout import TOKENS_PER_PAGE
from kvxfer.demo.scenario import DemoResult, LaneResult, stages_ms

SHOWN_TOKENS = 10
SHOWN_PAGES = 6


def render(console: Console, result: DemoResult) -> None:
    options = result.options
    model = "a small Llama with random weights" if options.model is None else str(options.model)
    sizes = f"a prompt of {options.prompt_tokens} tokens, {options.new_tokens} new ones"
    console.print(f"\n[bold]{escape(model)}, {sizes}[/bold]")
    console.print(f"one process alone   {_tokens(result.tokens_alone)}")
    for lane in result.lanes:
        _lane(console, result, lane)
    good, bad = "[bold green]everything is as promised[/bold green]", "[bold red]NOT as promised[/bold red]"
    console.print(f"\n{good if result.ok else bad}")


def _lane(console: Console, result: DemoResult, lane: LaneResult) -> None:
    handoff = lane.handoff
    console.print(f"\n[bold]lane {lane.lane}[/bold]")
    identical = handoff.get("tokens") == result.tokens_alone
    mark = "[green]identical[/green]" if identical else "[bold red]DIFFERENT[/bold red]"
    console.print(f"handed over         {_tokens(handoff.get('tokens', []))}  {mark}")
    console.print(f"KV of other weights {_tokens(lane.control.get('tokens', []))}  (must differ)")
    console.print(
        f"{handoff.get('pages')} pages of {TOKENS_PER_PAGE} tokens, {result.page_bytes} bytes each over all layers: "
        f"{handoff.get('bytes')} bytes"
    )
    console.print(_times(lane))
    console.print("decode's pool when the pages were READY:")
    console.print(escape(handoff.get("map", "")))
    for incident in lane.incidents:
        _incident(console, incident)
    if lane.incidents and lane.incidents[-1].get("map"):
        console.print("what decode's pool held when it was refused:")
        console.print(escape(lane.incidents[-1]["map"]))
    checks = Table.grid(padding=(0, 2))
    for promise, kept in lane.checks.items():
        checks.add_row("[green]yes[/green]" if kept else "[bold red]NO[/bold red]", escape(promise))
    console.print(checks)


def _times(lane: LaneResult) -> Table:
    table = Table(title="one handoff (ms)", title_justify="left")
    times = stages_ms(lane)
    for name in times:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{value:.2f}" for value in times.values()))
    return table


def _incident(console: Console, incident: dict[str, Any]) -> None:
    if incident["accepted"]:
        console.print(f"[bold red]a one-page placeholder that {incident['placeholder']} was ACCEPTED[/bold red]")
        return
    console.print(
        f"a one-page placeholder that {escape(incident['placeholder'])}: [green]refused[/green] ({incident['kind']})\n"
        f"  {escape(str(incident['error']))}\n"
        f"  {incident['pages_refused']} pages refused: logical {_numbers(incident['logical_pages'])}, in the pool "
        f"{_numbers(incident['pool_pages'])}\n"
        f"  {len(incident.get('stale_pages', []))} of {incident['pages']} reserved pages still held older bytes"
    )


def _tokens(tokens: list[int]) -> str:
    more = " …" if len(tokens) > SHOWN_TOKENS else ""
    return " ".join(f"{token:4d}" for token in tokens[:SHOWN_TOKENS]) + more


def _numbers(numbers: list[int]) -> str:
    more = ", …" if len(numbers) > SHOWN_PAGES else ""
    return ", ".join(map(str, numbers[:SHOWN_PAGES])) + more
