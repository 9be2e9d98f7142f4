"""``kvxfer keygen``: makes the CURVE key pair of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvxfer.cli import exit_codes
from kvxfer.cli.output import CliError, Output, json_wanted
from kvxfer.errors import KvxferError


def command(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Where the keys go; made if missing.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a key pair that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Make a CURVE key pair for one worker.

    The secret file is readable by its owner only. Copy kvxfer.pub to the peer's [bold]authorised[/bold] folder under a
    name of its own (any name that ends in .pub), and the peer's here; prefill and decode then trust each other and
    nobody else.
    """
    from kvxfer.control.keys import Keys

    output = Output(json_wanted(context, as_json))
    keys = Keys.generate()
    try:
        secret_path, public_path = keys.save(directory, overwrite=overwrite)
    except KvxferError as error:
        raise CliError(
            str(error), status=exit_codes.ENVIRONMENT, kind=type(error).__name__, hint="--overwrite replaces it."
        ) from error
    except OSError as error:
        raise CliError(
            f"cannot write keys to {directory}: {error.strerror}", status=exit_codes.ENVIRONMENT, kind="OSError"
        ) from error
    document = {"secret": str(secret_path), "public": str(public_path), "public_key": keys.public.decode()}

    def render(console: Console) -> None:
        console.print(f"secret key  {secret_path}  (keep it here)")
        console.print(f"public key  {public_path}")
        console.print("copy kvxfer.pub to the peer's authorised/ folder under a name of its own")

    output.result(document, render)
