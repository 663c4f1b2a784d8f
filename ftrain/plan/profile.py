"""Hardware as data: what a GPU, a server and a network can do, one TOML file each, with the source of every number.

Bandwidths are per direction, always: vendors print both directions added up (900 GB/s of NVLink is 450 each way), and a ring
sends in one. Peaks are named dense or sparse, because a utilisation against the sparse peak is half as large. What is assumed
rather than printed somewhere (the share of the peak that kernels reach) stands in its own table, so that nobody takes it for
a fact; `--set` does not reach it, a copy of the file does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from ftrain.config import Config

FOLDER = Path(__file__).parent / "hardware"


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: strict, so that a misspelt key is an error."""


class Gpu(_Part, frozen=True, kw_only=True):
    """One accelerator."""

    memory_gb: Annotated[float, Meta(gt=0, description="decimal GB")]
    memory_gb_s: Annotated[float, Meta(gt=0, description="bandwidth of its memory")]
    dense_bf16_tflops: Annotated[float, Meta(ge=0, description="peak without sparsity; 0: unknown, so no MFU")]
    sparse_bf16_tflops: Annotated[float, Meta(ge=0, description="peak with 2:4 sparsity, only to warn of it")] = 0.0
    peak_dtype: Annotated[str, Meta(description="what the peak is of, where it is not bfloat16: float32 on a CPU")] = "bfloat16"
    power_w: Annotated[float, Meta(ge=0)] = 0.0


class Server(_Part, frozen=True, kw_only=True):
    """One machine."""

    gpus: Annotated[int, Meta(ge=1)]
    link_name: str
    link_lanes: Annotated[int, Meta(ge=1)]
    link_gb_s_per_lane: Annotated[float, Meta(gt=0, description="per direction")]
    nic_gbit_s: Annotated[float, Meta(gt=0, description="of each GPU's network card, per direction")]
    host_gb_s: Annotated[float, Meta(gt=0, description="from a GPU to host memory, per direction")]
    host_memory_gb: Annotated[float, Meta(ge=0, description="0: unknown")] = 0.0
    cpus: int = 0
    switches: int = 0
    fans: int = 0
    size_mm: tuple[int, ...] = ()
    weight_kg: float = 0.0
    cooling: str = ""


class Tier(_Part, frozen=True, kw_only=True):
    """A level of the network: everything within `gpus` consecutive ranks, innermost tier first."""

    name: str
    gpus: Annotated[int, Meta(ge=1)]
    oversubscription: Annotated[float, Meta(ge=1, description="1: every card may send at full speed to any other")] = 1.0


class Assumed(_Part, frozen=True, kw_only=True):
    """Shares reached in practice. Not printed anywhere: change them in a copy of the file when you have measured."""

    kernel_share: Annotated[float, Meta(gt=0, le=1, description="of the dense peak, in large matrix products")] = 0.6
    link_share: Annotated[float, Meta(gt=0, le=1, description="of a link's bandwidth, in collectives")] = 0.8


class Published(_Part, frozen=True, kw_only=True):
    """A run that somebody reported on this hardware, as printed."""

    what: str
    gpus: int
    tflops: float
    mfu_printed: Annotated[float, Meta(description="per cent, as printed")]


class Profile(_Part, frozen=True, kw_only=True):
    """A kind of cluster."""

    name: str
    title: str
    device: Annotated[str, Meta(description="pattern of the name by which the device calls itself; empty: any")] = ""
    gpu: Gpu
    server: Server
    tiers: tuple[Tier, ...]
    assumed: Assumed = Assumed()
    sources: dict[str, str]
    published: tuple[Published, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU."""
        return round(self.gpu.memory_gb * 1e9)

    @property
    def link_gb_s(self) -> float:
        """Bandwidth between two GPUs of a server, per direction."""
        return self.server.link_lanes * self.server.link_gb_s_per_lane

    @property
    def nic_gb_s(self) -> float:
        """Bandwidth of a GPU's network card, per direction."""
        return self.server.nic_gbit_s / 8

    @property
    def peak_flops(self) -> float:
        """Dense peak of `gpu.peak_dtype`, FLOP/s; 0 if unknown."""
        return self.gpu.dense_bf16_tflops * 1e12

    @property
    def peak_text(self) -> str:
        """The peak as people write it."""
        return f"{self.gpu.dense_bf16_tflops:g} TFLOP/s dense {self.gpu.peak_dtype.replace('bfloat', 'bf')}"

    @property
    def no_peak(self) -> str:
        """Why no time is predicted, and the three ways out."""
        return (
            f"{self.name}: peak unknown, so no MFU and no predicted step: a time is not guessed. Give the peak of a rank"
            " (--peak TFLOPS), or name the hardware (machine.hardware or --hardware), or measure this machine:"
            " `ftrain doctor CONFIG --measure here.toml`, then --hardware here.toml"
        )

    def with_peak(self, tflops: float, compute_dtype: str) -> Profile:
        """The same hardware with a peak that somebody gives, of the dtype in which the run computes."""
        own = {"auto": "float32" if self.device == "cpu" else "bfloat16"}.get(compute_dtype, compute_dtype)
        gpu = structs.replace(self.gpu, dense_bf16_tflops=tflops, peak_dtype=own)
        sources = self.sources | {"gpu": f"peak of {tflops:g} TFLOP/s in {own}: --peak; the rest: {self.sources['gpu']}"}
        return structs.replace(self, gpu=gpu, sources=sources)

    def tier_gb_s(self, tier: Tier) -> float:
        """What is left of a card's bandwidth across a tier when all of its GPUs send at once."""
        return self.nic_gb_s / tier.oversubscription


def names() -> tuple[str, ...]:
    """The profiles that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def of(config: Config) -> str:
    """The profile that a config names; for one that names none, the laptop for few CPU ranks, else h100."""
    return config.machine.hardware or ("h100" if config.machine.device == "cuda" or config.parallel.ranks > 64 else "laptop")


def load(name: str) -> Profile:
    """A profile that ships, by name, or one of your own, by path (anything ending in .toml)."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"no hardware profile {name!r}: give one of {', '.join(names())}, or the path of a .toml file")
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware profile {path}: {error}. Compare with {FOLDER / 'h100.toml'}") from error
    except OSError as error:
        raise ValueError(f"hardware profile {path}: cannot be read ({error.strerror})") from error
    if problem := next(_problems(found), ""):
        raise ValueError(f"hardware profile {path}: {problem}")
    return found


def _problems(profile: Profile) -> Iterator[str]:
    """What the types do not say."""
    missing = [name for name in ("gpu", "server", "network", "assumed") if name not in profile.sources]
    if missing:
        yield f"sources has no {', '.join(missing)}: every number says where it is from"
    numbers = {f"gpu.{name}": value for name, value in structs.asdict(profile.gpu).items()}
    numbers |= {f"server.{name}": value for name, value in structs.asdict(profile.server).items()}
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} = {value}: wanted a finite number"
    sizes = [tier.gpus for tier in profile.tiers]
    if not sizes or sizes != sorted(sizes) or sizes[0] < profile.server.gpus:
        yield f"tiers of {sizes} GPUs, servers of {profile.server.gpus}: wanted one or more, each as large as what it holds"
