"""Finds impossible combinations in a config that still has wrong values, so that one run reports both.

The rules of `ftrain.combinations` take a whole Config. Here the wrong values are replaced by placeholders, the rules run over
a view that notes which fields they read, and a finding is kept only if nothing it was derived from is a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect as mi

from ftrain.combinations import RULES
from ftrain.config import Config
from ftrain.schema import Problem, bare, find_problems


def certain_combinations(data: Mapping[str, Any]) -> list[Problem]:
    """The impossible combinations of plain data that no wrong or missing value takes part in."""
    plain, doubtful = _repaired(data, cast(mi.StructType, mi.type_info(Config)), "")
    config, found = msgspec.convert(plain, Config), []
    for rule in RULES:
        read: set[str] = set()
        view = cast(Config, _View(config, "", read))
        found += [problem for problem in rule(view) if not read & doubtful]
    return found


class _View:
    """A Struct seen through a notebook: what is read from it is written down."""

    def __init__(self, target: msgspec.Struct, path: str, read: set[str]) -> None:
        self._target, self._path, self._read = target, path, read

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        path = f"{self._path}.{name}" if self._path else name
        if isinstance(value, msgspec.Struct):
            return _View(value, path, self._read)
        self._read.add(path)
        return value


def _repaired(data: object, type_: mi.StructType, path: str) -> tuple[dict[str, Any], set[str]]:
    """The data with unknown keys dropped and wrong values replaced, and the paths of the replaced fields."""
    given = data if isinstance(data, Mapping) else {}
    plain: dict[str, Any] = {}
    doubtful: set[str] = set()
    for field in type_.fields:
        name = field.encode_name
        here = f"{path}.{name}" if path else name
        inner = bare(field.type)
        if isinstance(inner, mi.StructType):
            plain[name], wrong = _repaired(given.get(name), inner, here)
            doubtful |= wrong
        elif name in given and not find_problems(given[name], field.type):
            plain[name] = given[name]
        else:
            if field.required:
                plain[name] = _placeholder(inner)
            if field.required or name in given:
                doubtful.add(here)
    return plain, doubtful


def _placeholder(type_: mi.Type) -> Any:
    """Some value of a required field's type."""
    if isinstance(type_, mi.IntType | mi.FloatType):
        return 2
    if isinstance(type_, mi.VarTupleType):
        return [_repaired({}, cast(mi.StructType, bare(type_.item_type)), "")[0]]
    return "placeholder"
