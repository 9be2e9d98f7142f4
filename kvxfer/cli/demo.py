"""``kvxfer demo``: a real KV cache handed over between two processes, and the incident refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli import exit_codes
from kvxfer.cli.output import CliError, Output, json_wanted

LANES = ("local", "tcp")


def command(
    context: typer.Context,
    lane: Annotated[str, typer.Option(help="local, tcp or both.")] = "both",
    model: Annotated[Path | None, typer.Option(help="Folder of a local model; default: a small random one.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 300,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 32,
    seed: Annotated[int, typer.Option(help="Of weights and prompt.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Hand a transformer's KV cache from one process to another, then replay the incident.

    Two worker processes: one computes the prompt's KV cache into pages of its pool, the other receives the pages and
    decodes from them. The tokens must be those of one process alone. Then prefill puts a one-page placeholder in the
    prompt's place, and decode must refuse it and name the pages. Ends with a status other than 0 if anything is not as
    promised.
    """
    output = Output(json_wanted(context, as_json))
    if lane not in (*LANES, "both"):
        raise _usage(f"unknown lane {lane!r}; there are: local, tcp, both")
    if prompt_tokens < 33:
        raise _usage("--prompt-tokens must be at least 33: the incident needs a prompt of several pages of 16 tokens")
    if not 1 <= new_tokens <= 4096:
        raise _usage("--new-tokens must lie between 1 and 4096")
    _require_packages()
    _check_model(model)
    from kvxfer.demo.report import render
    from kvxfer.demo.scenario import STEPS_PER_LANE, DemoOptions, run_demo

    lanes = LANES if lane == "both" else (lane,)
    options = DemoOptions(lanes, model, prompt_tokens, new_tokens, seed)
    with output.progress("demo", 1 + STEPS_PER_LANE * len(lanes)) as advance:
        result = run_demo(options, advance)
    output.result(result.document(), lambda console: render(console, result))
    if not result.ok:
        raise typer.Exit(exit_codes.NOT_AS_PROMISED)


def _usage(message: str) -> CliError:
    return CliError(message, status=exit_codes.USAGE, kind="UsageError", hint="See kvxfer demo --help.")


def _require_packages() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CliError(
                f"the demo needs {package}, which is not installed",
                status=exit_codes.ENVIRONMENT,
                kind="MissingPackage",
                hint="pip install 'kvxfer[demo]'",
                package=package,
            )


def _check_model(model: Path | None) -> None:
    if model is None or (model / "config.json").is_file():
        return
    what = "has no config.json" if model.is_dir() else "is not a folder"
    raise CliError(
        f"{model} {what}: --model takes a local folder as transformers saves it",
        status=exit_codes.ENVIRONMENT,
        kind="NoModel",
        hint="Leave --model out for a small model with random weights.",
        path=str(model),
    )
