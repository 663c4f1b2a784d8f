"""From a TOML file and `--set` to a checked Config; what it is called, and what changed since.

Everything wrong is reported at once: the person at the terminal may have waited in a queue to learn it. Precedence, all of
it: the schema's defaults, then the file, then the overrides; no environment variable takes part. No torch here: the supervisor
and every command load a config.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import inspect as mi

from ftrain import course, phases
from ftrain.combinations import combinations, head_dim, kv_heads, num_chunks, replicas
from ftrain.config import Config
from ftrain.lr import learning_rate
from ftrain.parallel.partition import partition_layers
from ftrain.partial import certain_combinations
from ftrain.ramp import stretches
from ftrain.schema import ConfigProblems, Problem, bare, check, resume_class
from ftrain.units import format_bytes, format_count, plural

__all__ = [
    "Change",
    "ConfigProblems",
    "Problem",
    "active_parameters",
    "changes",
    "combinations",
    "fingerprint",
    "layout_summary",
    "load",
    "num_parameters",
    "parse",
    "resolve",
    "to_toml",
]

Kind = Literal["free", "recorded", "accept", "refused"]

NOT_TOML = (ValueError, RecursionError)
"""What tomllib raises: its own error and that of an endless number are ValueErrors; lists may nest too deep."""

STATE_BYTES = 14
"""Stored bytes of a parameter under AdamW: bf16 weight, fp32 master and two moments."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field whose value differs between two configs, and what a resumed run does about it."""

    path: str
    old: object
    new: object
    kind: Kind


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file with `a.b=v` overrides; raises ConfigProblems with all that is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigProblems([Problem(path, f"cannot be read ({reason})", "a TOML file")], path) from error
    return parse(text, overrides, origin=path)


def parse(text: str, overrides: Sequence[str] = (), *, origin: str = "config") -> Config:
    """The config in a TOML text with `a.b=v` overrides."""
    try:
        data = tomllib.loads(text)
    except NOT_TOML as error:
        raise ConfigProblems([Problem(origin, f"not TOML: {error}", "TOML (https://toml.io)")], origin) from error
    problems = [problem for override in overrides for problem in apply_override(data, override)]
    return resolve(data, origin=origin, problems=problems)


def resolve(data: Mapping[str, Any], *, origin: str = "config", problems: Sequence[Problem] = ()) -> Config:
    """The config in plain data, e.g. as the ledger or a manifest recorded it. `problems` were found before."""
    from ftrain.train.certify import layouts  # which are configs as well

    found = [*problems, *check(data, Config), *phases.table_problems(data)]
    if found:
        named = [*_hardware(_named_hardware(data)), *layouts.misspelt(data)]
        raise ConfigProblems([*found, *certain_combinations(data), *named], origin)
    config = msgspec.convert(data, Config)
    impossible = [*combinations(config), *phases.problems(config)] or list(course.problems(config))
    impossible += _hardware(config.machine.hardware)
    impossible += layouts.misspelt(data) if impossible else layouts.problems(config)  # one mistake is told once, not of each
    if impossible:
        raise ConfigProblems(impossible, origin)
    return config


def _named_hardware(data: Mapping[str, Any]) -> str:
    """What plain data name as hardware, if their other mistakes let it be seen."""
    machine = data.get("machine")
    name = machine.get("hardware") if isinstance(machine, Mapping) else None
    return name if isinstance(name, str) else ""


def _hardware(name: str) -> Iterator[Problem]:
    """A profile that is not there, or is none. Here and not among the combinations, because it reads a file."""
    from ftrain.plan import profile  # which is about configs

    try:
        if name:
            profile.load(name)
    except (ValueError, OSError) as error:
        allowed = f"{', '.join(profile.names())}, or the path of a .toml file; or nothing: then no MFU is printed"
        yield Problem("machine.hardware", f'given "{name}": {error}', allowed)


def fingerprint(config: Config) -> str:
    """16 hex digits that change exactly when a value changes that is not FREE."""
    kept = {path: value for path, value, kind in _leaves(config) if kind != "free"}
    return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()[:16]


def changes(old: Config, new: Config) -> list[Change]:
    """The fields that differ, in schema order, each with its class."""
    pairs = zip(_leaves(old), _leaves(new), strict=True)
    return [Change(path, before, after, kind) for (path, before, kind), (_, after, _) in pairs if before != after]


