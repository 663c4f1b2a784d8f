"""The engine: one update of the whole model by all ranks, and the state that it changes.

    how many tokens count, over all replicas          one int64 all-reduce, before the first forward
    forward and backward of each of my micro-batches  gradients of (summed loss / that number), added to main_grad, in the
                                                      order of the schedule (`ftrain.parallel.program`)
    sum the gradients over the replicas               reduce-scatter, fp32; actions of the same list
    vote                                              one fp64 all-reduce: norm, finite or not, loss, wishes
    update my region, publish the weights             all ranks, or none if anything was not finite

Dividing by the global count, not by the number of replicas or micro-batches, is what lets replicas take unequal shares: every
token weighs the same wherever it is computed. A step is a pure function of (state, step number, data position): learning rate
and bias correction follow from the step number, so that there is nothing else to restore besides the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftrain.config import Config
from ftrain.course import Curve
from ftrain.lr import learning_rate
from ftrain.model import init
from ftrain.model.transformer import Transformer
from ftrain.parallel.arrays import EXACT, StatePiece, StateTypes, array_specs
from ftrain.parallel.buckets import Part, plan_buckets
from ftrain.parallel.clock import CHECKPOINT, COMPUTE, DATA
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.norm import clip_factor
from ftrain.parallel.optimizer import ShardedAdamW
from ftrain.parallel.partition import microbatches
from ftrain.parallel.shards import Shards
from ftrain.parallel.stages import config_parameters
from ftrain.ramp import global_batch_at
from ftrain.train.batch import Data, Sequences
from ftrain.train.evaluate import evaluate
from ftrain.train.passes import Passes
from ftrain.train.replay import differing
from ftrain.train.votes import Flags, Vote, vote
from storage.pack import ArraySpec

if TYPE_CHECKING:
    from ftrain.parallel.fsdp import FullyShardedAdamW


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, the same on every rank."""

    step: int  # number of updates behind the state after it, skipped ones included
    loss: float  # mean over the valid tokens of the global batch, in nats, before the update
    grad_norm: float  # before clipping
    tokens: int  # valid ones
    sequences: int
    lr: float
    applied: bool  # False: something was not finite, and no rank changed its state
    flags: Flags  # summed over ranks


def _no_wait() -> None:
    """Nothing reads the state while it changes."""


def _no_heartbeat(phase: str, microbatch: int) -> None:
    """Nobody watches."""


