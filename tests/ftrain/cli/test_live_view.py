"""What a running `ftrain run` says of the ledger's events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftrain.cli.live_view import Briefly, LiveView, sentence
from ftrain.config import Config
from recovery.events import (
    ConfigChanged,
    Decided,
    InterruptionClassified,
    PlaceLost,
    PlaceReturned,
    ProcessDied,
    RunEnded,
    Verdict,
)
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


def test_a_cause_is_told_once_in_full_and_then_referred_to() -> None:
    cause = "nothing says what happened; rank 1 ended with exit code 7"
    decided = f"unknown: {cause}; crash loop: 2 restarts brought no new step (limit 2)"
    verdict = Verdict(class_="unknown", component="unknown", reason=cause)
    briefly = Briefly()
    told = [
        briefly.sentence(event)
        for event in (
            InterruptionClassified(t=1.0, attempt=0, verdict_id="v", verdict=verdict),
            Decided(t=1.0, attempt=0, action="stop_for_human", reason=decided, verdict_id="v"),
            RunEnded(t=2.0, outcome="given_up", step=3, reason=decided),
        )
    ]
    assert told == [
        f"interruption: unknown: {cause}",
        "decision: stop_for_human: unknown; crash loop: 2 restarts brought no new step (limit 2)",
        "run given_up at step 3: as decided",
    ]
    alone = RunEnded(t=2.0, outcome="stopped", step=3, reason="stopped on request: SIGINT")
    assert Briefly().sentence(alone) == "run stopped at step 3: stopped on request: SIGINT"


@pytest.mark.parametrize(("slot", "said"), [(-1, "node a"), (3, "place a/3")])
def test_a_whole_node_is_called_one(slot: int, said: str) -> None:
    lost = PlaceLost(t=T0, node="a", slot=slot, reason="drained by ftrain drain")
    back = PlaceReturned(t=T0, node="a", slot=slot, reason="admitted by ftrain admit")
    assert sentence(lost) == f"{said} is taken away: drained by ftrain drain"
    assert sentence(back) == f"{said} is back: admitted by ftrain admit"
