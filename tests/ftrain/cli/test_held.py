"""A coordinator finds that somebody else runs the run, although its parent held the folder: it was deleted meanwhile and made
anew by another start. The parent says why it leaves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from ftrain.cli.supervise import launch_of, supervise
from ftrain.compose.args import Launch
from ftrain.compose.launch import write
from ftrain.compose.supervise import prepare
from recovery.codes import ExitCode
from recovery.launch import log_size, why_left
from recovery.owner import claim
from tests.ledgers import config

HELD = "held = claim(Path(sys.argv[1]).parent / 'that was here before')"
RUN = f"from ftrain.cli.run import run_supervised; {HELD}; sys.exit(run_supervised(Path(sys.argv[1]), held))"
SUPERVISE = (
    "from ftrain.cli.supervise import launch_of, run_supervised, supervise; "
    f"given = supervise.make_context('supervise', sys.argv[2:]).params; {HELD}; "
    "sys.exit(run_supervised(Path(sys.argv[1]), launch_of(given, ''), held))"
)


def second(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What the loser's parent does; this process holds the run, as the winner would."""
    held = claim(folder)
    try:
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                f"import sys; from pathlib import Path; from recovery.owner import claim; {code}",
                str(folder),
                *words,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        held.release()


def test_of_two_starts_at_once_the_loser_says_who_runs_it(tmp_path: Path) -> None:
    mine = config(f'run.url="{tmp_path / "run"}"')
    claim(tmp_path / "run" / "local").release()
    folder = write(Launch(config=msgspec.to_builtins(mine), fingerprint="", changes=[]), mine)
    done = second(RUN, folder)
    assert done.returncode == ExitCode.HELD, done.stderr
    assert f"the run is already running: process {os.getpid()} on" in done.stderr
    assert "logs are in" not in done.stderr, "they are the winner's"


def test_of_two_supervised_starts_too(tmp_path: Path) -> None:
    words = ["--run", str(tmp_path / "run"), "--", "true"]
    folder, held = prepare(launch_of(supervise.make_context("supervise", list(words)).params, ""))
    held.release()
    done = second(SUPERVISE, folder, *words)
    assert done.returncode == ExitCode.HELD, done.stderr
    assert f"the run is already running: process {os.getpid()} on" in done.stderr


def test_why_it_left_is_what_was_said_since(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    assert (log_size(log), why_left(log, 0, held=True)) == (0, "")
    log.write_text("2026-01-01 00:00:00,000 ERROR root: of yesterday\n2026-01-01 00:00:00,000 INFO root: failed: too\n")
    before = log_size(log)
    with log.open("a") as file:
        file.write("2026-01-02 00:00:00,000 INFO ftrain.x: the winner's\n")
    assert [why_left(log, before, held=held) for held in (True, False)] == ["", ""]
    with log.open("a") as file:
        file.write("2026-01-02 00:00:01,000 ERROR root: storage cannot be used: full\n2026-01-02 00:00:02,000 INFO a: b\n")
        file.write("2026-01-02 00:00:03,000 INFO root: failed: the disk is full\n")  # of which the ledger tells
    assert why_left(log, before, held=False) == "storage cannot be used: full"
