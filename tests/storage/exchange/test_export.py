"""What is exported is read by the programs it is meant for, none of which is ours, and holds the same bits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader, load
from transformers import AutoConfig, AutoModelForCausalLM

from ftrain.compose.errors import RefusedError
from ftrain.compose.exchange import LAST_OF_EXPORTS, Form, export
from ftrain.config import Model
from ftrain.model.names import hugging_face_name
from ftrain.model.transformer import Transformer
from ftrain.parallel.optimizer import View
from storage.errors import ConfigurationError
from storage.exchange.safetensors import write_safetensors
from storage.exchange.tensor import from_checkpoint, widened
from storage.local import LocalStore
from storage.memory import MemoryStore
from tests.storage.exchange.building import MODEL, State, save_model

TIED = msgspec.structs.replace(MODEL, tied=True)
QWEN = msgspec.structs.replace(MODEL, qk_norm=True)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def weights(state: State) -> State:
    return {hugging_face_name(n.removeprefix("weights/")): v for n, v in state.items() if n.startswith("weights/")}


def test_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("export-a"))
    export(run.open(), "safetensors", LocalStore(tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(weights(state))
        for name, values in weights(state).items():
            assert file.get_tensor(name).dtype == torch.bfloat16
            assert np.array_equal(bits(file.get_tensor(name)), values)


def test_masters_are_exported_on_demand(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("export-b"))
    export(run.open(), "safetensors", LocalStore(tmp_path), dtype="float32")
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert np.array_equal(file.get_tensor("lm_head.weight"), state["master/head"])
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"


def test_several_files_have_an_index(tmp_path: Path) -> None:
    run, _ = save_model(MemoryStore("export-c"))
    checkpoint = run.open()
    names = [name for name in checkpoint.names if name.startswith("master/")]
    tensors = [from_checkpoint(checkpoint, name, name) for name in names]
    files = write_safetensors(LocalStore(tmp_path), tensors, file_bytes=20_000)
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(names)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="numpy") as opened:
            assert np.array_equal(opened.get_tensor(name), checkpoint.read(name))


@pytest.mark.parametrize("model", [MODEL, TIED, QWEN], ids=["llama", "tied", "qwen3"])
def test_transformers_computes_what_our_model_computes(tmp_path: Path, model: Model) -> None:
    run, state = save_model(MemoryStore(f"export-hf-{model.tied}-{model.qk_norm}"), model)
    export(run.open(), "safetensors", LocalStore(tmp_path), dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(tmp_path)
        theirs, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert config.num_hidden_layers == 2
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    tokens = torch.arange(24).reshape(2, 12) % model.vocab
    ours = Transformer(model, dtype=torch.float32)
    masters = {n.removeprefix("master/"): torch.from_numpy(v) for n, v in state.items() if n.startswith("master/")}
    ours.place({name: View(value, torch.zeros_like(value)) for name, value in masters.items()})
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours.logits(ours(tokens))
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_dcp_loads_it(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("export-d"))
    export(run.open(), "dcp", LocalStore(tmp_path), state=True)
    metadata = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert len(metadata) == len(state)
    for mine, name in (
        ("weights/layers.1.mlp.w2", "model.layers.1.mlp.down_proj.weight"),
        ("exp_avg_sq/head", "exp_avg_sq/lm_head.weight"),
    ):
        values = state[mine]
        tensor = torch.empty(values.shape, dtype=torch.bfloat16 if mine.startswith("weights") else torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch notes that it runs in one process
            load({name: tensor}, checkpoint_id=tmp_path, no_dist=True)
        assert np.array_equal(bits(tensor), values)


def test_zarr_is_read_by_zarr_and_tensorstore(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("export-e"))
    export(run.open(), "zarr", LocalStore(tmp_path), state=True)
    group: Any = zarr.open_group(str(tmp_path), mode="r")
    assert {name for name, _ in group.arrays()} == set(weights(state))
    for name, values in weights(state).items():
        assert np.array_equal(group[name][...], values)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / name)}}
        assert np.array_equal(tensorstore.open(spec).result().read().result(), values)
    masters = "master/model.layers.0.self_attn.o_proj.weight"
    assert np.array_equal(group[masters][...], state["master/layers.0.attention.wo"])


def test_compressed_zarr_is_read_by_zarr_and_tensorstore_and_is_smaller(tmp_path: Path) -> None:
    run, state = save_model(MemoryStore("export-compressed"))
    for name, compress in (("plain", False), ("packed", True)):
        export(run.open(), "zarr", LocalStore(tmp_path / name), state=True, compress=compress)
    group: Any = zarr.open_group(str(tmp_path / "packed"), mode="r")
    masters = {"master/model.layers.0.self_attn.o_proj.weight": state["master/layers.0.attention.wo"]}
    for name, values in {**weights(state), **masters}.items():
        assert np.array_equal(group[name][...], values)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "packed" / name)}}
        assert np.array_equal(tensorstore.open(spec).result().read().result(), values)
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).rglob("*")) for name in ("plain", "packed")]
    assert sizes[1] < sizes[0]
    chunk = next((tmp_path / "packed" / "lm_head.weight" / "c").rglob("0/0"))
    damaged = bytearray(chunk.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    chunk.write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_group(str(tmp_path / "packed"), mode="r")["lm_head.weight"][...]  # type: ignore[index]


def test_only_zarr_is_compressed(tmp_path: Path) -> None:
    run, _ = save_model(MemoryStore("export-not-compressed"))
    with pytest.raises(ConfigurationError, match="safetensors files are not compressed"):
        export(run.open(), "safetensors", LocalStore(tmp_path), compress=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["safetensors", "dcp", "zarr"])
def test_an_export_is_never_overwritten(tmp_path: Path, form: Form) -> None:
    """Other arrays of the older one would be read as the newer one's. One that was interrupted begins again."""
    run, _ = save_model(MemoryStore(f"export-g-{form}"))
    export(run.open(), form, LocalStore(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RefusedError, match=r"holds an export already .*: give another folder"):
        export(run.open(), form, LocalStore(tmp_path))
    with pytest.raises(RefusedError, match="holds an export already"):
        export(run.open(), "zarr" if form == "dcp" else "dcp", LocalStore(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (last,) = [tmp_path / name for name in LAST_OF_EXPORTS if (tmp_path / name).exists()]
    last.unlink()
    with pytest.raises(RefusedError, match=r"holds a config.json already, and is left as it is"):  # nobody knows whose
        export(run.open(), form, LocalStore(tmp_path))
    (tmp_path / "config.json").unlink()  # as an interrupted one leaves it: this is written last
    export(run.open(), form, LocalStore(tmp_path))
    assert last.exists()


def test_a_flipped_bit_in_the_exported_zarr_is_noticed(tmp_path: Path) -> None:
    run, _ = save_model(MemoryStore("export-f"))
    export(run.open(), "zarr", LocalStore(tmp_path))
    chunk = tmp_path / "lm_head.weight" / "c" / "0" / "0"
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_group(str(tmp_path), mode="r")["lm_head.weight"][...]  # type: ignore[index]


def test_widening_is_exact() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    theirs = torch.from_numpy(every.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widened(every, "bfloat16").view(np.uint32), theirs.view(np.uint32))
