"""Checks plain data against the schema and names everything that is wrong with it, at once.

msgspec stops at the first error, and a person who has misspelt three keys should not need three runs to learn it. So this
module walks the same Structs that msgspec decodes into, and collects. It knows no field by name: ranges, choices and texts
come from `ftrain.config`, which stays the only owner.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as mi


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, what was given, what is allowed, and what to try."""

    path: str
    given: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.given}; allowed: {self.allowed}" + (f"; {self.hint}" if self.hint else "")


class ConfigProblems(ValueError):  # noqa: N818  it carries a list; "Error" would promise one
    """Everything that is wrong with a config. Commands exit with code 3."""

    def __init__(self, problems: Iterable[Problem], origin: str = "config") -> None:
        self.problems = tuple(problems)
        self.origin = origin
        count = len(self.problems)
        head = f"{origin}: {count} problem{'' if count == 1 else 's'}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def check(data: object, schema: type[msgspec.Struct]) -> list[Problem]:
    """All problems of plain data (as TOML gives it) against a Struct; empty if msgspec will accept it."""
    return find_problems(data, type_of(schema))


@cache
def type_of(schema: type[msgspec.Struct]) -> mi.Type:
    """What a Struct looks like; found out once, for it takes a hundredth of a second."""
    return mi.type_info(schema)


def find_problems(data: object, type_: mi.Type, path: str = "") -> list[Problem]:
    """The same for any type of the schema."""
    return list(_walk(data, type_, path))


def bare(type_: mi.Type) -> mi.Type:
    """The type without its Meta."""
    return type_.type if isinstance(type_, mi.Metadata) else type_


def resume_class(type_: mi.Type, inherited: str = "free") -> str:
    """What happens when a resumed run gives another value: free, recorded, accept, refused."""
    extra = type_.extra if isinstance(type_, mi.Metadata) else None
    return str((extra or {}).get("on_resume", inherited))


def description(type_: mi.Type) -> str:
    """The field's text from the schema."""
    return str((type_.extra_json_schema or {}).get("description", "")) if isinstance(type_, mi.Metadata) else ""


def allowed(type_: mi.Type) -> str:
    """What a value of this type may be, in words."""
    examples = (type_.extra_json_schema or {}).get("examples", ()) if isinstance(type_, mi.Metadata) else ()
    type_ = bare(type_)
    if isinstance(type_, mi.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in type_.values)
    if isinstance(type_, mi.BoolType):
        return "true or false"
    if isinstance(type_, mi.IntType):
        return "whole number" + _range(type_)
    if isinstance(type_, mi.FloatType):
        return "number" + _range(type_)
    if isinstance(type_, mi.StrType):
        such = " such as " + " or ".join(toml_text(example) for example in examples) if examples else ""
        return ("non-empty text" if type_.min_length else "text") + such
    if isinstance(type_, mi.VarTupleType):
        return ("non-empty list of " if type_.min_length else "list of ") + _plural(bare(type_.item_type))
    return "table"


def default_text(field: mi.Field) -> str:
    """A field's default as TOML would spell it; empty for a required field."""
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        return ""
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    return toml_text(msgspec.to_builtins(value))


