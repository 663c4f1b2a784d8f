"""`ftrain` commands as a user starts them, and the files of a finished run that tests damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.checkpoint import Checkpoint
from storage.objects import open_store
from storage.run import RunStore
from tests.runs import FTRAIN, TinyRun


def ftrain(*words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [*FTRAIN, *words], capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **(env or {})}, cwd=cwd
    )


def ftrain_json(*words: str, env: Mapping[str, str] | None = None) -> Any:
    """What a command that must succeed prints with --json."""
    done = ftrain(*words, "--json", env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copy_of(run: TinyRun, folder: Path) -> TinyRun:
    """A finished local run with everything it left, in another folder."""
    shutil.copytree(run.url, folder / "run", ignore=shutil.ignore_patterns("*.sock"))
    return replace(run, folder=folder, url=str(folder / "run"))


def opened(run: TinyRun, step: int | None = None) -> Checkpoint:
    """A checkpoint of a local run."""
    return RunStore(open_store(run.url)).open(step)


def step_files(run: TinyRun, step: int, pattern: str) -> list[Path]:
    """Files of a checkpoint."""
    found = sorted((Path(run.url) / "checkpoints" / f"step-{step:08d}").glob(pattern))
    assert found, f"no {pattern} in step {step}"
    return found


def flip(path: Path, offset: int) -> None:
    """Change one bit of one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def flip_array(run: TinyRun, step: int, array: str) -> str:
    """Change one bit in an array's first chunk; returns the name of the pack."""
    manifest = opened(run, step).manifest
    number = [spec.name for spec in manifest.arrays].index(array)
    row = int(manifest.table.rows_of(number)[0])
    pack = manifest.packs[int(manifest.table.pack[row])].name
    flip(step_files(run, step, pack)[0], int(manifest.table.position[row]) + 5)
    return pack
