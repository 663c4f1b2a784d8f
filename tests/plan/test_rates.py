"""Rates and utilisation: against published runs, and nothing where something is not known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftrain.config import Config
from ftrain.load import load
from ftrain.plan import cost, profile
from ftrain.plan.rates import Rates, rate_record, speed_text
from ftrain.plan.setup import Options, Setup

CONFIGS = Path(__file__).parents[2] / "configs"
H100, BF16 = "NVIDIA H100 80GB HBM3", "bfloat16"


def llama(hardware: str = "h100") -> Config:
    return load(str(CONFIGS / "llama3-405b.toml"), (f'machine.hardware="{hardware}"',))


def test_a_step_as_long_as_its_rate_says_gives_that_rate_back() -> None:
    """400 TFLOP/s of 989 is the 41 % (by the source's rounding) of Llama 3 405B on 16,384 GPUs: arXiv 2407.21783, table 4."""
    config = llama()
    setup = Setup(config=config, profile=profile.load("h100"), options=Options())
    seconds = cost.step_flops(setup) / (400e12 * config.parallel.ranks)
    rate = Rates.of(config, dtype=BF16, device=H100).rate(config.batch.global_batch, seconds)
    assert rate is not None
    assert rate.tflops == pytest.approx(400)
    assert rate.mfu == pytest.approx(400 / 989)
    full = cost.step_flops(setup, causal=False) / cost.step_flops(setup)
    assert rate.mfu_full == pytest.approx(400 / 989 * full)
    assert rate.tflops_full == pytest.approx(400 * full)


def test_a_utilisation_names_what_it_depends_on() -> None:
    rates = Rates.of(llama(), dtype=BF16, device=H100)
    rate = rates.rate(2048, 30.0)
    assert rate is not None
    text = speed_text({**rate_record(rate), **rates.terms()})
    for part in ("989 TFLOP/s", "dense bfloat16", "h100", "attention halved", "in full"):
        assert part in text
    assert rates.terms()["peak_tflops"] == 989


@pytest.mark.parametrize(
    ("hardware", "dtype", "device", "why"),
    [
        ("", BF16, H100, "machine.hardware is not set"),
        ("laptop", "float32", "cpu", "names no peak"),
        ("h100", "float32", H100, "computes in float32"),
        ("h100", BF16, "cpu", "compute on cpu"),
        ("h100", BF16, "NVIDIA H100 PCIe", "compute on NVIDIA H100 PCIe"),
    ],
)
def test_what_is_not_known_is_not_guessed(hardware: str, dtype: str, device: str, why: str) -> None:
    rates = Rates.of(llama(hardware), dtype=dtype, device=device)
    rate = rates.rate(2048, 30.0)
    assert rate is not None
    assert (rate.mfu, rate.mfu_full) == (None, None)
    assert rate.tflops > 0
    text = speed_text({**rate_record(rate), **rates.terms()})
    assert "MFU unknown" in text
    assert why in text


def test_nothing_is_measured_in_no_time() -> None:
    rates = Rates.of(llama(), dtype=BF16, device=H100)
    assert rates.rate(0, 1.0) is None
    assert rates.rate(1, 0.0) is None


def test_every_profile_that_ships_says_which_device_it_is() -> None:
    assert all(profile.load(name).device for name in profile.names())


def test_a_profile_that_is_gone_costs_the_utilisation_and_nothing_else() -> None:
    config = llama()
    gone = msgspec.structs.replace(config, machine=msgspec.structs.replace(config.machine, hardware="gone.toml"))
    rates = Rates.of(gone, dtype=BF16, device=H100)
    rate = rates.rate(2048, 30.0)
    assert rate is not None
    assert rate.mfu is None
    assert "gone.toml" in rates.peak_name