def toml_text(value: object) -> str:
    """Plain data in TOML syntax, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for DEL
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    return str(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f"did you mean `{close[0]}`?" if close else ""


def _walk(data: object, full: mi.Type, path: str) -> Iterator[Problem]:
    type_ = bare(full)
    if isinstance(type_, mi.StructType):
        yield from _table(data, type_, path)
    elif isinstance(type_, mi.UnionType):
        yield from _union(data, type_, path)
    elif isinstance(type_, mi.VarTupleType):
        yield from _sequence(data, type_, path)
    elif isinstance(type_, mi.DictType):
        if not isinstance(data, Mapping):
            yield Problem(path, _given(data), allowed(type_))
    elif not _fits(data, type_):
        yield Problem(path, _given(data), allowed(full), _word_hint(data, type_))


def _table(data: object, type_: mi.StructType, path: str) -> Iterator[Problem]:
    if not isinstance(data, Mapping):
        wanted = "table with " + ", ".join(field.encode_name for field in type_.fields)
        yield Problem(path or "the file", _given(data), wanted, f"write {table}" if (table := _as_table(data, type_)) else "")
        return
    fields = {field.encode_name: field for field in type_.fields}
    names = ", ".join(fields)
    for key in data:
        if key not in fields and key != type_.tag_field:
            yield Problem(_join(path, key), "unknown key", names, did_you_mean(key, fields) or _elsewhere(key))
    for name, field in fields.items():
        if name in data:
            yield from _walk(data[name], field.type, _join(path, name))
        elif field.required:
            yield from _missing(field, _join(path, name))


def _as_table(data: object, type_: mi.Type) -> str:
    """What stands alone, as the one thing that a table must hold; empty if it is not that."""
    needed = [field for field in type_.fields if field.required] if isinstance(type_, mi.StructType) else []
    fits = len(needed) == 1 and not isinstance(data, list | tuple) and not find_problems(data, needed[0].type)
    return toml_text({needed[0].encode_name: data}) if fits else ""


def _missing(field: mi.Field, path: str) -> Iterator[Problem]:
    """A missing table is reported by its missing keys, so that one reading tells all that is to be written."""
    type_ = bare(field.type)
    if isinstance(type_, mi.StructType):
        yield from _table({}, type_, path)
    else:
        yield Problem(path, "required, but missing", allowed(type_), description(field.type))


def _union(data: object, type_: mi.UnionType, path: str) -> Iterator[Problem]:
    """A union of tagged tables: the tag chooses, and a wrong tag is reported with the known ones."""
    members = {str(member.tag): member for member in type_.types if isinstance(member, mi.StructType)}
    tag_field = next(iter(members.values())).tag_field or ""
    wanted = f"one of {', '.join(toml_text(tag) for tag in members)}"
    if not isinstance(data, Mapping):
        yield Problem(path, _given(data), f"table with `{tag_field}` = {wanted}")
        return
    tag = data.get(tag_field)
    if isinstance(tag, str) and tag in members:
        yield from _table(data, members[tag], path)
        return
    given = "required, but missing" if tag is None else _given(tag)
    yield Problem(_join(path, tag_field), given, wanted, did_you_mean(str(tag), members) if tag is not None else "")


def _sequence(data: object, type_: mi.VarTupleType, path: str) -> Iterator[Problem]:
    if not isinstance(data, list | tuple):
        table = _as_table(data, bare(type_.item_type))
        yield Problem(path, _given(data), allowed(type_), f"write [{table}]" if table else "")
        return
    if len(data) < (type_.min_length or 0):
        yield Problem(path, "given an empty list", allowed(type_))
    for index, item in enumerate(data):
        yield from _walk(item, type_.item_type, f"{path}.{index}")


def _fits(data: object, type_: mi.Type) -> bool:
    if isinstance(type_, mi.LiteralType):
        return isinstance(data, str) and data in type_.values
    if isinstance(type_, mi.BoolType):
        return isinstance(data, bool)
    if isinstance(type_, mi.StrType):
        return isinstance(data, str) and _reads(data, type_)
    if isinstance(data, bool) or not isinstance(data, int | float) or _too_large(data):
        return False
    if isinstance(type_, mi.IntType):
        return isinstance(data, int) and _inside(data, type_)
    return isinstance(type_, mi.FloatType) and math.isfinite(data) and _inside(data, type_)


def _reads(text: str, type_: mi.StrType) -> bool:
    """Whether a text has the form that is asked for; one of blanks alone is as empty as it looks."""
    full = not type_.min_length or len(text.strip()) >= type_.min_length
    return full and (type_.pattern is None or re.search(type_.pattern, text) is not None) and not _unspeakable(text)


def _unspeakable(text: str) -> str:
    """What no file name or no record can hold of a text; empty: nothing."""
    if "\0" in text:
        return "a NUL character ends every file name"
    return "" if text.isascii() or not _SURROGATES.search(text) else "bytes that are not UTF-8 cannot be recorded"


_SURROGATES = re.compile("[\ud800-\udfff]")  # what the system makes of such bytes


def _too_large(data: object) -> bool:
    """A whole number that messages between processes cannot carry."""
    return isinstance(data, int) and abs(data) >= 2**63


def _inside(value: float, type_: mi.IntType | mi.FloatType) -> bool:
    tests: list[tuple[float | None, Callable[[float, float], bool]]] = [
        (type_.ge, lambda value, end: value >= end),
        (type_.gt, lambda value, end: value > end),
        (type_.le, lambda value, end: value <= end),
        (type_.lt, lambda value, end: value < end),
    ]
    return all(end is None or test(value, end) for end, test in tests)


def _range(type_: mi.IntType | mi.FloatType) -> str:
    ends = [(">=", type_.ge), (">", type_.gt), ("<=", type_.le), ("<", type_.lt)]
    texts = [f"{sign} {end}" for sign, end in ends if end is not None]
    return " " + " and ".join(texts) if texts else ""


def _plural(type_: mi.Type) -> str:
    if isinstance(type_, mi.LiteralType):
        return ", ".join(toml_text(value) for value in type_.values)
    return "tables" if isinstance(type_, mi.StructType | mi.UnionType) else f"{allowed(type_)}s"


def _given(data: object) -> str:
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "boolean"),
        (str, "text"),
        (int, "whole number"),
        (float, "number"),
        (list, "list"),
        (Mapping, "table"),
    )
    kind = next((name for type_, name in kinds if isinstance(data, type_)), type(data).__name__)
    if isinstance(data, int) and _too_large(data):
        return f"given a number of {data.bit_length()} bits (whole number)"  # of thousands of digits Python writes none
    text = toml_text(data)
    return f"given {text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _word_hint(data: object, type_: mi.Type) -> str:
    if isinstance(type_, mi.LiteralType) and isinstance(data, str):
        return did_you_mean(data, [str(value) for value in type_.values])
    if isinstance(data, str) and isinstance(type_, mi.StrType):
        return _unspeakable(data)
    return "more than 64 bits hold" if _too_large(data) else ""


def _elsewhere(key: str) -> str:
    """For a key that stands in the wrong table: nothing closer is known here, so say where such keys live."""
    from ftrain.config import Config  # the schema itself, only for this hint

    for section in cast(mi.StructType, mi.type_info(Config)).fields:
        inner = bare(section.type)
        if isinstance(inner, mi.StructType) and any(field.encode_name == key for field in inner.fields):
            return f"did you mean `{section.encode_name}.{key}`?"
    return ""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