def num_parameters(config: Config) -> int:
    """Parameters of the model, tied ones counted once, vocabulary unpadded."""
    return _parameters(config, config.model.experts)


def active_parameters(config: Config) -> int:
    """Those that compute a token: all of them but the experts that it is not sent to."""
    return _parameters(config, min(config.model.experts, config.model.experts_per_token))


def _parameters(config: Config, experts: int) -> int:
    """With so many experts in each layer; a dense model's SwiGLU is as large as one."""
    model, size = config.model, head_dim(config)
    attention = 2 * model.hidden * size * (model.heads + kv_heads(config))
    block = 3 * model.hidden * model.ffn * max(1, experts) + model.hidden * model.experts
    layer = attention + block + 2 * model.hidden + 2 * size * model.qk_norm
    return model.layers * layer + model.hidden + model.vocab * model.hidden * (1 if model.tied else 2)


def layout_summary(config: Config) -> str:
    """What a dry run shows of the layout: ranks, batch, model and state, one line each."""
    parallel, batch, count = config.parallel, config.batch, num_parameters(config)
    dp, micro = replicas(config), batch.global_batch // batch.micro_batch
    least, extra = divmod(micro, dp)
    share = f"{least} each" if not extra else f"{least + 1} on {extra}, {least} on {dp - extra}"
    tokens = format_count(batch.global_batch * config.data.seq_len)
    whole = format_count(course.tokens_after(config, config.run.steps))
    return "\n".join(
        (
            f"ranks   {parallel.ranks} = tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {dp}, "
            f"order {', '.join(parallel.order)} (innermost first)",
            *_pipeline(config),
            f"batch   {plural(batch.global_batch, 'sequence')} of {config.data.seq_len} tokens = {tokens} tokens; "
            f"{plural(micro, 'micro-batch')} of {batch.micro_batch} over {plural(dp, 'replica')}: {share}",
            *_ramp(config),
            f"model   {format_count(count)} parameters ({count:,}); state in storage {format_bytes(STATE_BYTES * count)}",
            *_experts(config),
            *_phases(config),
            f"run     {plural(config.run.steps, 'step')} = {whole} tokens",
        )
    )


def _phases(config: Config) -> Iterator[str]:
    """Where each phase begins, what it changes, and the learning rates of its first and last update."""
    legs = course.course(config) if config.phases else ()
    for leg in legs:
        if not leg.steps:
            yield f"phase   {leg.phase}: from {config.phases[leg.phase - 1].from_tokens:,} tokens on: not reached"
            continue
        first, stop = course.curve(config, legs, leg.phase)
        lr = [
            learning_rate(number - first, schedule=leg.config.schedule, peak=leg.config.optimizer.lr, total=stop - first)
            for number in (leg.first_step + 1, leg.stop_step)
        ]
        made = "; ".join(f"{it.path} {it.new}" for it in (changes(legs[leg.phase - 1].config, leg.config) if leg.phase else ()))
        yield (
            f"phase   {leg.phase}: steps {leg.first_step + 1} to {leg.stop_step}, tokens {leg.first_token:,} to "
            f"{leg.stop_token:,}, lr {lr[0]:.3g} to {lr[1]:.3g}{'; ' + made if made else ''}"
        )


def _pipeline(config: Config) -> Iterator[str]:
    """Which stage holds how many layers, so that no cut is silent."""
    parallel, stages = config.parallel, config.parallel.pp * num_chunks(config)
    if stages > 1:
        counts = [len(layers) for layers in partition_layers(config.model.layers, stages, parallel.layer_counts)]
        yield f"stages  {parallel.schedule}, {stages} on {parallel.pp} ranks; layers of each: {' '.join(map(str, counts))}"


def _experts(config: Config) -> Iterator[str]:
    """Who has which experts, and how much of the model computes a token."""
    model, ep = config.model, config.parallel.ep
    if model.experts:
        active = active_parameters(config)
        each = "one rank" if ep == 1 else f"{ep} ranks of dp x cp, {model.experts // ep} each"
        yield (
            f"experts {model.experts} in each layer on {each}, {model.experts_per_token} for a token: "
            f"{format_count(active)} active parameters ({active:,})"
        )


