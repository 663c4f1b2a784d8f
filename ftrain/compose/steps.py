"""What a start and a step of a run look like in the ledger."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from ftrain.checkpoint.messages import StepDone
from ftrain.compose.args import Launch, record_once
from recovery.events import CheckpointPassedOver, ConfigChanged, Evaluated, Event, StepFinished


def step_events(done: StepDone, attempt: int) -> list[Event]:
    """The update, and the held-out loss if it was measured after it."""
    step = StepFinished(
        t=done.t_end,
        attempt=attempt,
        step=done.step,
        t_begin=done.t_begin,
        t_end=done.t_end,
        blocked_s=done.blocked_s,
        evaluate_s=done.evaluate_s,
        loss=finite(done.loss),
        grad_norm=finite(done.grad_norm),
        tokens=done.tokens,
        sequences=done.sequences,
        lr=done.lr,
        applied=done.applied,
    )
    if done.eval_loss is None or not math.isfinite(done.eval_loss):
        return [step]
    return [step, Evaluated(t=done.t_end, attempt=attempt, step=done.step, loss=done.eval_loss)]


def config_changes(folder: str, launch: Launch) -> list[Event]:
    """What a launch changed, the first time that its changes are seen."""
    changes = tuple(launch.changes) if record_once(folder, launch.changes) else ()
    return [ConfigChanged(t=time.time(), changes=changes)] if changes else []


def passed_over(found: Iterable[tuple[int, str]], attempt: int = -1) -> list[Event]:
    """Checkpoints that were not used, and why."""
    now = time.time()
    return [CheckpointPassedOver(t=now, attempt=attempt, step=step, reason=reason) for step, reason in found]


def finite(value: float) -> float | None:
    """The value, or None if JSON has no word for it."""
    return value if math.isfinite(value) else None


def step_status(last: StepDone | None) -> dict[str, Any]:
    """The newest step, for `ftrain status`; None for everything before the first."""
    return {
        "step": last.step if last else None,
        "loss": finite(last.loss) if last else None,
        "lr": last.lr if last else None,
        "tokens_per_step": last.tokens if last else None,
    }
