"""What it means to go on with an existing run: is the state there, and does the config still describe the same training?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ftrain.config import Config
from ftrain.load import Change, changes
from storage.run import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The newest state of a run, and what the new config changes about it."""

    step: int | None
    changes: tuple[Change, ...] = ()

    def refused(self, *, accept: bool) -> list[str]:
        """Why this run may not go on with the new config; empty if it may."""
        found = []
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
    return Resume(step=checkpoint.step, changes=tuple(changes(old, config)))
