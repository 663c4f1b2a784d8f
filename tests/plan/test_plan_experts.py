"""Plans of models with experts: published counts, the engine's own boxes, and denominators, bytes and groups of their own."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import pytest
from founding import ROOT, ask

from ftrain.combinations import combinations
from ftrain.config import Axis
from ftrain.load import active_parameters, load, num_parameters
from ftrain.parallel.buckets import plan_buckets, state_boxes
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import Coordinate, MeshShape
from ftrain.plan import checkpoint, cost, elastic, memory, profile, search, state
from ftrain.plan import time as clock
from ftrain.plan.activations import saved_tensors
from ftrain.plan.params import largest
from ftrain.plan.placement import crossing_share, ring_hops
from ftrain.plan.setup import Options, Setup, options_of
from ftrain.plan.traffic import expert_warnings, group_path
from ftrain.plan.volume import volumes

MIXTRAL = "configs/mixtral-8x7b.toml --hardware h100"


def setup(*overrides: str, name: str = "mixtral-8x7b", hardware: str = "h100") -> Setup:
    config = load(str(ROOT / "configs" / f"{name}.toml"), overrides)
    return Setup(config=config, profile=profile.load(hardware), options=options_of(config))


def test_mixtral_has_its_published_size() -> None:
    """arXiv 2401.04088: 47B parameters, of which a token meets 13B; the weights published with it have 46,702,792,704."""
    plan = setup()
    assert num_parameters(plan.config) == 46_702_792_704
    assert active_parameters(plan.config) == 12_879_925_248
    reply = ask(f"plan memory {MIXTRAL}")
    assert (reply.value("params"), reply.value("active_params")) == (46_702_792_704, 12_879_925_248)
    assert reply.value("expert_params") == 32 * 8 * 3 * 4096 * 14336
    assert "active_params" not in ask("plan memory configs/llama3-8b.toml --hardware h100").data["figures"]


@pytest.mark.parametrize(
    "overrides", [(), ("parallel.tp=2", "parallel.ep=2"), ("parallel.ep=1", "parallel.pp=8"), ("parallel.cp=2",)]
)
def test_state_of_a_rank_is_that_of_the_engines_buckets(overrides: tuple[str, ...]) -> None:
    """Weights and gradients of the whole buffers, masters and moments of one region of each, padding included."""
    plan = setup(*overrides)
    specs = parameters(plan.config.model, plan.mesh)
    for rank in memory.all_ranks(plan):
        here = Coordinate(pp=rank.pp)
        buckets = plan_buckets(specs, plan.mesh, here, bucket_bytes=plan.config.parallel.bucket_mib * 2**20)
        assert {bucket.sharers for bucket in buckets} == {1, plan.mesh.ep}
        assert rank.state == sum(6 * bucket.numel + 12 * bucket.region for bucket in buckets)


def test_experts_have_a_denominator_of_their_own() -> None:
    """DP 32 x CP 1: attention over 32, experts over 32 / EP 8 = 4. Dividing all by 32 would promise 11 GB too little a card."""
    reply = ask(f"plan memory {MIXTRAL}")
    assert reply.value("optimizer_divisor") == 32
    assert reply.value("expert_divisor") == 4
    assert reply.text("expert_bytes_per_param") == "9 B"
    common, experts = 46_702_792_704 - 45_097_156_608, 45_097_156_608
    assert reply.value("state") == common / 4 * (6 + 12 / 32) + experts / 4 / 8 * (6 + 12 / 4)
    assert [row["part kept"] for row in reply.rows("expert_state_kinds")] == ["1/1", "1/1", "1/4", "1/4"]
    whole = ask(f"plan memory {MIXTRAL} --set parallel.ep=1")
    assert whole.value("state") == 46_702_792_704 / 4 * (6 + 12 / 32)
    assert "expert_state_kinds" not in whole.data["tables"]


@pytest.mark.parametrize("overrides", [(), ("parallel.tp=2",), ("parallel.cp=2", "parallel.ep=4")])
def test_the_busiest_writer_is_that_of_the_engine(overrides: tuple[str, ...]) -> None:
    """What a place writes is its ZeRO-1 share up to whole row blocks: the prediction is their mean over a stage's replicas."""
    plan = setup(*overrides)
    specs = parameters(plan.config.model, plan.mesh)
    pp = max(range(plan.mesh.pp), key=lambda rank: memory.all_ranks(plan)[rank].params)
    written = []
    for dp in range(plan.mesh.dp):
        for cp in range(plan.mesh.cp):
            here = Coordinate(pp=pp, dp=dp, cp=cp)
            buckets = plan_buckets(specs, plan.mesh, here, bucket_bytes=plan.config.parallel.bucket_mib * 2**20)
            written.append(14 * sum(box.size for _, box in state_boxes(buckets, plan.mesh, here)))
    assert checkpoint.rank_bytes(plan) == Fraction(sum(written), len(written))
    assert max(written) < 1.06 * checkpoint.rank_bytes(plan)


