"""Loss on a fixed held-out slice, the same number for any number of replicas.

Micro-batches are dealt to the replicas as in training, so each sequence is computed in the same company whoever computes it.
Its loss is summed over its positions in fp64; every sequence has its own place in one vector, filled by one rank and zero on
the others (with context parallelism by the ranks that share it), so the all-reduce adds nothing to anything; and the total is
`math.fsum`, which is exact in any order. Over DP the result is therefore bitwise the same; other axes change the sequence's own
sum in its last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ftrain.parallel.partition import microbatches
from ftrain.train.batch import Data, Sequences
from ftrain.train.passes import Passes


def evaluate(
    passes: Passes,
    data: Data,
    *,
    num_sequences: int,
    micro_batch: int,
    device: torch.device,
    progress: Callable[[str, int], None],
) -> float:
    """Mean loss per valid token, in nats, over the first held-out sequences. All ranks call it together."""
    mesh, document_mask = passes.mesh, passes.config.data.document_mask
    sums = torch.zeros(2, num_sequences, dtype=torch.float64, device=device)  # loss and valid tokens of each sequence
    mine = microbatches(num_sequences, micro_batch, mesh.shape.dp, mesh.coordinate.dp)

    def batch(number: int) -> Sequences:
        return Sequences.of(data.heldout(mine[number].start, len(mine[number])), device, document_mask=document_mask)

    def use(number: int, batch: Sequences, losses: torch.Tensor) -> None:
        progress("evaluate", number)
        part = mine[number]
        sums[0, part.start : part.stop] = (losses * batch.valid).sum(1, dtype=torch.float64)
        sums[1, part.start : part.stop] = batch.valid.sum(1)

    passes.forward([len(part) for part in mine], batch, use)
    for axis in ("cp", "dp", "pp"):  # only last stages have anything but zeros
        mesh.all_reduce(sums, (axis,))
    losses_of, valid_of = sums.tolist()
    return math.fsum(losses_of) / max(1.0, math.fsum(valid_of))
