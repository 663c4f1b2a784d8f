"""A few tokens from a checkpoint's weights, to see that it is a language model. One process, no engine, no cache of keys.

Every new token runs the whole window again: quadratic, and still instant at the sizes at which one looks at samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ftrain.config import Model
from ftrain.model.transformer import Transformer
from ftrain.parallel.optimizer import View

COLDEST = 1e-6
"""Below, a logit over the temperature may be more than fp32 holds, and the likeliest token is the only one left long before."""


def generate(
    weights: Mapping[str, torch.Tensor],
    prompt: Sequence[int],
    *,
    model: Model,
    window: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """New tokens after `prompt`, without end. `weights` are whole arrays by parameter name.

    At most the last `window` tokens are looked at (the sequence length of training); `temperature` 0 takes the likeliest
    token each time; `top_k` 0 draws from all.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token to start from")
    decoder = Transformer(model, dtype=torch.float32)
    decoder.place({name: View(weight, torch.empty(0)) for name, weight in weights.items()})
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    while True:
        with torch.no_grad():
            last = decoder(torch.tensor([tokens[-window:]]))[:, -1]
            tokens.append(_choose(decoder.logits(last)[0], temperature, top_k, generator))
        yield tokens[-1]


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < COLDEST:
        return int(logits.argmax())
    if top_k:
        worst = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
