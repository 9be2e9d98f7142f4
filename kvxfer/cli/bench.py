"""``kvxfer bench``: parses options, runs one or both sides, and prints figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli import exit_codes
from kvxfer.cli.output import CliError, Output, json_wanted
from kvxfer.errors import CapacityError, ConfigurationError, GeometryError, KvxferError

if TYPE_CHECKING:
    from kvxfer.bench.options import BenchOptions
    from kvxfer.control.keys import Keys


def command(
    context: typer.Context,
    lane: Annotated[str, typer.Option(help="local (same host) or tcp.")] = "local",
    page_bytes: Annotated[str, typer.Option(help="Bytes of a page in one region; commas make a sweep.")] = "64K",
    pages: Annotated[int | None, typer.Option(help="Pages a round; default: 256 MiB over all regions.")] = None,
    regions: Annotated[int, typer.Option(help="Regions (layers) that share the page numbering.")] = 1,
    connections: Annotated[int, typer.Option(help="Lanes: also copier threads, and threads given to memcpy.")] = 1,
    verify: Annotated[str, typer.Option(help="digest, or coverage (weaker: no digests).")] = "digest",
    repeat: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    latency_handoffs: Annotated[int, typer.Option(help="One-page handoffs timed for p50 and p99; 0: none.")] = 500,
    seed: Annotated[int, typer.Option(help="Of contents and page orders.")] = 1,
    role: Annotated[str | None, typer.Option(help="prefill or decode: run one side only; default: both, here.")] = None,
    listen: Annotated[str | None, typer.Option(help="With --role prefill: host:port to listen on.")] = None,
    connect: Annotated[str | None, typer.Option(help="With --role decode: host:port of prefill.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Key directory of this side (kvxfer keygen).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow another host without keys.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the sweep (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Measure a lane against memcpy of the same pages, and check every byte that arrived.

    Starts both sides itself. Across hosts: [bold]--role prefill --listen[/bold] on one and
    [bold]--role decode --connect[/bold] on the other, with the same options on both.
    """
    output = Output(json_wanted(context, as_json))
    if plot is not None:
        _require_matplotlib()
    runs = _options(lane, page_bytes, pages, regions, connections, verify, repeat, latency_handoffs, seed)
    _check_role(role, listen, connect)
    documents = []
    for options in runs:
        try:
            document = _run(output, options, role, listen, connect, _load_keys(keys), insecure)
        except CapacityError as error:
            raise CliError(
                str(error),
                status=exit_codes.ENVIRONMENT,
                kind="CapacityError",
                hint="Ask for fewer pages.",
                **error.details,
            ) from error
        if document is None:
            output.note("prefill's side is done; the figures are at decode")
            if output.as_json:
                output.result({"role": "prefill", "done": True}, lambda console: None)
            continue
        documents.append(document)
        if not output.as_json:
            _render(output.out, document)
    if not documents:
        return
    if output.as_json:
        output.result(documents[0] if len(documents) == 1 else {"results": documents}, lambda console: None)
    if plot is not None:
        from kvxfer.bench.plot import plot_sweep

        plot_sweep(documents, plot)
        output.note(f"wrote {plot}")
    if not all(document["bytes_checked_ok"] for document in documents):
        raise typer.Exit(exit_codes.NOT_AS_PROMISED)


def _run(
    output: Output,
    options: BenchOptions,
    role: str | None,
    listen: str | None,
    connect: str | None,
    keys: Keys | None,
    insecure: bool,
) -> dict[str, Any] | None:
    from kvxfer.bench.run import run_decode, run_pair, run_prefill
    from kvxfer.bench.sides import steps

    with output.progress(f"{options.lane}, pages of {options.page_bytes} bytes", len(list(steps(options)))) as advance:
        if role == "prefill":
            assert listen is not None
            try:
                run_prefill(
                    options, listen, keys=keys, insecure=insecure, advance=advance,
                    listening=lambda address: output.note(f"listening on {address}"),
                )  # fmt: skip
            except ConfigurationError as error:
                raise CliError(
                    str(error),
                    status=exit_codes.ENVIRONMENT,
                    kind=type(error).__name__,
                    hint="Another process may hold the port; port 0 takes a free one.",
                    **error.details,
                ) from error
            return None
        if role == "decode":
            assert connect is not None
            return run_decode(options, connect, keys=keys, insecure=insecure, advance=advance).document()
        return run_pair(options, advance=advance).document()


