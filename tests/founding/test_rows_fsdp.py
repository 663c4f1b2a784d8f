"""The founding rows that concern FSDP, by number, on the real engine."""

from fractions import Fraction

import pytest

from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape
from ftrain.parallel.shards import Shards
from tests.engines import engine_of, train
from tests.layouts import laid_out
from tests.tiny import tiny
from tests.world import run_world


def config(**parallel):
    return laid_out(
        tiny(model={"layers": 2, "vocab": 64}, data={"seq_len": 16}, machine={"compute_dtype": "float32"}),
        ranks=4,
        **parallel,
    )


def _kept(rank, own):
    """Elements of a rank: weights, gradients, moments; bytes of all of it; how often each parameter was gathered in a step."""
    engine = engine_of(own, rank)
    gathered = {}
    if own.parallel.sharding == "zero1":
        regions = engine.optimizer.regions
        weights, grads = (sum(getattr(r, name).numel() for r in regions) for name in ("weights", "main_grad"))
        moments = sum(region.exp_avg.numel() for region in regions)
        nbytes = sum(x.nbytes for r in regions for x in (r.weights, r.main_grad, r.master, r.exp_avg, r.exp_avg_sq))
        return weights, grads, moments, nbytes, gathered
    for held in engine.optimizer.held:
        held.rows.fsdp_pre_all_gather = _counted(held.rows.fsdp_pre_all_gather, held.spec.name, gathered)
    seen = {}
    engine.before_update = lambda: seen.update(grads=[h.parameter.grad._local_tensor for h in engine.optimizer.held])
    train(engine, 1)
    held = engine.optimizer.held
    arrays = [*(h.rows for h in held), *seen["grads"], *(h.exp_avg for h in held), *(h.exp_avg_sq for h in held)]
    counts = [sum(x.numel() for x in group) for group in ((h.rows for h in held), seen["grads"], (h.exp_avg for h in held))]
    return *counts, sum(x.nbytes for x in arrays), gathered


def _counted(hook, name, counts):
    def before(mesh, size, stride, module, policy):
        counts[name] = counts.get(name, 0) + 1
        return hook(mesh, size, stride, module, policy)

    return before


def total():
    return sum(spec.size for spec in parameters(config().model, MeshShape()))


CASES = {"zero1": {}, "fsdp": {}, "hfsdp": {"fsdp_inner": 2}}


def _all_kept(rank, configs):
    return [_kept(rank, own) for own in configs]


@pytest.fixture(scope="module")
def kept():
    """What each of four ranks keeps, by sharding."""
    configs = [config(sharding=sharding, **options) for sharding, options in CASES.items()]
    return dict(zip(CASES, zip(*run_world(_all_kept, 4, configs), strict=True), strict=True))


@pytest.mark.dist
def test_row_32_everything_is_cut_and_a_block_is_gathered_twice(kept):
    """Weights, gradients and moments a quarter each; two micro-batches: each block gathered for each forward and backward."""
    for weights, grads, moments, _, gathered in kept["fsdp"]:
        assert (weights, grads, moments) == (total() // 4,) * 3
        assert {name: count for name, count in gathered.items() if name.startswith("layers")} == {
            name: 2 * 2 for name in gathered if name.startswith("layers")
        }
        assert {gathered[name] for name in ("embedding", "norm", "head")} == {1}  # stay until the update


@pytest.mark.dist
def test_row_34_a_half_a_half_and_a_quarter(kept):
    """2 groups x 2 members: weights and gradients half each within a group, moments a quarter over all four."""
    for weights, grads, moments, _, _ in kept["hfsdp"]:
        shares = [Fraction(count, total()) for count in (weights, grads, moments)]
        assert shares == [Fraction(1, 2), Fraction(1, 2), Fraction(1, 4)]


def test_row_34_members_of_a_group_are_neighbours():
    """TP already uses a node's cards; the groups are made of what is left, in the order of the replicas."""
    mesh = MeshShape(tp=8, dp=4)
    shards = Shards(mesh, 2, split=True)
    places = [shards.place(mesh.coordinate(rank)) for rank in range(mesh.world)]
    assert [places[8 * replica] for replica in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(set(places[8 * replica : 8 * replica + 8])) == 1 for replica in range(4))


@pytest.mark.dist
def test_row_61_zero1_cuts_the_optimizer_only(kept):
    """Over four: 2 + 4 + 12 / 4 = 9 bytes a parameter with ZeRO-1, 16 / 4 = 4 with FSDP, whose weights are the masters."""
    assert all(nbytes == 4 * total() for *_, nbytes, _ in kept["fsdp"])
    for *_, nbytes, _ in kept["zero1"]:
        assert nbytes == pytest.approx(9 * total(), rel=0.05)  # aligned buckets are padded by up to 4 %
