"""A stored model, looked at by one process: a few tokens of it, and its loss beside what simple counts can do."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ftrain.compose.stores import opened_run
from ftrain.compose.weights import weights_of
from ftrain.config import Config
from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.errors import FormatError

if TYPE_CHECKING:
    import torch


def sample_text(url: str, *, step: int | None = None, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """`prompt` and what the weights of a checkpoint add to it."""
    from ftrain.data.tokenizer import load_tokenizer
    from ftrain.train.sample import generate

    with opened_run(url) as run:
        checkpoint = run.open(step)
        config = config_of(checkpoint)
        weights = stored_weights(checkpoint)
    tokenizer = load_tokenizer(config.data.tokenizer)
    start = [int(token) for token in tokenizer.encode(prompt)]
    stream = generate(weights, start, model=config.model, window=config.data.seq_len, temperature=temperature, seed=seed)
    return tokenizer.decode([*start, *itertools.islice(stream, tokens)])


def stored_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The whole weights by parameter name; nothing else of the checkpoint is read."""
    import torch

    found = {}
    for tensor in weights_of(checkpoint):
        bits = tensor.read(Box.whole(tensor.shape))
        found[tensor.name] = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, tensor.dtype))
    return found


def config_of(checkpoint: Checkpoint) -> Config:
    """The config a checkpoint was trained with."""
    import msgspec

    try:
        return msgspec.convert(checkpoint.progress["config"], Config)
    except (KeyError, msgspec.ValidationError) as error:
        raise FormatError(f"the checkpoint of step {checkpoint.step} has no config this version can read: {error}") from error


def heldout_comparison(config: Config) -> tuple[float, float, float]:
    """(held-out loss of the newest checkpoint, unigram entropy, bigram entropy), nats per token on the same held-out tokens."""
    from ftrain.data.dataset import Dataset
    from ftrain.data.stdlib import cache_root

    with opened_run(config.run.url) as run:
        progress = run.open(None).progress
    if progress.get("eval_loss") is None or progress.get("eval_step") != progress.get("step"):
        raise FormatError(
            "the newest checkpoint carries no evaluation of its own step: set evaluate.every_steps to divide run.steps"
        )
    dataset = Dataset(config, root=cache_root())
    sequences = config.evaluate.sequences
    return (
        float(progress["eval_loss"]),
        dataset.unigram_entropy(sequences=sequences),
        dataset.bigram_entropy(sequences=sequences),
    )
