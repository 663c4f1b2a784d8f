"""Forward and backward over micro-batches, and forward alone: the model's stages on this rank, at work.

Every mesh goes this way, also one process: there the pipeline has one rank and nothing to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ftrain.config import Config
from ftrain.model.fused import EAGER, compiled, prepare
from ftrain.model.moe import Groups
from ftrain.model.transformer import Transformer
from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.context import ContextGroup
from ftrain.parallel.expert import ExpertGroup, Routing
from ftrain.parallel.layout import ParameterSpec
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.optimizer import ShardedAdamW
from ftrain.parallel.pipeline import Job, Pipeline, Stage
from ftrain.parallel.program import Program, Segments, blocks, closing, lower, segments
from ftrain.parallel.schedule import Schedule
from ftrain.parallel.shape import Coordinate
from ftrain.parallel.stages import StagePlan, forward_schedule, stage_plan, training_schedule
from ftrain.train.batch import Sequences

if TYPE_CHECKING:
    from ftrain.parallel.fsdp import FullyShardedAdamW


class Passes:
    """A rank's stages, the programs it has run, and the pipeline that runs them."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[ParameterSpec],
        optimizer: ShardedAdamW | FullyShardedAdamW,
        *,
        dtype: torch.dtype,
        progress: Callable[[str, int], None],
    ) -> None:
        """`dtype`: of the activations."""
        self.config, self.optimizer, self.mesh = config, optimizer, optimizer.mesh
        self.plan: StagePlan = stage_plan(config)
        rank, parallel = self.mesh.coordinate.pp, config.parallel
        flat = isinstance(optimizer, ShardedAdamW)  # FSDP has no buckets
        buckets = [
            plan_buckets(specs, self.mesh.shape, place, bucket_bytes=parallel.bucket_mib * 2**20) if flat else ()
            for place in self._column()
        ]
        self._num_buckets = [len(of_rank) for of_rank in buckets]
        self._segments: list[Segments] = [segments(self.plan, index, of_rank) for index, of_rank in enumerate(buckets)]
        self.closing = tuple(gather.bucket for gather in closing(self._segments[rank], self._num_buckets[rank]))
        self.context = ContextGroup.of(self.mesh, parallel)
        tensor = TensorGroup.of(self.mesh, parallel, specs[0].tp, config.model.vocab)
        groups = Groups(tensor, self.context, ExpertGroup.of(self.mesh))
        self.kernels = compiled(optimizer.device.type) if config.machine.compile else EAGER
        self.modules = {
            stage: Transformer(
                config.model,
                dtype=dtype,
                layers=self.plan.layers[stage],
                groups=groups,
                recompute=parallel.recompute,
                kernels=self.kernels,
            )
            for stage in self.plan.stages_of(rank)
        }
        optimizer.place(self.modules)
        self.pipeline = Pipeline(
            {stage: self._stage(stage) for stage in self.modules},
            num_stages=self.plan.num_stages,
            mesh=self.mesh,
            dtype=dtype,
            device=optimizer.device,
            progress=progress,
        )
        self._programs: dict[int, Program] = {}
        self.schedule: Schedule | None = None  # of the newest `accumulate`
        self.choose: Callable[[int, int, torch.Tensor], torch.Tensor] | None = None
        """As `Routing.choose`, told the micro-batch first; for certificates."""

    def prepare(self) -> None:
        """Compile what is to be compiled: minutes, better spent before anybody's patience with a step begins to run."""
        model = self.config.model
        prepare(self.kernels, sizes=(model.hidden, model.ffn), dtype=self.pipeline.dtype, device=self.optimizer.device)

    def _column(self) -> list[Coordinate]:
        """The places of this rank's pipeline, first stage to last: one program is made for all of them."""
        here = self.mesh.coordinate
        return [Coordinate(tp=here.tp, cp=here.cp, pp=pp, dp=here.dp) for pp in range(self.mesh.shape.pp)]

    def _stage(self, stage: int) -> Stage:
        """In segments where reductions overlap, whole otherwise."""
        held = self._segments[self.mesh.coordinate.pp][stage]
        if self.config.parallel.overlap_reduce:
            return Stage(self.modules[stage], [s.blocks for s in held], [s.buckets for s in held])
        return Stage(self.modules[stage], [blocks(self.plan, stage)], [frozenset().union(*(s.buckets for s in held))])

    def program(self, num_microbatches: int) -> Program:
        """What the ranks of this pipeline do in a step of so many micro-batches."""
        if num_microbatches not in self._programs:
            schedule = training_schedule(self.config, num_microbatches)
            overlap = self.config.parallel.overlap_reduce
            self._programs[num_microbatches] = lower(schedule, self._segments, self._num_buckets, overlap=overlap)
        return self._programs[num_microbatches]

    def accumulate(self, microbatches: Sequence[Sequences], scale: float) -> torch.Tensor:
        """Add the gradients of scale x the summed loss to `main_grad`, and sum them over the replicas; my share of that loss,
        which is on the last stage. `microbatches` are whole sequences.
        """
        routings = [self._routing(number, batch, scale) for number, batch in enumerate(microbatches)]
        microbatches = [batch.part(self.context) for batch in microbatches]
        loss = torch.zeros((), dtype=torch.float64, device=self.optimizer.device)

        def finish(number: int, y: torch.Tensor) -> torch.Tensor:
            nonlocal loss
            batch = microbatches[number]
            mine = self._last.loss(y, batch.targets, batch.valid, scale)
            loss += mine.detach()
            return mine

        beside = self.config.parallel.overlap_reduce
        job = Job(
            tokens=lambda number: microbatches[number].tokens,
            shape=lambda number: _shape(microbatches[number].tokens),
            finish=finish,
            documents=lambda number: microbatches[number].documents,
            routing=routings.__getitem__,
            reduce=lambda bucket: self.optimizer.start_reduce(bucket, beside=beside),
            ready=self.optimizer.wait,
        )
        program = self.program(len(microbatches))
        self.schedule = program.schedule
        self.pipeline.run(program.ranks[self.mesh.coordinate.pp], job)
        return loss

    def _routing(self, number: int, batch: Sequences, scale: float) -> Routing:
        """A sequence's balance loss weighs as much as its valid tokens do."""
        if not self.config.model.experts:
            return Routing()
        balance = batch.valid.sum(1, dtype=torch.float64) * (self.config.model.balance_coef * scale)
        return Routing(balance, None if self.choose is None else partial(self.choose, number))

    def forward(
        self, sizes: Sequence[int], batch: Callable[[int], Sequences], use: Callable[[int, Sequences, torch.Tensor], None]
    ) -> None:
        """Forward only: micro-batches of so many sequences, `batch` gives them whole; `use` gets this rank's positions and the
        loss of each, on the last stage.
        """

        def part(number: int) -> Sequences:
            return batch(number).part(self.context)

        def finish(number: int, y: torch.Tensor) -> None:
            mine = part(number)
            use(number, mine, self._last.losses(y, mine.targets * mine.valid))

        length = self.config.data.seq_len // self.config.parallel.cp
        document_mask = self.config.data.document_mask
        job = Job(
            tokens=lambda number: part(number).tokens,
            shape=lambda number: (sizes[number], length),
            finish=finish,
            documents=lambda number: batch(number).documents if document_mask else None,
            ready=self.optimizer.wait,
        )
        schedule = forward_schedule(self.plan, len(sizes))
        program = lower(schedule, [{} for _ in self._segments], [0 for _ in self._segments], overlap=False)
        with torch.no_grad():
            self.pipeline.run(program.ranks[self.mesh.coordinate.pp], job)

    @property
    def _last(self) -> Transformer:
        """The stage that ends the model; only its rank asks."""
        return self.modules[self.plan.num_stages - 1]

    @property
    def ends_here(self) -> bool:
        """Whether this rank holds the last stage, and so knows the loss."""
        return self.plan.num_stages - 1 in self.modules


def _shape(tokens: torch.Tensor) -> tuple[int, int]:
    sequences, length = tokens.shape
    return sequences, length
