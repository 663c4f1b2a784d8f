"""The state that a run begins with, if it is another run's (`--from`): what can be known of it before a process is forked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ftrain.compose.errors import RefusedError
from ftrain.compose.paths import absolute_url
from ftrain.compose.residence import same_place
from ftrain.compose.stores import opened_run
from ftrain.config import Config, Model
from ftrain.parallel.arrays import MASTER, SLOTS, WEIGHTS
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape
from storage.checkpoint import Checkpoint
from storage.pack import ArraySpec

Origin = tuple[str, int | None]
"""A run's URL, and a step of it if not its newest."""

SHOWN = 4
SIZES = ("layers", "hidden", "heads", "ffn", "experts", "vocab", "tied", "qk_norm")


def check_other(origin: Origin, config: Config) -> None:
    """RefusedError if a run is to begin with a state of its own: it would go on from its newest, and might delete that one."""
    url, step = absolute_url(origin[0]), origin[1]
    if same_place(url, config.run.url):
        at = "" if step is None else f"@{step}"
        raise RefusedError(
            [
                f"--from {url}{at} is a state of this run itself, which goes on from its newest checkpoint and no other: leave "
                f"it out, or begin another run with that state: --set run.url=ANOTHER --from {url}{at}"
            ]
        )


def resolve(origin: Origin, config: Config) -> tuple[str, int]:
    """The checkpoint that a run begins with. Raises NoCheckpoint if it is not there, RefusedError if it is of no use to it."""
    url = absolute_url(origin[0])
    with opened_run(url) as run:
        checkpoint = run.open(origin[1])
        check_model(checkpoint, config.model, f"{url}@{checkpoint.step}")
    if checkpoint.step >= config.run.steps:
        raise RefusedError(
            [
                f"--from {url}@{checkpoint.step}: there is nothing to do: that is the state after step {checkpoint.step}, and "
                f"run.steps is {config.run.steps}; more run.steps go on from it"
            ]
        )
    return url, checkpoint.step


def check_model(checkpoint: Checkpoint, model: Model, name: str) -> None:
    """RefusedError if the arrays are not those of the model. `name`: the checkpoint's."""
    arrays = checkpoint.manifest.arrays
    if not any(spec.name.partition("/")[0] == MASTER for spec in arrays):
        few = ", ".join(spec.name for spec in arrays[:2])
        raise RefusedError(
            [
                f"--from {name} is not of a model that `ftrain run` trains: its arrays have a script's own names ({few}, ...); "
                "only that script can go on from it"
            ]
        )
    if wrong := [*_sizes(checkpoint.progress, model), *differences(model, arrays)]:
        rest = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        told = f"--from {name}: the config's model is not the checkpoint's: {'; '.join(wrong[:SHOWN])}{rest}"
        raise RefusedError([f"{told}. Set [model] to what the checkpoint has"])


def differences(model: Model, arrays: Sequence[ArraySpec]) -> list[str]:
    """How the arrays of a checkpoint ("there") differ from the state of a model ("here"), one sentence for each parameter."""
    wanted = {spec.name: spec.shape for spec in parameters(model, MeshShape())}
    slots = [slot for slot in SLOTS if slot != WEIGHTS or _has_weights(arrays)]
    stored = {spec.name: tuple(spec.shape) for spec in arrays}
    found: dict[str, None] = {}
    for name, shape in wanted.items():
        there = {slot: stored.get(f"{slot}/{name}") for slot in slots}
        if not any(there.values()):
            found[f"{name} is {shape} here, and not there"] = None
            continue
        for slot, had in there.items():
            if had is None:
                found[f"{slot}/{name} is not there"] = None
            elif had != shape:
                found[f"{name} is {had} there, {shape} here"] = None
    found |= dict.fromkeys(f"{name} is there, and not here" for name in _parameters(arrays) if name not in wanted)
    return list(found)


def _sizes(progress: Mapping[str, Any], model: Model) -> Iterator[str]:
    """Which sizes the checkpoint's own record has otherwise; heads, for one, can be others in arrays of the same shapes."""
    recorded = (progress.get("config") or progress.get("imported") or {}).get("model")
    try:
        there = _sizes_of(msgspec.convert(recorded, Model))
    except msgspec.ValidationError:  # none, or of another version
        return
    here = _sizes_of(model)
    yield from (f"model.{name} is {had} there, {here[name]} here" for name, had in there.items() if had != here[name])


def _sizes_of(model: Model) -> dict[str, int | bool]:
    derived = {"kv_heads": model.kv_heads or model.heads, "head_dim": model.head_dim or model.hidden // model.heads}
    return {name: getattr(model, name) for name in SIZES} | derived


def _has_weights(arrays: Iterable[ArraySpec]) -> bool:
    """They may be left out, as the rounded masters that they are."""
    return any(spec.name.startswith(f"{WEIGHTS}/") for spec in arrays)


def _parameters(arrays: Iterable[ArraySpec]) -> Iterator[str]:
    for spec in arrays:
        slot, _, name = spec.name.partition("/")
        yield name if slot in SLOTS else spec.name
