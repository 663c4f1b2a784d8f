"""Which phase an attempt is in: that of the state it will begin with.

The workers know best: they see the state. They leave with 0 at the boundary of their phase, and also at once if the state they
found belongs to another one (memory was lost just behind a boundary, and storage ends before it); either way they say where
each phase began, and the next attempt is planned for the right one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.checkpoint.messages import Final
from ftrain.config import Config
from ftrain.course import course, cursor_at, phase_after, recalled, tokens_after
from ftrain.load import changes
from ftrain.phases import effective, num_phases
from recovery.events import PhaseBegan


class Phasing:
    """Where the phases of a run began. Used by the delegate's one thread."""

    def __init__(self) -> None:
        self.firsts: tuple[int, ...] = (0,)
        """Of each phase that has begun: the updates before its first one."""
        self.left = False
        """Whether the newest workers have made way for another phase."""
        self.seam: int | None = None
        """The step behind which the newest attempt begins another phase; None: it goes on in the same."""
        self.recorded = 0
        """The phase that the ledger was told of last."""

    def recall(self, config: Config, progress: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.told([part.first_step for part in recalled(config, progress).begun])

    def told(self, firsts: Sequence[int]) -> None:
        """By workers that have the state."""
        self.firsts = tuple(firsts) or self.firsts

    def leave(self, final: Final) -> int:
        """Workers have left for another phase; which one."""
        self.told(final.firsts)
        self.left = True
        return self.of(final.step)

    def of(self, step: int) -> int:
        """The phase of the update that follows `step`."""
        return phase_after(self.firsts, step)


def began(config: Config, before: int, number: int, step: int, layout: str) -> PhaseBegan:
    """What the ledger keeps of a change-over from phase `before`, with all that it changes."""
    told = changes(effective(config, before), effective(config, number))
    return PhaseBegan(
        t=time.time(),
        phase=number,
        phases=num_phases(config),
        step=step,
        from_tokens=config.phases[number - 1].from_tokens if number else 0,
        layout=layout,
        changes=tuple({"path": it.path, "old": it.old, "new": it.new} for it in told),
    )


def at_boundary(config: Config, number: int, step: int) -> bool:
    """Whether a run that has come to `step` in this phase has come to its end, and not to its own."""
    if not config.phases or step >= config.run.steps:
        return False
    return cursor_at(config, step).phase > number


def phase_status(config: Config, number: int, step: int) -> dict[str, Any]:
    """For `ftrain status`; nothing of a run without phases."""
    if not config.phases:
        return {}
    legs = course(config, cursor_at(config, step))
    following = legs[number + 1] if number + 1 < len(legs) else None
    return {
        "phase": number,
        "phases": len(legs),
        "tokens_read": tokens_after(config, step),
        "seq_len": legs[number].config.data.seq_len,
        "next_phase_step": following.first_step if following is not None and following.steps else None,
    }
