"""The ``kvxfer`` command: parses arguments, calls one function a command, and turns every failure into a status."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvxfer._version import __version__
from kvxfer.cli import bench, demo, exit_codes, keygen, sim
from kvxfer.cli.output import CliError, Output, kvxfer_error
from kvxfer.errors import CapacityError, ConfigurationError, GeometryError, InsecureEndpoint, KvxferError

app = typer.Typer(
    name="kvxfer",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Moves KV-cache pages from prefill to decode, and lets decode read only what was proven to be written.",
)
app.command("demo")(demo.command)
app.command("bench")(bench.command)
app.command("keygen")(keygen.command)
app.command("sim")(sim.command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    if version:
        document = {"version": __version__, "python": platform.python_version(), "native": _native_isa()}
        Output(as_json).result(document, lambda console: console.print(f"kvxfer {__version__}"))
        raise typer.Exit(exit_codes.OK)
    if context.invoked_subcommand is None:
        raise CliError(
            "no command given", status=exit_codes.USAGE, kind="UsageError", hint="See kvxfer --help for the commands."
        )


def _native_isa() -> str | None:
    try:
        from kvxfer import _native
    except ImportError:
        return None
    return _native.isa()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its status; never prints a traceback for a user's mistake."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    output = Output("--json" in given)
    try:
        status = app(args=given, standalone_mode=False, prog_name="kvxfer")
        if status == exit_codes.INTERRUPTED:  # typer takes Ctrl-C for a command that chose this status
            raise KeyboardInterrupt
    except CliError as error:
        output.fail(error)
    except KvxferError as error:
        output.fail(kvxfer_error(error, _status_of(error)))
    except (KeyboardInterrupt, typer.Abort):
        output.fail(CliError("interrupted", status=exit_codes.INTERRUPTED, kind="Interrupted"))
    except Exception as error:
        usage = _usage_error(error)
        if usage is None:
            raise
        output.fail(usage)
    sys.exit(status if isinstance(status, int) else exit_codes.OK)


def _status_of(error: KvxferError) -> int:
    if isinstance(error, GeometryError):
        return exit_codes.USAGE
    if isinstance(error, (CapacityError, ConfigurationError, InsecureEndpoint)):
        return exit_codes.ENVIRONMENT
    return exit_codes.HANDOFF_FAILED


def _usage_error(error: Any) -> CliError | None:
    """The parser's own errors, whichever package they come from (typer carries its own copy of click since 0.20)."""
    if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvxfer"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        sys.exit(exit_codes.USAGE)
    return CliError(error.format_message(), status=exit_codes.USAGE, kind="UsageError", hint=f"See {command} --help.")