def _options(
    lane: str,
    page_bytes: str,
    pages: int | None,
    regions: int,
    connections: int,
    verify: str,
    repeat: int,
    latency_handoffs: int,
    seed: int,
) -> list[BenchOptions]:
    from kvxfer.bench.options import DEFAULT_TOTAL_BYTES, MAX_CHUNKS, BenchOptions, parse_bytes

    runs = []
    try:
        for text in page_bytes.split(","):
            size = parse_bytes(text)
            if pages is None and size > 0 and regions > 0:
                n_pages = max(1, min(DEFAULT_TOTAL_BYTES // (size * regions), MAX_CHUNKS // regions))
            else:
                n_pages = 1 if pages is None else pages
            runs.append(
                BenchOptions(
                    lane=lane,
                    page_bytes=size,
                    pages=n_pages,
                    regions=regions,
                    connections=connections,
                    verify=verify,
                    repeat=repeat,
                    latency_handoffs=latency_handoffs,
                    seed=seed,
                )  # fmt: skip
            )
    except GeometryError as error:
        raise CliError(
            error.message, status=exit_codes.USAGE, kind="UsageError", hint="See kvxfer bench --help.", **error.details
        ) from error
    return runs


def _check_role(role: str | None, listen: str | None, connect: str | None) -> None:
    problem = ""
    if role not in (None, "prefill", "decode"):
        problem = f"unknown role {role!r}; there are: prefill, decode"
    elif role == "prefill" and listen is None:
        problem = "--role prefill needs --listen host:port"
    elif role == "decode" and connect is None:
        problem = "--role decode needs --connect host:port"
    elif listen is not None and role != "prefill":
        problem = "--listen goes with --role prefill"
    elif connect is not None and role != "decode":
        problem = "--connect goes with --role decode"
    if problem:
        raise CliError(problem, status=exit_codes.USAGE, kind="UsageError", hint="See kvxfer bench --help.")


def _load_keys(directory: Path | None) -> Keys | None:
    if directory is None:
        return None
    from kvxfer.control.keys import Keys

    try:
        return Keys.load(directory)
    except KvxferError as error:
        raise CliError(
            str(error),
            status=exit_codes.ENVIRONMENT,
            kind=type(error).__name__,
            hint="kvxfer keygen makes a key directory.",
        ) from error


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CliError(
            "--plot needs matplotlib, which is not installed",
            status=exit_codes.ENVIRONMENT,
            kind="MissingPackage",
            hint="pip install 'kvxfer[plot]'",
            package="matplotlib",
        ) from error


def _render(console: Console, document: dict[str, Any]) -> None:
    table = Table(title=_title(document), title_justify="left", show_header=True, header_style="bold")
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("worst – best", justify="right")
    table.add_row(
        f"{document['lane']}, {document['verify']}",
        f"{document['gbps_median']:.2f} GB/s",
        f"{document['gbps_worst']:.2f} – {document['gbps_best']:.2f}",
    )
    table.add_row(
        f"memcpy, {document['memcpy_threads']} thread(s)",
        f"{document['memcpy_gbps']:.2f} GB/s",
        f"{document['memcpy_gbps_worst']:.2f} – {document['memcpy_gbps_best']:.2f}",
    )
    table.add_row("ratio to memcpy", f"{document['ratio_to_memcpy']:.2f}", "")
    if document.get("c_stream_gbps") is not None:
        table.add_row("plain C stream", f"{document['c_stream_gbps']:.2f} GB/s", "")
        table.add_row("ratio to the C stream", f"{document['ratio_to_c_stream']:.2f}", "")
        table.add_row("the same from the cache", f"{document['c_stream_cached_gbps']:.2f} GB/s", "")
    elif document.get("c_stream_missing"):
        table.add_row("plain C stream", "none", document["c_stream_missing"])
    latency = document["latency_us"]
    if latency["p50"] is not None:
        size = document["latency_bytes"]
        table.add_row(f"one-page handoff ({size} B), p50", f"{latency['p50']:.0f} µs", f"p99 {latency['p99']:.0f}")
    table.add_row("memory beyond the pool", f"{document['rss_beyond_pool_mib']:.1f} MiB", "")
    console.print(table)
    stages = ", ".join(f"{name} {value:.2f}" for name, value in document["stages_ms"].items())
    console.print(f"stages (ms, medians): {stages}")
    good, bad = "[green]every byte as sent[/green]", "[bold red]BYTES DIFFER[/bold red]"
    verdict = good if document["bytes_checked_ok"] else bad
    console.print(f"checked {document['bytes_checked']} bytes: {verdict}\n")


def _title(document: dict[str, Any]) -> str:
    total_mib = document["total_bytes"] / (1 << 20)
    return (
        f"{document['pages']} pages of {document['page_bytes']} B in {document['regions']} region(s): "
        f"{total_mib:.1f} MiB, {document['connections']} lane(s), {document['repeat']} rounds, "
        f"{document['cpus']} CPUs, {document['isa']}"
    )
