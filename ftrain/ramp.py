"""How many sequences an update takes: a pure function of where the run is in its data, whatever the layout.

A ramp (`batch.ramp`) gives the beginning of a run other batches, each up to a number of tokens. Nothing is counted and nothing
has to be saved for it: the position, in sequences, is what a checkpoint remembers anyway, so a run that is resumed in the
middle of a ramp, or under another layout, takes the batches it would have taken. The learning rate goes by steps and is not
touched.

Tokens are those of whole sequences, masked ones included: which targets count is known only once they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftrain.config import Config


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equal updates in a row: steps [first_step, stop_step), counted from 0, from the sequence `first_sequence` on."""

    first_step: int
    stop_step: int
    first_sequence: int
    global_batch: int


def global_batch_at(config: Config, sequence: int) -> int:
    """Sequences of the update that begins at the position `sequence`."""
    for part in config.batch.ramp:
        if sequence * config.data.seq_len < part.tokens:
            return part.global_batch
    return config.batch.global_batch


def batches(config: Config) -> tuple[int, ...]:
    """Every number of sequences that an update of the run may take, the final one last."""
    return tuple(dict.fromkeys([*(part.global_batch for part in config.batch.ramp), config.batch.global_batch]))


def stretches(config: Config, steps: int | None = None) -> Iterator[Stretch]:
    """The whole run, or its first `steps` updates, from the beginning."""
    stop = config.run.steps if steps is None else steps
    step = sequence = 0
    for part in config.batch.ramp:
        left = -(-part.tokens // config.data.seq_len) - sequence  # sequences until the first position behind the part
        count = min(-(-left // part.global_batch), stop - step)
        if count > 0:
            yield Stretch(step, step + count, sequence, part.global_batch)
            step, sequence = step + count, sequence + count * part.global_batch
    if step < stop:
        yield Stretch(step, stop, sequence, config.batch.global_batch)


def position(config: Config, steps: int) -> int:
    """Sequences consumed by the first `steps` updates of a run that began at 0."""
    return sum((part.stop_step - part.first_step) * part.global_batch for part in stretches(config, steps))
