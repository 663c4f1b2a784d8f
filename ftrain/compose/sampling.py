"""A stored model, looked at by one process: a few tokens of it, and its loss beside what simple counts can do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.compose.errors import RefusedError
from ftrain.compose.stores import opened_run
from ftrain.compose.weights import of_a_script, weights_of
from ftrain.config import Config, Model
from ftrain.phases import config_of as trained_with
from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.errors import FormatError

if TYPE_CHECKING:
    import torch


SMALL = 50_000_000
"""Parameters of a model whose operations are too short to be shared: threads spin for each other, and where a run has the
cores, a sample of 100 tokens took ten times as long with two of them (51 s, not 5 s)."""

IMPORTED_WINDOW = 4096
"""Tokens that an imported model looks back on, if its source did not say."""


def sample_text(
    url: str, *, step: int | None = None, prompt: str, tokens: int, temperature: float, seed: int, tokenizer: str = ""
) -> str:
    """`prompt` and what the weights of a checkpoint add to it. `tokenizer`: another than the one it was trained with.

    Raises RefusedError for an empty prompt, and where the tokenizer of an imported model is not known or not its own.
    """
    from ftrain.data.tokenizer import load_tokenizer
    from ftrain.train.sample import generate

    with opened_run(url) as run:
        checkpoint = run.open(step)
        known = model_of(checkpoint)
        words = load_tokenizer(tokenizer or _tokenizer(known))
        if words.vocab > known.model.vocab:
            raise RefusedError(
                [f"the tokenizer has {words.vocab} tokens, the model {known.model.vocab}: it is another model's"]
            )
        start = [int(token) for token in words.encode(prompt)]
        if not start:
            raise RefusedError(["the prompt is empty: give --prompt at least one character to go on from"])
        weights = stored_weights(checkpoint)
    stream = generate(weights, start, model=known.model, window=known.seq_len, temperature=temperature, seed=seed)
    with fitting_threads(weights):
        return words.decode([*start, *itertools.islice(stream, tokens)])


@contextmanager
def fitting_threads(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """One thread for a small model, as many as torch would take for another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if sum(weight.numel() for weight in weights.values()) < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Known:
    """What a checkpoint says of its model. An imported one has no tokenizer, and a `source` beside which there may be one."""

    model: Model
    seq_len: int
    tokenizer: str = ""
    source: str = ""


def model_of(checkpoint: Checkpoint) -> Known:
    """The model of a checkpoint, trained here or imported. Raises FormatError where it does not say which model it is."""
    import msgspec

    saved = checkpoint.progress.get("imported")
    if saved is None and "config" not in checkpoint.progress:
        raise FormatError(f"{of_a_script(checkpoint)}, and only the script knows how to run it: sample from it there")
    if saved is None or "config" in checkpoint.progress:
        config = config_of(checkpoint)
        return Known(config.model, config.data.seq_len, tokenizer=config.data.tokenizer)
    try:
        window = int(saved.get("seq_len") or IMPORTED_WINDOW)
        return Known(msgspec.convert(saved["model"], Model), window, source=str(saved.get("source", "")))
    except (KeyError, AttributeError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise FormatError(f"the checkpoint of step {checkpoint.step} does not say which model was imported: {error}") from error


def _tokenizer(known: Known) -> str:
    """The model's own tokenizer: of its config, bytes if it has just as many tokens, or the file beside the weights."""
    from ftrain.data.tokenizer import load_tokenizer

    beside = Path(known.source) / "tokenizer.json"
    if known.tokenizer:
        return known.tokenizer
    if beside.is_file():
        return str(beside)
    if known.model.vocab == load_tokenizer("byte").vocab:
        return "byte"
    where = f"and no tokenizer.json in {known.source}: name the file (--tokenizer)"
    raise RefusedError([f"an imported model of {known.model.vocab} tokens, {where}"])


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
        return trained_with(checkpoint.progress)
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
