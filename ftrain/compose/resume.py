"""What it means to go on with an existing run: is the state there, and does the config still describe the same training?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from ftrain.config import Config
from ftrain.course import Cursor, tokens_read
from ftrain.load import Change, changes
from ftrain.phases import effective
from storage.run import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The newest state of a run, and what the new config changes about it."""

    step: int | None
    changes: tuple[Change, ...] = ()
    past: tuple[str, ...] = ()
    """Why phases that are over, or have begun, cannot be as the new config says."""

    def refused(self, *, accept: bool) -> list[str]:
        """Why this run may not go on with the new config; empty if it may."""
        found = list(self.past)
        for change in self.changes:
            what = f"{change.path}: was {change.old!r}, is {change.new!r}"
            if change.kind == "refused":
                found.append(f"{what}: the saved state would be meaningless; set it back, or choose another run.url")
            elif change.kind == "accept" and not accept:
                found.append(f"{what}: this changes what is being trained; set it back, or say --accept-change")
        return found

    def recorded(self) -> Sequence[dict[str, object]]:
        """The changes that go into the ledger."""
        return [
            {"path": change.path, "old": change.old, "new": change.new, "kind": change.kind}
            for change in self.changes
            if change.kind != "free"
        ]


def look(run: RunStore, config: Config) -> Resume:
    """Compare `config` with the one the newest checkpoint was trained with.

    Raises NoCheckpoint if there are commits and none of them is whole: starting over would hide what was lost.
    """
    if not any(info.state in ("valid", "damaged") for info in run.checkpoints()):
        return Resume(step=None)
    checkpoint = run.open(None)
    saved = checkpoint.progress.get("config")
    if saved is None:
        return Resume(step=checkpoint.step)
    try:
        old = msgspec.convert(saved, Config)
    except msgspec.ValidationError:
        return Resume(step=checkpoint.step)  # written by another version: nothing that could be compared
    return compared(old, config, checkpoint.step, Cursor.of(checkpoint.progress))


def compared(old: Config, new: Config, step: int, cursor: Cursor) -> Resume:
    """Outside the table, and in the phase that the run is in, a value may change as ever; what later phases do is recorded."""
    if not old.phases and not new.phases:
        return Resume(step=step, changes=tuple(changes(old, new)))
    number = min(cursor.phase, len(old.phases))
    past = list(_past(old, new, number, tokens_read(old, cursor)))
    if past:
        return Resume(step=step, past=tuple(past))
    now = [
        Change(_where(change.path, new, number), change.old, change.new, change.kind)
        for change in changes(effective(old, number), effective(new, number))
    ]
    known = {change.path for change in now}
    base = [it for it in changes(replace(old, phases=()), replace(new, phases=())) if it.path not in known]
    return Resume(step=step, changes=(*now, *base, *_elsewhere(old, new, number)))


def _past(old: Config, new: Config, number: int, read: int) -> Iterator[str]:
    """What the new config says otherwise of phases before the one with this number, and of when it and later ones begin."""
    was, now = msgspec.to_builtins(old.phases), msgspec.to_builtins(new.phases)
    for index in range(number):
        entry = now[index] if index < len(now) else None
        if entry is None or entry["from_tokens"] != was[index]["from_tokens"]:
            given = "is missing" if entry is None else f"was {was[index]['from_tokens']}, is {entry['from_tokens']}"
            yield f"phases.{index}.from_tokens: {given}: this phase has begun; set it back"
        elif index < number - 1 and _but_layout(entry) != _but_layout(was[index]):
            yield f"phases.{index}: was {_said(was[index])}, is {_said(entry)}: this phase is over; set it back"
    for index in range(number, len(now)):
        moved = index >= len(was) or was[index]["from_tokens"] != now[index]["from_tokens"]
        if moved and now[index]["from_tokens"] <= read:
            given = f"given {now[index]['from_tokens']}, and the run has read {read} tokens"
            yield f"phases.{index}.from_tokens: {given}: give more"
    before = {it.path for it in changes(effective(old, number), effective(new, number))}
    for it in changes(replace(old, phases=()), replace(new, phases=())) if number else ():
        if it.kind == "accept" and it.path not in before:
            yield f"{it.path}: was {it.old!r}, is {it.new!r}: it only counts in a phase that is over; set it back"


def _said(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """An entry as somebody wrote it: without the tables that it leaves alone."""
    return None if entry is None else {name: value for name, value in entry.items() if value != {}}


def _but_layout(entry: dict[str, Any]) -> dict[str, Any]:
    """What a phase has done to the training. Its layout may have been another than planned: it was resized."""
    batch = {name: value for name, value in entry["batch"].items() if name != "micro_batch"}
    return {**entry, "parallel": {}, "batch": batch}


def _where(path: str, config: Config, number: int) -> str:
    """The path of a phase's value: in the newest entry of the table that names it, or outside."""
    section, _, name = path.partition(".")
    for index in range(number - 1, -1, -1):
        if name in (getattr(config.phases[index], section, None) or {}):
            return f"phases.{index}.{path}"
    return path


def _elsewhere(old: Config, new: Config, number: int) -> Iterator[Change]:
    """What is different about later phases, and about the layout of those that are over."""
    was, now = msgspec.to_builtins(old.phases), msgspec.to_builtins(new.phases)
    for index in (*range(number - 1), *range(number, max(len(was), len(now)))):
        before, after = (found[index] if index < len(found) else None for found in (was, now))
        if before != after:
            yield Change(f"phases.{index}", _said(before), _said(after), "recorded")
