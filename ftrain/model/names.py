"""What Hugging Face calls our parameters, and the `config.json` that goes with them, both ways.

A model with `qk_norm` is what `transformers` calls Qwen3, one without is Llama; everything else about the two is the same here.
Queries and keys need no permutation: our rotary embedding pairs element i of a head with i + K/2 ("halves"), as theirs does.
What our model cannot compute (biases, scaled rotary positions, experts, sliding windows) is refused by name: a model that loads
and computes something else is worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftrain.config import Model
from ftrain.parallel.layout import head_dim, num_kv_heads

__all__ = ["UnknownModelError", "hugging_face_config", "hugging_face_name", "model_of_config", "our_name", "our_names"]

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
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_COMPUTED = (".rotary_emb.inv_freq",)  # old files carry it; it is no parameter


class UnknownModelError(ValueError):
    """A model that ours is not; `problems` lists every difference."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def hugging_face_name(parameter: str) -> str:
    """`layers.7.attention.wq` -> `model.layers.7.self_attn.q_proj.weight`."""
    if parameter in _TOP:
        return _TOP[parameter]
    _, number, rest = parameter.split(".", 2)
    return f"model.layers.{number}.{_LAYER[rest]}.weight"


def our_name(key: str) -> str | None:
    """The parameter a Hugging Face key stands for, whatever wrapped the module that wrote it; None if there is none."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    key = key if key.startswith(("model.", "lm_head.")) else f"model.{key}"
    if key in _TOP_BACK:
        return _TOP_BACK[key]
    _, _, rest = key.partition("model.layers.")
    number, _, rest = rest.partition(".")
    leaf = _LAYER_BACK.get(rest.removesuffix(".weight"))
    if leaf is None or not number.isdecimal() or not rest.endswith(".weight"):
        return None
    return f"layers.{int(number)}.{leaf}"


def our_names(keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Parameter -> key, and the keys that are no parameter of ours. Raises if two keys stand for one parameter."""
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
    kind, architecture = ("qwen3", "Qwen3ForCausalLM") if model.qk_norm else ("llama", "LlamaForCausalLM")
    return {
        "architectures": [architecture],
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
    }


def model_of_config(config: Mapping[str, Any]) -> Model:
    """The model a Hugging Face `config.json` describes; `UnknownModelError` lists everything ours does not compute."""
    problems = _unlike_ours(config)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    problems += [f"{key} is missing" for key in needed if not isinstance(config.get(key), int)]
    if problems:
        raise UnknownModelError(problems)
    return Model(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_base=float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0),
        qk_norm=config.get("model_type") == "qwen3",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What newer configs say in `rope_parameters`, older ones in `rope_scaling`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def _unlike_ours(config: Mapping[str, Any]) -> list[str]:
    kind = config.get("model_type")
    problems = [] if kind in ("llama", "mistral", "qwen3") else [f"model_type is {kind!r}, known are llama, mistral and qwen3"]
    problems += [f"{key} is true" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(key)]
    if kind == "mistral" and config.get("sliding_window"):
        problems.append("sliding_window is set")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']!r}, ours is silu")
    rope = _rope(config).get("rope_type") or _rope(config).get("type") or "default"
    if rope != "default":
        problems.append(f"rotary positions are scaled ({rope})")
    return problems