def test_operations_are_those_of_the_experts_that_a_token_meets() -> None:
    plan = setup()
    model = plan.config.model
    matrices = active_parameters(plan.config) - model.vocab * model.hidden - model.hidden * (2 * model.layers + 1)
    attention = 6 * model.layers * model.hidden * 8192
    assert cost.token_flops(plan) == 6 * matrices + attention
    reply = ask(f"plan time {MIXTRAL} --tokens 1e12")
    assert reply.value("flops") == 6 * 12_879_925_248 * 1e12
    assert "3hf k + hE" in reply.data["figures"]["token_gflops"]["formula"]


def test_tokens_go_to_their_experts_and_back_twice() -> None:
    """8 layers and 16 micro-batches of a rank, 8,192 tokens with two experts each; an eighth of the rows stays at home."""
    sent = {volume.name: volume for volume in volumes(setup())}
    assert sent["EP"].ideal == 4 * Fraction(7, 8) * 2 * (2 * 8192 * 4096) * 8 * 16
    assert (sent["EP"].members, sent["DP x CP"].members, sent["DP x CP / EP"].members) == (8, 32, 4)
    own = largest(setup())
    assert sent["DP x CP"].nbytes == Fraction(31, 32) * own.common * 6
    assert sent["DP x CP / EP"].nbytes == Fraction(3, 4) * own.experts * 6
    half = {volume.name: volume.ideal for volume in volumes(setup("model.capacity=0.5"))}
    assert half["EP"] * 2 == sent["EP"].ideal
    more = {volume.name: volume.ideal for volume in volumes(setup("model.capacity=1.25"))}
    assert more["EP"] == sent["EP"].ideal, "room beyond the mean is used by no more tokens than there are"
    alone = {volume.name for volume in volumes(setup("parallel.ep=1"))}
    assert alone == {"PP", "DP x CP"}


def test_neighbours_that_share_experts_sit_in_a_server_or_the_plan_warns() -> None:
    inside = next(volume for volume in volumes(setup()) if volume.name == "EP")
    assert group_path(setup(), inside).link == "NVLink 4"
    assert expert_warnings(setup()) == ()
    far = setup('parallel.order=["tp","cp","pp","dp"]')
    (warning,) = expert_warnings(far)
    assert "members 4 ranks apart and cross servers of 8 cards" in warning
    assert "Put dp before pp" in warning
    assert clock.step(far).ep > 5 * clock.step(setup()).ep
    assert warning in ask(f'plan traffic {MIXTRAL} --set \'parallel.order=["tp","cp","pp","dp"]\'').said


