"""The config that a newcomer starts from: for the machine at hand, the fields that are likely to be touched, and their meaning.

The comments are the schema's own words, so they cannot grow old; fields that stand at their defaults are there as comments, to
be found without the reference. What is not in the text is in that (`python -m ftrain.reference`, also from a wheel). No
torch: GPUs are asked of the driver's own tool.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, cast

from msgspec import inspect as mi

from ftrain.config import Config
from ftrain.schema import bare, default_text, description, toml_text

SHOWN = {
    "run": ("url", "steps", "seed", "local_dir"),
    "model": ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied"),
    "data": ("sources", "tokenizer", "seq_len", "heldout_fraction"),
    "batch": ("global_batch", "micro_batch"),
    "parallel": ("ranks", "tp", "pp", "schedule", "recompute", "overlap_reduce", "overlap_gather"),
    "optimizer": ("lr", "weight_decay", "clip_norm"),
    "schedule": ("kind", "warmup_steps", "min_ratio"),
    "evaluate": ("every_steps", "sequences"),
    "checkpoint": ("snapshot_steps", "every_steps", "retention", "local_url", "mirror_url"),
    "recovery": ("max_restarts", "notice"),
    "machine": ("device", "threads", "hardware", "ranks_per_node", "shared_dir"),
    "slurm": ("time", "partition", "account"),
}
"""Sections and fields of the starter, in the schema's order."""

PROFILES = {"H100": "h100", "H200": "h200", "B200": "b200", "A100": "a100"}
"""What a GPU calls itself -> the hardware profile that ships."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The machine at hand."""

    cores: int
    gpus: tuple[str, ...] = ()
    """Names of its GPUs."""
    gpu_gib: float = 0.0
    """Memory of the smallest of them."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model that a machine of so much memory a rank trains comfortably."""

    name: str
    gpu_gib: float
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a token file says of itself."""

    tokens: int
    highest: int
    """The highest token of a sample of it."""


HELDOUT, SLICE = 0.05, 64
"""The share of a corpus that is held out, and how many sequences of it are evaluated, if there are as many."""

BYTES = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 344, "vocab": 257}
SIZES = (
    Size("1.1B parameters", 70, {"layers": 22, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 32000}),
    Size("0.16B parameters", 14, {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 32000}),
    Size("0.8M parameters: minutes on a CPU", 0, BYTES),
)
"""Largest first. 18 bytes of state a parameter, and as much again for activations, stay below half of a GPU's memory."""


def facts() -> Facts:
    """Look at this machine."""
    names, memory = _gpus()
    return Facts(cores=len(os.sched_getaffinity(0)), gpus=names, gpu_gib=memory)


def _gpus() -> tuple[tuple[str, ...], float]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), 0.0
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        rows = [line.rsplit(",", 1) for line in found.splitlines() if "," in line]
        return tuple(name.strip() for name, _ in rows), min((float(mib) / 1024 for _, mib in rows), default=0.0)
    except (OSError, subprocess.SubprocessError, ValueError):
        return (), 0.0