def _ramp(config: Config) -> Iterator[str]:
    """Which steps take other batches than the final one."""
    for phase in stretches(config) if config.batch.ramp else ():
        yield f"ramp    steps {phase.first_step + 1} to {phase.stop_step}: {phase.global_batch} sequences"


def to_toml(config: Config) -> str:
    """The resolved config as TOML, every default written out: what `--dry-run` prints."""
    from ftrain.schema import toml_text

    lines: list[str] = []
    for section, value in msgspec.to_builtins(config).items():
        if isinstance(value, Mapping):
            lines += [f"[{section}]", *(f"{key} = {toml_text(item)}" for key, item in value.items()), ""]
        else:
            lines.insert(0, f"{section} = {toml_text(value)}\n")
    return "\n".join(lines)


def _leaves(config: Config) -> Iterator[tuple[str, object, Kind]]:
    """(path, plain value, class) of every field of every section."""
    top = cast(mi.StructType, mi.type_info(Config))
    for section in top.fields:
        value = getattr(config, section.name)
        inner = bare(section.type)
        if not isinstance(inner, mi.StructType):
            yield section.name, _plain(value), cast(Kind, resume_class(section.type))
            continue
        for field in inner.fields:
            kind = cast(Kind, resume_class(field.type))
            yield f"{section.name}.{field.name}", _plain(getattr(value, field.name)), kind


def _plain(value: object) -> object:
    """The value as a record gives it back: lists, not tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


def apply_override(data: dict[str, Any], override: str) -> Iterator[Problem]:
    """Applies one `a.b=v` to the data in place; a path into a list uses an item's index: `data.sources.0.weight=2`. A list that
    the data leave out has the default's items.
    """
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        yield Problem(f"--set {override}", "not of the form a.b=v", "e.g. --set parallel.ranks=4")
        return
    node: Any = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not (key.isdecimal() and len(key) < 19) or int(key) >= len(node):
                name = ".".join(keys[:depth])
                allowed = f"0 to {len(node) - 1}" if node else f"the whole list: --set '{name}=[...]'"
                yield Problem(".".join(keys), f"no item {key} in `{name}` (--set)", allowed)
                return
            slot: Any = int(key)
        elif isinstance(node, dict):
            slot = key
        else:
            yield Problem(".".join(keys), f"`{'.'.join(keys[:depth])}` is a value, not a table (--set)", "a path to a field")
            return
        if last:
            node[slot] = _value(text.strip(), keys)
        else:
            node = node.setdefault(slot, _left_out(keys[: depth + 1])) if isinstance(node, dict) else node[slot]


def _value(text: str, keys: Sequence[str]) -> Any:
    """A value in TOML syntax; what is no TOML value, or a date, is taken as a bare word.

    So is a number where the schema wants text (`slurm.time=60`): the shell has taken the quotes away.
    """
    try:
        value = tomllib.loads(f"v = {text}")
    except NOT_TOML:
        return text
    plain = len(value) == 1 and isinstance(value["v"], bool | int | float | str | list | dict)
    bare_word = not plain or (isinstance(value["v"], bool | int | float) and _wants_text(keys))
    return text if bare_word else value["v"]


def _wants_text(keys: Sequence[str]) -> bool:
    """Whether the field of that path holds text."""
    return isinstance(_type_at(keys), mi.StrType)


def _left_out(keys: Sequence[str]) -> list[Any] | dict[str, Any]:
    """What stands for a list or table that plain data do not mention: the default's items, or an empty table."""
    if not isinstance(_type_at(keys), mi.VarTupleType):
        return {}
    section = _type_at(keys[:-1])
    fields = section.fields if isinstance(section, mi.StructType) else ()
    default = next((field.default for field in fields if field.encode_name == keys[-1]), ())
    return [msgspec.to_builtins(item) for item in default] if isinstance(default, tuple) else []


def _type_at(keys: Sequence[str]) -> mi.Type:
    """The type that the schema has at that path; any, where it has nothing."""
    type_ = bare(mi.type_info(Config))
    for key in keys:
        if isinstance(type_, mi.StructType):
            type_ = bare(next((field.type for field in type_.fields if field.encode_name == key), mi.AnyType()))
        else:
            type_ = bare(type_.item_type) if isinstance(type_, mi.VarTupleType) else mi.AnyType()
    return type_
