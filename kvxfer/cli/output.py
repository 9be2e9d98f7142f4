"""What a command prints: text for people, or one JSON document with ``--json``. Errors follow the same rule."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvxfer.errors import KvxferError


class CliError(Exception):
    """A failure with an exit status and, in ``hint``, what to do next."""

    def __init__(self, message: str, *, status: int, kind: str, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.hint = hint
        self.details = details


class Output:
    """Standard output carries results only; progress, hints and errors go to standard error (with ``--json`` errors are
    the document on standard output, so that a program reads one place)."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, soft_wrap=False)
        self.err = Console(stderr=True, highlight=False)

    def result(self, document: dict[str, Any], render: Callable[[Console], None]) -> None:
        """Prints the JSON document, or calls ``render`` with the terminal's console."""
        if self.as_json:
            print(json.dumps(document, default=str), flush=True)
        else:
            render(self.out)

    def note(self, text: str) -> None:
        """A line for people, on standard error; silent with ``--json``."""
        if not self.as_json:
            self.err.print(f"[dim]{escape(text)}[/dim]")

    def fail(self, error: CliError) -> NoReturn:
        """Prints the error and ends the process with its status."""
        if self.as_json:
            document = {"kind": error.kind, "message": error.message, "hint": error.hint, "details": error.details}
            print(json.dumps({"error": document}, default=str), flush=True)
        else:
            self.err.print(f"[bold red]error:[/bold red] {escape(error.message)}")
            if error.hint:
                self.err.print(f"[dim]{escape(error.hint)}[/dim]")
        sys.exit(error.status)

    @contextlib.contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on standard error when it is a terminal; yields the function that advances it by one."""
        if self.as_json or not self.err.is_terminal:
            yield lambda: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)


def json_wanted(context: typer.Context, as_json: bool) -> bool:
    """True if ``--json`` stands before or after the command's name."""
    return as_json or bool(context.find_root().params.get("as_json"))


def kvxfer_error(error: KvxferError, status: int) -> CliError:
    """A library error as the command line shows it, with its numbers."""
    hint = "The same request may be tried again." if error.retryable else ""
    shown = CliError(str(error), status=status, kind=type(error).__name__, hint=hint)
    shown.details = dict(error.details)  # whatever their names are
    return shown
