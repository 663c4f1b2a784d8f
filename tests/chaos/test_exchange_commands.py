"""`ftrain ckpt export|import|cp|gc` as a person uses them, and a run that begins with what was imported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from storage.local import LocalStore
from storage.run import RunStore
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun

pytestmark = [pytest.mark.chaos, pytest.mark.dist]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = TinyRun(folder=tmp_path_factory.mktemp("exchange"), corpus="stdlib", steps=18, ranks=1)
    code, output = run.run()
    assert code == 0, output
    return run


def test_a_run_begins_with_what_was_imported(finished: TinyRun, tmp_path: Path) -> None:
    out, imported = str(tmp_path / "out"), str(tmp_path / "imported")
    exported = ftrain_json("ckpt", "export", finished.url, "--to", "safetensors", out)
    assert exported["step"] == 18
    commit = ftrain_json("ckpt", "import", "--from", "safetensors", out, imported)
    assert commit["step"] == 0
    assert ftrain("ckpt", "verify", imported).returncode == 0
    told = ftrain_json("sample", imported, "--tokens", "5", "--temperature", "0")  # no config of a run, only the model's own
    assert told["text"].startswith(told["prompt"])
    assert told == ftrain_json("sample", finished.url, "--tokens", "5", "--temperature", "0")
    new = TinyRun(folder=tmp_path / "new", corpus="stdlib", steps=20, ranks=2)
    code, output = new.run("--from", imported)
    assert code == 0, output
    found = RunStore(LocalStore(new.url)).open()
    assert found.step == 20
    assert found.progress["sequences"] == 20 * 8
    original, first = RunStore(LocalStore(finished.url)).open(), RunStore(LocalStore(imported)).open()
    name = "weights/layers.1.mlp.w2"
    assert np.array_equal(original.read(name), first.read(name))
    early = found.progress["eval_loss"]
    assert early < 4.9, "it went on from a trained model, not from ln(257) = 5.55"


def test_cp_and_gc(finished: TinyRun, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    steps = [row["step"] for row in ftrain_json("ckpt", "ls", finished.url)]
    assert steps == [9, 18]
    for step in steps:
        assert ftrain_json("ckpt", "cp", f"{finished.url}@{step}", mirror)["copied_bytes"] > 0
    assert ftrain_json("ckpt", "cp", f"{finished.url}@9", mirror)["commit"] is None
    assert ftrain("ckpt", "diff", f"{mirror}@18", f"{finished.url}@18").returncode == 0
    plan = ftrain_json("ckpt", "gc", mirror, "--keep-last", "1")
    assert (plan["done"], plan["deleted_commits"]) == (False, [9])
    assert [row["state"] for row in ftrain_json("ckpt", "ls", mirror)] == ["valid", "valid"]
    done = ftrain_json("ckpt", "gc", mirror, "--keep-last", "1", "--yes", "--grace", "0")
    assert done["deleted_commits"] == [9]
    assert done["deleted_objects"] > 0
    assert [row["step"] for row in ftrain_json("ckpt", "ls", mirror)] == [18]


def test_errors_have_their_codes(finished: TinyRun, tmp_path: Path) -> None:
    assert ftrain("ckpt", "export", f"{finished.url}@4", "--to", "zarr", str(tmp_path / "z")).returncode == 4
    assert ftrain("ckpt", "import", "--from", "dcp", str(tmp_path / "nothing"), str(tmp_path / "r")).returncode == 5
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    done = ftrain("ckpt", "import", "--from", "safetensors", str(tmp_path / "bad"), str(tmp_path / "r"))
    assert done.returncode == 5
    assert "gpt2" in done.stderr
