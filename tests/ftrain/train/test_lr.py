"""Learning rates against the formulas."""

import math

import pytest

from ftrain.config import Schedule
from ftrain.lr import learning_rate


def rate(number, **schedule):
    return learning_rate(number, schedule=Schedule(**schedule), peak=3e-4, total=100)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [rate(n, warmup_steps=4) for n in (1, 2, 4)] == pytest.approx([0.75e-4, 1.5e-4, 3e-4])


def test_cosine_ends_at_the_minimum():
    options = {"kind": "cosine", "warmup_steps": 20, "min_ratio": 0.1}
    assert rate(20, **options) == 3e-4
    assert rate(60, **options) == pytest.approx(3e-4 * (0.1 + 0.9 * 0.5))  # half way: cos(pi / 2) = 0
    assert rate(80, **options) == pytest.approx(3e-4 * (0.1 + 0.9 * (1 + math.cos(math.pi * 0.75)) / 2))
    assert rate(100, **options) == pytest.approx(3e-5)
    assert rate(150, **options) == pytest.approx(3e-5)


def test_wsd_is_flat_and_then_straight():
    options = {"kind": "wsd", "warmup_steps": 10, "decay_steps": 20, "min_ratio": 0.0}
    assert rate(10, **options) == rate(50, **options) == rate(80, **options) == 3e-4
    assert rate(90, **options) == pytest.approx(1.5e-4)
    assert rate(100, **options) == 0.0
    assert rate(100, kind="wsd", decay_steps=0) == 3e-4


def test_constant():
    assert rate(1, kind="constant") == rate(100, kind="constant") == 3e-4
