"""`plain_ddp.py` with checkpoints: killed at any moment, it goes on bit for bit. Compare the two: ten lines differ.

torchrun --nproc-per-node 2 examples/ddp.py
ftrain supervise --nproc 2 -- python examples/ddp.py
ftrain submit --slurm -- ftrain supervise --nnodes 2 --nproc 8 -- python examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrain


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))


def batch_of(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 16)
    return x, torch.sin(x.sum(dim=1, keepdim=True) + rank)


def digest(model: nn.Module) -> str:
    bits = [parameter.detach().view(torch.int32).sum(dtype=torch.int64).item() for parameter in model.parameters()]
    return ",".join(map(str, bits))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)

    model = DistributedDataParallel(make_model(options.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    checkpointer = ftrain.Checkpointer()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": ftrain.per_rank(ftrain.RandomState())}

    for step in range(checkpointer.load(state) + 1, options.steps + 1):
        x, y = batch_of(rank, options.batch)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        stop = ftrain.progress(step)
        if stop or step % 10 == 0:
            checkpointer.save(step, state)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if stop:
            break

    checkpointer.close()
    if rank == 0:
        print("final", digest(model), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
