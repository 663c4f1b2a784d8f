"""What a group sends, told line by line: what the founding rows count, and what this engine sends beyond it.

The documents' formulas are of ideal layers: they stay what they are, one line of a group's answer. An engine gathers some
inputs twice, sums gradients of norms, exchanges the loss, fills buffers up: each a line of its own, with its own formula, so
that the sum of all lines is what a run counts (`ftrain report` lays both side by side) and a reader sees where the two part.

All collectives are counted as rings, which send the least possible: a member of an all-reduce over N sends 2 (N-1)/N of the
buffer, of a reduce-scatter or an all-gather (N-1)/N.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.config import Axis
from ftrain.plan.setup import Quantity


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of message of a group. Negative where the engine saves what the ideal counts."""

    what: str
    formula: str
    nbytes: Quantity
    """Sent by the busiest rank in one update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What one kind of group moves."""

    name: str
    axes: tuple[Axis, ...]
    members: int
    lines: tuple[Line, ...]
    """The ideal of the founding rows first, then what this engine sends beyond it."""
    run: int = 0
    """Not the whole group talks, but each so many neighbours of it."""
    step: int = 1
    """Not the whole group talks, but every so manieth member."""
    everyone: bool = False
    """Each member sends to every other one instead of to the next."""

    @property
    def ideal(self) -> Quantity:
        """Bytes of the founding rows' formula."""
        return self.lines[0].nbytes

    @property
    def nbytes(self) -> Quantity:
        """All that the busiest rank sends in one update."""
        return sum(line.nbytes for line in self.lines)

    @property
    def formula(self) -> str:
        """Of the ideal."""
        return self.lines[0].formula


def lines(*found: Line) -> tuple[Line, ...]:
    """The first, and of the others those that send something."""
    return (found[0], *(line for line in found[1:] if line.nbytes))
