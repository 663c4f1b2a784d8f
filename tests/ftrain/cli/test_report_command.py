"""`ftrain report`: what goes where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.report import report
from tests.ledgers import Story, config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, finished."""
    folder = tmp_path / "run"
    Story(config()).start().steps(3).end().write(folder)
    return folder


def test_the_page_is_written_and_the_terminal_gets_one_line(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = CliRunner().invoke(report, [str(run), "--html", str(page)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [f"wrote {page}: open it in a browser"]
    assert page.read_text().startswith("<!doctype html>")


def test_the_text_fits_a_terminal_of_80_columns_and_the_json_is_not_cut(tmp_path: Path) -> None:
    folder, reason = tmp_path / "run", "rank 1 said " + "something at length " * 12
    story = Story(config(), layout="tp1 x cp1 x pp1 x dp2").start().steps(3)
    story.die(class_="object_store_throttle", reason=reason)
    story.start().steps(5).end().write(folder)
    text = CliRunner().invoke(report, [str(folder)]).stdout
    assert [line for line in text.splitlines() if len(line) > 80 and "tmp" not in line] == []
    assert reason.strip() in " ".join(text.split())
    story = json.loads(CliRunner().invoke(report, [str(folder), "--attempt", "0", "--json"]).stdout)["story"]
    assert any(reason.strip() in line for line in story)
    told = CliRunner().invoke(report, [str(folder), "--attempt", "0"]).stdout
    assert max(map(len, told.splitlines())) <= 80


def test_why_a_prediction_has_no_error_is_said_once_for_all_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    story = Story(config(), layout="dp4").start().steps(5).die().start(layout="dp2", ranks=2).steps(5)
    story.die().start(layout="dp1", ranks=1).steps(5).end().write(folder)
    text = CliRunner().invoke(report, [str(folder)]).stdout
    assert text.count("(1) not predicted: the hardware profile names no peak") == 1
    steps = [line.split() for line in text.splitlines() if line.startswith("  step  ")]
    assert [row[-1] for row in steps] == ["(1)"] * 3


def test_page_and_json_may_both_be_had(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(report, [str(run), "--html", str(tmp_path / "report.html"), "--json"])
    assert json.loads(done.stdout)["step"] == 3


def test_a_page_that_cannot_be_written_is_said(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(report, [str(run), "--html", str(tmp_path / "no" / "report.html")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
