"""Layouts as text: `tp=2,pp=2;dp=2,schedule=zb_v` and what each makes of a config.

A layout says all of itself: axes it does not name are 1, schedule and stages are the defaults, and the number of ranks follows.
Switches that it does not name (sp, buckets, overlaps, rank order) are the config's. A dotted name changes another section
(`model.tied=true`): such layouts are compared with one process of the same model, so one list covers several models. Lists are
written with plus signs: `layer_counts=1+2+1`.

Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec

from ftrain.config import Certify, Config, Parallel
from ftrain.load import ConfigProblems, Problem, resolve
from ftrain.parallel.shape import AXES

DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
"""The modes of a certificate, and what they compute in."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of the list."""

    name: str
    config: Config

    @property
    def one(self) -> Config:
        """One process of the same model and training: what it is compared with."""
        return msgspec.structs.replace(self.config, parallel=Parallel(), faults=(), certify=Certify())

    @property
    def model_key(self) -> bytes:
        """Equal exactly for layouts that are compared with the same process."""
        return msgspec.json.encode(self.one, order="sorted")


def parse_layouts(text: str, config: Config) -> list[Layout]:
    """All layouts of a list separated by semicolons; ConfigProblems names every problem of every one of them."""
    names = _names(text)
    problems: list[Problem] = []
    layouts = []
    for name in dict.fromkeys(names):
        try:
            layouts.append(Layout(name, _applied(name, config)))
        except ConfigProblems as error:
            problems += [replace(problem, path=_within(name, problem.path)) for problem in error.problems]
    if not names:
        problems.append(Problem("--layouts", "no layout given", 'such as "tp=2;pp=2;tp=2,dp=2", or certify.layouts'))
    if problems:
        raise ConfigProblems(problems, "layouts")
    return layouts


def problems(config: Config) -> Iterator[Problem]:
    """What is wrong with `certify.layouts` of a config with which nothing else is."""
    for index, text in enumerate(config.certify.layouts):
        if not _names(text):
            yield Problem(f"certify.layouts.{index}", f'given "{text}"', 'a layout such as "tp=2,pp=2"')
            continue
        try:
            parse_layouts(text, config)
        except ConfigProblems as error:
            yield from (_of_item(index, text, problem) for problem in error.problems)


def misspelt(data: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the words of `certify.layouts`, told from plain data: for a config with which more is wrong."""
    section = data.get("certify")
    written = section.get("layouts") if isinstance(section, Mapping) else None
    for index, text in enumerate(written if isinstance(written, list | tuple) else ()):
        for name in _names(text) if isinstance(text, str) else ():
            try:
                _items(name)
            except ConfigProblems as error:
                yield from (_of_item(index, text, problem) for problem in error.problems)


def _of_item(index: int, text: str, problem: Problem) -> Problem:
    """The same problem, where the config has it."""
    name = "".join(text.split())
    where = problem.path.removeprefix(f"{name}: ")
    given = f'given "{text}"' if where == name else f'given "{text}": {where}: {problem.given}'
    return replace(problem, path=f"certify.layouts.{index}", given=given)


def _within(name: str, path: str) -> str:
    """Where a layout has a problem; of one word that is none, the word."""
    return path if path == name else f"{name}: {path}"


def in_mode(config: Config, mode: str) -> Config:
    """The same training, computed in the dtype of a mode."""
    return msgspec.structs.replace(config, machine=msgspec.structs.replace(config.machine, compute_dtype=DTYPES[mode]))


def _names(text: str) -> list[str]:
    return [name for item in text.split(";") if (name := "".join(item.split()))]


def _applied(name: str, config: Config) -> Config:
    data: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(config, certify=Certify()))
    plain = msgspec.to_builtins(Parallel())
    data["parallel"] |= {key: plain[key] for key in ("tp", "cp", "pp", "ep", "schedule", "virtual_stages", "layer_counts")}
    data["faults"] = []
    sizes = dict.fromkeys(AXES, 1)
    for key, value in _items(name).items():
        if key in AXES:
            sizes[key] = value
        elif "." in key:
            section, _, leaf = key.partition(".")
            _section(data, section, name)[leaf] = value
        else:
            data["parallel"][key] = value
    data["parallel"] |= {axis: size for axis, size in sizes.items() if axis != "dp"}
    data["parallel"]["ranks"] = prod(sizes.values())
    return resolve(data, origin=name)


SAID_ELSEWHERE = {
    "ranks": "nothing: the ranks of a layout are tp x cp x pp x dp",
    "machine.compute_dtype": "nothing: --modes says what is computed in",
}
"""What a layout cannot choose: it would be overwritten, and another layout certified than the one that is named."""


def _items(name: str) -> dict[str, Any]:
    """Keys and values as they are written, each once and none without effect; `parallel.tp` is `tp`."""
    found: dict[str, Any] = {}
    for item in name.split(","):
        key, equals, text = item.partition("=")
        key = key.removeprefix("parallel.")
        allowed = _allowed(key, text, found) if key and equals else "key=value, such as tp=2"
        if allowed:
            given = f"given {text!r}" if key and equals else f'given "{item}"'
            raise ConfigProblems([Problem(key or "(no key)", given, allowed)], name)
        found[key] = _value(text)
    return found


def _allowed(key: str, text: str, before: dict[str, Any]) -> str:
    """What should have been written instead; empty: it is well."""
    if key in SAID_ELSEWHERE:
        return SAID_ELSEWHERE[key]
    if key in before:
        return f"once in a layout: {before[key]!r} was given before"
    if key in AXES and not (text.isdecimal() and int(text)):
        return "a whole number of at least 1"
    return ""


def _section(data: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    found = data.get(section)
    if not isinstance(found, dict):
        raise ConfigProblems([Problem(section, "not a section of the config", "such as model or batch")], name)
    return found


def _value(text: str) -> Any:
    if "+" in text:
        return [_value(part) for part in text.split("+")]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
