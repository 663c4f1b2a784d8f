"""What a person may have meant by a RUN that is not there: the config's run, a neighbour's name, a step that exists.

Looked up only after something was not found, and only among folders of this machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from ftrain.compose.paths import is_local
from ftrain.schema import did_you_mean

SHOWN_STEPS = 8


def no_run(run_url: str) -> str:
    """That no run is recorded there, what RUN is, and what may have been meant."""
    return f"{run_url}: no ledger of a run is there; RUN is the run.url of a config.{meant(run_url)}"


def meant(run_url: str) -> str:
    """A sentence that follows "not there", with a space before it; empty if nothing comes near."""
    path = Path(run_url.removeprefix("file://")).expanduser()
    if not is_local(run_url):
        return ""
    if path.is_file():
        return _of_file(path)
    base, at, step = run_url.rpartition("@")
    if at and not step.isdigit() and holds_run(Path(base)):
        return f" STEP is a number: {base}@100."
    parent = path.parent
    try:
        runs = [entry.name for entry in parent.iterdir() if holds_run(entry)] if parent.is_dir() else []
    except OSError:
        return ""
    close = did_you_mean(path.name, runs)
    return close.replace(f"`{_named(close)}`", f"`{parent / _named(close)}`") if close else ""


def _named(hint: str) -> str:
    return hint.split("`")[1]


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


def steps_there(steps: Sequence[int]) -> str:
    """The newest few of a run's steps, in words."""
    shown = sorted(steps)[-SHOWN_STEPS:]
    more = f"{len(steps) - len(shown)} older and " if len(steps) > len(shown) else ""
    return f"{more}{', '.join(map(str, shown))}" if steps else "none"
