"""A ledger that has lost a segment: whoever reads it says so, or refuses; nobody takes what is left for the whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ftrain.cli.entry import cli
from ftrain.compose.standing import reminders
from recovery.events import CheckpointCommitted, Event, Ready, RunStarted
from recovery.gaps import SegmentsMissing
from recovery.ledger import Ledger, read_all, read_past
from tests.ledgers import Story, config


def saved(story: Story) -> Story:
    """A checkpoint of the step reached."""
    story.events.append(CheckpointCommitted(t=story.t, attempt=story.attempt, step=story.step, epoch=1, nbytes=8))
    return story


def told() -> list[Event]:
    """Two starts of a run, an interruption in each, and checkpoints: segment after segment, as a coordinator writes them."""
    story = saved(saved(Story(config("run.steps=60")).start().steps(10)).steps(10)).steps(4).die()
    saved(story.start(at=20).steps(10)).steps(2).end("stopped")
    story.t += 50
    saved(saved(story.launch("run.steps=60").start(at=32, source="storage").steps(8)).steps(4)).die()
    saved(story.start(at=44).steps(16)).end()
    return story.events


def write(run: Path, events: Iterable[Event]) -> list[str]:
    """As the coordinators of the run do; the segments' names."""
    folder, epoch, ledger = run / "local" / "ledger", 0, None
    for event in events:
        if isinstance(event, RunStarted):
            if ledger is not None:
                ledger.close()
            epoch += 1
            ledger = Ledger(folder, None, epoch, after=read_past(folder)[1])
        assert ledger is not None
        ledger.append(event)
        if isinstance(event, CheckpointCommitted | Ready):
            ledger.rotate()
    assert ledger is not None
    ledger.close()
    return sorted(path.name for path in folder.glob("e*.jsonl"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert write(run, told()) == SEGMENTS
    return run


SEGMENTS = [f"e0001-{n:06d}.jsonl" for n in range(6)] + [f"e0002-{n:06d}.jsonl" for n in range(6)]
GONE = [[name] for name in SEGMENTS] + [SEGMENTS[:6], SEGMENTS[6:], SEGMENTS[4:8]]
BOOKED = {"e0001-000001.jsonl", "e0001-000002.jsonl", "e0001-000004.jsonl", "e0001-000005.jsonl", "e0002-000001.jsonl",
          "e0002-000002.jsonl", "e0002-000004.jsonl", "e0002-000005.jsonl"}  # fmt: skip
"""Without one of these the start of the run, and of each attempt of which there is more, is there all the same."""


def without(whole: Path, names: Iterable[str], folder: Path) -> Path:
    run = folder / "run"
    shutil.copytree(whole, run)
    for name in names:
        (run / "local" / "ledger" / name).unlink()
    return run


def use(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def test_a_whole_ledger_has_no_gap(whole: Path) -> None:
    assert not [event for event in read_all(whole / "local" / "ledger") if isinstance(event, SegmentsMissing)]
    assert "missing" not in use("report", whole).output


@pytest.mark.parametrize("gone", GONE, ids=lambda gone: f"{gone[0]}+{len(gone) - 1}")
def test_without_any_segment_every_reader_says_which_is_missing_or_refuses(
    whole: Path, gone: list[str], tmp_path: Path
) -> None:
    run, page = without(whole, gone, tmp_path), tmp_path / "page.html"
    for words in (
        ["report", run],
        ["report", run, "--json"],
        ["report", run, "--html", page],
        ["report", run, "--attempt", 0],
        ["compare", run, whole],
        ["compare", whole, run, "--json"],
        ["watch", run, "--once"],
        ["metrics", run, "--tensorboard", tmp_path / "tb"],
    ):
        done = use(*words)
        said = done.output + (page.read_text() if done.exit_code == 0 and page in words else "")
        assert done.exit_code in (0, 4), f"{words}: {done.output}"
        assert " ".join(said.replace("│", " ").split()).count(gone[-1].removesuffix(".jsonl")), f"{words}: {said}"
        assert "missing" in said
        if words[:1] == ["report"] and "--attempt" not in words and len(gone) == 1:
            assert (done.exit_code == 0) == (gone[0] in BOOKED), done.output


def test_what_is_left_of_the_books_adds_up_and_counts_what_is_known(whole: Path, tmp_path: Path) -> None:
    """Of steps 11 to 20 only that they were finished: attempt 0 told 10, and then 21."""
    before, found = (json.loads(use("report", run, "--json").stdout) for run in
                     (whole, without(whole, ["e0001-000002.jsonl"], tmp_path)))  # fmt: skip
    assert (before["steps_finished"], found["steps_finished"], found["at_least"]) == (64, 64, True)
    assert before["tokens"] - found["tokens"] == 10 * 1024
    assert found["buckets"]["unrecorded"] == pytest.approx(10.0)
    assert before["buckets"]["productive"] - found["buckets"]["productive"] == pytest.approx(10.0)
    assert sum(found["buckets"].values()) == pytest.approx(found["wall_s"])
    assert found["wall_s"] == before["wall_s"]
    assert [row["segments"] for row in found["missing"]] == [["e0001-000002.jsonl"]]
    assert before["missing"] == []


def test_a_run_that_goes_on_says_it_at_its_start_and_never_forgets_it(whole: Path, tmp_path: Path) -> None:
    """Also if the newest segment of all is lost: the next one says after which it was written."""
    run = without(whole, [SEGMENTS[-1]], tmp_path)
    assert any(SEGMENTS[-1] in line for line in reminders(config(f'run.url="{run}"')))
    last = Story(config("run.steps=60"))
    folder = run / "local" / "ledger"
    with Ledger(folder, None, 3, after=read_past(folder)[1]) as ledger:
        ledger.append(*last.events)
    (gap,) = (event for event in read_all(folder) if isinstance(event, SegmentsMissing))
    assert gap.segments == (SEGMENTS[-1],)


def test_a_segment_that_is_in_storage_yet_is_not_missing(whole: Path, tmp_path: Path) -> None:
    run = without(whole, [SEGMENTS[2]], tmp_path)
    (run / "ledger").mkdir()
    shutil.copy(whole / "local" / "ledger" / SEGMENTS[2], run / "ledger" / SEGMENTS[2])
    for words in (["report", run], ["watch", run, "--once"], ["metrics", run, "--tensorboard", tmp_path / "tb"]):
        done = use(*words)
        assert done.exit_code == 0
        assert "missing" not in done.output


def test_a_segment_that_was_moved_away_beside_the_others_is_not_read(whole: Path, tmp_path: Path) -> None:
    run = without(whole, [SEGMENTS[2]], tmp_path)
    shutil.copy(whole / "local" / "ledger" / SEGMENTS[2], run / "local" / "ledger" / f"{SEGMENTS[2]}.away")
    assert SEGMENTS[2] in " ".join(use("watch", run, "--once").output.replace("│", " ").split())
