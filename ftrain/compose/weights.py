"""The weights of a checkpoint, stored or left out: they are the rounded masters, by the format's invariant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ftrain.parallel.arrays import MASTER, WEIGHTS
from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.exchange.tensor import Tensor, bfloat16_bits, from_checkpoint

__all__ = ["of_a_script", "weights_of"]


def of_a_script(checkpoint: Checkpoint) -> str:
    """That a checkpoint is not of a model that is known here, for who asks for its weights as such."""
    names = [name for name in checkpoint.names if not name.startswith("random/")]
    shown = ", ".join([*names[:2], *(["..."] if len(names) > 2 else [])])
    return (
        f"the checkpoint of step {checkpoint.step} is not of a model that `ftrain run` trains: its arrays have a script's own "
        f"names ({shown})"
    )


def weights_of(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """All of them, by the names of the parameters; nothing is read before it is asked for."""
    slot = WEIGHTS if any(name.startswith(f"{WEIGHTS}/") for name in checkpoint.names) else MASTER
    for name in checkpoint.names:
        if name.startswith(f"{slot}/"):
            stored = from_checkpoint(checkpoint, name, name.removeprefix(f"{slot}/"))
            yield stored if slot == WEIGHTS else _rounded(stored)


def _rounded(master: Tensor) -> Tensor:
    """fp32 to bfloat16, to nearest even. (fp64 masters, which `certify` uses, are their own weights.)"""
    if master.dtype != "float32":
        return master

    def read(box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        return bfloat16_bits(np.ascontiguousarray(master.read(box), dtype=np.float32))

    return Tensor(master.name, "bfloat16", master.shape, read)
