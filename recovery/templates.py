"""The table of signatures: what real software says when it breaks, as data that a site can override.

Published advice about failures disagrees between vendors and ages with every release, so none of it is code. The table ships
as `signatures.toml`; a second file of the same form is merged over it (an entry of the same name replaces ours, `disable`
removes). Expressions are compiled when they are first needed: a supervisor that is never interrupted never pays for them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from recovery.events import Action
from recovery.literals import Index, compiled

Source = Literal["log", "kernel", "scheduler"]


class TableError(ValueError):
    """A signature table that cannot be used: which entry, and what is wrong with it."""


class Overrides(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a signature says otherwise than its class does."""

    class_: str | None = field(name="class", default=None)
    component: str | None = None
    action: Action | None = None
    retryable: bool | None = None
    planned: bool | None = None


class ClassMeaning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a class means unless a signature knows better. `action` is for a first occurrence."""

    component: str
    action: Action
    retryable: bool = True
    planned: bool = False
    at_start: Overrides = Overrides()  # when no step was finished before it


class Signature(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One family of messages. See the head of `signatures.toml` for weights and roles."""

    name: str
    class_: str = field(name="class")
    weight: int
    patterns: tuple[str, ...]
    sources: tuple[str, ...]
    where: tuple[Source, ...] = ("log",)
    role: Literal["cause", "cascade"] = "cause"
    level: Literal["", "any"] = ""  # any: a line of level INFO or WARNING counts as much
    survives: bool = False  # counts although training went on after it
    exception: Literal["", "line", "traceback"] = (
        ""  # only a line that looks like an exception, or only one that ends a traceback
    )
    context: str = ""  # must be found in the traceback, the line or the few lines before it
    needs: tuple[str, ...] = ()  # counts only if one of these was found too
    not_from: str = ""  # not if the traceback ended here: a launcher's own words only repeat what a worker did
    rank: Literal["speaker", "timeout", "outside", "vanished", "killed", "stuck", "slow"] = (
        "speaker"  # first is who says it, did not time out, was taken away, fell silent, was killed, never came back, is behind
    )
    component: str | None = None
    action: Action | None = None
    retryable: bool | None = None
    planned: bool | None = None
    at_start: Overrides = Overrides()  # when no step was finished before it


class ExitMeaning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an exit status says when nothing else speaks: `only` if every rank ended like this, or only if `one` did.

    `first`: of the rank that is known to have ended before all others, by its own doing and without a word of its own.
    """

    name: str
    class_: str = field(name="class")
    weight: int
    statuses: tuple[int, ...]
    only: bool = False
    one: bool = False
    first: bool = False
    action: Action | None = None
    retryable: bool | None = None
    planned: bool | None = None


class Noise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lines that are never evidence, and why."""

    why: str
    patterns: tuple[str, ...]
    role: Literal["", "teardown", "advice"] = ""  # advice: only from the sentence on that holds it


class Reading(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a log is read: who speaks, what is a finished step, what is data or a setting."""

    prefixes: tuple[str, ...]
    speakers: tuple[str, ...]
    progress: tuple[str, ...]
    not_progress: tuple[str, ...]
    preview: tuple[str, ...]
    preview_block: str
    config: tuple[str, ...]
    config_not: str
    handled: str
    not_handled: str
    again: tuple[str, ...]
    finished: str


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The whole table."""

    version: int
    classes: dict[str, ClassMeaning]
    signature: tuple[Signature, ...]
    exit: tuple[ExitMeaning, ...]
    noise: tuple[Noise, ...]
    reading: Reading

    @cached_property
    def by_source(self) -> Mapping[str, Index[Signature]]:
        """Signatures by where they look."""
        return {
            where: Index((s, s.patterns) for s in self.signature if where in s.where)
            for where in ("log", "kernel", "scheduler")
        }

    @cached_property
    def noises(self) -> Index[Noise]:
        """What is never evidence."""
        return Index((noise, noise.patterns) for noise in self.noise)

    def check(self) -> Table:
        """Itself, or TableError: unknown classes, names used twice, expressions that do not compile, no source given."""
        entries: list[Signature | ExitMeaning] = [*self.signature, *self.exit]
        names = [entry.name for entry in entries]
        for entry in entries:
            if entry.class_ not in self.classes:
                raise TableError(f"{entry.name}: class {entry.class_!r} is not in [classes]")
            if names.count(entry.name) > 1:
                raise TableError(f"{entry.name}: the name is used twice")
        for owner, patterns in self._patterns():
            for pattern in patterns:
                try:
                    compiled(pattern)
                except re.error as error:
                    raise TableError(f"{owner}: {pattern!r} is not a regular expression: {error}") from error
        return self

    def without_source(self, source: str) -> Table:
        """The table without what is known from this one source only."""
        kept = tuple(signature for signature in self.signature if set(signature.sources) != {source})
        return replace(self, signature=kept) if len(kept) < len(self.signature) else self

    def _patterns(self) -> Iterable[tuple[str, Iterable[str]]]:
        yield from ((s.name, (*s.patterns, s.context, s.not_from)) for s in self.signature)
        yield from ((n.why, n.patterns) for n in self.noise)
        for name in self.reading.__struct_fields__:
            value = getattr(self.reading, name)
            yield f"reading.{name}", (value,) if isinstance(value, str) else value


@cache
def default_table() -> Table:
    """The table that ships with the package."""
    return _convert(_parse(resources.files("recovery").joinpath("signatures.toml").read_text(encoding="utf-8")))


def load_table(overrides: Path | None = None) -> Table:
    """The shipped table, with a site's own file merged over it; TableError if the result cannot be used."""
    if overrides is None:
        return default_table()
    base = _parse(resources.files("recovery").joinpath("signatures.toml").read_text(encoding="utf-8"))
    return _convert(_merge(base, _parse(overrides.read_text(encoding="utf-8")))).check()


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"not TOML: {error}") from error


def _merge(base: dict[str, Any], site: dict[str, Any]) -> dict[str, Any]:
    """Entries by name: the site's replace ours, its own come first, `disable` removes."""
    gone = set(site.pop("disable", []))
    merged = base | {key: site[key] for key in site if key not in ("signature", "exit", "noise", "classes", "reading")}
    for kind in ("signature", "exit"):
        own = site.get(kind, [])
        replaced = gone | {entry.get("name") for entry in own}
        merged[kind] = [*own, *(entry for entry in base[kind] if entry["name"] not in replaced)]
    merged["noise"] = [*site.get("noise", []), *base["noise"]]
    for kind in ("classes", "reading"):
        merged[kind] = base[kind] | site.get(kind, {})
    return merged


def _convert(raw: dict[str, Any]) -> Table:
    try:
        return msgspec.convert(raw, Table)
    except msgspec.ValidationError as error:
        raise TableError(f"signature table: {error}") from error
