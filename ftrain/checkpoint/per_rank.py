"""State that each rank has for itself, and what becomes of it when another number of ranks goes on.

A tensor or a number in the state is the same on all ranks, or a shard; a data loader's position and a random generator are
neither. Saved like the rest, one rank's would silently stand for all. So they are marked, and the mark (`per_rank`) says the
rule.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Rule = Literal["refuse", "first", "split"]


@dataclass(slots=True)
class PerRank:
    """A value of this rank, or an object with `state_dict` and `load_state_dict`. After a load, `value` is what was loaded."""

    value: Any
    other_world: Rule = "refuse"

    def __post_init__(self) -> None:
        if self.other_world not in get_args(Rule):
            raise ValueError(f"other_world is {self.other_world!r}; allowed are {', '.join(get_args(Rule))}")


def per_rank(value: Any, other_world: Rule = "refuse") -> PerRank:
    """Mark a part of the state as this rank's own. `other_world` says what becomes of it when another number of ranks loads it.

        ftrain.per_rank(loader)                          "refuse": only the same number of ranks can load it
        ftrain.per_rank(value, other_world="first")      every rank gets that of rank 0
        ftrain.per_rank(samples, other_world="split")    a list: all ranks' lists one after the other, dealt out in equal runs

    Returns a PerRank; its `value` is what was given, and after a load what was loaded. Raises ValueError for another rule.
    """
    return PerRank(value, other_world)


def dealt(lists: Sequence[list[Any]], rank: int, world: int) -> list[Any]:
    """This rank's equal run of all lists, one after the other; the first ranks get one more where it does not come out even."""
    whole = [item for each in lists for item in each]
    size, more = divmod(len(whole), world)
    start = rank * size + min(rank, more)
    return whole[start : start + size + (rank < more)]


class RandomState:
    """The random generators of this process: Python's, torch's of CPU and of the current GPU, and NumPy's if it is in use.

    Wrap it: `state["random"] = ftrain.per_rank(ftrain.RandomState(), other_world="first")`.
    """

    def state_dict(self) -> dict[str, Any]:
        """All of them, now."""
        held: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            held["cuda"] = torch.cuda.get_rng_state()
        if "numpy" in sys.modules:
            import numpy as np

            held["numpy"] = np.random.get_state()
        return held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        """Set those that were saved."""
        random.setstate(held["python"])
        torch.set_rng_state(held["torch"])
        if "cuda" in held and torch.cuda.is_available():
            torch.cuda.set_rng_state(held["cuda"])
        if "numpy" in held:
            import numpy as np

            np.random.set_state(held["numpy"])