ORDERS = ("tp cp pp dp", "tp cp dp pp", "dp tp cp pp", "tp dp cp pp")
SIZES = ({"tp": 2, "cp": 1, "pp": 4, "dp": 16}, {"tp": 2, "cp": 4, "pp": 2, "dp": 8}, {"tp": 3, "cp": 2, "pp": 5, "dp": 6})
AXES_TOGETHER = (("cp", "dp"), ("tp", "cp"), ("tp", "pp"), ("cp", "pp", "dp"), ("tp", "dp"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axes", AXES_TOGETHER)
def test_crossings_of_parts_of_a_group_are_those_counted(order: str, sizes: dict[str, int], axes: tuple[Axis, ...]) -> None:
    """Hop by hop, in every unit."""
    mesh = MeshShape(**sizes, order=tuple(order.split()))  # type: ignore[arg-type]
    members = len(mesh.group(0, axes))
    cuts = [n for n in range(2, members) if members % n == 0]
    parts = [(0, 1), *((run, 1) for run in cuts), *((0, step) for step in cuts)]
    for run, step in parts:
        hops = ring_hops(mesh, axes, run=run, step=step)
        for unit in (2, 3, 4, 6, 8, 12, 16, 32, 48, 500):
            units = range(-(-mesh.world // unit))
            counted = [sum(a // unit == home and b // unit != home for a, b in hops) for home in units]
            share = crossing_share(mesh, axes, unit, run=run, step=step)
            assert share == pytest.approx(max(counted) / unit), (run, step, unit)


@pytest.mark.parametrize("order", [*permutations(("tp", "cp", "pp", "dp"))], ids=" ".join)
def test_no_group_of_16384_ranks_is_gone_through_rank_by_rank(order: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search asks a thousand times; pods have 3,072 cards, which no power of two fits into."""
    monkeypatch.setattr("ftrain.plan.placement.ring_hops", None)
    mesh = MeshShape(tp=8, cp=16, pp=16, dp=8, order=order)
    for unit, step in product((8, 16, 3072), (1, 2, 8, 16, 32)):
        assert 0 <= crossing_share(mesh, ("cp", "dp"), unit, step=step) <= 1
        assert 0 <= crossing_share(mesh, ("cp", "dp"), unit, run=step) <= 1


def test_explain_names_those_that_share_the_experts_and_those_that_have_the_same() -> None:
    plan = setup()
    rows = {row["group"]: row for row in ask(f"plan explain {MIXTRAL} --rank 42").rows("peers")}
    assert rows["EP"]["ranks"].split() == [str(rank) for rank in range(40, 48) if rank != 42]
    assert rows["DP x CP / EP"]["ranks"] == "34 50 58"
    assert plan.mesh.expert_replicas(42) == (34, 42, 50, 58)
    assert rows["EP"]["slowest link"].startswith("NVLink")
    assert "EP" not in {row["group"] for row in ask(f"plan explain {MIXTRAL} --rank 42 --set parallel.ep=1").rows("peers")}


def test_what_experts_keep_grows_with_the_experts_of_a_token() -> None:
    one, two = ({item.name: item.nbytes for item in saved_tensors(setup(f"model.experts_per_token={k}"))} for k in (1, 2))
    for name in ("rows of the experts", "gate and up", "SwiGLU product", "what the experts made"):
        assert two[name] == 2 * one[name]
    assert one["gate and up"] == 2 * 2 * 8192 * 14336
    assert one["scores of the experts"] == two["scores of the experts"] == 4 * 8192 * 8
    dense = {item.name for item in saved_tensors(setup("model.experts=0", "parallel.ep=1"))}
    assert "rows of the experts" not in dense


def test_search_tries_sizes_of_ep_only_where_there_are_experts() -> None:
    found = search.search(setup())
    assert {candidate.setup.mesh.ep for candidate in found.fitting} == {1, 2, 4, 8}
    assert all(candidate.setup.mesh.shards % candidate.setup.mesh.ep == 0 for candidate in found.fitting)
    assert found.fitting[0].setup.mesh.ep > 1
    assert {candidate.setup.mesh.ep for candidate in search.search(setup(name="llama3-8b")).fitting} == {1}
    assert "ep" in ask(f"plan search {MIXTRAL}").rows("layouts")[0]
    assert "ep" not in ask("plan search configs/llama3-8b.toml --hardware h100").rows("layouts")[0]


def test_what_the_search_keeps_between_candidates_changes_no_figure() -> None:
    for candidate in search.search(setup()).fitting[::40]:
        fresh = replace(candidate.setup)
        assert candidate.step == clock.step(fresh, exact=False)
        assert candidate.peak == float(max(rank.total for rank in memory.all_ranks(fresh, aligned=False)))


@pytest.mark.parametrize(("left", "ranks", "ep"), [(127, 126, 1), (96, 96, 8), (60, 60, 1), (12, 12, 4)])
def test_what_is_left_of_a_run_shares_out_its_experts_evenly(left: int, ranks: int, ep: int) -> None:
    """768 sequences have no equal shares for 21 or 10 replicas: there each has all experts, as it may have unequal shares."""
    plan = setup("evaluate.every_steps=0", "batch.global_batch=768")
    found = elastic.best(plan.config, left, plan.profile)
    assert found is not None
    assert (found.config.parallel.ranks, found.config.parallel.ep) == (ranks, ep)
    assert combinations(found.config) == []


def test_what_does_not_fit_is_told_of_ep_and_not_of_fsdp() -> None:
    """All experts on each of 128 ranks: weights and gradients of 47B parameters are 280 GB."""
    reply = ask(f"plan memory {MIXTRAL} --set parallel.ep=1 --set parallel.pp=1")
    assert reply.code == 3
    assert "raise parallel.ep" in reply.said
    with pytest.raises(ValueError, match=r"--sharding fsdp: experts are shared out with parallel\.ep"):
        Setup(config=setup().config, profile=profile.load("h100"), options=Options(sharding="fsdp"))


def test_ep_multiplies_nothing() -> None:
    """The sixth trap: 128 ranks are 4 stages of 32 replicas, with eight experts on eight of them or without."""
    reply = ask(f"plan memory {MIXTRAL}")
    assert reply.text("layout") == "TP1 x CP1 x DP32 x PP4 = 128 (EP8 inside DP x CP)"
    assert reply.value("replicas") == ask(f"plan memory {MIXTRAL} --set parallel.ep=1").value("replicas") == 32
    assert state.expert_shares(setup()) == {"weights": 1, "gradients": 1, "master": 4, "moments": 4}
