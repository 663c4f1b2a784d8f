"""Initial values as a pure function of (seed, parameter name, global index): the same bits under every layout and device.

A generator's stream depends on who draws how much, and differs between CPU and GPU. Here each element is computed from its
own number: splitmix64 of (key(seed, name) + index x golden ratio) gives 64 bits; their four 16-bit fields, added, are an exact
integer with a bell-shaped distribution (Irwin-Hall of order 4: it ends at 3.46 standard deviations, much like the usual
truncated normal). One fp64 multiplication and one rounding to fp32 remain, both exactly rounded everywhere. A rank that
holds a box generates that box and nothing else.

    parameter                    values
    norms                        1
    wo, w2 (into the residual)   std / sqrt(2 x layers)      GPT-2's rule: the residual stream keeps its scale
    everything else              std                         `model.init_std`
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from math import prod

import torch

from ftrain.config import Model
from ftrain.parallel.layout import ParameterSpec, row_dim
from storage.box import Box

GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIELDS = 0x0000FFFF0000FFFF
_CENTRE = 2 * 0xFFFF
_STD = math.sqrt((2**32 - 1) / 3)  # of the sum of four uniform 16-bit integers: 4 x (65536^2 - 1) / 12
BLOCK = 1 << 15  # elements on CPU: the integers of a block stay in cache


def initial_std(spec: ParameterSpec, model: Model) -> float | None:
    """The standard deviation of a parameter's initial values; None for a norm, which starts at 1."""
    if len(spec.shape) == 1:
        return None
    into_residual = spec.name.endswith((".wo", ".w2"))
    return model.init_std / math.sqrt(2 * model.layers) if into_residual else model.init_std


def fill(out: torch.Tensor, box: Box, *, spec: ParameterSpec, model: Model, seed: int) -> None:
    """Write the initial values of `box` of a parameter into `out`, a tensor of the box's shape."""
    std = initial_std(spec, model)
    if std is None:
        out.fill_(1.0)
        return
    key, scale, dim = _key(seed, spec.name), std / _STD, row_dim(spec.shape)
    columns = _column_indices(box, spec.shape, dim, out.device)
    row_length = prod(spec.shape[dim + 1 :])
    for number, rows in enumerate(out.view(-1, box.shape[dim], len(columns)).unbind()):  # the matrices of a stack, or the one
        above = (box.offset[0] + number) * spec.shape[dim] if dim else 0
        for start, stop in _row_blocks(rows, BLOCK if out.device.type == "cpu" else 1 << 24):
            first = above + box.offset[dim] + start
            numbers = torch.arange(first, first + stop - start, device=out.device).mul_(row_length).unsqueeze(1) + columns
            rows[start:stop].copy_(_bell(numbers, key).double().mul_(scale).float())


def _row_blocks(rows: torch.Tensor, block: int) -> Iterator[tuple[int, int]]:
    step = max(1, block // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield start, min(start + step, rows.shape[0])


def _column_indices(box: Box, shape: tuple[int, ...], dim: int, device: torch.device) -> torch.Tensor:
    """Flat index within a row of the logical array (along `dim`), for each element of a row of the box."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for offset, extent, size in zip(box.offset[dim + 1 :], box.shape[dim + 1 :], shape[dim + 1 :], strict=True):
        index = (index.unsqueeze(-1) * size + torch.arange(offset, offset + extent, device=device)).reshape(-1)
    return index


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _bell(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """The centred sum of the four 16-bit fields of splitmix64(key + number x GOLDEN), exact, in place on int64 `numbers`."""
    z = numbers.mul_(_signed(GOLDEN)).add_(_signed(key))
    z ^= _shift(z, 30)
    z *= _signed(_MIX1)
    z ^= _shift(z, 27)
    z *= _signed(_MIX2)
    z ^= _shift(z, 31)
    pairs = (z & _FIELDS) + (_shift(z, 16) & _FIELDS)  # two sums of 17 bits, side by side
    return (pairs & 0x1FFFF).add_(pairs >> 32).sub_(_CENTRE)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value
