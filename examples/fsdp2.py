"""FSDP2 with checkpoints that any number of ranks can load.

ftrain supervise --nproc 4 --run runs/fsdp2 -- python examples/fsdp2.py --steps 20
ftrain supervise --nproc 3 --run runs/fsdp2 -- python examples/fsdp2.py --steps 40
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ftrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", default=None, help="folder of the checkpoints (default: that of ftrain supervise)")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 67), nn.GELU(), nn.Linear(67, 1))  # 67 rows: no number of ranks divides them
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    unread = ftrain.per_rank(list(range(dist.get_rank(), 10_000, dist.get_world_size())), other_world="split")

    checkpointer = ftrain.Checkpointer(options.run, keep_last=3)
    state = {"model": model, "optimizer": optimizer, "unread": unread}
    start = checkpointer.load(state)
    for step in range(start + 1, options.steps + 1):
        samples = torch.tensor([unread.value.pop(0) for _ in range(8)], dtype=torch.float32)
        x = torch.sin(samples[:, None] * torch.arange(1, 17))
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stop = ftrain.progress(step, loss=loss.item())  # on all ranks after the same step
        if stop or step % 10 == 0:
            checkpointer.save(step, state)
        if stop:
            break
    checkpointer.close()
    if dist.get_rank() == 0:
        print(f"from step {start} to {options.steps}, {len(unread.value)} samples unread by rank 0", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
