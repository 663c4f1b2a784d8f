"""How fast a run is, in units that compare: operations a second of a rank, and the share of what its hardware could do.

A utilisation is printed with everything it depends on, or not at all:

- operations of the model, not of the program: recomputed ones are not counted, nor are those of padding;
- attention's core halved by the causal mask (Megatron-LM, MaxText), and beside it in full (PaLM, torchtitan);
- a named peak, of the dtype that the run computes in. Where the hardware is not named, or its profile names no peak of that
  dtype, there is no utilisation: a guess would look like a measurement.

Operations are those of whole sequences, whether their targets count in the loss or not: they are computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftrain.config import Config
from ftrain.plan import cost, profile
from ftrain.plan.setup import Options, Setup

FORMULA = "model FLOPs, causal attention halved (_full: in full)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A step's speed. TFLOP/s of a rank; shares of the peak are None where it is unknown."""

    tflops: float
    tflops_full: float
    mfu: float | None
    mfu_full: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What turns sequences and seconds into rates."""

    flops: int  # of a sequence, forward and backward
    flops_full: int
    world: int
    peak_tflops: float | None
    peak_name: str  # of what; or why there is none

    @staticmethod
    def of(config: Config, *, dtype: str, device: str) -> Rates:
        """For a run that computes in `dtype` (as torch spells it, without `torch.`) on `device` (as it calls itself)."""
        name = config.machine.hardware
        setup = Setup(config=config, profile=profile.load("laptop"), options=Options())  # operations depend on no hardware
        length = config.data.seq_len
        peak, said = _peak(name, dtype, device)
        return Rates(
            flops=cost.token_flops(setup) * length,
            flops_full=cost.token_flops(setup, causal=False) * length,
            world=config.parallel.ranks,
            peak_tflops=peak,
            peak_name=said,
        )

    def rate(self, sequences: int, seconds: float) -> Rate | None:
        """Of so many sequences in so many seconds, over all ranks; None if either is none."""
        if sequences <= 0 or seconds <= 0:
            return None
        causal, full = (flops * sequences / seconds / self.world / 1e12 for flops in (self.flops, self.flops_full))
        peak = self.peak_tflops
        return Rate(
            tflops=causal,
            tflops_full=full,
            mfu=causal / peak if peak else None,
            mfu_full=full / peak if peak else None,
        )

    def terms(self) -> dict[str, object]:
        """The same as data."""
        return {"peak_tflops": self.peak_tflops, "peak": self.peak_name, "formula": FORMULA}


def speed_text(record: Mapping[str, Any]) -> str:
    """A step's speed as a person reads it, with everything the numbers depend on; `record` has the fields of a `Rate` and the
    terms."""
    speed = f"{record['tflops']:.3g} TFLOP/s a rank (attention halved; in full {record['tflops_full']:.3g})"
    return f"{speed}, {mfu_text(record)}"


def mfu_text(record: Mapping[str, Any]) -> str:
    """The utilisation alone, or why there is none."""
    if record["mfu"] is None:
        return f"MFU unknown: {record['peak']}"
    return f"MFU {record['mfu']:.1%} of {record['peak']}, attention halved ({record['mfu_full']:.1%} with attention in full)"


def _peak(name: str, dtype: str, device: str) -> tuple[float | None, str]:
    """The peak in TFLOP/s and what it is of, or None and why."""
    if not name:
        return None, "machine.hardware is not set"
    try:
        loaded = profile.load(name)
    except (ValueError, OSError) as error:  # a file that was there when the run was started, or under another folder
        return None, f"machine.hardware cannot be read ({error})"
    if loaded.device and not re.fullmatch(loaded.device, device):
        return None, f"machine.hardware is {loaded.name}, the ranks compute on {device}"
    if not loaded.gpu.dense_bf16_tflops:
        return None, f"the profile {loaded.name} names no peak"
    if dtype != loaded.gpu.peak_dtype:
        return None, f"the run computes in {dtype}, the profile {loaded.name} names a peak of {loaded.gpu.peak_dtype} only"
    return loaded.gpu.dense_bf16_tflops, f"{loaded.gpu.dense_bf16_tflops:g} TFLOP/s dense {dtype} ({loaded.name})"


def rate_record(rate: Rate | None) -> dict[str, float | None]:
    """A rate as fields of a record; nothing is measured in a step of no time."""
    if rate is None:
        return dict.fromkeys(("tflops", "tflops_full", "mfu", "mfu_full"))
    plain: dict[str, float | None] = msgspec.to_builtins(rate)
    return plain
