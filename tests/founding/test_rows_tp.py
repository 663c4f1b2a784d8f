"""The founding rows that concern tensor and sequence parallelism, by number."""

import msgspec
import pytest
import torch
from engines import engine_of
from layouts import deviations, laid_out, one_process, run_layouts
from tiny import data_of, tiny
from torch.autograd.graph import saved_tensors_hooks
from world import run_world

from ftrain.config import Model
from ftrain.model.functional import swiglu
from ftrain.parallel.layout import local_box, parameters
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.shape import Coordinate, MeshShape, mesh_shape
from ftrain.parallel.tensor import column, row
from ftrain.train.step import Engine


def _worked_example(rank):
    group = TensorGroup(mesh=Mesh(MeshShape(tp=2), rank), vocabulary=range(0), sequence=False)
    x = torch.tensor([[2.0, 3.0]])
    full = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0]])
    (mine,) = column(group, x, full[:, 2 * rank : 2 * rank + 2].t().contiguous())
    parts = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(parts, mine)
    assert torch.equal(torch.cat(parts, -1), x @ full)
    return mine.tolist()


@pytest.mark.dist
def test_row_08_the_worked_example_of_tensor_parallelism():
    """x = [2, 3]: columns A give [2, 3], columns B [5, 8] (2 x 1 + 3 x 2 = 8); in order [2, 3, 5, 8]."""
    assert run_world(_worked_example, 2) == [[[2.0, 3.0]], [[5.0, 8.0]]]


class CountingMesh(Mesh):
    """Counts the collectives over tp by the phase they are in."""

    def __init__(self, shape, rank):
        super().__init__(shape, rank)
        self.phase, self.counts = "", {}

    def count(self, kind, axes):
        if axes == ("tp",):
            self.counts[self.phase, kind] = self.counts.get((self.phase, kind), 0) + 1

    def start_sum(self, tensor, axes):
        self.count("all-reduce", axes)
        return super().start_sum(tensor, axes)

    def start_gather(self, out, part, axes):
        self.count("all-gather", axes)
        return super().start_gather(out, part, axes)

    def start_scatter(self, out, whole, axes):
        self.count("reduce-scatter", axes)
        return super().start_scatter(out, whole, axes)


def _column_then_row(rank):
    mesh = CountingMesh(MeshShape(tp=2), rank)
    group = TensorGroup(mesh=mesh, vocabulary=range(0), sequence=False)
    x, w1, w3, w2 = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((5, 4), (6, 4), (6, 4), (4, 6))
    )
    x, w1, w3, w2 = (y.double() for y in (x, w1, w3, w2))
    own = slice(3 * rank, 3 * rank + 3)
    hidden = swiglu(*column(group, x, w1[own], w3[own]))
    assert mesh.counts == {}  # the shards are used as they are
    share = hidden @ w2[:, own].T
    full = swiglu(x @ w1.T, x @ w3.T) @ w2.T
    out = row(group, hidden, w2[:, own].contiguous())
    assert mesh.counts == {("", "all-reduce"): 1}  # here a sum is needed
    assert not torch.allclose(share, full)
    torch.testing.assert_close(out, full, rtol=1e-12, atol=1e-12)


@pytest.mark.dist
def test_row_09_a_column_feeds_a_row_and_the_sum_is_the_full_product():
    run_world(_column_then_row, 2)


