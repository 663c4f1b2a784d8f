"""Predicted bytes against the engine's own placement table, and the literature's formulas against published numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from founding import ROOT, ask

from ftrain.load import load, num_parameters
from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.layout import local_box, parameters
from ftrain.parallel.schedule import NAMES, IllegalScheduleError, build, peak_in_flight
from ftrain.parallel.shape import Coordinate
from ftrain.parallel.shards import Shards
from ftrain.parallel.stages import config_parameters
from ftrain.plan import cost, memory, profile, state
from ftrain.plan.activations import held, layer_bytes, paper_layer_bytes, saved_tensors
from ftrain.plan.params import alignment, replicated, shards
from ftrain.plan.schedule import bubble_of_compute, timeline
from ftrain.plan.setup import Options, Setup, options_of
from ftrain.plan.volume import volumes


def setup(name: str, *overrides: str, hardware: str = "h100", **options: object) -> Setup:
    config = load(str(ROOT / "configs" / f"{name}.toml"), overrides)
    return Setup(config=config, profile=profile.load(hardware), options=Options(**options))  # type: ignore[arg-type]


CASES = [
    ("dense-500b",),
    ("llama3-405b",),
    ("llama3-8b", "parallel.tp=2", "parallel.pp=4"),
    ("llama3-8b", "parallel.tp=16", "parallel.pp=2"),  # more TP ranks than kv heads
    ("llama3-8b", "parallel.tp=4", "model.vocab=128259"),  # a vocabulary that does not divide
    ("llama3-8b", "model.tied=true"),
    ("llama3-8b", "model.qk_norm=true", "parallel.tp=2"),
    ("mixtral-8x7b",),
    ("mixtral-8x7b", "parallel.tp=2", "parallel.ep=4", "parallel.cp=2"),
    ("mixtral-8x7b", "parallel.tp=4", "parallel.ep=1"),
    ("tiny-dp2",),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_parameters_of_a_rank_are_those_of_the_placement_table(case: tuple[str, ...]) -> None:
    plan = setup(*case)
    specs = parameters(plan.config.model, plan.mesh)
    for pp, own in enumerate(shards(plan)):
        boxes = [local_box(spec, plan.mesh, Coordinate(pp=pp)) for spec in specs]
        assert own.total == sum(box.size for box in boxes if box is not None)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "llama3-8b" or "model.vocab=128259" not in case])
def test_shards_add_up_to_the_model_and_its_copies(case: tuple[str, ...]) -> None:
    plan = setup(*case)
    specs = parameters(plan.config.model, plan.mesh)
    everywhere = sum(
        box.size * spec.sharers(plan.mesh.ep)
        for spec in specs
        for tp in range(plan.mesh.tp)
        for pp in range(plan.mesh.pp)
        if (box := local_box(spec, plan.mesh, Coordinate(tp=tp, pp=pp))) is not None
    )
    assert everywhere == num_parameters(plan.config) + replicated(plan)


@pytest.mark.parametrize("name", NAMES)
def test_held_microbatches_are_what_the_schedule_holds(name: str) -> None:
    for p in range(1, 7):
        for m in range(1, 20):
            v = {"interleaved": 3, "zb-v": 2}.get(name, 1)
            try:
                schedule = build(name, num_ranks=p, num_microbatches=m, num_chunks=v)
            except IllegalScheduleError:
                continue
            assert held(name, p=p, m=m, v=v) == peak_in_flight(schedule), (p, m)


@pytest.mark.parametrize("name", NAMES)
def test_closed_bubbles_are_those_of_the_simulated_schedule(name: str) -> None:
    for p in range(1, 7):
        for m in range(1, 15):
            v = {"interleaved": 3, "zb-v": 2}.get(name, 1)
            if (name == "interleaved" and (p == 1 or m % p)) or (name == "zb-v" and m < 2 * p):
                continue
            line = timeline(name, p=p, m=m, v=v)
            assert line is not None
            assert bubble_of_compute(name, p=p, m=m, v=v) == line.bubble_of_compute(), (p, m)


def test_paper_formulas_for_gpt3_175b() -> None:
    """arXiv 2205.05198: for the 175B model (a=96, s=2048, h=12288) attention's 5as/h is 80."""
    plan = setup("llama3-8b", "model.hidden=12288", "model.heads=96", "model.kv_heads=96", "data.seq_len=2048", "parallel.tp=8")
    sbh = 2048 * 12288
    formula = paper_layer_bytes(plan)
    assert formula["nothing"] == sbh * (34 + 80)
    assert formula["TP + SP"] == sbh * Fraction(34 + 80, 8)
    assert formula["TP + SP, selective"] == sbh * Fraction(34, 8)
    assert formula["full"] == 2 * sbh


def test_recompute_keeps_less_and_sequence_parallelism_cuts_the_rest() -> None:
    kept = [layer_bytes(setup("llama3-405b", recompute=policy)) for policy in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] == Fraction(2 * 8192 * 16384, 8)
    whole = {item.name: item.nbytes for item in saved_tensors(setup("llama3-405b", "parallel.sp=false"))}
    cut = {item.name: item.nbytes for item in saved_tensors(setup("llama3-405b"))}
    assert whole["layer input"] == 8 * cut["layer input"]
    assert whole["q, k, v"] == cut["q, k, v"]
    kept = {item.name: item.nbytes for item in saved_tensors(setup("llama3-405b", "parallel.sp_regather=false"))}
    assert kept["normed input of the MLP"] == 8 * cut["normed input of the MLP"]


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    reply = ask("plan memory configs/llama3-405b.toml --hardware h100 --recompute none")
    assert reply.code == 3
    assert "With --recompute full it needs 25.6 GB, which fits" in reply.said
    assert ask("plan memory configs/llama3-405b.toml --hardware h100").code == 0, "the config's own choice"


