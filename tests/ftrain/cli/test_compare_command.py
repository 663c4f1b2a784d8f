"""`ftrain compare`: which runs may be given for which."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.entry import cli
from tests.ledgers import T0, Story, config


def written(folder: Path, *, t: float, seconds: float) -> Path:
    """A run that began then."""
    story = Story(config())
    story.events.clear()
    story.t = t
    story.launch().start().steps(40, seconds=[seconds, 1.01 * seconds, 0.99 * seconds]).end().write(folder)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path / "a", t=T0, seconds=2.0), written(tmp_path / "b", t=T0 + 500, seconds=1.0)


@pytest.mark.parametrize("spelled", ["as before", "by another path", "a link", "a copy"])
def test_the_same_run_again_is_no_second_measurement(runs: tuple[Path, Path], spelled: str, tmp_path: Path) -> None:
    a, b = runs
    second = written(tmp_path / "a2", t=T0 + 1000, seconds=2.0)
    match spelled:
        case "as before":
            again = str(b)
        case "by another path":
            again = f"{tmp_path}/../{tmp_path.name}/b"
        case "a link":
            again = str(tmp_path / "linked")
            Path(again).symlink_to(b)
        case _:
            again = str(shutil.copytree(b, tmp_path / "copied"))
    done = CliRunner().invoke(cli, ["compare", str(a), str(b), "--again", str(second), again], catch_exceptions=False)
    assert done.exit_code == 2, done.output
    assert f"B ({b}) and B2 ({again}) are one and the same run, test, begun" in done.stderr
    assert "no second measurement" in done.stderr
    assert done.stdout == ""


def test_runs_that_were_begun_anew_are_one(runs: tuple[Path, Path], tmp_path: Path) -> None:
    again = [written(tmp_path / "a2", t=T0 + 1000, seconds=2.0), written(tmp_path / "b2", t=T0 + 1500, seconds=1.0)]
    done = CliRunner().invoke(cli, ["compare", *map(str, runs), "--again", *map(str, again)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "more tokens per second" in done.stdout
