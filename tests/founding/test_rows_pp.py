"""The founding rows that concern pipelines, by number, on the real engine."""

from fractions import Fraction

import pytest
import torch
from engines import engine_of, train
from pipelines import one_of, piped, run_mesh, same_bits
from tiny import tiny
from world import run_world

from ftrain.model.transformer import Transformer
from ftrain.parallel.partition import balanced_counts
from ftrain.parallel.program import Batch
from ftrain.parallel.schedule import Action, build, gpipe, peak_in_flight
from ftrain.parallel.shape import Coordinate, MeshShape
from ftrain.parallel.stages import config_parameters, stage_plan
from ftrain.parallel.timeline import even, simulate


def _links(rank, config):
    """What this rank sends in a step: (to which stage, which action's result, bytes); and the bytes of its weights."""
    engine = engine_of(config, rank)
    before = {name: view.weight.data_ptr() for name, view in engine.optimizer.views().items()}
    sent, plain = [], engine.mesh.start_transfers

    def counted(transfers):
        sent.extend((peer, tensor.nbytes) for tensor, peer, sends in transfers if sends)
        return plain(transfers)

    engine.mesh.start_transfers = counted
    train(engine, 1)
    assert {name: view.weight.data_ptr() for name, view in engine.optimizer.views().items()} == before
    planned = [i for i in engine.passes.program(4).ranks[rank] if isinstance(i, Batch)]
    kinds = {(t.peer, t.of.kind.value) for batch in planned for t in batch.transfers if t.sends}
    return sent, kinds


@pytest.mark.dist
def test_row_04_stages_keep_their_weights_and_hand_on_activations():
    """Three stages, as in the figure: forward to the next, gradients of activations back, and not a byte of weights."""
    config = piped("1f1b", pp=3, dtype="bfloat16", batch={"global_batch": 4})
    hand_on = 2 * config.data.seq_len * config.model.hidden  # bytes of a micro-batch's activations
    (first, first_kinds), (middle, middle_kinds), (last, last_kinds) = run_world(_links, 3, config)
    assert first == [(1, hand_on)] * 4
    assert sorted(middle) == [(0, hand_on)] * 4 + [(2, hand_on)] * 4
    assert last == [(1, hand_on)] * 4
    assert (first_kinds, middle_kinds, last_kinds) == ({(1, "F")}, {(2, "F"), (0, "B")}, {(1, "B")})


def test_row_04_eight_stages_are_eight_servers():
    """TP8 x PP8 x DP80: a stage is a server, eight neighbouring servers are a replica."""
    mesh = MeshShape(tp=8, pp=8, dp=80)
    for dp in (0, 79):
        servers = [{mesh.rank(Coordinate(tp=tp, pp=pp, dp=dp)) // 8 for tp in range(8)} for pp in range(8)]
        assert servers == [{8 * dp + pp} for pp in range(8)]


@pytest.mark.dist
def test_row_07_the_config_says_which_stage_holds_which_layers():
    config = piped("1f1b", model={"layers": 4}, parallel={"layer_counts": (1, 3)})
    assert run_world(_layers_of, 2, config) == [["0"], ["1", "2", "3"]]


def _layers_of(rank, config):
    return list(engine_of(config, rank).model.layers)


def test_row_07_cuts_equalise_time():
    """A head worth three layers: the last stage takes fewer, and no stage takes longer than it has to."""
    counts = balanced_counts([1.0] * 32, 8, last=3.0)
    assert sum(counts) == 32
    assert counts[-1] < 4
    assert max(count + 3 * (stage == 7) for stage, count in enumerate(counts)) == 5  # 35 units on 8 stages
    assert balanced_counts([1.0] * 126, 16, first=1.0, last=1.0) == (7, *[8] * 14, 7)
    assert balanced_counts([4.0, 1.0, 1.0, 1.0, 1.0], 2) == (1, 4)


def _order(rank, config):
    engine = engine_of(config, rank)
    train(engine, 1)
    return [str(t.instruction).split("@")[0] for t in engine.passes.pipeline.timed if isinstance(t.instruction, Action)]


@pytest.mark.dist
def test_row_16_two_stages_and_three_micro_batches():
    """The figure's order, as carried out; a quarter of the time is idle; a backward frees what its forward kept."""
    first, last = run_world(_order, 2, piped("1f1b", batch={"global_batch": 3}))
    assert first == ["F1", "F2", "B1", "F3", "B2", "B3"]
    assert last == ["F1", "B1", "F2", "B2", "F3", "B3"]
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    assert simulate(schedule, even()).bubble_of_total() == Fraction(2 - 1, 3 + 2 - 1) == Fraction(1, 4)
    assert peak_in_flight(schedule) == (2, 1)


@pytest.mark.dist
def test_row_21_plain_first_then_virtual_stages_on_the_same_model_and_batch():
    """Both give one process's bits; with p = 8 and m = 32, 17.9 % is idle, and 9.9 % with two virtual stages."""
    model = {"layers": 4}
    plain, virtual = piped("1f1b", model=model), piped("interleaved", model=model)
    ran = [run_mesh(config, 2) for config in (one_of(plain), plain, virtual)]
    assert all(other.results == ran[0].results and not same_bits(other.arrays, ran[0].arrays) for other in ran[1:])
    idle = {
        chunks: simulate(build(name, num_ranks=8, num_microbatches=32, num_chunks=chunks), even(num_chunks=chunks))
        for name, chunks in (("1f1b", 1), ("interleaved", 2))
    }
    assert [f"{100 * float(idle[chunks].bubble_of_total()):.1f}" for chunks in (1, 2)] == ["17.9", "9.9"]


def test_row_65_126_layers_on_16_stages():
    """[7, 8 x 14, 7]: the engine's own plan, its placement table, and its modules on the meta device."""
    config = tiny(model={"layers": 126}, parallel={"pp": 16, "ranks": 16})
    plan = stage_plan(config)
    assert plan.counts == (7, *[8] * 14, 7)
    assert sum(plan.counts) == 126
    held = [set() for _ in range(16)]
    for spec in config_parameters(config, MeshShape(pp=16)):
        if spec.block.startswith("layers."):
            (stage,) = spec.stages
            held[stage].add(int(spec.block.removeprefix("layers.")))
    assert [sorted(layers) for layers in held] == [list(layers) for layers in plan.layers]
    modules = [Transformer(config.model, dtype=torch.float32, layers=layers) for layers in plan.layers]
    assert [len(module.layers) for module in modules] == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("m", "share", "printed"), [(16, "0.4839", "48"), (64, "0.1899", "19"), (128, "0.1049", "10.5")])
def test_row_66_the_bubble_of_gpipe(m, share, printed):
    """(p-1)/(m+p-1), p = 16: the simulated schedule equals the formula."""
    idle = simulate(gpipe(16, m), even()).bubble_of_total()
    assert idle == Fraction(15, m + 15)
    assert f"{float(idle):.4f}" == share
    assert f"{100 * float(idle):.{1 if '.' in printed else 0}f}" == printed
