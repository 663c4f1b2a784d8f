"""What comes in: right values, derived state by the one rule, all misfits listed, nothing hostile carried out."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 (to write what an attacker writes)
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ftrain.compose.errors import RefusedError
from ftrain.compose.exchange import export, import_run
from storage.box import Box
from storage.errors import ConfigurationError, CoverageError, Damaged, FormatError, ObjectMissing
from storage.exchange.dcp import read_dcp
from storage.exchange.safetensors import read_safetensors
from storage.exchange.tensor import bfloat16_bits
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.storage.exchange.building import save_model


def hugging_face_model(folder: Path, **config: Any) -> LlamaForCausalLM:
    """A random tiny Llama, saved by transformers."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**{**shape, "num_key_value_heads": 2, **config})).to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model


def test_a_model_of_transformers_becomes_a_checkpoint(tmp_path: Path) -> None:
    model = hugging_face_model(tmp_path / "hf")
    commit = import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    assert commit.step == 0
    checkpoint = RunStore(LocalStore(tmp_path / "run")).open()
    assert checkpoint.verify().ok
    weight = model.model.layers[1].self_attn.k_proj.weight.detach()
    assert np.array_equal(checkpoint.read("weights/layers.1.attention.wk"), weight.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(checkpoint.read("master/layers.1.attention.wk"), weight.float().numpy())
    assert not checkpoint.read("exp_avg/layers.1.attention.wk").any()
    assert not checkpoint.read("exp_avg_sq/head").any()
    imported = checkpoint.progress["imported"]
    assert imported["moments"] == "zero"
    assert imported["masters"].startswith("weights of the source")
    assert checkpoint.progress["step"] == checkpoint.progress["sequences"] == 0


def test_masters_of_a_float32_file_are_kept_and_weights_rounded(tmp_path: Path) -> None:
    model = hugging_face_model(tmp_path / "hf").float()
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight) * 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "hf")
    import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    checkpoint = RunStore(LocalStore(tmp_path / "run")).open()
    head = model.lm_head.weight.detach()
    assert np.array_equal(checkpoint.read("master/head"), head.numpy())
    assert np.array_equal(checkpoint.read("weights/head"), head.bfloat16().view(torch.int16).numpy().view(np.uint16))


def test_a_tied_model_has_one_matrix(tmp_path: Path) -> None:
    model = hugging_face_model(tmp_path / "hf", tie_word_embeddings=True)
    import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    checkpoint = RunStore(LocalStore(tmp_path / "run")).open()
    assert "weights/head" not in checkpoint.names
    assert checkpoint.array("weights/embedding").attributes["tied"] == ["head"]
    twice = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(twice["lm_head.weight"], twice["model.embed_tokens.weight"])
    save_file(twice, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "both"))  # written twice, the same: one matrix
    twice["lm_head.weight"][0, 0] += 1
    save_file(twice, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CoverageError, match="two different arrays"):
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run2"))


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_whole_state_comes_back_bit_for_bit(tmp_path: Path, form: Any) -> None:
    run, state = save_model(MemoryStore(f"back-{form}"))
    export(run.open(), form, LocalStore(tmp_path / "out"), state=True)
    import_run(form, str(tmp_path / "out"), str(tmp_path / "run"))
    back = RunStore(LocalStore(tmp_path / "run")).open()
    assert back.step == 7
    assert back.progress["tokens"] == 7 * 128
    assert back.manifest.digests == run.open().manifest.digests
    assert set(back.names) == set(state)


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    model = hugging_face_model(tmp_path / "hf")
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(48)
    tensors["lm_head.weight"] = torch.zeros(64, 32, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CoverageError) as caught:
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    assert len(caught.value.problems) == 3
    assert "layers.0.mlp.w3 is missing" in str(caught.value)
    assert "(64, 32) instead of (61, 32)" in str(caught.value)
    assert "up_proj.bias is no parameter" in str(caught.value)
    assert not (tmp_path / "run" / "epochs").exists()


def test_what_our_model_does_not_compute_is_refused(tmp_path: Path) -> None:
    hugging_face_model(tmp_path / "hf", attention_bias=True)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"attention_bias.*yarn"):
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))


def test_a_missing_config_says_what_to_give(tmp_path: Path) -> None:
    hugging_face_model(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigurationError, match="--config"):
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    commit = import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"), config=str(tmp_path / "elsewhere.json"))
    assert commit.created
    with pytest.raises(RefusedError, match="checkpoints already"):
        import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"), config=str(tmp_path / "elsewhere.json"))


def test_the_form_that_is_there_is_named_where_another_was_asked_for(tmp_path: Path) -> None:
    run, _ = save_model(MemoryStore("another-form"))
    hugging_face_model(tmp_path / "hf")
    export(run.open(), "dcp", LocalStore(tmp_path / "dcp"))
    with pytest.raises(ConfigurationError, match=r"hf holds no dcp checkpoint but safetensors files: say --from safetensors"):
        import_run("dcp", str(tmp_path / "hf"), str(tmp_path / "run"))
    with pytest.raises(ConfigurationError, match=r"dcp holds no safetensors checkpoint but dcp files: say --from dcp"):
        import_run("safetensors", str(tmp_path / "dcp"), str(tmp_path / "run"))


