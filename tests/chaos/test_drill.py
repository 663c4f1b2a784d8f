"""`ftrain drill`: random faults of every kind, and the state of the unbroken run."""

from __future__ import annotations

import faulthandler
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ftrain.cli.drill import possible
from ftrain.compose.strikes import BY_NAME, TABLE_5, plan
from tests.commands import ftrain
from tests.runs import FTRAIN, TinyRun

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


def drilled(run: TinyRun, *options: str, limit_s: float) -> dict[str, Any]:
    """One drill to its end."""
    faulthandler.cancel_dump_traceback_later()  # it has a limit of its own
    argv = [*FTRAIN, "drill", str(run.config), "--json", *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit_s)
    assert done.stdout, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    table = json.dumps(outcome["struck"], indent=1) + json.dumps(outcome["unexplained"], indent=1)
    assert (done.returncode, outcome["equal"], outcome["good"]) == (0, True, True), done.stderr + table
    assert outcome["covered"] == len(outcome["struck"]) > 0, "the compared checkpoint comes after every strike"
    assert outcome["step"] >= max(strike["step"] for strike in outcome["struck"])
    assert len(outcome["struck"]) == sum(sum(counts.values()) for counts in outcome["confusion"].values())
    shutil.rmtree(str(run.url) + "-drill")
    return outcome


@pytest.mark.minutes(2.5)
@pytest.mark.usefixtures("no_mounts_of_its_own")
def test_two_minutes(tmp_path: Path, corpus: str) -> None:
    """Half of them left alone, half of them under fire."""
    run = TinyRun(folder=tmp_path, corpus=corpus)
    outcome = drilled(run, "--minutes", "2", "--every", "6", "--seed", "8", limit_s=1200)
    strikes = plan(possible(tuple(BY_NAME)), seed=8, seconds=60, mean_gap_s=6, ranks=run.ranks)
    assert sorted(strike["kind"] for strike in outcome["struck"]) == sorted(strike.kind for strike in strikes)
    assert len(outcome["confusion"]) >= 10
    for kind, classes in outcome["confusion"].items():
        assert classes.keys() <= BY_NAME[kind].classes


@pytest.mark.minutes(6)
@pytest.mark.slow
def test_five_minutes_of_the_mix_of_llama_3(tmp_path: Path, corpus: str) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    outcome = drilled(run, "--minutes", "5", "--every", "10", "--seed", "1", "--faults", "table5", limit_s=2000)
    assert outcome["confusion"].keys() <= TABLE_5.keys()


@pytest.mark.minutes(22)
@pytest.mark.slow
def test_twenty_minutes_on_four_ranks(tmp_path: Path, corpus: str) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4)
    drilled(run, "--minutes", "20", "--every", "60", "--seed", "0", limit_s=7000)


def test_kinds_that_there_are(tmp_path: Path) -> None:
    wrong = ftrain("drill", str(tmp_path / "none.toml"), "--faults", "worker-kill,meteorite")
    assert wrong.returncode == 2
    assert "'meteorite' is no kind of fault" in wrong.stderr
    listed = ftrain("drill", str(tmp_path / "none.toml"), "--faults", "help")
    assert listed.returncode == 0
    rows = listed.stdout.partition("\n\n")[0].splitlines()[1:]  # under the heading, above the mixes
    assert [row.split()[0] for row in rows] == list(BY_NAME)
