"""Context parallelism on real process groups: attention, then whole training, against one process."""

from dataclasses import dataclass

import msgspec
import pytest
import torch

from ftrain.model.attention import attention
from ftrain.parallel.context import ContextGroup
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import MeshShape
from tests.layouts import deviations, laid_out, one_process, run_layouts
from tests.tiny import tiny
from tests.world import run_world

B, T, H, G, K = 2, 24, 4, 2, 8
EXCHANGES = ("all_gather", "ring")


def numbers(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole(dtype):
    """Queries, keys, values, the gradient of the output, and documents."""
    sizes = ((B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, H, K))
    tensors = [numbers(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]
    documents = (torch.rand(B, T, generator=torch.Generator().manual_seed(9)) < 0.2).cumsum(1)
    return tensors, documents


def with_gradients(q, k, v, dout, group, documents):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, group, documents)
    out.backward(dout)
    return out.detach(), *(leaf.grad for leaf in leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting(ContextGroup):
    """Says where the blocks of keys and values that it shows lie in memory, and what passes between ranks."""

    places: list
    passes: list

    def blocks(self, kv):
        for source, block in ContextGroup.blocks(self, kv):
            self.places.append(block.data_ptr())
            yield source, block

    def pass_on(self, block, into):
        self.passes.append(block.dtype)
        return ContextGroup.pass_on(self, block, into)


def _attention(rank, size):
    mesh = Mesh(MeshShape(cp=size), rank)
    for dtype in (torch.float64, torch.bfloat16):
        tensors, documents = whole(dtype)
        for mask in (None, documents):
            found = {}
            for exchange in EXCHANGES:
                group = Counting(mesh=mesh, exchange=exchange, places=[], passes=[])
                mine = [group.cut(x) for x in tensors]
                found[exchange] = with_gradients(*mine, group, mask)
                assert len(group.places) == 2 * size  # forward and backward
                if exchange == "ring":
                    assert len(set(group.places[:size])) == len(set(group.places[size:])) == 2  # never room for more
                    block, gradients = group.passes.count(dtype), group.passes.count(torch.float32)
                    if dtype == torch.bfloat16:  # keys and values as they are, gradients in fp32, all the way home
                        assert (block, gradients) == (2 * (size - 1), size)
            assert torch.equal(found["ring"][0], found["all_gather"][0])
            if dtype == torch.float64:
                expected = [group.cut(x) for x in with_gradients(*tensors, None, mask)]
                for ours in found.values():
                    torch.testing.assert_close(ours, tuple(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_one_process(size):
    run_world(_attention, size, size)


def config(dtype="float64", **changes):
    return tiny(
        model={"layers": 4},
        data={"seq_len": 16, "document_mask": True},
        machine={"compute_dtype": dtype},
        **changes,
    )


LAYOUTS = (  # those of two ranks are in the certificate's tests
    {"ranks": 4, "cp": 4, "cp_exchange": "ring"},
    {"ranks": 4, "cp": 2},
    {"ranks": 4, "cp": 2, "tp": 2, "cp_exchange": "ring"},
    {"ranks": 4, "cp": 2, "pp": 2, "cp_exchange": "ring", "schedule": "zb_v"},
)


@pytest.fixture(scope="module")
def runs():
    several = run_layouts([laid_out(config(), **layout) for layout in LAYOUTS], 2)
    return {(): run_layouts([one_process(config())], 2)[0], **dict(zip(map(key, LAYOUTS), several, strict=True))}


def key(layout):
    return tuple(layout.items())


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_training_is_one_process_in_fp64(layout, runs):
    """Every array of state, every gradient, losses and the held-out loss; masked targets and documents differ between ranks."""
    found = deviations(runs[key(layout)], runs[()])
    assert max(found.values()) < 1e-12, found


def test_a_document_mask_is_not_nothing(runs):
    data = msgspec.structs.replace(config().data, document_mask=False)
    (other,) = run_layouts([one_process(msgspec.structs.replace(config(), data=data))], 2)
    assert deviations(other, runs[()])["loss"] > 1e-6


@pytest.mark.dist
@pytest.mark.slow
def test_gradients_are_reproducible_at_a_fixed_layout():
    configs = [laid_out(config("float32"), ranks=2, cp=2, cp_exchange="ring")] * 2
    first, second = run_layouts(configs, 1)
    assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)
