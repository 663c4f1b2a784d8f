"""The peers of `benchmarks.engine`: one training step each, by what PyTorch itself offers for the same parallelism.

    Plain      one process
    Tensor     DTensor: `parallelize_module` with sequence parallelism, vocabulary-parallel embedding, head and loss
    Piped      `torch.distributed.pipelining`, 1F1B
    Replicas   DistributedDataParallel, the optimizer whole on each replica or cut by ZeroRedundancyOptimizer
    Sharded    FSDP2: `fully_shard` on each block

All in fp32 with fused AdamW, SDPA, the same micro-batches and clipping as ours, and no communication that a careful user would
save (`no_sync` and its like between micro-batches). `step` takes all micro-batches of this replica and returns the mean loss
where it is known, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.llama import Llama, Shape, decay_groups, loss_of

MicroBatch = tuple[torch.Tensor, torch.Tensor]
Fill = Callable[[nn.Module], None]


class Task(NamedTuple):
    """What is to be trained, the same for all."""

    shape: Shape
    length: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float
    fill: Fill  # sets the initial values by name

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        """The fused one."""
        return torch.optim.AdamW(decay_groups(model, self.weight_decay), fused=True, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Of AdamW, but for weight decay."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}

    def model(self, layers: range | None = None) -> Llama:
        """With its initial values."""
        model = Llama(self.shape, self.length, layers)
        self.fill(model)
        return model


class Plain:
    """One process."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, task.model()
        self.optimizer = task.adamw(self.model)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """One update."""
        loss = 0.0
        for tokens, targets in batches:
            part = loss_of(self.model(tokens), targets) / len(batches)
            part.backward()
            loss += float(part.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Tensor:
    """DTensor over all ranks."""

    def __init__(self, task: Task) -> None:
        self.task = task
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = _tensor_parallel(task.model(), mesh)
        self.optimizer = task.adamw(self.model)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """One update."""
        loss = 0.0
        for tokens, targets in batches:
            with loss_parallel():
                part = loss_of(self.model(tokens), targets) / len(batches)
                part.backward()
            loss += float(part.detach().full_tensor())  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def _tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """The plan of PyTorch's own tutorial and of torchtitan: two collectives into and two out of each layer."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
            **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "mlp.w2")},
        }
        parallelize_module(block, mesh, plan)
    return model


class Piped:
    """1F1B over all ranks, one stage each."""

    def __init__(self, task: Task, layers: range, num_microbatches: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.task, self.model = task, task.model(layers)
        self.first, self.last = rank == 0, rank == world - 1
        stage = PipelineStage(self.model, rank, world, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_of)
        self.optimizer = task.adamw(self.model)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """One update."""
        tokens, targets = (torch.cat([batch[index] for batch in batches]) for index in (0, 1))
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *((tokens,) if self.first else ()),
            target=targets if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    def _clip(self) -> None:
        """By the norm over all stages."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        squared = norm.square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.task.clip_norm, squared.sqrt())


class Replicas:
    """DDP."""

    def __init__(self, task: Task, *, zero: bool) -> None:
        self.task = task
        self.model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
        self.optimizer = _zero(task, self.model) if zero else task.adamw(self.model)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """One update."""
        loss = torch.zeros(())
        for number, (tokens, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.model.no_sync():
                part = loss_of(self.model(tokens), targets) / len(batches)
                part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return float(loss) / dist.get_world_size()


def _zero(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    groups = decay_groups(model, task.weight_decay)
    return ZeroRedundancyOptimizer(
        groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **task.settings()
    )


class Sharded:
    """FSDP2 over all ranks."""

    def __init__(self, task: Task, *, reshard: bool) -> None:
        """`reshard`: let go of a layer's weights after its forward (ZeRO-3), or keep them until backward (ZeRO-2)."""
        self.task, self.model = task, task.model()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.layers.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = task.adamw(self.model)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """One update."""
        loss = torch.zeros(())
        for number, (tokens, targets) in enumerate(batches, 1):
            self.model.set_requires_gradient_sync(number == len(batches))  # type: ignore[operator]
            part = loss_of(self.model(tokens), targets) / len(batches)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss) / dist.get_world_size()
