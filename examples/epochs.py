"""The usual script of epochs and batches: killed at any moment, it goes on in the middle of its epoch, bit for bit.

ftrain supervise --nproc 2 -- python examples/epochs.py
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ftrain


class SamplerFrom(DistributedSampler[int]):
    """A DistributedSampler that begins at a place in the epoch: what was trained on is not even read again."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.first, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="processes that read the data")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)))
    sampler = SamplerFrom(dataset)
    own = torch.Generator()  # without it each pass over the loader draws from the generator that `load` has just restored
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=options.workers, generator=own)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    checkpointer = ftrain.Checkpointer()  # under `ftrain supervise`: into the run's folder
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": ftrain.per_rank(ftrain.RandomState())}
    step, stop = checkpointer.load(state), False
    for epoch in range(step // len(loader), options.epochs):
        sampler.set_epoch(epoch)
        sampler.first = step % len(loader) * 32  # 0 in all epochs but the one that a load came into
        own.manual_seed(epoch * dist.get_world_size() + dist.get_rank())  # seeds the processes that read
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % len(loader) == 0:
                scheduler.step()  # what ends an epoch comes before the save of its last step
            stop = ftrain.progress(step, loss=loss.item())
            if stop or step % 10 == 0:
                checkpointer.save(step, state)
            if stop:
                break
        if stop:
            break
    checkpointer.close()
    if dist.get_rank() == 0:
        print(f"final step {step} weights {sum(p.sum().item() for p in model.parameters()):.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
