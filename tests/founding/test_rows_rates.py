"""The founding rows that concern rates and utilisation, by number."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.load import load
from ftrain.plan.rates import Rates, rate_record, speed_text

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama3-405b.toml")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("tflops", "share"), [(430, 0.435), (400, 0.404), (380, 0.384)])
def test_row_72_mfu_names_its_peak_and_its_formula(tflops: float, share: float) -> None:
    """43 and 41 % are the source's rounding of 43.5 and 40.4; the peak is the dense one, half of the sparse."""
    config = load(CONFIG, ('machine.hardware="h100"',))
    rates = Rates.of(config, dtype="bfloat16", device=H100)
    seconds = rates.flops * config.batch.global_batch / (tflops * 1e12 * config.parallel.ranks)
    rate = rates.rate(config.batch.global_batch, seconds)
    assert rate is not None
    assert rate.mfu == pytest.approx(share, abs=5e-4)
    text = speed_text({**rate_record(rate), **rates.terms()})
    assert "989 TFLOP/s dense bfloat16 (h100)" in text
    assert "attention halved" in text


@pytest.mark.parametrize(("length", "factor"), [(8192, 1.04), (131072, 1.40)])
def test_row_72_the_other_formula_is_another_number(length: int, factor: float) -> None:
    """Attention in full: 4 % more at 8,192 tokens, 40 % at 131,072."""
    config = load(CONFIG, (f"data.seq_len={length}", 'machine.hardware="h100"'))
    rates = Rates.of(config, dtype="bfloat16", device=H100)
    assert rates.flops_full / rates.flops == pytest.approx(factor, abs=0.005)
