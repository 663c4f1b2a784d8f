"""One rank of `benchmarks.engine`: our engine and its peers in the same processes, stepping in turns on the same data.

Both sides start from the same initial values. The loss of each first step is handed back: a peer that learned something else
would be no peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import turns
from benchmarks.peers.llama import Shape
from benchmarks.peers.trainers import MicroBatch, Piped, Plain, Replicas, Sharded, Task, Tensor
from benchmarks.text import Text
from ftrain.config import Config
from ftrain.lr import learning_rate
from ftrain.model import init
from ftrain.parallel.layout import num_kv_heads, parameters
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.partition import microbatches
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.parallel.stages import stage_plan
from ftrain.train.step import Engine
from storage.box import Box

Step = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one contestant did on this rank."""

    seconds: list[float]
    cpu_seconds: list[float]  # of this process, all threads
    first_loss: float


def contest(rank: int, config: Config, peers: tuple[str, ...], rounds: int, seed: int) -> dict[str, Turn]:
    """Steps of ours and of each peer in turns, after one of each that does not count."""
    text = Text(config, seed)
    steps: dict[str, Step] = {"ours": _ours(rank, config, text)}
    for name in peers:
        steps[name] = _peer(name, config, text)
    losses = {name: step(1) for name, step in steps.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in turns(names, number):
            taken[name].append(_timed(steps[name], number + 2))
    return {name: Turn([w for w, _ in taken[name]], [c for _, c in taken[name]], losses[name]) for name in names}


def _timed(step: Step, number: int) -> tuple[float, float]:
    """From when all ranks are there to when the last one has finished; and of the processors, this process' part."""
    _meet()
    begin, cpu = time.perf_counter(), time.process_time()
    step(number)
    _meet()
    return time.perf_counter() - begin, time.process_time() - cpu


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _ours(rank: int, config: Config, text: Text) -> Step:
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=text)
    engine.init_state()
    size = config.batch.global_batch
    return lambda number: engine.train_step(step=number, first_sequence=(number - 1) * size).loss


def _peer(name: str, config: Config, text: Text) -> Step:
    trainer = _trainer(name, config)
    mine = _share(config, text)
    return lambda number: trainer.step(mine)


def _trainer(name: str, config: Config) -> Any:
    task = _task(config)
    if name == "pipelining":
        layers = stage_plan(config).layers[dist.get_rank()]
        return Piped(task, layers, config.batch.global_batch // config.batch.micro_batch)
    makers: dict[str, Callable[[], Any]] = {
        "pytorch": lambda: Plain(task),
        "dtensor": lambda: Tensor(task),
        "ddp": lambda: Replicas(task, zero=False),
        "ddp_zero": lambda: Replicas(task, zero=True),
        "fsdp2": lambda: Sharded(task, reshard=True),
        "fsdp2_kept": lambda: Sharded(task, reshard=False),
    }
    return makers[name]()


def _share(config: Config, text: Text) -> list[MicroBatch]:
    """The micro-batches of this rank's replica, cut as ours are."""
    shape = mesh_shape(config)
    place = shape.coordinate(dist.get_rank() if dist.is_initialized() else 0)
    parts = microbatches(config.batch.global_batch, config.batch.micro_batch, shape.dp, place.dp)
    batches = [text.sequences(part.start, len(part)) for part in parts]
    return [(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)) for batch in batches]


def _task(config: Config) -> Task:
    model, options = config.model, config.optimizer
    shape = Shape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=num_kv_heads(model),
        ffn=model.ffn,
        vocab=model.vocab,
        eps=model.norm_eps,
        rope_base=model.rope_base,
    )
    return Task(
        shape=shape,
        length=config.data.seq_len,
        lr=learning_rate(1, schedule=config.schedule, peak=options.lr, total=config.run.steps),
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        fill=lambda module: _fill(module, config),
    )


def _fill(module: nn.Module, config: Config) -> None:
    """Our initial values into a peer's model, or into those layers that it has."""
    theirs = dict(module.named_parameters())
    for spec in parameters(config.model, MeshShape()):
        if (parameter := theirs.pop(f"{spec.name}.weight", None)) is not None:
            whole = Box((0,) * len(spec.shape), spec.shape)
            init.fill(parameter.detach(), whole, spec=spec, model=config.model, seed=config.run.seed)
    if theirs:
        raise ValueError(f"no initial values for {', '.join(theirs)}")
