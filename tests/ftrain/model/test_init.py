"""Initial values: an integer oracle, any cut, the distribution."""

import hashlib
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.config import Model
from ftrain.model import init
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape
from storage.box import Box

MODEL = Model(layers=2, hidden=40, heads=4, ffn=72, vocab=300, init_std=0.02)
SPARSE = Model(layers=2, hidden=10, heads=1, ffn=18, vocab=300, experts=3)
SPECS = {spec.name: spec for model in (SPARSE, MODEL) for spec in parameters(model, MeshShape())}
MASK = 2**64 - 1


def splitmix64(x):
    """Steele, Lea and Flood 2014, on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def filled(name, box=None, seed=5, dtype=torch.float32):
    spec = SPECS[name]
    box = box or Box.whole(spec.shape)
    out = torch.empty(box.shape, dtype=dtype)
    init.fill(out, box, spec=spec, model=MODEL, seed=seed)
    return out


def test_the_generator_is_splitmix64():
    """First outputs for seed 1234567, as published with the reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64((1234567 + n * init.GOLDEN) & MASK) for n in (1, 2, 3)] == expected


@pytest.mark.parametrize("name", ["embedding", "layers.1.attention.wo", "layers.0.mlp.w1"])
def test_each_value_is_the_formula_exactly(name):
    values, spec = filled(name), SPECS[name]
    key = int.from_bytes(hashlib.sha256(f"5/{name}".encode()).digest()[:8], "little")
    std = 0.02 / math.sqrt(4) if name.endswith("wo") else 0.02
    scale = std / math.sqrt((2**32 - 1) / 3)
    for row, column in [(0, 0), (3, 17), (spec.shape[0] - 1, spec.shape[1] - 1)]:
        z = splitmix64((key + (row * spec.shape[1] + column) * init.GOLDEN) & MASK)
        total = sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 0xFFFF
        product = float(Fraction(total) * Fraction(scale))  # rounded once, to nearest even
        assert values[row, column].item() == torch.tensor(product, dtype=torch.float64).float().item()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_cut_has_the_same_bits(data):
    name = data.draw(st.sampled_from(["embedding", "layers.0.attention.wk", "layers.1.mlp.w2", "layers.1.moe.w2", "norm"]))
    shape = SPECS[name].shape
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)))
    assert torch.equal(filled(name, box), filled(name)[box.slices()])


def test_blocks_do_not_show(monkeypatch):
    whole = filled("embedding")
    monkeypatch.setattr(init, "BLOCK", 100)
    assert torch.equal(filled("embedding"), whole)


def test_distribution():
    values = torch.cat([filled(name, seed=seed).double().flatten() for seed in range(8) for name in ("embedding", "head")])
    size = len(values)
    assert abs(values.mean().item()) < 4 * 0.02 / math.sqrt(size)
    assert values.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(size))
    kurtosis = (values**4).mean() / (values**2).mean() ** 2
    assert kurtosis.item() == pytest.approx(3 - 1.2 / 4, abs=0.05)  # Irwin-Hall of order 4
    assert values.abs().max() <= 0.02 * 2 * math.sqrt(3)
    assert len(values.unique()) > size / 2


def test_names_and_seeds_differ_and_norms_are_one():
    assert not torch.equal(filled("embedding"), filled("head"))
    assert not torch.equal(filled("embedding"), filled("embedding", seed=6))
    assert torch.equal(filled("norm"), torch.ones(40))
    assert torch.equal(filled("embedding", dtype=torch.float64), filled("embedding").double())


def test_stacked_matrices_have_the_values_of_one_long_one(monkeypatch):
    monkeypatch.setattr(init, "BLOCK", 50)
    spec = SPECS["layers.0.moe.w1"]
    long = replace(spec, shape=(3 * 18, 10))
    out = torch.empty(long.shape)
    init.fill(out, Box.whole(long.shape), spec=long, model=MODEL, seed=5)
    assert torch.equal(filled(spec.name).view(long.shape), out)
