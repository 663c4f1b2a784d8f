"""What a person may have meant by a RUN that is not there: the config's run, a neighbour's name, a step that exists.

Looked up only after something was not found, and only among folders of this machine.
"""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ftrain.schemes import is_local


def from_here(words: Sequence[str]) -> str:
    """A command for any shell in any folder: the paths in it, and in what it reads, are relative to this one."""
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"


def no_run(run_url: str) -> str:
    """That no run is recorded there, what RUN is, and what may have been meant."""
    return f"{run_url}: no ledger of a run is there; RUN is the run.url of a config.{meant(run_url)}"


def meant(run_url: str) -> str:
    """A sentence that follows "not there", with a space before it; empty if nothing comes near."""
    path = Path(os.path.expanduser(run_url.removeprefix("file://")))
    if not run_url or not is_local(run_url) or holds_run(path):
        return ""
    if path.is_file():
        return _of_file(path)
    base, at, step = run_url.rpartition("@")
    if at and holds_run(Path(base)):
        return f" RUN has no step: {base}." if step.isdecimal() else f" STEP is a number, as in {base}@100."
    parent = path.parent
    try:
        runs = [entry.name for entry in parent.iterdir() if holds_run(entry)] if parent.is_dir() else []
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, runs, n=1)
    return f" Did you mean `{parent / close[0]}`?" if close else ""


def _of_file(path: Path) -> str:
    """A config was given where its run was wanted, which is an easy mistake."""
    try:
        url = tomllib.loads(path.read_text(encoding="utf-8"))["run"]["url"]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return " It is a file; a run is a folder or a URL."
    return f" It is a config; its run is `{url}`."


def holds_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return any((folder / name).is_dir() for name in ("checkpoints", "epochs", "ledger", "local"))
