"""What a running `ftrain run` says of the ledger's events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftrain.cli.live_view import LiveView
from ftrain.config import Config
from recovery.events import ConfigChanged, ProcessDied
from tests.ledgers import T0, Story, config


def live(story: Story, now: Config, folder: Path) -> None:
    """The story happens while somebody looks on."""
    (folder / "local").mkdir()
    (folder / "local" / "config.json").write_bytes(msgspec.json.encode(now))
    view = LiveView(folder / "local")
    story.write(folder)
    view.close()


@pytest.mark.parametrize(
    ("kind", "path", "said"),
    [
        (
            "cosine",
            "run.steps",
            "run.steps: 1000 -> 100; the learning rate's curve (cosine) ends at run.steps and changes with it",
        ),
        ("constant", "run.steps", "run.steps: 1000 -> 100"),
        ("cosine", "data.cap", "data.cap: 1000 -> 100"),
    ],
)
def test_other_steps_are_said_to_change_the_learning_rate(
    kind: str, path: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = config(f"schedule.kind={kind}")
    story = Story(now)
    change = {"path": path, "old": 1000, "new": 100, "kind": "recorded"}
    story.events.append(ConfigChanged(t=T0, changes=(change,)))
    live(story, now, tmp_path)
    assert f"config changed: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "said"),
    [(None, "died (how is not known)"), (-9, "died (killed by SIGKILL)"), (3, "died (exit code 3)")],
)
def test_how_a_process_died_is_said_in_words(
    status: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a coordinator, whose parent was somebody else, nobody knows it."""
    now = config()
    story = Story(now)
    story.events.append(ProcessDied(t=T0, kind="coordinator", node="localhost", pid=7, status=status))
    live(story, now, tmp_path)
    assert f"coordinator (pid 7) {said}\n" in capsys.readouterr().err
