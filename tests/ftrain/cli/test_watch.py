"""`ftrain watch`: what stands on the screen, and that it ends with the run."""

from __future__ import annotations

import os
import pty
import subprocess
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from rich.console import Console

from ftrain.cli.bars import COLOURS, Bars
from ftrain.cli.entry import cli
from ftrain.cli.watch import Screen
from recovery.events import Decided, encode_line
from tests.commands import ftrain
from tests.ledgers import Story, config
from tests.runs import FTRAIN


def shown(story: Story, **how: Any) -> str:
    screen = Screen()
    screen.add(story.events)
    console = Console(**{"width": 120, "record": True, "file": StringIO(), **how})
    console.print(screen.picture(Bars.of(console)))
    return console.export_text()


def test_the_screen_says_where_the_run_is_and_what_troubled_it() -> None:
    story = Story(config()).start().steps(60, tokens=1024).die(class_="gpu").start(at=50).steps(10, seconds=2.0, tokens=1024)
    text = shown(story)
    assert "step        60/100" in text
    assert "attempt 1" in text
    assert "interruptions 1, steps done again 10" in text
    assert "interruption: gpu: it died" in text
    assert "ETA 58" in text  # 40 steps, of which 20 newest took 11 x 1 s and 9 x 2 s (the first of an attempt does not count)
    assert f"loss        {2 + 3 / 60:.4f}" in text


def test_a_cause_is_told_once() -> None:
    story = Story(config()).start().steps(3).die(class_="gpu", reason="it died")
    story.events = [
        structs.replace(event, reason="gpu: it died; first time") if isinstance(event, Decided) else event
        for event in story.events
    ]
    text = shown(story)
    assert "interruption: gpu: it died" in text
    assert "decision: restart: gpu; first time" in text


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    Story(config()).start().steps(100).end().write(tmp_path / "run")
    result = CliRunner().invoke(cli, ["watch", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "100/100" in result.stdout
    assert "finished" in result.stdout


def test_where_no_run_is_that_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["watch", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "none" in result.stderr


def test_on_a_terminal_it_follows_the_ledger_and_ends_with_the_run(tmp_path: Path) -> None:
    story = Story(config()).start().steps(10)
    segment = story.write(tmp_path / "run")
    seen = len(story.events)
    ours, theirs = pty.openpty()
    watching = subprocess.Popen([*FTRAIN, "watch", str(tmp_path / "run")], stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while b"10/100" not in text:
        text += os.read(ours, 4096)
    story.steps(90).end()
    with segment.open("ab") as file:
        file.write(b"".join(encode_line(event) for event in story.events[seen:]))
    while b"100/100" not in text:
        text += os.read(ours, 4096)
    try:
        while os.read(ours, 4096):
            pass
    except OSError:  # it has left the terminal
        pass
    assert watching.wait(30) == 0
    os.close(ours)


def test_a_curve_in_one_line_keeps_its_ends() -> None:
    bars = Bars()
    assert bars.curve([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert bars.curve([3, 3, 3]) == "▁▁▁"
    assert bars.curve([]) == ""
    assert len(bars.curve([float(n) for n in range(1000)])) == 40


def test_the_bar_of_the_time_is_as_long_as_it_is_meant_to_be() -> None:
    """Each kind of time has a cell or more; what that is too much the longest gives."""
    story = Story(config()).start().steps(900, tokens=1024).die(class_="gpu").start(at=50).steps(10, seconds=0.1)
    text = shown(story, force_terminal=True, color_system="truecolor", no_color=False)
    bar = next(line for line in text.splitlines() if "time  " in line)
    assert bar.count("█") == 60
    assert "initialisation" in text


def test_a_narrow_terminal_gets_short_bars_and_one_without_unicode_gets_ascii() -> None:
    story = Story(config()).start().steps(60).die().start(at=50).steps(10)
    text = shown(story, width=40)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 40
    drawn = BytesIO()
    plain = TextIOWrapper(drawn, encoding="ascii", errors="strict")
    shown(story, file=plain)
    plain.flush()
    assert b"60/100  ########################................" in drawn.getvalue()
    assert b"ppppp" in drawn.getvalue()
    assert b"p productive, " in drawn.getvalue()
    assert b"d discarded" in drawn.getvalue()


def test_letters_that_stand_for_colours_have_a_key_and_each_its_own() -> None:
    bars, seconds = Bars(coloured=False), dict.fromkeys(COLOURS, 1.0)
    letters = {part.split()[0] for part in bars.key(seconds).split(", ")}
    assert len(letters) == len(COLOURS), "one letter for two kinds of time"
    assert set(str(bars.shares(seconds))) == letters
    story = Story(config()).start().steps(10, tokens=1024)
    assert "p productive" in shown(story, no_color=True)
    assert "p productive" not in shown(story, force_terminal=True, color_system="truecolor", no_color=False)


def test_no_speed_is_shown_where_no_tokens_are_told() -> None:
    assert "tokens/s" in shown(Story(config()).start().steps(10, tokens=1024))
    silent = shown(Story(config()).start().steps(10, tokens=0))
    assert "speed" not in silent
    assert "tokens/s" not in silent


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "cp1252"}]
)
def test_no_locale_makes_it_fail(locale: dict[str, str], tmp_path: Path) -> None:
    Story(config()).start().steps(100).end().write(tmp_path / "run")
    done = ftrain("watch", str(tmp_path / "run"), env=locale)
    assert (done.returncode, done.stderr) == (0, "")
    assert "100/100" in done.stdout
