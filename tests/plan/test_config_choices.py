"""The planner takes schedule, virtual stages, cuts, recompute and overlap from the config, as the engine does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from founding import ROOT, ask

from ftrain.load import load
from ftrain.parallel.layout import local_box
from ftrain.parallel.shape import mesh_shape
from ftrain.parallel.stages import config_parameters, stage_plan
from ftrain.plan import profile
from ftrain.plan.setup import Setup, options_of
from ftrain.plan.volume import hand_offs

CONFIG = "configs/llama3-8b.toml --hardware h100"
INTERLEAVED = "--set parallel.pp=4 --set parallel.schedule=interleaved --set parallel.virtual_stages=2"
COUNTS = "--set parallel.pp=2 --set parallel.layer_counts=[15,17]"


def test_the_bubble_is_that_of_the_configs_schedule() -> None:
    reply = ask(f"plan schedule {CONFIG} {INTERLEAVED}")
    m = ask(f"plan time {CONFIG} {INTERLEAVED}").value("microbatches")
    compute = Fraction(4 - 1, 2 * m)  # (p-1)/(v m)
    assert reply.value("bubble_of_compute") == pytest.approx(float(compute))
    plain = ask(f"plan schedule {CONFIG} {INTERLEAVED} --schedule 1f1b")  # what is asked for replaces what is configured
    assert plain.value("bubble_of_compute") == pytest.approx(3 / m)


def test_recompute_and_overlap_are_the_configs() -> None:
    config = load(
        str(ROOT / "configs/llama3-8b.toml"),
        ["parallel.recompute=full", "parallel.overlap_reduce=true", "parallel.overlap_gather=true"],
    )
    options = options_of(config)
    assert (options.recompute, options.overlap) == ("full", True)
    assert options_of(config, recompute="none").recompute == "none"


@pytest.mark.parametrize(
    ("p", "v", "placement", "sends"),
    [
        (1, 1, "loop", 0),
        (2, 1, "loop", 1),
        (8, 1, "loop", 2),
        (2, 2, "loop", 3),
        (4, 2, "loop", 4),
        (2, 2, "vee", 2),
        (4, 2, "vee", 4),
    ],
)
def test_the_busiest_stage_hands_on_and_back_unless_it_is_an_end(p: int, v: int, placement: Any, sends: int) -> None:
    """Counted along the chain of virtual stages; where two of them share a rank nothing is sent."""
    assert max(hand_offs(p, v, placement)) == sends


@pytest.mark.parametrize("overrides", [INTERLEAVED, COUNTS, "--set parallel.pp=2 --set parallel.schedule=zb_v"])
def test_explain_names_the_boxes_that_the_engine_gives_the_rank(overrides: str) -> None:
    words = [word for word in overrides.split() if word != "--set"]
    config = load(str(ROOT / "configs/llama3-8b.toml"), words)
    mesh, cuts = mesh_shape(config), stage_plan(config)
    specs = config_parameters(config, mesh)
    setup = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    assert setup.stages == cuts.layers
    for rank in (0, mesh.world - 1):
        here = mesh.coordinate(rank)
        held = sum(box.size for spec in specs if (box := local_box(spec, mesh, here)) is not None)
        reply = ask(f"plan explain {CONFIG} {overrides} --rank {rank}")
        assert reply.value("parameters") == held
        layers = [f"{cuts.layers[stage].start} to {cuts.layers[stage].stop - 1}" for stage in cuts.stages_of(here.pp)]
        assert reply.text("layers") == ", ".join(layers)
        assert "no virtual stages yet" not in reply.said
