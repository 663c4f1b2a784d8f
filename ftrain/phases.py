"""A run in phases: the config of each, and what may still be changed about them.

A phase is the config with other values, from some token of the run on. So everything that takes a config (engine, planner,
layouts, checks) takes that of a phase without knowing of phases; this module is where one becomes the other. Phase 0 is what
stands outside `[[phases]]`; the first entry of the table is phase 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as mi
from msgspec.structs import replace

from ftrain.combinations import combinations
from ftrain.config import Config, Phase
from ftrain.schema import Problem, bare, did_you_mean, find_problems, type_of

S = TypeVar("S", bound=msgspec.Struct)

ALLOWED: Mapping[str, tuple[str, ...]] = {
    "data": ("seq_len", "sources", "isolate_documents", "document_mask"),
    "batch": ("global_batch", "micro_batch"),
    "parallel": (),
    "optimizer": (),
    "schedule": (),
    "model": ("rope_base",),
    "evaluate": (),
}
"""Section -> what a phase may change of it; empty: anything."""


def num_phases(config: Config) -> int:
    """Phases of a run: one more than the table has."""
    return 1 + len(config.phases)


def effective(config: Config, number: int) -> Config:
    """The config of phase `number`, without a table of phases."""
    if not config.phases:
        return config
    found = replace(config, phases=())
    for phase in config.phases[:number]:
        found = _apply(found, phase)
    return found


def _apply(config: Config, phase: Phase) -> Config:
    changed = {name: _merged(getattr(config, name), getattr(phase, name)) for name in ALLOWED if getattr(phase, name)}
    if phase.schedule:
        changed["schedule"] = msgspec.convert(phase.schedule, type(config.schedule))
    batch = changed.get("batch", config.batch)
    return replace(config, **{**changed, "batch": replace(batch, ramp=())})


def _merged(section: S, table: Mapping[str, Any]) -> S:
    return msgspec.convert({**msgspec.to_builtins(section), **table}, type(section))


def with_layout(config: Config, number: int, now: Config) -> Config:
    """The whole config with the layout (`parallel`, `batch.micro_batch`) that phase `number` has in `now`."""
    if number == 0:
        return replace(config, parallel=now.parallel, batch=replace(config.batch, micro_batch=now.batch.micro_batch))
    was = effective(config, number)
    phase = config.phases[number - 1]
    parallel = {**phase.parallel, **_different(was.parallel, now.parallel)}
    batch = {**phase.batch, **_different(was.batch, replace(was.batch, micro_batch=now.batch.micro_batch))}
    changed = replace(phase, parallel=parallel, batch=batch)
    return replace(config, phases=(*config.phases[: number - 1], changed, *config.phases[number:]))


def _different(was: msgspec.Struct, now: msgspec.Struct) -> dict[str, Any]:
    """The fields of `now` that `was` has otherwise."""
    before = msgspec.to_builtins(was)
    return {name: value for name, value in msgspec.to_builtins(now).items() if value != before[name]}


def config_of(progress: Mapping[str, Any]) -> Config:
    """The config that a checkpoint was trained with: that of its phase.

    Raises KeyError if it has none, msgspec.ValidationError if this version cannot read it.
    """
    whole = msgspec.convert(progress["config"], Config)
    return effective(whole, min(int(progress.get("phase", 0)), len(whole.phases)))


def most_ranks(config: Config) -> int:
    """Ranks of the largest phase."""
    return max(effective(config, number).parallel.ranks for number in range(num_phases(config)))


# what is wrong with a table


def table_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Wrong names and values in the sub-tables of the phases in plain data."""
    sections = {field.encode_name: field for field in cast(mi.StructType, type_of(Config)).fields}
    entries = data.get("phases", ())
    for index, entry in enumerate(entries if isinstance(entries, list | tuple) else ()):
        for name, names in ALLOWED.items():
            table = entry.get(name) if isinstance(entry, Mapping) else None
            if isinstance(table, Mapping):
                section = cast(mi.StructType, bare(sections[name].type))
                yield from _entry_problems(table, section, names, f"phases.{index}.{name}")


def _entry_problems(table: Mapping[str, Any], section: mi.StructType, names: tuple[str, ...], path: str) -> Iterator[Problem]:
    fields = {field.encode_name: field for field in section.fields if not names or field.encode_name in names}
    for key, value in table.items():
        if key in fields:
            yield from find_problems(value, fields[key].type, f"{path}.{key}")
        else:
            yield Problem(f"{path}.{key}", "not among what a phase may change", ", ".join(fields), did_you_mean(key, fields))


def problems(config: Config) -> list[Problem]:
    """Everything impossible about the phases, all of them together; what is wrong outside the table is told there."""
    known = {str(problem) for problem in combinations(replace(config, phases=()))} if config.phases else set()
    found = list(_order(config))
    for number in range(1, num_phases(config)):
        for problem in combinations(effective(config, number)):
            if str(problem) not in known and not problem.path.startswith("faults."):
                known.add(str(problem))
                found.append(replace_path(problem, f"phases.{number - 1}.{problem.path}"))
    return found


def replace_path(problem: Problem, path: str) -> Problem:
    """The same problem elsewhere."""
    return Problem(path, problem.given, problem.allowed, problem.hint)


def _order(config: Config) -> Iterator[Problem]:
    before = 0
    for index, phase in enumerate(config.phases):
        if phase.from_tokens <= before:
            given = f"given {phase.from_tokens}, after {before}"
            yield Problem(f"phases.{index}.from_tokens", given, "more than the phase before (tokens of the run)")
        before = max(before, phase.from_tokens)
    ramp = config.batch.ramp
    if config.phases and ramp and ramp[-1].tokens > config.phases[0].from_tokens:
        given = f"given {config.phases[0].from_tokens}, with a batch.ramp up to {ramp[-1].tokens} tokens"
        yield Problem("phases.0.from_tokens", given, "the ramp is over before a phase begins", f"nearest: {ramp[-1].tokens}")
