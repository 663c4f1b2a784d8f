"""A run with experts as a person handles it: trained on two ranks, shown, handed to transformers, taken back, trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from ftrain.load import load
from ftrain.model.transformer import Transformer
from ftrain.parallel.optimizer import View
from storage.local import LocalStore
from storage.run import RunStore
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun

pytestmark = [pytest.mark.chaos, pytest.mark.dist, pytest.mark.slow]

EXPERTS = ("--set", "model.experts=4", "--set", "model.ffn=48")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = TinyRun(folder=tmp_path_factory.mktemp("experts"), corpus="stdlib", steps=18, ranks=2)
    code, output = run.run(*EXPERTS, "--set", "parallel.ep=2")
    assert code == 0, output
    return run


def test_arrays_of_three_dimensions_are_shown_verified_and_compared(finished: TinyRun) -> None:
    shown = {row["name"]: row for row in ftrain_json("ckpt", "show", finished.url)["arrays"]}
    assert shown["master/layers.1.moe.w2"]["shape"] == [4, 32, 48]
    assert shown["weights/layers.0.moe.router"]["shape"] == [4, 32]
    assert ftrain("ckpt", "verify", finished.url).returncode == 0
    same = ftrain("ckpt", "diff", f"{finished.url}@18", f"{finished.url}@18")
    assert same.returncode == 0, same.stdout
    other = ftrain("ckpt", "diff", f"{finished.url}@9", f"{finished.url}@18")
    assert other.returncode != 0
    assert "moe.w1" in other.stdout


def test_transformers_computes_what_was_trained_and_a_run_begins_with_it(finished: TinyRun, tmp_path: Path) -> None:
    out, imported = tmp_path / "out", str(tmp_path / "imported")
    assert ftrain_json("ckpt", "export", finished.url, "--to", "safetensors", str(out), "--dtype", "float32")["step"] == 18
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert isinstance(theirs, MixtralForCausalLM)
    trained = RunStore(LocalStore(finished.url)).open()
    model = load(str(finished.config), [word for word in EXPERTS if word != "--set"]).model
    ours = Transformer(model, dtype=torch.float32)
    masters = {name.removeprefix("master/"): torch.from_numpy(np.array(trained.read(name), np.float32))
               for name in trained.names if name.startswith("master/")}  # fmt: skip
    ours.place({name: View(value, torch.zeros_like(value)) for name, value in masters.items()})
    tokens = torch.arange(64).reshape(2, 32) * 3 % 257
    with torch.no_grad():
        assert torch.allclose(ours.logits(ours(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-5)

    ftrain_json("ckpt", "import", "--from", "safetensors", str(out), imported)
    back = RunStore(LocalStore(imported)).open()
    for name in ("master/layers.0.moe.w1", "master/layers.1.moe.w3", "master/layers.1.moe.router", "weights/layers.0.moe.w2"):
        assert np.array_equal(back.read(name), trained.read(name)), name
    new = TinyRun(folder=tmp_path / "new", corpus="stdlib", steps=4, ranks=1)
    code, output = new.run(*EXPERTS, "--from", imported)
    assert code == 0, output
    found = RunStore(LocalStore(new.url)).open()
    assert found.step == 4
    assert not np.array_equal(found.read("master/layers.0.moe.w1"), trained.read("master/layers.0.moe.w1"))
