"""What a run brings with it from its past: places that are out, and an end that is reached."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftrain.compose.standing import away, finished_step, really_changed, reminders
from recovery.events import ConfigChanged, Event, PlaceLost, PlaceReturned
from storage.objects import open_store
from storage.run import RunStore
from tests.commands import ftrain
from tests.ledgers import BASE, T0, Story, config
from tests.storage.building import SPECS, random_values, save


def lost(node: str, slot: int, *, until: float | None = None, t: float = T0) -> Event:
    return PlaceLost(t=t, node=node, slot=slot, reason="drained by ftrain drain", until=until)


def returned(node: str, slot: int) -> Event:
    return PlaceReturned(t=T0 + 9, node=node, slot=slot, reason="admitted")


@pytest.mark.parametrize(
    ("events", "out"),
    [
        ([], []),
        ([lost("a", 1)], ["a/1"]),
        ([lost("a", 1), lost("b", 0), returned("a", 1)], ["b/0"]),
        ([lost("a", 1), lost("a", -1)], ["a"]),  # the node with all of its places
        ([lost("a", 1), returned("a", -1)], []),
        ([lost("a", 1, until=T0 + 60)], []),  # its quarantine is over
        ([lost("a", 1, until=T0 + 600)], ["a/1"]),
    ],
)
def test_what_is_out_is_what_was_lost_and_did_not_come_back(events: list[Event], out: list[str]) -> None:
    assert [str(it.place) for it in away(events, T0 + 100)] == out


def test_a_start_says_who_is_out_since_when_why_and_the_way_back(tmp_path: Path) -> None:
    story = Story(config()).start().steps(5)
    story.events += [lost("localhost", 1), lost("localhost", 2, until=time.time() + 999)]
    story.end("stopped").write(tmp_path / "run")
    said = list(reminders(config(f'run.url="{tmp_path / "run"}"')))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(T0))
    assert said[0].startswith(f"localhost/1 is out since {since} (drained by ftrain drain)")
    assert said[0].endswith(f"ftrain admit {tmp_path / 'run'} localhost/1")
    assert "by itself at" in said[1]
    assert "without them" in said[2]


SIZE = {"path": "parallel.ranks", "old": 2, "new": 4, "kind": "recorded"}
RATE = {"path": "optimizer.lr", "old": 1e-3, "new": 2e-3, "kind": "recorded"}


@pytest.mark.parametrize(
    ("resized", "found"),
    [((), [RATE]), (({"path": "parallel.ranks", "old": 4, "new": 2},), [SIZE, RATE]), (({"path": "x.y", "new": 1},), [RATE])],
)
def test_a_size_that_was_asked_for_before_is_no_change(
    tmp_path: Path, resized: tuple[dict[str, object], ...], found: list[object]
) -> None:
    """It ran on 2 of the 4 ranks when it was saved, because places were away, or because somebody had resized it."""
    story = Story(config()).start().steps(5).start(ranks=2, layout="dp2")
    story.events += [ConfigChanged(t=story.t, changes=resized)] if resized else []
    story.end("stopped").write(tmp_path / "run")
    assert really_changed(config(f'run.url="{tmp_path / "run"}"'), [SIZE, RATE]) == found


def test_a_run_without_a_past_is_told_nothing(tmp_path: Path) -> None:
    assert list(reminders(config(f'run.url="{tmp_path / "none"}"'))) == []


def past(folder: Path, *, outcome: str = "finished", step: int = 100) -> None:
    Story(config()).start().steps(step).end(outcome).write(folder)
    run = RunStore(open_store(str(folder)))
    save(run, random_values(SPECS, 1), step=step, epoch=run.take_epoch(owner={}))


@pytest.mark.parametrize(
    ("outcome", "step", "more", "found"),
    [
        ("finished", 100, (), 100),
        ("finished", 100, ("run.steps=101",), None),
        ("finished", 100, ('checkpoint.mirror_url="elsewhere"',), None),  # a copy may still be owed
        ("finished", 100, ("data.skip=[{first=40, last=41}]",), None),  # its state has read what it is now to pass over
        ("stopped", 100, (), None),
        ("stopped", 100, ("run.steps=90",), 100),  # there is nothing left to do, whatever ended it
        ("finished", 90, (), None),
    ],
)
def test_a_finished_run_is_known_from_its_ledger_and_its_checkpoint(
    tmp_path: Path, outcome: str, step: int, more: tuple[str, ...], found: int | None
) -> None:
    past(tmp_path / "run", outcome=outcome, step=step)
    assert finished_step(config(f'run.url="{tmp_path / "run"}"', *more)) == found


def test_a_finished_run_whose_checkpoint_is_lost_is_started(tmp_path: Path) -> None:
    past(tmp_path / "run")
    for pack in (tmp_path / "run/checkpoints").rglob("*.pack"):
        pack.unlink()
    assert finished_step(config(f'run.url="{tmp_path / "run"}"')) is None


def test_a_finished_run_whose_checkpoint_is_damaged_is_started(tmp_path: Path) -> None:
    past(tmp_path / "run")
    pack = next((tmp_path / "run/checkpoints").rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    assert finished_step(config(f'run.url="{tmp_path / "run"}"')) is None


def test_a_finished_run_started_again_forks_nothing(tmp_path: Path) -> None:
    """`tests.chaos` finishes real runs; here the past is enough."""
    past(tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run/local").rglob("*"))
    path = tmp_path / "my.toml"
    path.write_text(BASE.replace("runs/a", str(tmp_path / "run")).replace("vocab = 512", "vocab = 257"))
    done = ftrain("run", str(path))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "the run is finished: step 100 of 100" in done.stderr
    assert not [name for name in {path.name for path in (tmp_path / "run/local").rglob("*")} - set(before) if "log" in name]


def test_a_stopped_run_that_is_past_the_steps_now_wanted_is_told_so_and_left_as_it_is(tmp_path: Path) -> None:
    past(tmp_path / "run", outcome="stopped")
    (tmp_path / "run/local/launch.json").write_text("as it was")
    path = tmp_path / "my.toml"
    path.write_text(BASE.replace("runs/a", str(tmp_path / "run")).replace("vocab = 512", "vocab = 257"))
    ledger = (tmp_path / "run/local/ledger/e0000-000000.jsonl").read_bytes()
    done = ftrain("run", str(path), "--set", "run.steps=90")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "step 100 of 90 is in storage already; more run.steps go on with it" in done.stderr
    assert (tmp_path / "run/local/launch.json").read_text() == "as it was"
    assert (tmp_path / "run/local/ledger/e0000-000000.jsonl").read_bytes() == ledger
    assert not (tmp_path / "run/local/logs").exists()
