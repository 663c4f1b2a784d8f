"""Names there and back for every parameter, and no model that computes something else."""

from __future__ import annotations

import msgspec
import pytest

from ftrain.config import Model
from ftrain.model.names import (
    UnknownModelError,
    family,
    hugging_face_config,
    hugging_face_name,
    model_of_config,
    our_name,
    our_names,
    pieces,
)
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape

MODEL = Model(layers=12, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=100, qk_norm=True)
MIXTRAL = msgspec.structs.replace(MODEL, qk_norm=False, experts=11, experts_per_token=2)
QWEN_MOE = msgspec.structs.replace(MIXTRAL, qk_norm=True)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_name_and_comes_back(tied: bool) -> None:
    specs = parameters(msgspec.structs.replace(MODEL, tied=tied), MeshShape())
    theirs = {hugging_face_name(spec.name): spec.name for spec in specs}
    assert len(theirs) == len(specs)
    assert {our_name(key) for key in theirs} == {spec.name for spec in specs}
    assert theirs["model.layers.11.self_attn.q_norm.weight"] == "layers.11.attention.q_norm"
    assert theirs["model.layers.0.mlp.gate_proj.weight"] == "layers.0.mlp.w1"


@pytest.mark.parametrize("model", [MIXTRAL, QWEN_MOE], ids=family)
def test_every_expert_has_names_of_its_own_and_comes_back(model: Model) -> None:
    specs = parameters(model, MeshShape())
    ours = {piece: shape for spec in specs for piece, shape in pieces(spec.name, spec.shape).items()}
    theirs = {hugging_face_name(piece, family(model)): piece for piece in ours}
    assert len(theirs) == len(ours) == len(specs) + 12 * 3 * 10
    assert {our_name(key) for key in theirs} == set(ours)
    names = {"mixtral": "block_sparse_moe.experts.10.w2", "qwen3_moe": "mlp.experts.10.down_proj"}
    piece = theirs[f"model.layers.3.{names[family(model)]}.weight"]
    assert piece == "layers.3.moe.w2[10]"
    assert ours[piece] == (64, 96)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("_orig_mod.model.layers.3.mlp.down_proj.weight", "layers.3.mlp.w2"),
        ("model.layers.3._orig_mod.mlp.down_proj.weight", "layers.3.mlp.w2"),
        ("module.model.norm.weight", "norm"),
        ("layers.0.input_layernorm.weight", "layers.0.attention_norm"),
        ("model.layers.0.self_attn.q_proj.bias", None),
        ("model.layers.x.self_attn.q_proj.weight", None),
        ("model.layers.0.mlp.experts.1.w1.weight", None),
        ("model.layers.0.block_sparse_moe.experts.x.w1.weight", None),
        ("model.layers.0.block_sparse_moe.experts.1.w1", None),
        ("_orig_mod.model.layers.0.block_sparse_moe.experts.12.w1.weight", "layers.0.moe.w1[12]"),
        ("layers.0.mlp.gate.weight", "layers.0.moe.router"),
        ("", None),
    ],
)
def test_wrappers_and_strangers(key: str, ours: str | None) -> None:
    assert our_name(key) == ours


def test_tables_that_are_computed_are_no_parameters_and_doubles_are_refused() -> None:
    names, unknown = our_names(
        ["model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.mlp.router"]
    )
    assert names == {"norm": "model.norm.weight"}
    assert unknown == ["model.layers.0.mlp.router"]
    with pytest.raises(UnknownModelError, match="same parameter"):
        our_names(["model.norm.weight", "_orig_mod.model.norm.weight"])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_config_comes_back(qk_norm: bool) -> None:
    model = msgspec.structs.replace(MODEL, qk_norm=qk_norm, head_dim=16, rope_base=1234.0, norm_eps=1e-6, tied=True)
    assert model_of_config(hugging_face_config(model, seq_len=32, dtype="bfloat16")) == model


@pytest.mark.parametrize("model", [MIXTRAL, QWEN_MOE], ids=family)
def test_a_config_of_experts_comes_back(model: Model) -> None:
    model = msgspec.structs.replace(model, balance_coef=0.02, head_dim=16)
    assert model_of_config(hugging_face_config(model, seq_len=32, dtype="bfloat16")) == model


def test_experts_that_are_used_otherwise_are_refused() -> None:
    config = hugging_face_config(QWEN_MOE, seq_len=32, dtype="bfloat16")
    config |= {"norm_topk_prob": False, "mlp_only_layers": [0], "use_sliding_window": True}
    with pytest.raises(UnknownModelError, match=r"use_sliding_window.*norm_topk_prob.*mlp_only_layers"):
        model_of_config(config)
    config = {**hugging_face_config(MIXTRAL, seq_len=32, dtype="bfloat16"), "sliding_window": 4096, "hidden_act": "gelu"}
    del config["num_experts_per_tok"]
    with pytest.raises(UnknownModelError, match=r"sliding_window.*hidden_act.*num_experts_per_tok is missing"):
        model_of_config(config)


def test_all_differences_are_listed() -> None:
    config = {**hugging_face_config(MODEL, seq_len=32, dtype="bfloat16"), "hidden_act": "gelu", "mlp_bias": True}
    config |= {"rope_parameters": {"rope_type": "llama3"}, "model_type": "gemma3"}
    del config["vocab_size"]
    with pytest.raises(UnknownModelError) as caught:
        model_of_config(config)
    assert len(caught.value.problems) == 5
