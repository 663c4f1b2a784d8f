"""Files that a command writes where its user says: made again as often as wanted, and never over anything else.

What is at the path is looked at before any work is done: a config that was named by mistake is kept, and nobody waits for an
answer that then cannot be written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ftrain.cli import render
from ftrain.cli.types import NamedPath
from recovery.codes import ExitCode


@dataclass(frozen=True, slots=True)
class Kind:
    """What is written, and how every such file of ours begins."""

    name: str
    beginnings: tuple[bytes, ...]


PAGE = Kind(
    "page",
    (
        b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>',
        b'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>',
    ),
)
PICTURE = Kind("SVG picture", (b'<svg xmlns="http://www.w3.org/2000/svg" width="',))
TRACE = Kind("trace", (b'{"traceEvents": [{"ph": "M", "name": "thread_name"',))
CERTIFICATE = Kind("certificate", (b'{\n  "version": "',))
PROFILE = Kind("hardware profile", (b"# Written by `ftrain doctor --measure`",))


class OutputFile(NamedPath):
    """A file to write: a new one, an earlier one of the same kind, or what is no file that could be lost (/dev/stdout)."""

    def __init__(self, kind: Kind) -> None:
        """`kind`: what may be replaced."""
        super().__init__(dir_okay=False, path_type=Path)
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or click's own usage error."""
        path: Path = super().convert(value, param, ctx)
        if why := why_not(path, self.kind):
            self.fail(why, param, ctx)
        return path


def why_not(path: Path, kind: Kind) -> str:
    """Why a file of that kind may not, or cannot, be written there; empty if nothing is against it."""
    try:
        if path.is_file():
            if not _may_go(path, kind):
                return f"{path} is there already and is no {kind.name} of ftrain's; it is left as it is: give another name"
            place, right = path, os.W_OK
        else:
            place, right = (path, os.W_OK) if path.exists() else (path.parent, os.W_OK | os.X_OK)
            if not place.is_dir() and place != path:
                return f"{path}: cannot be written: there is no folder {place}; make it (mkdir -p {place})"
        return "" if os.access(place, right) else f"{path}: cannot be written (Permission denied)"
    except OSError as error:
        return f"{path}: cannot be written ({error.strerror})"


def _may_go(path: Path, kind: Kind) -> bool:
    """Whether what would be lost is an earlier file of the same kind, or empty."""
    with path.open("rb") as file:
        head = file.read(max(map(len, kind.beginnings)))
    return not head or head.startswith(kind.beginnings)


def write(path: Path, kind: Kind, text: str) -> None:
    """Write it; leaves with a sentence if that cannot be done, or if meanwhile something else has come there."""
    if why := why_not(path, kind):
        render.fail(why, ExitCode.USAGE)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        render.fail(f"{path}: cannot be written ({error.strerror})", ExitCode.USAGE)
