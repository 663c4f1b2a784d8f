"""What a checkpoint holds that is no array, entry by entry: to be shown, and to be compared with another one's.

Two states of equal arrays are not equal yet: an epoch, a schedule's value, a random generator of Python's are in the record of
the state, and no digest covers them. Of a checkpoint of `ftrain run` the part of the progress record counts that says from
where it goes on in its data.

What differs by nature is not compared: the step (it is how a checkpoint is asked for), epochs of ownership, attempts and times;
the layout and the number of ranks, as long as nothing in the state is each rank's own; the config, which says how the rest is
to be computed; and what was measured on the way (evaluations, the last losses and gradient norms), which other layouts add up
in another order. Neither is the order of a dict's keys.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrain.checkpoint.record import Node, StateError, items_of, kind_of, value_of
from ftrain.checkpoint.script_messages import RECORD

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint

PROGRESS = ("sequences", "tokens", "begun", "skipped")
"""Of a run's progress, what says how it goes on: data read and learnt from, phases begun, data passed over."""
PLAIN = ("plain", "float", "int", "bytes", "dtype")
MANY, LONGEST = 16, 120
SHOWN = 4
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 120
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = SHOWN


@dataclass(frozen=True, slots=True)
class EntryDiff:
    """How one entry differs."""

    entry: str
    """Its path in the state, or the field of a run's progress."""
    kind: str
    """missing (only in the second), extra (only in the first), value."""
    text: str
    first: str = ""
    second: str = ""
    """The values, shortened; empty where there is none."""


def diff_entries(a: Checkpoint, b: Checkpoint) -> list[EntryDiff]:
    """Every entry that is not the same in both, type and all. Arrays that only one has, or other values of one, are no entries:
    `storage.diff` names these.
    """
    if RECORD in a.progress and RECORD in b.progress:
        both = frozenset(a.names) & frozenset(b.names)
        return list(_differing(a.progress[RECORD], b.progress[RECORD], "", both))
    return list(_progress(a.progress, b.progress))


def entries_of(checkpoint: Checkpoint) -> Iterator[tuple[str, Node]]:
    """Path and node of all that is no array in a script's state; plain sequences and long dicts of plain values are one entry.
    Nothing for a checkpoint of `ftrain run`.
    """
    if RECORD in checkpoint.progress:
        yield from _entries(checkpoint.progress[RECORD], "")


def short(node: Node) -> str:
    """A node's value as Python writes it, cut where it is long."""
    if kind_of(node) == "rank":
        return f"each rank's own, of {len(node['values'])}"
    try:
        text = _SHORT.repr(value_of(node, _Named))
    except StateError:  # of a later version
        return f"a {kind_of(node):.40}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def as_json(node: Node) -> Any:
    """The value as far as JSON has a word for it (a tuple is a list there), else the node (`ftrain.checkpoint.record`)."""
    match kind_of(node):
        case "list" | "tuple" as kind:
            return [as_json(each) for each in node[kind]]
        case "map":
            return {key: as_json(each) for key, each in node["map"].items()}
    return node


class _Named:
    """What stands for an array, or a type of torch, in a value that is only to be read by people."""

    def __init__(self, node: Node) -> None:
        kind = kind_of(node)
        what, value = ("torch.", node[kind]) if kind == "dtype" else (f"{node['type'][0]} ", node[kind])
        self._text = f"{what}{value}"

    def __repr__(self) -> str:
        return self._text


def _parts(node: Node, path: str) -> dict[str, Node] | None:
    """The parts of a node that are entries of their own, by path; None: it is one entry."""
    match kind_of(node):
        case "map":
            return {f"{path}.{key}" if path else key: each for key, each in node["map"].items()}
        case "pairs":
            return {f"{path}[{key!r}]": each for key, each in items_of(node).items()}
        case "list" | "tuple" as kind:
            plain = all(kind_of(each) in PLAIN for each in node[kind])
            return None if plain else {f"{path}[{index}]": each for index, each in enumerate(node[kind])}
        case "rank" if len(node["values"]) == 1:
            return {path: node["values"][0]}
        case "rank":
            return {f"{path} of rank {rank}": each for rank, each in enumerate(node["values"])}
    return None


