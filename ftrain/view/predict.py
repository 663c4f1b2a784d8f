"""What the planner says of a run's own config: asked after the run, to be laid beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from ftrain.config import Config
from ftrain.plan import memory, profile, schedule
from ftrain.plan.ring import Volume
from ftrain.plan.setup import Setup, options_of
from ftrain.plan.time import Step, step
from ftrain.plan.volume import volumes


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions for one config."""

    setup: Setup
    memory: tuple[memory.RankMemory, ...]
    """Of each pipeline rank."""
    bubble: float
    """Idle share of the total, with the work of the config's own stages."""
    step: Step | None
    """None where the hardware's peak is unknown: a time is not guessed."""
    volumes: tuple[Volume, ...]

    @property
    def peak_memory(self) -> float:
        """Of the most loaded rank, bytes."""
        return float(max(rank.total for rank in self.memory))


def predict(config: Config, hardware: str = "", *, sequences: int = 0) -> Predicted:
    """All of it; `sequences`: of the updates that were measured, where a ramp may not have come to its end (0: not known).

    Raises ValueError where the planner refuses the config (a schedule its micro-batches cannot run).
    """
    if config.batch.ramp and sequences:
        config = replace(config, batch=replace(config.batch, global_batch=sequences, ramp=()))
    setup = Setup(config=config, profile=profile.load(hardware or profile.of(config)), options=options_of(config))
    setup.require_schedule()
    return Predicted(
        setup=setup,
        memory=memory.all_ranks(setup),
        bubble=_bubble(setup),
        step=step(setup) if setup.profile.peak_flops else None,
        volumes=volumes(setup, aligned=True),
    )


def _bubble(setup: Setup) -> float:
    if setup.mesh.pp == 1:
        return 0.0
    line = schedule.uneven(setup)
    if line is not None:
        return float(line.bubble_of_total())
    p, m, v = setup.mesh.pp, setup.microbatches, setup.chunks
    return float(schedule.of_total(schedule.bubble_of_compute(setup.options.schedule, p=p, m=m, v=v)))
