"""One save of a script's rank, under way, and what the ranks ask each other before it takes place."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftrain.checkpoint.beside import Later
from ftrain.checkpoint.state import Flat

MOST_STEPS = 2**53  # JSON's readers know no larger whole numbers
BUSY = "step %d is not saved: two earlier saves are still on their way"
ALONE = "the structure of the state has changed on some ranks alone; the next save plans anew"


class Vote(NamedTuple):
    """What the ranks must agree about before a save; of each the largest that any of them says."""

    failed: int
    """There is a problem with this rank's state, or an earlier failure to be raised."""
    changed: int
    """The state has another structure than the plan."""
    busy: int
    """No slot is free, and the save is rather left out."""
    ahead: int
    """A rank has gone on already."""
    last: int
    first: int
    """The step, negative: the largest is the first."""

    @property
    def steps_differ(self) -> str:
        """What is wrong with the steps; empty: nothing."""
        ours = f"the ranks save steps {-self.first} to {self.last}: all save after the same step"
        return ours if self.last != -self.first else ""

    @property
    def clear(self) -> bool:
        """Whether all is well."""
        return not (self.failed or self.changed or self.busy or self.steps_differ)


@dataclass(slots=True)
class Save:
    """One save of this rank, under way."""

    before: int
    """The newest step before this save."""
    step: int = 0
    flat: Flat = field(default_factory=lambda: Flat({}, [], [], {}))
    later: Later | None = None
    record: bytes = b""
    fits: bool = False  # the plan and the slots are right for this state
    problem: Exception | None = None  # it cannot be saved
    slot: str = ""  # filled, and not published yet
    overlaps: bool = False  # some of it is to be copied yet
    agreed: bool = False  # the other ranks have been asked
    broken: Exception | None = None  # the slot could not be filled


def checked_step(step: object, newest: int) -> int:
    """The step of a save after that of `newest`, as an int. Raises TypeError for what is no whole number (one of NumPy is),
    ValueError for one that cannot come now.
    """
    try:
        given = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"the step is {step!r}, a {type(step).__name__}: it is the number of finished steps, an int") from None
    if not 0 <= given < MOST_STEPS:
        raise ValueError(f"the step is {given}: it is the number of finished steps, from 0 to {MOST_STEPS - 1}")
    if given <= newest:
        raise ValueError(f"step {given} comes after step {newest}: steps grow, and `load` is what goes back")
    return given
