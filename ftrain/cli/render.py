"""The only place that prints. Data goes to stdout, everything else to stderr; colour only where there is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click
import msgspec

from recovery.codes import ExitCode


def data(text: str) -> None:
    """A line of the answer."""
    click.echo(text)


def json(value: Any, *, indent: int = 2) -> None:
    """The answer as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=indent).decode())


def note(text: str) -> None:
    """Something for the person, not for the pipe."""
    click.echo(text, err=True)


def fail(message: str, code: ExitCode) -> NoReturn:
    """Say what is wrong and what to do, and leave with `code`."""
    complain(message)
    sys.exit(code)


def complain(message: str) -> None:
    """In red, unless the person wants no colours (no-color.org)."""
    click.echo(message if os.environ.get("NO_COLOR") else click.style(message, fg="red"), err=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain aligned table: it survives a pipe, a log file and a narrow terminal."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    for row in [list(head), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def is_terminal() -> bool:
    """Whether a person may be watching stderr."""
    return sys.stderr.isatty()
