"""Errors of composing a run."""

from __future__ import annotations


class RefusedError(ValueError):
    """The run may not start like this; each line says why and what to do."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class UnfitError(RefusedError):
    """Nothing is wrong with the run: this machine cannot do it, another one may."""