class Engine:
    """One rank's engine. Methods that communicate (all but `set_step`, `pieces`, `array_specs`) are called by all ranks."""

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        device: torch.device | str,
        dataset: Data,
        before_update: Callable[[], None] = _no_wait,
        progress: Callable[[str, int], None] = _no_heartbeat,
    ) -> None:
        """`before_update` is called before the vote on each update: a copy of the state must be finished on return.
        `progress` is told the phase and micro-batch, for the heartbeat."""
        self.config, self.mesh, self.device, self.dataset = config, mesh, torch.device(device), dataset
        self.before_update, self.progress = before_update, progress
        self.after_vote: Callable[[], None] = _no_wait  # all ranks are together there, and the host waits for nothing
        self.step = 0
        self.phase = 0
        self.curve = Curve(0, config.run.steps)
        """The updates over which the learning-rate schedule stretches."""
        self.shares = torch.zeros(2, dtype=torch.float64)
        """What this rank contributed to the last vote: the squares of its gradients, its part of the loss."""
        self.passed_over = 0
        """Sequences of the data that lie before the next update and are not read by any."""
        self.compute_dtype = compute_dtype(config, self.device)
        self.types = EXACT if self.compute_dtype == torch.float64 else StateTypes()
        self.parameters = config_parameters(config, mesh.shape)
        for width in sorted({spec.summands(mesh.shape.tp) for spec in self.parameters}):
            mesh.make_neighbours(width)  # the same list on every rank
        self.shards = Shards.of(mesh.shape, config.parallel)
        self.optimizer = self._optimizer()
        self.passes = Passes(
            config,
            self.parameters,
            self.optimizer,
            dtype=self.compute_dtype,
            progress=lambda phase, microbatch: self.progress(phase, microbatch),
        )

    def _optimizer(self) -> ShardedAdamW | FullyShardedAdamW:
        config, mesh, device, types = self.config, self.mesh, self.device, self.types
        if self.shards is not None:
            from ftrain.parallel.fsdp import FullyShardedAdamW  # most runs can do without a second of imports

            specs = self.parameters
            return FullyShardedAdamW(specs, self.shards, mesh=mesh, device=device, types=types, options=config.optimizer)
        buckets = plan_buckets(self.parameters, mesh.shape, mesh.coordinate, bucket_bytes=self._bucket_bytes)
        return ShardedAdamW(buckets, mesh=mesh, device=device, types=types, options=config.optimizer)

    def prepare(self) -> None:
        """Do beforehand what the first step would need long for."""
        self.passes.prepare()

    @property
    def model(self) -> Transformer:
        """The rank's first stage: the whole model where there is no pipeline."""
        return next(iter(self.passes.modules.values()))

    @property
    def layout(self) -> str:
        """The layout in words, as checkpoints remember it."""
        return str(self.mesh.shape)

    @property
    def _bucket_bytes(self) -> float:
        return self.config.parallel.bucket_mib * 2**20

    def init_state(self) -> None:
        """The state of step 0: counter-based initial values, the same bits under every layout."""

        def fill(out: torch.Tensor, part: Part) -> None:
            init.fill(out, part.box, spec=part.spec, model=self.config.model, seed=self.config.run.seed)

        self.optimizer.fill_masters(fill)
        self.step = 0

    def set_step(self, step: int) -> None:
        """Say how many updates are behind the state that was put into `pieces()`."""
        self.step = step

    def pieces(self) -> list[StatePiece]:
        """The state this rank holds, as boxes of the logical arrays; tensors are live views."""
        return self.optimizer.pieces()

    def array_specs(self) -> list[ArraySpec]:
        """All arrays of the state, the same list on every rank."""
        shape, types = self.mesh.shape, self.types
        return array_specs(self.parameters, shape, bucket_bytes=self._bucket_bytes, types=types, shards=self.shards)

    def differing(self, before: torch.Tensor) -> tuple[int, ...]:
        """The ranks whose `shares` are not bit for bit what they were (`before`)."""
        return differing(self.mesh, before, self.shares)

    def after_load(self) -> None:
        """Once masters and moments are in place: derive the weights from the masters, everywhere."""
        self.optimizer.publish()

    def evaluate(self) -> float:
        """Mean loss per valid token on the fixed held-out slice."""
        return evaluate(
            self.passes,
            self.dataset,
            num_sequences=self.config.evaluate.sequences,
            micro_batch=self.config.batch.micro_batch,
            device=self.device,
            progress=self.progress,
        )

    def train_step(
        self, *, step: int, first_sequence: int, flags: Flags | None = None, norm_limit: float = math.inf
    ) -> StepResult:
        """Do update number `step`, the one after the state's, on the global batch that starts at `first_sequence`; a gradient
        norm above `norm_limit` is not applied, as one that is not finite.
        """
        if step != self.step + 1:
            raise ValueError(f"asked for update {step}, but the state is that after update {self.step}")
        clock = self.mesh.clock
        with clock.during(COMPUTE):
            self.optimizer.zero_grad()
        sequences = global_batch_at(self.config, first_sequence)
        loss, tokens = self._accumulate_gradients(first_sequence, sequences)
        self.progress("reduce", 0)
        self.optimizer.reduce_twins()
        with clock.during(CHECKPOINT):
            self.before_update()  # before the vote: whoever has passed it may overwrite what others are still copying
        with clock.during(COMPUTE):
            squares = self.optimizer.sum_of_squares()
            outcome = vote(self.mesh, squares=squares, loss=loss, flags=flags or Flags(), exact=self.types is EXACT)
        self.after_vote()
        self.shares = torch.stack([squares.double(), loss.double()])
        return self._finish(outcome, tokens, sequences, apply=outcome.is_finite and outcome.norm <= norm_limit)

    def _accumulate_gradients(self, first_sequence: int, count: int) -> tuple[torch.Tensor, int]:
        """All my micro-batches; my share of the loss (tp ranks know the same one), and the valid tokens of all replicas, which
        read whole sequences: context-parallel ranks count the same ones.
        """
        mine = microbatches(count, self.config.batch.micro_batch, self.mesh.shape.dp, self.mesh.coordinate.dp)
        self.progress("data", 0)
        first, stop = (mine[0].start, mine[-1].stop) if mine else (0, 0)
        with self.mesh.clock.during(DATA):
            sequences = self._read(first_sequence + first, stop - first) if mine else None
        valid = torch.zeros((), dtype=torch.int64, device=self.device) if sequences is None else sequences.valid.sum()
        tokens = int(self.mesh.all_reduce(valid, ("dp",)))
        parts = [] if sequences is None else [sequences[part.start - first : part.stop - first] for part in mine]
        loss = self.passes.accumulate(parts, 1 / max(1, tokens))
        return loss * (self.mesh.coordinate.tp == 0), tokens

    def batch_at(self, first_sequence: int) -> int:
        """Sequences of the update that begins at this position."""
        return global_batch_at(self.config, first_sequence)

    def _read(self, first: int, count: int) -> Sequences:
        arrays = self.dataset.sequences(first + self.passed_over, count)
        return Sequences.of(arrays, self.device, document_mask=self.config.data.document_mask)

    def _finish(self, outcome: Vote, tokens: int, sequences: int, *, apply: bool) -> StepResult:
        """Update or skip; either way the step counts, so that a resumed run needs no second counter."""
        config, number = self.config, self.step + 1
        first, stop = self.curve
        lr = learning_rate(number - first, schedule=config.schedule, peak=config.optimizer.lr, total=stop - first)
        if apply:
            self.progress("update", 0)
            with self.mesh.clock.during(COMPUTE):
                self.optimizer.update(
                    lr=lr,
                    number=number,
                    factor=clip_factor(outcome.norm, config.optimizer.clip_norm),
                    order=self.passes.closing,
                    beside=config.parallel.overlap_gather,
                )
        self.step = number
        return StepResult(
            step=number,
            loss=outcome.loss,
            grad_norm=outcome.norm,
            tokens=tokens,
            sequences=sequences,
            lr=lr,
            applied=apply,
            flags=outcome.flags,
        )


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The dtype of activations. `auto` is bfloat16 on GPUs that have it and fp32 elsewhere: on CPUs it is rarely faster."""
    chosen = config.machine.compute_dtype
    if chosen == "auto":
        chosen = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[chosen]
