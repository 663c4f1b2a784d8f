"""Every config that ships fits the hardware that it names, by the planner, with room for what the planner leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.course import course
from ftrain.load import load
from ftrain.plan import memory, profile, traffic
from ftrain.plan.setup import Setup, options_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
LEFT_OUT = 4e9
"""CUDA context, NCCL's channels, workspaces, fragmentation: a few GB of a GPU."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_fits_its_hardware(path: Path) -> None:
    config = load(str(path))
    hardware = profile.load(profile.of(config))
    room = hardware.memory_bytes - (LEFT_OUT if config.machine.device == "cuda" else 0)
    for leg in course(config):
        plan = Setup(config=leg.config, profile=hardware, options=options_of(leg.config))
        plan.require_schedule()
        worst = max(memory.all_ranks(plan), key=lambda rank: rank.total)
        assert worst.total <= room, f"phase {leg.phase}: rank {worst.pp} needs {float(worst.total) / 1e9:.1f} GB"
        assert traffic.refusals(plan) == ()
        assert traffic.answer(plan).warnings == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_of_gpus_names_them(path: Path) -> None:
    config = load(str(path))
    assert bool(config.machine.hardware) == (config.machine.device == "cuda")


def test_the_long_phase_of_llama_3_fits_as_an_override() -> None:
    """8 x 16 x 16 x 8, of the config without phases."""
    path = next(path for path in CONFIGS if path.stem == "llama3-405b")
    config = load(str(path), ["parallel.cp=16", "data.seq_len=131072", "batch.global_batch=128"])
    plan = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    assert str(plan.mesh) == "tp8 x cp16 x pp16 x dp8"
    assert memory.refusals(plan, memory.all_ranks(plan)) == ()