def saved_bytes(engine):
    """Bytes that one micro-batch keeps for its backward."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = data_of(engine.config).sequences(0, 1)
    tokens, targets, valid = (torch.from_numpy(a) for a in (batch.tokens, batch.targets, batch.valid))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine.model.loss(engine.model(tokens), targets, valid, 1.0)
    loss.backward()
    return sum(kept.values())


def _activations(rank, config):
    results = []
    for sp in (False, True):
        engine = engine_of(laid_out(config, sp=sp), rank)
        results.append(saved_bytes(engine))
    mesh = Mesh(mesh_shape(config), rank)
    group = TensorGroup(mesh=mesh, vocabulary=range(0))
    positions = group.narrow(torch.arange(1.0, 9.0).repeat(2, 1).T.unsqueeze(0) / 2).wait()[0, :, 0].tolist()
    again = group.widen(torch.tensor(positions).view(1, 4, 1)).wait().flatten().tolist()
    return results, positions, again


@pytest.mark.dist
def test_row_36_sequence_parallelism_equals_none_and_keeps_less():
    """Positions 1 to 8 over two members: what lies between the blocks is halved."""
    config = laid_out(tiny(data={"seq_len": 8}), ranks=2, tp=2)
    model, length, item = config.model, 8, 8
    stream = length * model.hidden
    halved = model.layers * (4 * stream + 2 * length) + 2 * stream + length  # inputs of norms and columns, norms' factors
    for rank, ((without, cut), positions, again) in enumerate(run_world(_activations, 2, config)):
        assert without - cut == halved * item // 2
        assert positions == [1 + 4 * rank, 2 + 4 * rank, 3 + 4 * rank, 4 + 4 * rank]
        assert again == [1, 2, 3, 4, 5, 6, 7, 8]
    with_sp, without_sp = run_layouts([config, laid_out(config, sp=False)], 2)
    assert max(deviations(with_sp, without_sp).values()) < 1e-12
    (single,) = run_layouts([one_process(config)], 2)
    assert max(deviations(with_sp, single).values()) < 1e-12


def _counted(rank, config):
    """Collectives over tp of one micro-batch."""
    mesh = CountingMesh(mesh_shape(config), rank)

    def phase(name, _):
        mesh.phase = name

    engine = Engine(config, mesh=mesh, device="cpu", dataset=data_of(config), progress=phase)
    engine.init_state()
    engine.train_step(step=1, first_sequence=0)
    return {key: count for key, count in mesh.counts.items() if key[0] in ("forward", "backward")}


def _per_layer(rank, config):
    one, three = (_counted(rank, replace_model(config, layers=layers)) for layers in (1, 3))
    return {key: (three[key] - one.get(key, 0)) / 2 for key in three if three[key] != one.get(key, 0)}


def replace_model(config, **changes):
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))


def _all_counts(rank, config):
    return [_per_layer(rank, laid_out(config, **change)) for change in ({"sp": False}, {"sp_regather": False}, {})]


@pytest.mark.dist
def test_row_64_collectives_of_a_layer():
    """Two all-reduces forward and two backward; with sp each is an all-gather and a reduce-scatter.

    The default gathers the inputs of attention and MLP once more in backward instead of keeping them whole.
    """
    config = laid_out(tiny(batch={"global_batch": 1}), ranks=2, tp=2)
    for plain, pairs, regather in run_world(_all_counts, 2, config):
        assert plain == {("forward", "all-reduce"): 2, ("backward", "all-reduce"): 2}
        both = {(phase, kind): 2 for phase in ("forward", "backward") for kind in ("all-gather", "reduce-scatter")}
        assert pairs == both
        assert regather == both | {("backward", "all-gather"): 4}


def test_row_64_a_width_of_16384_is_cut_in_eighths():
    model = Model(layers=1, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)
    mesh = MeshShape(tp=8)
    specs = {spec.name: spec for spec in parameters(model, mesh)}
    for index in range(8):
        here = Coordinate(tp=index)
        wq = local_box(specs["layers.0.attention.wq"], mesh, here)
        assert (wq.offset, wq.shape) == ((2048 * index, 0), (16384 // 8, 16384))  # 16 whole heads
        assert local_box(specs["layers.0.attention.wo"], mesh, here).shape == (16384, 2048)
        assert local_box(specs["layers.0.mlp.w1"], mesh, here).shape == (53248 // 8, 16384)
        assert local_box(specs["layers.0.mlp.w2"], mesh, here).shape == (16384, 53248 // 8)
