"""Models with experts, out and in: one array of ours is as many of theirs as there are experts, and no value changes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zarr
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ftrain.compose.exchange import export, import_run
from ftrain.config import Model
from ftrain.model.names import family
from ftrain.model.transformer import Transformer
from ftrain.parallel.optimizer import View
from storage.box import Box
from storage.errors import ConfigurationError, CoverageError
from storage.exchange.tensor import Tensor, index, stack
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.storage.exchange.building import MODEL, save_model

MIXTRAL = msgspec.structs.replace(MODEL, experts=4, experts_per_token=2)
QWEN = msgspec.structs.replace(MIXTRAL, qk_norm=True)
BOTH = pytest.mark.parametrize("model", [MIXTRAL, QWEN], ids=family)


def opened(folder: Path) -> Any:
    """The model as transformers builds and fills it, and what it could not place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


@BOTH
def test_transformers_finds_every_weight_in_its_place(tmp_path: Path, model: Model) -> None:
    run, state = save_model(MemoryStore(f"experts-out-{family(model)}"), model)
    export(run.open(), "safetensors", LocalStore(tmp_path), dtype="float32")
    theirs, loaded = opened(tmp_path)
    assert type(theirs) is (Qwen3MoeForCausalLM if model.qk_norm else MixtralForCausalLM)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    mlp = theirs.model.layers[1].mlp
    both = [state[f"master/layers.1.moe.{name}"] for name in ("w1", "w3")]
    assert np.array_equal(mlp.experts.gate_up_proj.detach().numpy(), np.concatenate(both, axis=1))
    assert np.array_equal(mlp.experts.down_proj.detach().numpy(), state["master/layers.1.moe.w2"])
    assert np.array_equal(mlp.gate.weight.detach().numpy(), state["master/layers.1.moe.router"])
    assert (theirs.config.num_local_experts, theirs.config.num_experts_per_tok) == (4, 2)


@BOTH
def test_transformers_computes_what_our_model_computes(tmp_path: Path, model: Model) -> None:
    run, state = save_model(MemoryStore(f"experts-logits-{family(model)}"), model)
    export(run.open(), "safetensors", LocalStore(tmp_path), dtype="float32")
    theirs, _ = opened(tmp_path)
    tokens = torch.arange(24).reshape(2, 12) % model.vocab
    ours = Transformer(model, dtype=torch.float32)
    masters = {n.removeprefix("master/"): torch.from_numpy(v) for n, v in state.items() if n.startswith("master/")}
    ours.place({name: View(value, torch.zeros_like(value)) for name, value in masters.items()})
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours.logits(ours(tokens))
    assert wanted.std() > 0.01
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_files_have_the_published_names_and_shapes(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("experts-names"), MIXTRAL)
    done = export(run.open(), "safetensors", LocalStore(tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
        tensor = file.get_tensor("model.layers.0.block_sparse_moe.experts.3.w2.weight")
    assert len(keys) == done.arrays == 3 + 2 * (2 + 4 + 1 + 3 * 4)
    assert "model.layers.1.block_sparse_moe.gate.weight" in keys
    assert tensor.shape == (32, 48)
    assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), state["weights/layers.0.moe.w2"][3])
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]


def test_an_export_reads_one_expert_at_a_time() -> None:
    asked = []

    def read(box: Box) -> np.ndarray[Any, Any]:
        asked.append(box)
        return np.ones(box.shape, np.float32)

    experts = Tensor("moe.w1", "float32", (4, 6, 5), read)
    one = index(experts, 3, "w1")
    assert (one.shape, one.nbytes) == ((6, 5), 120)
    assert one.read(Box((2, 0), (3, 5))).shape == (3, 5)
    assert asked == [Box((3, 2, 0), (1, 3, 5))]


def test_a_stack_reads_only_the_experts_of_a_box() -> None:
    values = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
    asked = []

    def one(number: int) -> Tensor:
        def read(box: Box) -> np.ndarray[Any, Any]:
            asked.append(number)
            return values[number][(*box.slices(),)]

        return Tensor(str(number), "float32", (6, 5), read)

    whole = stack([one(number) for number in range(4)], "moe.w1")
    assert whole.shape == values.shape
    assert np.array_equal(whole.read(Box((1, 2, 1), (2, 4, 3))), values[1:3, 2:6, 1:4])
    assert asked == [1, 2]