def test_the_worst_rank_is_among_those_the_search_looks_at() -> None:
    for options in ({}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}, {"schedule": "interleaved", "chunks": 2}):
        plan = setup("llama3-405b", **options)
        worst = max(rank.total for rank in memory.all_ranks(plan, aligned=False))
        assert max(rank.total for rank in memory.heaviest_ranks(plan)) == worst


def test_fsdp_shards_everything_and_gathers_two_layers() -> None:
    plan = setup("llama3-8b", "parallel.tp=1", sharding="fsdp")
    (rank,) = memory.all_ranks(plan)
    assert rank.state == Fraction(18 * rank.params, 64)
    logits = 4 * 8192 * 128_256  # in fp32, while the loss is made of them
    assert rank.buffers == Fraction(rank.params, 32) * 8 + logits


def test_ring_volumes_are_the_lower_bound() -> None:
    plan = setup("dense-500b", hardware="b200")
    ring, half_ring = plan.ring, plan.half_ring
    assert (ring(8), ring(128)) == (Fraction("1.75"), Fraction("1.984375"))
    assert ring(8) == 2 * half_ring(8)
    sent = {volume.name: volume.ideal for volume in volumes(plan)}
    assert sent["TP"] == 4 * ring(8) * 2 * 4096 * 18432 * 15 * 32
    assert sent["PP"] == 2 * Fraction(2 * 4096 * 18432, 8) * 32
    assert sent["DP x CP"] == half_ring(80) * 6 * max(own.total for own in shards(plan))


def test_model_flops_are_six_per_matrix_parameter_and_token() -> None:
    plan = setup("llama3-405b")
    model = plan.config.model
    matrices = num_parameters(plan.config) - model.vocab * model.hidden - model.hidden * (2 * model.layers + 1)
    attention = 6 * model.layers * model.hidden * 8192
    assert cost.token_flops(plan) == 6 * matrices + attention
    assert cost.token_flops(plan, causal=False) == 6 * matrices + 2 * attention
    assert sum(cost.stage_flops(plan)) * plan.mesh.tp == 8192 * cost.token_flops(plan)


@pytest.mark.parametrize(
    ("sharding", "inner", "shares"),
    [("zero1", 1, (1, 1, 16, 16)), ("fsdp", 1, (16,) * 4), ("hsdp", 4, (4,) * 4), ("hfsdp", 4, (4, 4, 16, 16))],
)
def test_the_config_says_what_replicas_share(sharding: str, inner: int, shares: tuple[int, ...]) -> None:
    """DP 8 x CP 2 in llama3-8b on 16 ranks: 16 replicas, as the engine counts them."""
    overrides = ["parallel.ranks=16", "parallel.tp=1", "parallel.pp=1", "parallel.cp=2", f"parallel.sharding={sharding}"]
    config = load(str(ROOT / "configs" / "llama3-8b.toml"), [*overrides, f"parallel.fsdp_inner={inner}"])
    planned = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    assert tuple(state.shares(planned).values()) == shares
    engine = Shards.of(planned.mesh, config.parallel)
    if engine is not None:
        cut = engine.inner, engine.inner * (engine.outer if engine.split else 1)
        assert cut == (shares[0], shares[3])


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_ring_keeps_two_blocks_and_all_gather_all_and_ones_own(cp: int) -> None:
    """Keys, values and their gradients: 2/c of those of the whole sequence, and 1 + 1/c of them."""
    overrides = ["parallel.ranks=8", "parallel.tp=1", "parallel.pp=1", f"parallel.cp={cp}"]
    kept = {
        exchange: memory.exchange_bytes(setup("llama3-8b", *overrides, f"parallel.cp_exchange={exchange}"))
        for exchange in ("ring", "all_gather")
    }
    whole = 2 * 8192 * 1024 * (2 + 4)  # 8 heads of 128; bf16, and gradients in fp32
    assert kept == {"ring": Fraction(2 * whole, cp), "all_gather": Fraction((cp + 1) * whole, cp)}


@pytest.mark.parametrize("overrides", [(), ("parallel.schedule=interleaved", "parallel.virtual_stages=2")])
def test_padding_of_each_rank_is_that_of_its_own_buckets(overrides: tuple[str, ...]) -> None:
    """Ranks that look alike are planned once; each one's own plan has the same padding."""
    config = load(str(ROOT / "configs" / "llama3-405b.toml"), overrides)
    plan = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    specs = config_parameters(config, plan.mesh)
    for pp in range(plan.mesh.pp):
        own = plan_buckets(specs, plan.mesh, Coordinate(pp=pp), bucket_bytes=config.parallel.bucket_mib * 2**20)
        assert sum(alignment(plan, pp).values()) == sum(bucket.padding for bucket in own)
