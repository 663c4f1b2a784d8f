"""The layers that tensor parallelism cuts, one by one against the plain ones, and a block of them against DTensor."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from world import run_world

from ftrain.config import Model, Parallel
from ftrain.model import functional
from ftrain.model.moe import Groups
from ftrain.model.transformer import Block, Transformer
from ftrain.parallel.layout import local_box, parameters
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.optimizer import View
from ftrain.parallel.shape import Coordinate, MeshShape
from ftrain.parallel.tensor import Labels, column, embed_cut, head_loss_cut, row, token_losses_cut
from ftrain.parallel.weight import Weight

B, T, D, V = 2, 6, 8, 11  # a prime vocabulary, cut unevenly
PARTS = {2: [range(6), range(6, 11)], 3: [range(4), range(4, 11), range(11, 11)]}


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weight(values):
    own = Weight(values.contiguous().clone())
    own.main_grad = torch.zeros_like(own.data)
    return own


class Cut:
    """One rank's view of whole tensors."""

    def __init__(self, mesh, **options):
        self.rank, self.size = mesh.rank, mesh.shape.tp
        self.group = TensorGroup(mesh=mesh, vocabulary=PARTS[self.size][self.rank], **options)

    def positions(self, whole_ND):
        """What this rank has of activations between blocks."""
        return whole_ND.chunk(self.size)[self.rank] if self.group.sequence else whole_ND

    def stream(self, whole_BTD):
        parts = self.size if self.group.sequence else 1
        return self.positions(whole_BTD.flatten(0, 1)).reshape(B, T // parts, -1).clone().requires_grad_()

    def check_stream(self, mine, whole_BTD):
        torch.testing.assert_close(mine.flatten(0, 1), self.positions(whole_BTD.flatten(0, 1)), rtol=1e-12, atol=1e-12)


def plain_of(function, x, *weights):
    """Output and gradients of one process."""
    x, own = x.clone().requires_grad_(), [weight(w) for w in weights]
    out = function(x, *own)
    return x, own, out


def _column_and_row(cut):
    wide = [numbers(6, D, seed=1), numbers(12, D, seed=2)]
    back, x, direction = numbers(D, 18, seed=3), numbers(B, T, D, seed=4), numbers(B, T, D, seed=5)
    rows = [w.chunk(cut.size)[cut.rank] for w in wide]
    columns = torch.cat([part.chunk(cut.size, 1)[cut.rank] for part in back.split([6, 12], 1)], 1)

    def whole(x, *w):
        return functional.linear(torch.cat(functional.project(x, *w[:2]), -1), w[2])

    x_whole, own_whole, out_whole = plain_of(whole, x, *wide, back)
    out_whole.backward(direction)
    mine, own = cut.stream(x), [weight(w) for w in (*rows, columns)]
    out = row(cut.group, torch.cat(column(cut.group, mine, *own[:2]), -1), own[2])
    cut.check_stream(out, out_whole)
    out.backward(cut.stream(direction).detach())
    cut.check_stream(mine.grad, x_whole.grad)
    for part, full in zip(own[:2], own_whole[:2], strict=True):
        torch.testing.assert_close(part.main_grad, full.main_grad.chunk(cut.size)[cut.rank], rtol=1e-12, atol=1e-12)
    expected = torch.cat([part.chunk(cut.size, 1)[cut.rank] for part in own_whole[2].main_grad.split([6, 12], 1)], 1)
    torch.testing.assert_close(own[2].main_grad, expected, rtol=1e-12, atol=1e-12)


def _vocabulary(cut):
    table, direction = numbers(V, D, seed=6), numbers(B, T, D, seed=7)
    own = cut.group.vocabulary
    tokens, targets = torch.arange(B * T).view(B, T) * 7 % V, torch.arange(B * T) * 5 % V
    valid = torch.arange(B * T) % 4 > 0
    for dtype in (torch.float64, torch.bfloat16):  # a sum of one number and zeros is exact
        part = weight(table[own.start : own.stop])
        out = embed_cut(cut.group, tokens, part, dtype)
        assert torch.equal(out.flatten(0, 1), cut.positions(table[tokens].to(dtype).flatten(0, 1)))
    part, full = weight(table[own.start : own.stop]), weight(table)
    embed_cut(cut.group, tokens, part, torch.float64).backward(cut.stream(direction).detach())
    functional.embed(tokens, full, torch.float64).backward(direction)
    torch.testing.assert_close(part.main_grad, full.main_grad[own.start : own.stop], rtol=1e-12, atol=1e-12)

    x = numbers(B * T, D, seed=8) * 300  # logits of hundreds: exponentials overflow unless the largest is taken off
    wild = torch.where(valid, targets, -100)
    full, part = weight(table), weight(table[own.start : own.stop])
    x_whole, mine = x.clone().requires_grad_(), cut.positions(x).clone().requires_grad_()
    expected = functional.head_loss(x_whole, full, wild, valid, 0.25, 0.01)
    loss = head_loss_cut(cut.group, mine, part, Labels(wild, valid, 0.25, 0.01))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(mine.grad, cut.positions(x_whole.grad), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(part.main_grad, full.main_grad[own.start : own.stop], rtol=1e-11, atol=1e-11)
    losses = token_losses_cut(cut.group, cut.positions(x), part, targets)
    torch.testing.assert_close(losses, F.cross_entropy(x @ table.T, targets, reduction="none"))


def _layers(rank, size):
    mesh = Mesh(MeshShape(tp=size), rank)
    for options in ({}, {"regather": False}, {"overlap": True}, {"sequence": False}, {"sequence": False, "overlap": True}):
        _column_and_row(Cut(mesh, **options))
        _vocabulary(Cut(mesh, **options))


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_cut_layers_are_the_plain_ones(size):
    """Three ranks: one of them holds nothing of the vocabulary."""
    run_world(_layers, size, size)


def _uneven(rank):
    group = TensorGroup(mesh=Mesh(MeshShape(tp=2), rank), vocabulary=range(0))
    with pytest.raises(ValueError, match="cuts 3 positions over 2 ranks: they must divide"):
        group.narrow(torch.zeros(1, 3, 4))


@pytest.mark.dist
def test_positions_that_do_not_divide_are_an_error():
    run_world(_uneven, 2)


MODEL = Model(layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=32)


class PlainBlock(nn.Module):
    """A block as any user of PyTorch would write it, for DTensor to cut."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
        for name, (out, wide) in {
            "wq": (16, 16),
            "wk": (8, 16),
            "wv": (8, 16),
            "wo": (16, 16),
            "w1": (24, 16),
            "w2": (16, 24),
            "w3": (24, 16),
        }.items():
            self.add_module(name, nn.Linear(wide, out, bias=False))
        self.into_attention, self.into_mlp = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.into_attention(self.attention_norm(x))
        q, k, v = (getattr(self, name)(h).unflatten(-1, (-1, 4)) for name in ("wq", "wk", "wv"))
        tables = Transformer(MODEL, dtype=torch.float64).positions(T, x.device).tables
        q, k = (functional.rotate(y, *tables) for y in (q, k))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True, enable_gqa=True)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        h = self.into_mlp(self.mlp_norm(x))
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


PLAN = {
    "attention_norm": SequenceParallel(),
    "mlp_norm": SequenceParallel(),
    "into_attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "into_mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")},
    **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("wo", "w2")},
}


def _dtensor(rank):
    values = {spec.name.removeprefix("layers.0."): numbers(*spec.shape, seed=len(spec.name)) for spec in specs()}
    x, direction = numbers(1, T, 16, seed=1), numbers(1, T, 16, seed=2)
    mine = slice(rank * T // 2, (rank + 1) * T // 2)

    theirs = PlainBlock().double()
    theirs.load_state_dict({f"{name.rpartition('.')[2]}.weight": value for name, value in values.items()})
    parallelize_module(theirs, init_device_mesh("cpu", (2,)), PLAN)
    x_theirs = x[:, mine].clone().requires_grad_()
    expected = theirs(x_theirs)
    expected.backward(direction[:, mine])

    mesh = Mesh(MeshShape(tp=2), rank)
    ours = Block(MODEL, Groups(TensorGroup(mesh=mesh, vocabulary=range(0))), "none")
    for spec in specs():
        name = spec.name.removeprefix("layers.0.")
        box = local_box(spec, mesh.shape, mesh.coordinate)
        path, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(path), leaf, weight(values[name][box.slices()]))
    x_ours = x[:, mine].clone().requires_grad_()
    out = ours(x_ours, Transformer(MODEL, dtype=torch.float64).positions(T, x.device))
    out.backward(direction[:, mine])

    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, rtol=1e-12, atol=1e-12)
    for spec in specs():
        name = spec.name.removeprefix("layers.0.")
        grad = ours.get_parameter(name).main_grad
        if spec.summands(2) == 2:
            dist.all_reduce(grad)
        full = theirs.get_parameter(f"{name.rpartition('.')[2]}.weight").grad
        full = full.full_tensor() if isinstance(full, DTensor) else full
        torch.testing.assert_close(grad, full[local_box(spec, mesh.shape, mesh.coordinate).slices()], rtol=1e-12, atol=1e-12)


def specs():
    return [spec for spec in parameters(MODEL, MeshShape(tp=2)) if spec.name.startswith("layers.0.")]


@pytest.mark.dist
def test_a_block_is_what_dtensor_computes():
    run_world(_dtensor, 2)


LLAMA3_405B = Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", [LLAMA3_405B, msgspec.structs.replace(MODEL, heads=16, ffn=32, qk_norm=True, vocab=61)])
def test_modules_have_the_shapes_of_the_placement_table(tp, model):
    """Built without storage or processes."""
    mesh = MeshShape(tp=tp)
    table = {spec.name: spec for spec in parameters(model, mesh)}
    for index in range(tp):
        place = SimpleNamespace(shape=mesh, coordinate=Coordinate(tp=index))
        group = TensorGroup.of(place, Parallel(), table["embedding"].tp, model.vocab)
        modules = {
            name: tuple(parameter.shape)
            for name, parameter in Transformer(model, dtype=torch.float32, groups=Groups(group)).named_parameters()
            if parameter.numel()
        }
        boxes = {name: local_box(spec, mesh, place.coordinate) for name, spec in table.items()}
        assert modules == {name: box.shape for name, box in boxes.items() if box}


def test_a_part_without_rows_has_no_parameter():
    """The module keeps an empty matrix, the optimizer holds nothing of it."""
    mesh = Mesh(MeshShape(), 0)
    decoder = Transformer(MODEL, dtype=torch.float64, groups=Groups(TensorGroup(mesh=mesh, vocabulary=range(32, 32))))
    views = {
        spec.name: View(torch.zeros(spec.shape), torch.zeros(spec.shape))
        for spec in parameters(MODEL, MeshShape())
        if spec.block not in ("embedding",) and spec.name != "head"
    }
    decoder.place(views)
    assert decoder.embedding.shape == decoder.output.shape == (0, 16)