def corpus(prefix: str) -> Corpus | None:
    """Look at a token file; None if it is not there yet. Raises DataError if it is something else.

    Tokens are looked at as a corpus is told from another one: at 64 places, so that a large one takes no longer.
    """
    from ftrain.data.tokens import TokenFile

    if prefix == "stdlib" or not Path(prefix + ".idx").is_file():
        return None
    file = TokenFile(prefix)
    pieces = (file.tokens(at, min(at + 4096, len(file))) for at in range(0, len(file), max(4096, len(file) // 64)))
    return Corpus(len(file), max((int(piece.max()) for piece in pieces), default=0))


def values(machine: Facts, *, url: str, data: str, tokenizer: str, corpus: Corpus | None = None) -> dict[str, dict[str, Any]]:
    """What the starter sets, section by section; sequences as long and as many as the corpus has them."""
    ranks = len(machine.gpus) or max(1, min(2, machine.cores))
    size = _size(machine, tokenizer)
    small = size.values is BYTES
    seq_len = _seq_len(128 if small else 2048, 8 * ranks, corpus)
    heldout = SLICE if corpus is None else max(0, int(corpus.tokens * HELDOUT) - 1) // seq_len
    model = {**size.values, **({} if tokenizer == "byte" else {"vocab": vocabulary(tokenizer)})}
    hardware = next((profile for word, profile in PROFILES.items() if any(word in name for name in machine.gpus)), "")
    return {
        "run": {"url": url, "steps": 1000 if small else 20_000, "seed": 1},
        "model": model,
        "data": {
            "sources": [{"path": data}],
            "tokenizer": tokenizer,
            "seq_len": seq_len,
            "heldout_fraction": HELDOUT,
        },
        "batch": {"global_batch": 8 * ranks, "micro_batch": 8 if small else 4},
        "parallel": {"ranks": ranks},
        "optimizer": {"lr": 2e-3 if small else 4e-4},
        "schedule": {"kind": "cosine", "warmup_steps": 10 if small else 1000},
        "evaluate": {
            "every_steps": (100 if small else 500) if heldout else 0,
            **({"sequences": heldout} if 0 < heldout < SLICE else {}),
        },
        "checkpoint": {"snapshot_steps": 10, "every_steps": 100},
        "recovery": {"max_restarts": 3},
        "machine": {
            "threads": 1 if machine.gpus else max(1, machine.cores // ranks),
            **({"hardware": hardware} if hardware else {}),
        },
        "slurm": {},
    }


def _size(machine: Facts, tokenizer: str) -> Size:
    """The largest that fits; with the byte tokenizer only the small one, for its vocabulary is 257."""
    if tokenizer == "byte" or not machine.gpus:
        return SIZES[-1]
    return next(size for size in SIZES if machine.gpu_gib >= size.gpu_gib)


def _seq_len(wanted: int, sequences: int, corpus: Corpus | None) -> int:
    """As long as wanted, unless the corpus has less than `sequences` of them: one update should not see a token twice."""
    while corpus is not None and wanted > 16 and corpus.tokens * (1 - HELDOUT) < sequences * wanted:
        wanted //= 2
    return wanted


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary: its highest number and one; 32000 where the file cannot tell."""
    from ftrain.data import tiktoken_file
    from ftrain.data.errors import TokenizerError

    try:
        if tokenizer.endswith(tiktoken_file.SUFFIXES):
            return tiktoken_file.vocabulary(tokenizer)
        found = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
        words = found["model"]["vocab"]
        known = words.values() if isinstance(words, dict) else range(len(words))
        return 1 + max(int(number) for number in [*known, *(token["id"] for token in found.get("added_tokens", []))])
    except (OSError, ValueError, KeyError, TypeError, TokenizerError):
        return 32_000


def text(
    machine: Facts, *, url: str = "runs/mine", data: str = "stdlib", tokenizer: str = "byte", corpus: Corpus | None = None
) -> str:
    """The whole file."""
    found = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else f"{machine.cores} CPU cores"
    chosen = values(machine, url=url, data=data, tokenizer=tokenizer, corpus=corpus)
    head = f"""# A run for {found}, written by `ftrain init`. Every field, with what it means: python -m ftrain.reference
#
#   ftrain doctor THIS_FILE           is this machine fit for it?
#   ftrain run THIS_FILE --dry-run    what it resolves to: all fields
#   ftrain run THIS_FILE              start, and go on after anything
"""
    sections = cast(mi.StructType, mi.type_info(Config)).fields
    return head + "".join(
        _section(field.encode_name, cast(mi.StructType, bare(field.type)), chosen[field.encode_name])
        for field in sections
        if field.encode_name in SHOWN
    )


def _section(name: str, type_: mi.StructType, chosen: Mapping[str, Any]) -> str:
    doc = (type_.cls.__doc__ or "").strip().splitlines()[0]
    fields = {field.encode_name: field for field in type_.fields}
    lines = [line for key in SHOWN[name] for line in _lines(key, fields[key], chosen)]
    return "\n".join(["", f"[{name}] # {doc}", *lines, ""])


def _lines(key: str, field: mi.Field, chosen: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"# {line}" for line in wrap(description(field.type), 118))
    if key in chosen:
        yield f"{key} = {toml_text(chosen[key])}"
    else:
        yield f"# {key} = {default_text(field)}"
