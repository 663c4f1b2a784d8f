"""The founding rows that concern context parallelism and the loss, by number, on the real engine."""

from pathlib import Path

import pytest
import torch

from ftrain.load import load
from ftrain.model.attention import attention, seen
from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.context import ContextGroup, head_tail
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import Coordinate, MeshShape, mesh_shape
from ftrain.parallel.stages import config_parameters
from tests.engines import reference_run
from tests.layouts import laid_out, one_process, run_layouts
from tests.tiny import data_of, tiny
from tests.world import run_world

ROOT = Path(__file__).parents[2]


def config_of(name, *changes):
    return load(str(ROOT / "configs" / name), list(changes))


def regions_of(config):
    """Elements of the optimizer's regions of one place, bucket by bucket."""
    mesh = mesh_shape(config)
    specs = config_parameters(config, mesh)
    return [
        bucket.region for bucket in plan_buckets(specs, mesh, Coordinate(), bucket_bytes=config.parallel.bucket_mib * 2**20)
    ]


def test_row_37_cp2_makes_dp40_and_shards_stay_80():
    one, two = config_of("dense-500b.toml"), config_of("dense-500b.toml", "parallel.cp=2")
    assert [mesh_shape(config).dp for config in (one, two)] == [80, 40]
    assert [mesh_shape(config).shards for config in (one, two)] == [80, 80]
    assert regions_of(one) == regions_of(two)  # masters and moments are cut over DP x CP


def test_row_37_placement_is_balanced_and_not_contiguous():
    """Positions 1 to 8 over two members, counted from 0: {0, 1, 6, 7} and {2, 3, 4, 5}; each sees 18 pairs."""
    places = [[p for span in head_tail(8, 2, rank) for p in span] for rank in range(2)]
    assert places == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [sum(p + 1 for p in place) for place in places] == [18, 18]
    block = seen(head_tail(8, 2, 0), head_tail(8, 2, 1))  # of the first's positions only 6 and 7 see any of the second's
    assert (block.q_pos, block.k_pos) == ((range(6, 8),), (range(2, 4), range(4, 6)))


def _position_six(rank, exchange):
    """Only position 6 learns: gradients of the keys and values that it sees must reach whoever made them."""
    group = ContextGroup(mesh=Mesh(MeshShape(cp=2), rank), exchange=exchange)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 8, 1, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    dout = torch.zeros_like(q)
    dout[:, 6] = 1
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*leaves).backward(dout)
    mine = [group.cut(x).requires_grad_() for x in (q, k, v)]
    attention(*mine, group).backward(group.cut(dout))
    for ours, whole in zip(mine, leaves, strict=True):
        torch.testing.assert_close(ours.grad, group.cut(whole.grad), rtol=1e-12, atol=1e-12)
    return [bool(x.grad.abs().sum((0, 2, 3)).gt(0).all()) for x in mine[1:]]


@pytest.mark.dist
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_row_37_gradients_of_keys_and_values_return(exchange):
    """The second member has none of position 6's queries, and all four of its keys and values learn from it."""
    assert run_world(_position_six, 2, exchange)[1] == [True, True]


@pytest.mark.dist
def test_row_39_the_loss_weighs_by_tokens_that_learn():
    """Sum over sum, whatever the layout: sequences with few and with many valid targets, cut and dealt in every way."""
    config = tiny(data={"seq_len": 16})
    (one,) = run_layouts([one_process(config)], 2)
    layouts = [{"cp": 2}, {"cp": 2, "cp_exchange": "ring"}, {"tp": 2}, {}]
    runs = run_layouts([laid_out(config, ranks=2, **layout) for layout in layouts], 2)
    _, expected = reference_run(config, torch.float64, 2)
    valid = [int(data_of(config).sequences(step * 8, 8).valid.sum()) for step in range(2)]
    assert len({int(row.sum()) for row in data_of(config).sequences(0, 8).valid}) > 1
    for run in (one, *runs):
        assert [result.tokens for result in run.results] == valid
        assert [result.loss for result in run.results] == pytest.approx([loss for loss, _ in expected], rel=1e-12)


def test_row_69_both_phases_cut_the_state_alike():
    """8 x 1 x 16 x 128 and 8 x 16 x 16 x 8 are 16,384 ranks; 128 shards in both, so a change of phase moves no master."""
    short = config_of("llama3-405b.toml")
    long = config_of("llama3-405b.toml", "parallel.cp=16", "data.seq_len=131072")
    shapes = [mesh_shape(config) for config in (short, long)]
    assert [(s.tp, s.cp, s.pp, s.dp, s.world) for s in shapes] == [(8, 1, 16, 128, 16_384), (8, 16, 16, 8, 16_384)]
    assert [s.shards for s in shapes] == [128, 128]
    assert regions_of(short) == regions_of(long)
    spans = [head_tail(131_072, 16, rank) for rank in range(16)]
    assert {sum(map(len, span)) for span in spans} == {8192}  # as many positions a rank as in the short phase
    assert {sum(sum(part) + len(part) for part in span) for span in spans} == {131_072 * 131_073 // 2 // 16}


@pytest.mark.dist
@pytest.mark.slow
def test_row_69_the_engine_in_four_dimensions():
    """TP x CP x PP of two each, and the same eight ranks with DP in the place of CP: one function."""
    config = tiny(model={"layers": 2}, data={"seq_len": 16})
    (one,) = run_layouts([one_process(config)], 1)
    layouts = [{"cp": 1}, {"cp": 2, "cp_exchange": "ring"}]
    for run in run_layouts([laid_out(config, ranks=8, tp=2, pp=2, **layout) for layout in layouts], 1):
        assert run.results[0].loss == pytest.approx(one.results[0].loss, rel=1e-12)
        assert run.results[0].grad_norm == pytest.approx(one.results[0].grad_norm, rel=1e-12)
        for name, master in one.state["master"].items():
            torch.testing.assert_close(run.state["master"][name], master, rtol=1e-11, atol=1e-12)
