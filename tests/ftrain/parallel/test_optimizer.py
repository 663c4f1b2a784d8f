"""The sharded optimizer against torch.optim.AdamW(foreach=False): the same bits; clipping against torch's."""

import math

import msgspec
import pytest
import torch
from tiny import tiny
from world import run_world

from ftrain.parallel.arrays import StateTypes
from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.layout import parameters
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.norm import clip_factor, round_to_float32, sum_of_squares
from ftrain.parallel.optimizer import ShardedAdamW
from ftrain.parallel.shape import MeshShape

UPDATES = 10


def values(name, shape, *key):
    generator = torch.Generator().manual_seed(hash((sum(map(ord, name)), *key)) % 2**31)
    return torch.randn(shape, generator=generator)


def sharded(config, rank):
    mesh = Mesh(MeshShape(dp=config.parallel.ranks), rank)
    specs = parameters(config.model, mesh.shape)
    buckets = plan_buckets(specs, mesh.shape, mesh.coordinate, bucket_bytes=config.parallel.bucket_mib * 2**20)
    optimizer = ShardedAdamW(buckets, mesh=mesh, device=torch.device("cpu"), types=StateTypes(), options=config.optimizer)
    optimizer.fill_masters(lambda out, part: out.copy_(values(part.spec.name, part.spec.shape)[part.box.slices()]))
    return specs, optimizer


def oracle(config, specs, factor):
    """Masters and moments of torch's own AdamW; the gradient is that of two replicas, added in fp32."""
    params = {spec.name: torch.nn.Parameter(values(spec.name, spec.shape)) for spec in specs}
    options = config.optimizer
    groups = [
        {"params": [params[spec.name] for spec in specs if spec.decay is decay], "weight_decay": options.weight_decay * decay}
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps, foreach=False)
    for update in range(1, UPDATES + 1):
        for name, param in params.items():
            param.grad = sum(values(name, param.shape, update, rank) for rank in range(config.parallel.ranks)).mul_(factor)
        for group in adamw.param_groups:
            group["lr"] = 0.01 / update
        adamw.step()
    return {
        "master": {name: param.detach() for name, param in params.items()},
        "exp_avg": {name: adamw.state[param]["exp_avg"] for name, param in params.items()},
        "exp_avg_sq": {name: adamw.state[param]["exp_avg_sq"] for name, param in params.items()},
    }


def _update(rank, config, factor):
    specs, optimizer = sharded(config, rank)
    for update in range(1, UPDATES + 1):
        for name, view in optimizer.views().items():
            view.main_grad.copy_(values(name, view.main_grad.shape, update, rank))
        optimizer.reduce_grads()
        optimizer.update(lr=0.01 / update, number=update, factor=factor)
    expected = oracle(config, specs, factor)
    for piece in optimizer.pieces():
        slot, _, name = piece.array.partition("/")
        wanted = expected["master" if slot == "weights" else slot][name][piece.box.slices()]
        assert torch.equal(piece.tensor, wanted), piece.array
    for name, view in optimizer.views().items():
        assert torch.equal(view.weight, expected["master"][name].bfloat16()), name


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_one_replica_is_torch_adamw_bit_for_bit(factor):
    _update(0, tiny(), factor)


def test_it_is_so_for_arrays_of_many_blocks_and_odd_sizes():
    _update(0, tiny(model={"hidden": 202, "head_dim": 50, "ffn": 333, "vocab": 501}), 1.0)


@pytest.mark.dist
def test_row_22_two_replicas_are_torch_adamw_bit_for_bit():
    """Two summands: addition commutes, so even the sum over replicas has one value."""
    run_world(_update, 2, tiny(ranks=2), 0.3)


def _cut(rank, config):
    _, optimizer = sharded(config, rank)
    before = {name: view.weight.clone() for name, view in optimizer.views().items()}
    for name, view in optimizer.views().items():
        assert torch.equal(view.weight, values(name, view.weight.shape).bfloat16())
    optimizer.publish()
    for name, view in optimizer.views().items():
        assert torch.equal(view.weight, before[name])
    parts = [part for region in optimizer.regions for part in region.parts]
    return {part.spec.name for part in parts if part.box.shape != part.spec.shape}


@pytest.mark.dist
def test_large_matrices_are_cut_between_rows():
    """1.1 M elements are over the 4 MiB below which nothing is cut."""
    config = tiny(model={"hidden": 1024, "vocab": 1100, "ffn": 64, "head_dim": 8}, ranks=3, parallel={"bucket_mib": 64.0})
    cut = set().union(*run_world(_cut, 3, config))
    assert cut <= {"embedding", "head"}
    assert cut


def test_norms_are_not_decayed():
    config = tiny(optimizer={"weight_decay": 0.5, "lr": 1.0})
    _, optimizer = sharded(config, 0)
    before = {piece.array: piece.tensor.clone() for piece in optimizer.pieces() if piece.array.startswith("master/")}
    optimizer.zero_grad()
    optimizer.update(lr=0.1, number=1, factor=1.0)
    for piece in optimizer.pieces():
        if piece.array.startswith("master/"):
            shrink = 1.0 if piece.tensor.ndim == 1 else 0.95
            assert torch.equal(piece.tensor, before[piece.array] * shrink)


def test_clipping_is_torchs():
    grads = [values("a", (300, 7)), values("b", (50_000,))]
    norm = math.sqrt(sum_of_squares(grads, torch.device("cpu")))
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_(params, 2.0, foreach=False)
    assert norm == pytest.approx(float(total), rel=1e-6)
    factor = clip_factor(norm, 2.0)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.grad, grad * factor, rtol=1e-6, atol=0)
    assert clip_factor(0.5, 2.0) == clip_factor(50.0, 0.0) == 1.0


def test_the_norm_does_not_depend_on_the_grouping():
    """Cut anywhere, the fp64 sums round to one fp32 norm."""
    values_ = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    norms = set()
    for parts in (1, 2, 3, 7, 64):
        squares = [sum_of_squares([piece], torch.device("cpu")) for piece in values_.chunk(parts)]
        norms.add(round_to_float32(math.sqrt(sum(squares))))
    assert len(norms) == 1
    assert norms == {float(torch.tensor(math.sqrt(math.fsum(v * v for v in values_.tolist()))))}


def test_a_non_finite_gradient_shows_in_the_sum():
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not math.isfinite(sum_of_squares([torch.tensor([1.0, bad])], torch.device("cpu")))
    assert math.isfinite(sum_of_squares([torch.full((4,), 3e38)], torch.device("cpu")))


def test_a_mesh_of_several_ranks_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Mesh(MeshShape(dp=2), 0)


def test_the_state_of_a_replica_is_its_share():
    config = tiny(ranks=1)
    _, optimizer = sharded(config, 0)
    arrays = {piece.array.split("/")[0] for piece in optimizer.pieces()}
    assert arrays == {"weights", "master", "exp_avg", "exp_avg_sq"}
    dtypes = {piece.array.split("/")[0]: piece.dtype for piece in optimizer.pieces()}
    assert dtypes == {"weights": "bfloat16", "master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert all(piece.tensor.shape == piece.box.shape and piece.tensor.is_contiguous() for piece in optimizer.pieces())
    assert msgspec.structs.asdict(config)["parallel"].ranks == 1
