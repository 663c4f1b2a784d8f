"""Memory, a local disk, storage, a mirror: each with its own interval; the newest that verifies is taken, none is missed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from ftrain.compose.stores import local_tier_url
from ftrain.load import load
from recovery.client import ask
from recovery.events import AttemptStarted, CheckpointPassedOver, RunEnded, StorageNotice, TierCommitted
from storage.epoch import read_epochs
from storage.objects import open_store
from storage.run import RunStore
from storage.testing import flip_bit
from tests.commands import ftrain
from tests.runs import TinyRun, halt, kill_tree
from tests.storage.building import SPECS, random_values, save

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


@pytest.fixture
def run(tmp_path: Path, corpus: str) -> TinyRun:
    made = TinyRun(folder=tmp_path, corpus=corpus, ranks=2, steps=30, extra="[storage]\nlease_s = 10")
    text = made.config.read_text().replace(
        "grace_s = 0", f'grace_s = 0\nlocal_url = "{tmp_path}/nvme"\nlocal_every_steps = 6\nmirror_url = "{tmp_path}/mirror"'
    )
    made.config.write_text(text)
    return made


def add_fault(run: TinyRun, fault: str) -> None:
    run.config.write_text(run.config.read_text() + "\n" + fault)


def tier(run: TinyRun) -> RunStore:
    return RunStore(open_store(local_tier_url(load(str(run.config)))))


def committed(run: TinyRun, name: str) -> list[int]:
    return [event.step for event in run.events() if isinstance(event, TierCommitted) and event.tier == name]


def test_another_runs_place_as_mirror_is_refused_before_anything_is_written(run: TinyRun, tmp_path: Path) -> None:
    other = RunStore(open_store(str(tmp_path / "mirror")))
    save(other, random_values(SPECS, 1), step=15, epoch=other.take_epoch(owner={"host": "there"}))
    before = [info.step for info in other.checkpoints() if info.state == "valid"]
    code, output = run.run()
    assert code == 3, output
    assert "belongs to a training run" in output
    assert [info.step for info in other.checkpoints() if info.state == "valid"] == before == [15]
    assert read_epochs(other.store).newest == 0
    assert not (run.local / "logs").exists()


def test_each_tier_gets_what_its_interval_says(run: TinyRun, unbroken: dict[str, str]) -> None:
    code, output = run.run()
    assert code == 0, output
    local = tier(run)
    assert [info.step for info in local.checkpoints() if info.state == "valid"] == [24, 30]
    assert local.open().verify().ok
    assert committed(run, "local")[-1] == 30
    mirror = RunStore(open_store(f"{run.folder}/mirror"))
    assert mirror.open().step == 30
    assert mirror.open().verify().ok
    assert set(committed(run, "mirror")) <= {9, 18, 27, 30}  # the last copy ends with the run, after its ledger
    assert not [event for event in run.events() if isinstance(event, StorageNotice)]
    assert stored_digests(run.url) == (30, unbroken)
    assert stored_digests(f"{run.folder}/mirror") == (30, unbroken)


@pytest.mark.parametrize("damage", ["none", "flipped", "lost"])
def test_after_a_power_cut_the_newest_that_verifies_is_taken(run: TinyRun, unbroken: dict[str, str], damage: str) -> None:
    add_fault(run, halt(14))
    parent = run.start()
    run.wait_for(lambda events: any(isinstance(event, TierCommitted) and event.step >= 12 for event in events))
    assert ask(run.local, "status")["run"]["local_step"] >= 12
    kill_tree(run, parent)
    local = tier(run)
    newest = local.open()
    stored = RunStore(open_store(run.url)).open().step
    if damage == "flipped":
        pack, part = next(p for p in newest.manifest.parts if p[1].array.startswith("master/"))  # weights are not read
        flip_bit(local.store, newest.prefix + pack.name, 8 * part.position)
    if damage == "lost":
        shutil.rmtree(run.folder / "nvme")
    code, output = run.run()
    assert code == 0, output
    started = [event for event in run.events() if isinstance(event, AttemptStarted)][-1]
    if damage == "none":
        assert (started.source, started.restored_step) == (
            "local" if newest.step >= stored else "storage",
            max(newest.step, stored),
        )
    if damage == "flipped" and newest.step >= stored:
        assert newest.step in [event.step for event in run.events() if isinstance(event, CheckpointPassedOver)]
    assert stored_digests(run.url) == (30, unbroken)
    assert [event.outcome for event in run.events() if isinstance(event, RunEnded)] == ["finished"]
    assert tier(run).open().step == 30


def test_a_damaged_checkpoint_is_healed_from_the_run_s_own_tiers(
    run: TinyRun, unbroken: dict[str, str], tmp_path: Path
) -> None:
    code, output = run.run()
    assert code == 0, output
    pack = next(Path(run.url).glob("checkpoints/step-00000030/*.pack"))
    good = pack.read_bytes()
    pack.write_bytes(good[:5000] + bytes(4096) + good[9096:])
    assert ftrain("ckpt", "verify", f"{run.url}@30").returncode == 4
    done = ftrain("ckpt", "heal", f"{run.url}@30")
    assert done.returncode == 0, done.stderr
    assert "it verifies" in done.stdout
    assert pack.read_bytes() == good
    shutil.rmtree(tmp_path / "nvme")
    pack.unlink()
    assert ftrain("ckpt", "heal", f"{run.url}@30").returncode == 0
    assert pack.read_bytes() == good
    assert "whole" in ftrain("ckpt", "heal", f"{run.url}@30", "--from", str(tmp_path / "mirror")).stdout
    assert ftrain("ckpt", "heal", f"{run.url}@30", "--from", str(tmp_path / "nowhere")).returncode == 4
