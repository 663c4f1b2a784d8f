"""Where a run's copies may go: to no other run's place, and not over the last copies of a run that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.errors import RefusedError
from ftrain.compose.mirrors import check_mirror, probe
from ftrain.compose.tiers import mirror_checkpoint
from ftrain.config import Config
from ftrain.load import load
from storage.copy import copy_checkpoint
from storage.errors import Fenced
from storage.local import LocalStore
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"
VALUES = random_values(SPECS, 1)


def place(folder: Path) -> RunStore:
    return RunStore(LocalStore(str(folder)))


def trained(folder: Path, *steps: int) -> RunStore:
    """A run with checkpoints of these steps."""
    run = place(folder)
    epoch = run.take_epoch(owner={"host": "here"})
    for step in steps:
        save(run, VALUES, step=step, epoch=epoch)
    return run


def config(run: Path, mirror: Path) -> Config:
    return load(str(CONFIG), [f"run.url={run}", f"checkpoint.mirror_url={mirror}"])


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_runs_place_is_refused_at_the_start_and_by_whoever_copies(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", 10), trained(tmp_path / "other", 15)
    before = everything(tmp_path / "other")
    with pytest.raises(RefusedError, match=r"other belongs to a training run \(epoch 0\).*give checkpoint.mirror_url another"):
        check_mirror(config(tmp_path / "run", tmp_path / "other"), begun=True)
    with pytest.raises(Fenced, match="belongs to a training run"):
        mirror_checkpoint(run, place(tmp_path / "other"), 10)
    assert everything(tmp_path / "other") == before


def test_another_runs_mirror_is_refused(tmp_path: Path) -> None:
    first, second = trained(tmp_path / "first", 10), trained(tmp_path / "second", 5)
    mirror_checkpoint(first, place(tmp_path / "mirror"), 10)
    before = everything(tmp_path / "mirror")
    with pytest.raises(RefusedError, match=f"holds copies of another run, {tmp_path}/first"):
        check_mirror(config(tmp_path / "second", tmp_path / "mirror"), begun=True)
    with pytest.raises(Fenced, match="copies of another run"):
        mirror_checkpoint(second, place(tmp_path / "mirror"), 5)
    assert everything(tmp_path / "mirror") == before


def test_a_run_goes_on_with_its_mirror_wherever_it_was_moved_to_or_brought_back(tmp_path: Path) -> None:
    mirror, wanted = place(tmp_path / "mirror"), config(tmp_path / "run", tmp_path / "mirror")
    mirror_checkpoint(trained(tmp_path / "run", 10), mirror, 10)
    check_mirror(wanted, begun=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    check_mirror(config(tmp_path / "moved", tmp_path / "mirror"), begun=True)
    copy_checkpoint(mirror.open(), place(tmp_path / "run"))
    check_mirror(wanted, begun=True)
    copy_checkpoint(mirror.open(), place(tmp_path / "elsewhere"))
    check_mirror(config(tmp_path / "elsewhere", tmp_path / "mirror"), begun=True)


def test_a_new_run_does_not_write_over_the_last_copies_of_the_one_before(tmp_path: Path) -> None:
    mirror, wanted = tmp_path / "mirror", config(tmp_path / "run", tmp_path / "mirror")
    mirror_checkpoint(trained(tmp_path / "run", 10), place(mirror), 10)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RefusedError, match=r"copies of a run that is not at .*run any more: bring it back"):
        check_mirror(wanted, begun=False)
    check_mirror(wanted, begun=False, origin=str(mirror))


def test_the_runs_own_place_is_no_mirror(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="is the run's own place"):
        check_mirror(config(tmp_path / "run", tmp_path / "run"), begun=False)


def test_doctor_tells_what_the_start_would_say(tmp_path: Path) -> None:
    trained(tmp_path / "other", 15)
    asked = msgspec.to_builtins(config(tmp_path / "run", tmp_path / "mirror"))
    assert "written, read back" in probe(asked)
    with pytest.raises(RefusedError, match="belongs to a training run"):
        probe(msgspec.to_builtins(config(tmp_path / "run", tmp_path / "other")))
