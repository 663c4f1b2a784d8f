"""The peer of benchmarks.recovery: what a careful user of `torchrun` writes for the same model.

Plain PyTorch: DistributedDataParallel over Gloo, fp32, SDPA, fused AdamW. Rank 0 saves model, optimizer and step to tmpfs
every so many steps (written aside, then renamed); after a restart every rank loads the newest file. Imports nothing but
torch, and the data costs nothing: what is measured is how fast training goes on. It tells the benchmark its process ids and
finished steps by small files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [B, H, T, K]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        changed: torch.Tensor = x + self.down(F.silu(gate) * up)
        return changed


class Model(nn.Module):
    """A Llama-style decoder; its output is the mean loss."""

    def __init__(self, model: dict[str, int]) -> None:
        super().__init__()
        self.head_dim = model["hidden"] // model["heads"]
        self.embedding = nn.Embedding(model["vocab"], model["hidden"])
        blocks = (Block(model["hidden"], model["heads"], model["ffn"]) for _ in range(model["layers"]))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(model["hidden"])
        self.head = nn.Linear(model["hidden"], model["vocab"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each token from those before it."""
        x = self.embedding(tokens[:, :-1])
        frequencies = 5e5 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[1]), frequencies)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int, args: dict[str, Any]) -> torch.Tensor:
    """A pure function of step and rank, so that a resumed run goes on with the same data."""
    generator = torch.Generator().manual_seed(step * args["ranks"] + rank)
    shape = (args["global_batch"] // args["ranks"], args["seq_len"] + 1)
    return torch.randint(args["model"]["vocab"], shape, generator=generator)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text)
    os.replace(aside, path)


def _join(rank: int, restart: int, world: int) -> None:
    """Meet the other rank under names of this restart.

    The usual `init_process_group("gloo")` re-uses the names in torchrun's store, which lives on: who looks before its peer has
    written connects to the dead process and fails ("Connection refused"), often several restarts in a row.
    """
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, world, is_master=rank == 0 and not agent_has_it)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"restart-{restart}", store), rank=rank, world_size=world)


def main(args: dict[str, Any]) -> None:
    """Train for ever."""
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    folder, snapshot = Path(args["folder"]), Path(args["tmpfs"]) / "snapshot.pt"
    write(folder / f"pid-{rank}", f"{restart} {os.getpid()}")
    torch.set_num_threads(1)
    _join(rank, restart, args["ranks"])
    torch.manual_seed(args["seed"])
    model = DistributedDataParallel(Model(args["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"], fused=True)
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True, mmap=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with (folder / "steps").open("a", buffering=1) as steps:
        while True:
            step += 1
            loss = model(batch(step, rank, args))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % args["snapshot_steps"] == 0 and rank == 0:
                aside = snapshot.with_suffix(".tmp")
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
                os.replace(aside, snapshot)
            if rank == 0:
                steps.write(f"{restart} {step} {time.time()!r}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