def _entries(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    parts = _parts(node, path)
    if not parts or (len(parts) > MANY and all(kind_of(each) in PLAIN for each in parts.values())):
        if kind_of(node) not in ("array", "empty"):
            yield path, node
        return
    for at, each in parts.items():
        yield from _entries(each, at)


def _differing(one: Node, other: Node, path: str, both: frozenset[str]) -> Iterator[EntryDiff]:
    kinds = kind_of(one), kind_of(other)
    ours, theirs = _parts(one, path), _parts(other, path)
    if ours is None or theirs is None or kinds[0] != kinds[1]:
        if not (kinds == ("array", "array") and _told(one, other, both)) and _content(one) != _content(other):
            yield _changed(one, other, path)
    elif kinds == ("rank", "rank") and len(ours) != len(theirs):
        yield _changed(one, other, path)
    else:
        for at in ours | theirs:
            if at not in ours:
                yield from _alone(theirs[at], at, "missing", both)
            elif at not in theirs:
                yield from _alone(ours[at], at, "extra", both)
            else:
                yield from _differing(ours[at], theirs[at], at, both)


def _told(one: Node, other: Node, both: frozenset[str]) -> bool:
    """Whether the arrays' own comparison says it: one of them is not in both."""
    return not {one["array"], other["array"]} <= both


def _alone(node: Node, path: str, kind: str, both: frozenset[str]) -> Iterator[EntryDiff]:
    if not _all_told(node, path, both):
        which, value = "second" if kind == "missing" else "first", short(node)
        yield EntryDiff(path, kind, f"{path} is only in the {which}: {value}", **{which: value})


def _all_told(node: Node, path: str, both: frozenset[str]) -> bool:
    """Whether there is nothing in it but arrays that the other checkpoint does not have."""
    if kind_of(node) == "array":
        return node["array"] not in both
    parts = _parts(node, path)
    return bool(parts) and all(_all_told(each, at, both) for at, each in (parts or {}).items())


def _content(node: Node) -> str:
    """Of equal text if and only if it is the same: 1, 1.0 and True are three values, as 0.0 and -0.0 are two."""
    if kind_of(node) == "array":  # how its elements are stored is the arrays' own comparison
        return f"{node['array']} {node['type'][0]}"
    if kind_of(node) == "counter":
        return repr(sorted(map(repr, node["counter"])))
    return repr(node)


def _changed(one: Node, other: Node, path: str) -> EntryDiff:
    first, second = short(one), short(other)
    kind = kind_of(one)
    if kind == kind_of(other) and kind in ("list", "tuple") and len(one[kind]) == len(other[kind]) > SHOWN:
        pairs = enumerate(zip(one[kind], other[kind], strict=True))
        at = [index for index, (each, that) in pairs if repr(each) != repr(that)]
        where = f"{path}[{at[0]}]"
        told = f"{short(one[kind][at[0]])} in the first, {short(other[kind][at[0]])} in the second"
        more = f"; {len(at)} of its {len(one[kind])} values differ" if len(at) > 1 else ""
        return EntryDiff(path, "value", f"{where}: {told}{more}", first, second)
    told = f"{first} in the first, {second} in the second" if first != second else f"{first} in both, cut where they differ"
    return EntryDiff(path, "value", f"{path}: {told}", first, second)


def _progress(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[EntryDiff]:
    """Of two runs' progress; a field that one of them does not have says nothing."""
    for field in PROGRESS:
        if field in one and field in other and one[field] != other[field]:
            first, second = _SHORT.repr(one[field]), _SHORT.repr(other[field])
            yield EntryDiff(field, "value", f"{field}: {first} in the first, {second} in the second", first, second)
