"""Attention behind one seam, and the rotary tables.

`block_attention` is what context parallelism replaces: it sees queries and keys of possibly different positions. Until then
it is causal attention of a sequence with itself, by PyTorch's fused kernel.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


def block_attention(q_BTHK: torch.Tensor, k_BTHK: torch.Tensor, v_BTHK: torch.Tensor) -> torch.Tensor:
    """Causal attention, [B, T, H, K] in and out; k and v may have fewer heads, each then serves a group of queries."""
    grouped = q_BTHK.shape[2] != k_BTHK.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@lru_cache(maxsize=8)
def rotary_tables(
    length: int, size: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, [T, 1, K/2]; computed in fp64 so that every device has the same table."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).unsqueeze(1)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