def test_keys_of_wrapped_modules_are_the_same_parameters(tmp_path: Path) -> None:
    model = hugging_face_model(tmp_path / "hf")
    wrapped = {name.replace("layers.0.", "layers.0._orig_mod."): value.clone() for name, value in model.state_dict().items()}
    save_file(wrapped, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    import_run("safetensors", str(tmp_path / "hf"), str(tmp_path / "run"))
    names = RunStore(LocalStore(tmp_path / "run")).open().names
    assert not [name for name in names if "_orig_mod" in name]
    assert "weights/layers.0.attention.wq" in names


@pytest.fixture
def dcp_folder(tmp_path: Path) -> Path:
    """What torch itself writes: a slice of a larger storage, a scalar, an object, a nested name."""
    wide = torch.arange(40.0).reshape(4, 10)
    state = {"a": wide[:, 2:7], "b": {"c": torch.ones(5, dtype=torch.bfloat16) * 3}, "n": 3, "s": torch.tensor(7)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_dcp_is_read_without_torch(dcp_folder: Path) -> None:
    with read_dcp(LocalStore(dcp_folder)) as found:
        assert set(found) == {"a", "b.c", "s"}
        assert np.array_equal(found["a"].read(Box((1, 1), (2, 3))), np.arange(40.0).reshape(4, 10)[1:3, 3:6])
        assert np.array_equal(found["b.c"].read(Box.whole((5,))), bfloat16_bits(np.full(5, 3, np.float32)))
        assert found["s"].read(Box((), ())) == 7


def test_a_flipped_bit_in_dcp_is_noticed(dcp_folder: Path) -> None:
    file = dcp_folder / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    at = raw.find(struct.pack("<f", 33.0))
    assert at > 0
    raw[at + 1] ^= 4
    file.write_bytes(raw)
    with read_dcp(LocalStore(dcp_folder)) as found, pytest.raises(Damaged, match="checksum"):
        found["a"].read(Box.whole((4, 5)))


class Evil:
    """What an attacker's pickle would do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "owned"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(str(target))))
    with pytest.raises(FormatError, match="which no checkpoint needs"), read_dcp(LocalStore(tmp_path)):
        pass
    assert not target.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x02]q\x00.",
        b"not a pickle",
        b"\x80\x02" + b"]r" + struct.pack("<I", 2**31 - 2) + b".",  # a memo of two thousand million places
        b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
        b"\x80\x02}" * 1000 + b".",
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00truetR.",
    ],
    ids=range(9),
)
def test_hostile_metadata_ends_in_a_format_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(FormatError), read_dcp(LocalStore(tmp_path)):
        pass


def test_mutated_metadata_never_does_worse(dcp_folder: Path) -> None:
    rng = np.random.default_rng(0)
    raw = (dcp_folder / ".metadata").read_bytes()
    for _ in range(40):
        mutant = bytearray(raw)
        for at in rng.integers(0, len(raw), 3):
            mutant[at] = rng.integers(256)
        (dcp_folder / ".metadata").write_bytes(mutant)
        try:
            with read_dcp(LocalStore(dcp_folder)) as found:
                for tensor in found.values():
                    tensor.read(Box.whole(tensor.shape))
        except (FormatError, Damaged, ObjectMissing):
            continue


def test_hostile_safetensors_end_in_format_errors(tmp_path: Path) -> None:
    header: dict[str, Any] = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    cases = {
        "too long": struct.pack("<Q", 2**60) + b"{}",
        "short": b"abc",
        "no json": struct.pack("<Q", 2) + b"xx",
        "type": _file({"a": {**header["a"], "dtype": "F8"}}, 8),
        "offsets": _file({"a": {**header["a"], "data_offsets": [4, 8]}}, 8),
        "gap": _file({"a": {**header["a"], "data_offsets": [8, 16]}}, 16),
        "rest": _file(header, 9),
        "huge": _file({"a": {**header["a"], "shape": [2**50, 2**50]}}, 8),
        "overlap": _file({**header, "b": header["a"]}, 8),
    }
    for name, raw in cases.items():
        (tmp_path / "model.safetensors").write_bytes(raw)
        with pytest.raises(FormatError):
            read_safetensors(LocalStore(tmp_path))
        assert name
    (tmp_path / "model.safetensors").write_bytes(_file(header, 8))
    assert np.array_equal(read_safetensors(LocalStore(tmp_path))["a"].read(Box((1,), (1,))), np.zeros(1, "<f4"))


def test_an_index_may_not_point_outside(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises((FormatError, ValueError)):
        read_safetensors(LocalStore(tmp_path))


def _file(header: dict[str, Any], nbytes: int) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(nbytes)
