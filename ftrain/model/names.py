"""What Hugging Face calls our parameters, and the `config.json` that goes with them, both ways.

A model with `qk_norm` is what `transformers` calls Qwen3, one without is Llama, and the same with experts are Qwen3-MoE and
Mixtral; everything else about them is the same here. Queries and keys need no permutation: our rotary embedding pairs element i
of a head with i + K/2 ("halves"), as theirs does. What our model cannot compute (biases, scaled rotary positions, sliding
windows, dense layers between those with experts) is refused by name: a model that loads and computes something else is worse
than an error.

We keep the matrices of a layer's experts in one array, they keep each by itself. So what has a name of theirs is a piece: a
whole parameter, or one expert's matrix of it, `layers.7.moe.w1[3]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ftrain.config import Model
from ftrain.parallel.layout import head_dim, num_kv_heads

__all__ = [
    "Family",
    "UnknownModelError",
    "family",
    "hugging_face_config",
    "hugging_face_name",
    "model_of_config",
    "our_name",
    "our_names",
    "pieces",
]

Family = Literal["llama", "qwen3", "mixtral", "qwen3_moe"]
"""A `model_type` of theirs that ours can be."""

_TOP = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
}
_EXPERTS: dict[Family, dict[str, str]] = {
    "mixtral": {
        "moe.router": "block_sparse_moe.gate",
        "moe.w1": "block_sparse_moe.experts.{}.w1",
        "moe.w3": "block_sparse_moe.experts.{}.w3",
        "moe.w2": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": {
        "moe.router": "mlp.gate",
        "moe.w1": "mlp.experts.{}.gate_proj",
        "moe.w3": "mlp.experts.{}.up_proj",
        "moe.w2": "mlp.experts.{}.down_proj",
    },
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_BACK = {theirs: ours for ours, theirs in (*_LAYER.items(), *(n for own in _EXPERTS.values() for n in own.items()))}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PIECE = re.compile(r"(.+)\[(\d+)\]")
_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_BASES = {"mixtral": 1_000_000.0}
"""Base of the rotary positions where a config names none, if it is not 10,000."""
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_COMPUTED = (".rotary_emb.inv_freq",)  # old files carry it; it is no parameter


class UnknownModelError(ValueError):
    """A model that ours is not; `problems` lists every difference."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def family(model: Model) -> Family:
    """What `transformers` calls such a model."""
    if model.experts:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    return "qwen3" if model.qk_norm else "llama"


def pieces(parameter: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What they store of a parameter, each with its shape: the parameter, or every expert's matrix of it."""
    if len(shape) == 3:
        return {f"{parameter}[{expert}]": shape[1:] for expert in range(shape[0])}
    return {parameter: shape}


def hugging_face_name(piece: str, kind: Family = "llama") -> str:
    """`layers.7.attention.wq` -> `model.layers.7.self_attn.q_proj.weight`."""
    if piece in _TOP:
        return _TOP[piece]
    found = _PIECE.fullmatch(piece)
    parameter, expert = found.groups() if found else (piece, "")
    _, number, rest = parameter.split(".", 2)
    theirs = _EXPERTS.get(kind, {}).get(rest) or _LAYER[rest]
    return f"model.layers.{number}.{theirs.format(expert)}.weight"


def our_name(key: str) -> str | None:
    """The piece a Hugging Face key stands for, whatever wrapped the module that wrote it; None if there is none."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    key = key if key.startswith(("model.", "lm_head.")) else f"model.{key}"
    if key in _TOP_BACK:
        return _TOP_BACK[key]
    _, _, rest = key.partition("model.layers.")
    number, _, rest = rest.partition(".")
    expert = _EXPERT.search(rest)
    leaf = _LAYER_BACK.get(_EXPERT.sub(".experts.{}.", rest).removesuffix(".weight"))
    if leaf is None or not number.isdecimal() or not rest.endswith(".weight"):
        return None
    return f"layers.{int(number)}.{leaf}" + (f"[{int(expert[1])}]" if expert else "")


def our_names(keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Piece -> key, and the keys that are no piece of ours. Raises if two keys stand for one piece."""
    found: dict[str, str] = {}
    unknown = []
    for key in keys:
        name = our_name(key)
        if name is None:
            unknown += [] if key.endswith(_COMPUTED) else [key]
        elif name in found:
            raise UnknownModelError([f"{key} and {found[name]} are the same parameter, {name}"])
        else:
            found[name] = key
    return found, unknown


def hugging_face_config(model: Model, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """The `config.json` with which `transformers` builds this model."""
    kind = family(model)
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": head_dim(model),
        "vocab_size": model.vocab,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": model.init_std,
        "torch_dtype": dtype,
        "use_cache": True,
        **(_experts_of(model, kind) if model.experts else {}),
    }


def _experts_of(model: Model, kind: Family) -> dict[str, Any]:
    """The part of `config.json` that says how experts are used."""
    same = {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.balance_coef,
        "output_router_logits": False,
        "sliding_window": None,
    }
    if kind == "mixtral":
        return same | {"router_jitter_noise": 0.0}
    every = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # all layers have experts
    return same | every | {"num_experts": model.experts, "moe_intermediate_size": model.ffn, "norm_topk_prob": True}


def model_of_config(config: Mapping[str, Any]) -> Model:
    """The model a Hugging Face `config.json` describes; `UnknownModelError` lists everything ours does not compute."""
    kind = config.get("model_type")
    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    needed = ["hidden_size", width, "num_hidden_layers", "num_attention_heads", "vocab_size"]
    if kind in _EXPERTS:
        config = {"num_local_experts": config.get("num_experts"), **config}  # transformers 4 and 5 differ
        needed += ["num_local_experts", "num_experts_per_tok"]
    problems = _unlike_ours(config)
    problems += [f"{key} is missing" for key in needed if not isinstance(config.get(key), int)]
    if problems:
        raise UnknownModelError(problems)
    experts: dict[str, Any] = {}
    if kind in _EXPERTS:
        experts = {"experts": config["num_local_experts"], "experts_per_token": config["num_experts_per_tok"]}
        experts["balance_coef"] = float(config.get("router_aux_loss_coef", 0.0))
    return Model(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
        ffn=config[width],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_base=float(_rope(config).get("rope_theta") or config.get("rope_theta") or _BASES.get(str(kind), 10_000.0)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        norm_eps=float(config.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
        **experts,
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What newer configs say in `rope_parameters`, older ones in `rope_scaling`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def _unlike_ours(config: Mapping[str, Any]) -> list[str]:
    kind = config.get("model_type")
    known = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe")
    problems = [] if kind in known else [f"model_type is {kind!r}, known are {', '.join(known)}"]
    problems += [f"{key} is true" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(key)]
    if kind in ("mistral", "mixtral") and config.get("sliding_window"):
        problems.append("sliding_window is set")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']!r}, ours is silu")
    rope = _rope(config).get("rope_type") or _rope(config).get("type") or "default"
    if rope != "default":
        problems.append(f"rotary positions are scaled ({rope})")
    return problems + (_experts_unlike_ours(config) if kind == "qwen3_moe" else [])


def _experts_unlike_ours(config: Mapping[str, Any]) -> list[str]:
    problems = [] if config.get("norm_topk_prob") else ["norm_topk_prob is false: our router's weights of a token add up to 1"]
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        problems.append("some layers have no experts (mlp_only_layers, decoder_sparse_step); ours have them in all or in none")
    return problems