def saved(folder: Path, model: Model, **config: Any) -> torch.nn.Module:
    """A random model, made and saved by transformers."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    same = {**shape, "num_experts_per_tok": 2, "head_dim": 8}
    if model.qk_norm:
        made: Any = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**{**same, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True, **config})
        )
    else:
        made = MixtralForCausalLM(MixtralConfig(**{**same, "num_local_experts": 4, "intermediate_size": 48, **config}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.to(torch.bfloat16).save_pretrained(folder)
    return made


@BOTH
def test_a_model_of_transformers_becomes_a_checkpoint(tmp_path: Path, model: Model) -> None:
    theirs: Any = saved(tmp_path / "hf", model)
    import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    checkpoint = RunStore(LocalStore(tmp_path / "run")).open()
    assert checkpoint.verify().ok
    mlp = theirs.model.layers[0].mlp
    gate, up = mlp.experts.gate_up_proj.detach().float().numpy().reshape(4, 2, 48, 32).swapaxes(0, 1)
    assert np.array_equal(checkpoint.read("master/layers.0.moe.w1"), gate)
    assert np.array_equal(checkpoint.read("master/layers.0.moe.w3"), up)
    assert np.array_equal(checkpoint.read("master/layers.0.moe.w2"), mlp.experts.down_proj.detach().float().numpy())
    assert np.array_equal(checkpoint.read("master/layers.0.moe.router"), mlp.gate.weight.detach().float().numpy())
    assert not checkpoint.read("exp_avg_sq/layers.1.moe.w2").any()
    found = msgspec.convert(checkpoint.progress["imported"]["model"], Model)
    assert (found.experts, found.experts_per_token, found.ffn, found.qk_norm) == (4, 2, 48, model.qk_norm)


@BOTH
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_whole_state_comes_back_bit_for_bit(tmp_path: Path, form: Any, model: Model) -> None:
    run, state = save_model(MemoryStore(f"experts-back-{form}-{family(model)}"), model)
    export(run.open(), form, LocalStore(tmp_path / "out"), state=True)
    import_run(form, str(tmp_path / "out"), str(tmp_path / "run"))
    back = RunStore(LocalStore(tmp_path / "run")).open()
    assert back.manifest.digests == run.open().manifest.digests
    assert set(back.names) == set(state)


def test_zarr_holds_every_expert(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("experts-zarr"), msgspec.structs.replace(MIXTRAL, layers=1))
    export(run.open(), "zarr", LocalStore(tmp_path))
    for expert in range(4):
        array = zarr.open_array(tmp_path / f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight", mode="r")
        assert np.array_equal(np.asarray(array[...]), state["weights/layers.0.moe.w1"][expert])


def test_the_view_of_the_packs_has_whole_arrays(tmp_path: Path) -> None:
    """The reference view of a commit is read by zarr alone, three dimensions as well as two."""
    run, state = save_model(LocalStore(tmp_path), MIXTRAL)
    (view,) = run.open().write_view(["master/layers.0.moe.w3"])
    array = zarr.open_array(f"reference::{view}", mode="r")
    assert array.shape == (4, 48, 32)
    assert array.chunks[0] == 1, "no two experts share a chunk"
    assert np.array_equal(np.asarray(array[...]), state["master/layers.0.moe.w3"])


def test_experts_that_are_missing_or_unlike_are_listed_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "hf", MIXTRAL)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
    del tensors[expert.format(0, 2, "w1")]
    tensors[expert.format(0, 1, "w3")] = tensors[expert.format(0, 1, "w3")].float()
    tensors[expert.format(1, 0, "w2")] = torch.zeros(32, 49, dtype=torch.bfloat16)
    tensors[expert.format(1, 4, "w1")] = torch.zeros(48, 32, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CoverageError) as caught:
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    assert len(caught.value.problems) == 4
    assert "layers.0.moe.w1[2] is missing" in str(caught.value)
    assert "the experts of layers.0.moe.w3 are of several types" in str(caught.value)
    assert "layers.1.moe.w2[0] has shape (32, 49) instead of (32, 48)" in str(caught.value)
    assert "layers.1.moe.w1[4] is no parameter of this model" in str(caught.value)


def test_a_mixtral_that_attends_otherwise_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "hf", MIXTRAL, sliding_window=16)
    with pytest.raises(ConfigurationError, match="sliding_window is set"):
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
