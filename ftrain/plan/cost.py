"""Floating-point operations, by the conventions in use: how many a step needs, and which rank does how many of them.

A utilisation means nothing without its numerator. The one this project reports halves causal attention, as Megatron-LM and
MaxText do; counting it in full, as PaLM, torchtitan, Picotron and Nanotron do, raises the number by 4 % at 8,192 tokens and
40 % at 131,072 for the same run. Recomputed operations are never counted.
"""

from __future__ import annotations

from fractions import Fraction

from ftrain.plan.setup import Quantity, Setup


def layer_flops(setup: Setup) -> int:
    """Forward and backward of one layer for one token, without the attention core: 6 per matrix parameter that computes it."""
    model = setup.config.model
    used = min(model.experts, model.experts_per_token) if model.experts else 1
    return 6 * model.hidden * (2 * setup.queries + 2 * setup.keys + 3 * used * model.ffn + model.experts)


def attention_flops(setup: Setup, *, causal: bool = True) -> int:
    """Attention core of one layer for one token of a full sequence: 12 q s, half of it under the causal mask."""
    return (6 if causal else 12) * setup.queries * setup.config.data.seq_len


def head_flops(setup: Setup) -> int:
    """The output head for one token; the embedding is a lookup."""
    return 6 * setup.config.model.hidden * setup.config.model.vocab


def token_flops(setup: Setup, *, causal: bool = True) -> int:
    """Model FLOPs of one token, forward and backward."""
    return setup.config.model.layers * (layer_flops(setup) + attention_flops(setup, causal=causal)) + head_flops(setup)


def step_flops(setup: Setup, *, causal: bool = True) -> int:
    """Model FLOPs of one update over all ranks."""
    return token_flops(setup, causal=causal) * setup.tokens_per_update


def stage_flops(setup: Setup) -> tuple[Quantity, ...]:
    """Model FLOPs of each virtual stage for one micro-batch on one rank (forward and backward)."""
    return tuple(_share(setup) * flops for flops in _per_token(setup))


def _share(setup: Setup) -> Quantity:
    """Tokens of a micro-batch that a rank's operations amount to."""
    return setup.tokens / setup.mesh.tp


def _per_token(setup: Setup) -> list[int]:
    layer = layer_flops(setup) + attention_flops(setup)
    flops = [len(stage) * layer for stage in setup.stages]
    flops[-1] += head_flops(setup)
    return flops


def _loads(setup: Setup) -> list[int]:
    """Operations of each pipeline rank for one token."""
    stages = _per_token(setup)
    return [sum(stages[stage] for stage in setup.stages_of(rank)) for rank in range(setup.mesh.pp)]


def slowest(setup: Setup) -> Quantity:
    """Model FLOPs of the pipeline rank that does most, for one micro-batch."""
    return _share(setup) * max(_loads(setup))


def imbalance(setup: Setup) -> Fraction:
    """The slowest pipeline rank's work over the mean: what a step waits for at best."""
    loads = _loads(setup)
    return Fraction(max(loads) * len(loads), sum(loads))
