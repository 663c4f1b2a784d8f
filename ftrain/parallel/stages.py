"""From the config to virtual stages: which layers each holds, on which pipeline rank it lives, in what order it works.

The table of placements, the engine, the checkpoints' planner and the tests all ask here, so that nobody cuts the model in a
way of his own. Explicit counts are taken as they are or refused: 30 layers are never quietly built as 28.

Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftrain.combinations import num_chunks
from ftrain.config import Config
from ftrain.parallel.layout import ParameterSpec, parameters
from ftrain.parallel.partition import partition_layers
from ftrain.parallel.schedule import Action, Kind, Placement, Schedule, build, rank_of
from ftrain.parallel.shape import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The virtual stages of a run, in the order in which activations pass through them."""

    layers: tuple[range, ...]  # of each virtual stage
    num_ranks: int
    placement: Placement

    @property
    def num_stages(self) -> int:
        """Virtual stages over all ranks."""
        return len(self.layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each virtual stage."""
        return tuple(len(layers) for layers in self.layers)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a virtual stage."""
        return rank_of(stage, num_ranks=self.num_ranks, placement=self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, ascending."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def stage_plan(config: Config) -> StagePlan:
    """How a config cuts the model."""
    parallel, layers = config.parallel, config.model.layers
    return StagePlan(
        layers=partition_layers(layers, parallel.pp * num_chunks(config), parallel.layer_counts),
        num_ranks=parallel.pp,
        placement="vee" if parallel.schedule == "zb_v" else "loop",
    )


def config_parameters(config: Config, mesh: MeshShape) -> tuple[ParameterSpec, ...]:
    """The placement table of a config."""
    plan = stage_plan(config)
    return parameters(
        config.model,
        mesh,
        layer_counts=plan.counts,
        placement=plan.placement,
        sequence_parallel=config.parallel.sp,
    )


def training_schedule(config: Config, num_microbatches: int) -> Schedule:
    """The schedule of a replica that computes so many micro-batches; none of them is legal too, and has nothing to do."""
    name = config.parallel.schedule.replace("_", "-")
    chunks = num_chunks(config)
    some = num_microbatches or config.parallel.pp
    whole = build(name, num_ranks=config.parallel.pp, num_microbatches=some, num_chunks=chunks)
    if num_microbatches:
        return whole
    return replace(whole, num_microbatches=0, actions=tuple(() for _ in whole.actions))


def forward_schedule(plan: StagePlan, num_microbatches: int) -> Schedule:
    """Forwards only, for an evaluation: micro-batches in groups of p through all chunks of a rank."""
    p = plan.num_ranks
    ranks = (
        sorted(
            (Action(Kind.FORWARD, stage, m) for stage in plan.stages_of(rank) for m in range(num_microbatches)),
            key=lambda action: (action.microbatch // p, action.stage, action.microbatch),
        )
        for rank in range(p)
    )
    return Schedule(
        name="forward",
        num_ranks=p,
        num_chunks=plan.num_stages // p,
        num_microbatches=num_microbatches,
        placement=plan.placement,
        actions=tuple(tuple(rank) for rank in ranks),
    )
