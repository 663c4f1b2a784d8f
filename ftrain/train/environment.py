"""The numeric environment: what must be the same for a resumed run to continue bit for bit.

It is recorded with every checkpoint. On a mismatch the promise is downgraded in words; nothing is refused, because
the state is as good.
"""

from __future__ import annotations

import platform

import torch


def numeric_environment(device: torch.device, compute_dtype: torch.dtype, *, compiled: bool = False) -> dict[str, str]:
    """What decides the bits of a step besides the state, the data and the layout."""
    return {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "compute_dtype": str(compute_dtype).removeprefix("torch."),
        **({"compiled": "yes"} if compiled else {}),
    }


def mismatches(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """Sentences that say what differs; empty if a continuation is bitwise."""
    keys = sorted(saved.keys() | now.keys()) if saved else []
    return [f"{key} was {saved.get(key)!r}, is {now.get(key)!r}" for key in keys if saved.get(key) != now.get(key)]
