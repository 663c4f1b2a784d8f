"""The last state of an attempt: whether its workers came to an end, and whether that end has reached storage or ever will."""

from __future__ import annotations

from collections.abc import Mapping

from ftrain.checkpoint.messages import Final


class LastState:
    """What is known of it; forgotten when the next attempt is planned."""

    def __init__(self) -> None:
        self.final: Final | None = None
        self._failed: dict[int, str] = {}  # steps whose save failed, and why

    def forget(self) -> None:
        """Another attempt begins."""
        self.final = None
        self._failed.clear()

    def failed(self, saves: Mapping[int, str]) -> None:
        """Saves (step -> reason) that will not be tried again."""
        self._failed |= saves

    @property
    def at_end(self) -> bool:
        """Whether the loop did its last step."""
        return self.final is not None and self.final.outcome == "finished"

    def is_stored(self, committed: int | None) -> bool:
        """Whether there is a last state, and storage has it."""
        return self.final is not None and committed is not None and committed >= self.final.step

    def lost(self, committed: int | None) -> str:
        """Why storage will never have it (its save failed, and nobody is left to try again); empty if that is not so."""
        if self.final is None or self.is_stored(committed) or self.final.step not in self._failed:
            return ""
        reason = self._failed[self.final.step]
        return f"the state of step {self.final.step} could not be stored ({reason}); the same command goes on from the newest"
