"""The training loop, the one you would show a visitor.

A step is: one update; now and then the held-out loss; now and then a snapshot. What could make two ranks disagree
(has somebody asked to stop? is a slot free?) rides on the update's own all-reduce, so every decision below is the
same on all ranks without another message.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ftrain.checkpoint import when
from ftrain.checkpoint.messages import Doubt, Final, SaveSkipped, StepDone, WorkerMessage
from ftrain.checkpoint.saver import Saver
from ftrain.config import Config
from ftrain.parallel.arrays import StatePiece
from ftrain.parallel.clock import CHECKPOINT, EVALUATE
from ftrain.train.numerics import NORMS, Bounds, NumericsError, Trouble, Watch
from ftrain.train.profile import NoWindow, Window
from ftrain.train.replay import doubt
from ftrain.train.step import StepResult
from ftrain.train.times import NoTimes, StepTimer
from ftrain.train.votes import Flags


class Trainee(Protocol):
    """What the loop needs of an engine."""

    shares: torch.Tensor
    passed_over: int

    def batch_at(self, first_sequence: int) -> int: ...

    def train_step(self, *, step: int, first_sequence: int, flags: Flags, norm_limit: float = ...) -> StepResult: ...

    def differing(self, before: torch.Tensor) -> tuple[int, ...]: ...

    def set_step(self, step: int) -> None: ...

    def evaluate(self) -> float: ...

    def pieces(self) -> Sequence[StatePiece]: ...


class Asked(Protocol):
    """Requests from outside: stop after this step; save once more (a counter that grows)."""

    @property
    def stop(self) -> bool: ...

    @property
    def save(self) -> int: ...


@dataclass(kw_only=True)
class Progress:
    """How far the run is: what a checkpoint remembers besides arrays. `sequences` is the data cursor."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    eval_loss: float | None = None
    eval_step: int | None = None
    begun: list[tuple[int, int]] = field(default_factory=list)  # of each phase: updates before it, sequences read in it
    norms: list[float] = field(default_factory=list)  # the newest gradient norms that were applied
    losses: list[float] = field(default_factory=list)  # usual ones, by which the next are judged
    skipped: list[tuple[int, int, int]] = field(default_factory=list)  # passed over: first and last update, sequences
    constant: dict[str, Any] = field(default_factory=dict)  # config, fingerprint, layout, numeric environment

    def __post_init__(self) -> None:
        self.begun = self.begun or [(0, self.sequences)]

    @property
    def first_sequence(self) -> int:
        """Of the next update, counted in its phase."""
        return self.begun[-1][1]

    def read(self, sequences: int) -> None:
        """One more update has read so many."""
        first, before = self.begun[-1]
        self.begun[-1] = (first, before + sequences)
        self.sequences += sequences

    def record(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "step": self.step,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "begun": [list(part) for part in self.begun],
            "eval_loss": self.eval_loss,
            "eval_step": self.eval_step,
            "norms": self.norms,
            "losses": self.losses,
            "skipped": self.skipped,
            **self.constant,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], constant: dict[str, Any]) -> Progress:
        """Back from a checkpoint; what is constant comes from the run that goes on."""
        names = ("step", "sequences", "tokens", "eval_loss", "eval_step", "norms", "losses")
        known = {key: record[key] for key in names if key in record}
        skipped = [(first, last, sequences) for first, last, sequences in record.get("skipped", ())]
        return cls(**known, skipped=skipped, constant=constant)


@dataclass(kw_only=True)
class Loop:
    """One worker's loop over the steps. Only rank 0 reports."""

    config: Config
    engine: Trainee
    saver: Saver
    asked: Asked
    report: Callable[[WorkerMessage], None]
    beat: Callable[[str, int], None]
    reached: Callable[[str, int], None]
    rank: int
    times: StepTimer = field(default_factory=NoTimes)
    window: Window = field(default_factory=NoWindow)  # of a profiler
    saves_handled: int = 0
    stored_step: int = 0  # newest step that is in storage already
    skips: Sequence[tuple[int, int]] = ()  # first and last update of each range whose data are passed over
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        recovery = self.config.recovery
        names = ("nonfinite_steps", "spike_z", "spike_steps", "replay_norm")
        bounds = Bounds(**{name: getattr(recovery, name) for name in names})
        self.watch = Watch(bounds=bounds)
        self._last = self.config.run.steps
        self._kept = -1  # step of the newest snapshot

    def end_after(self, step: int) -> None:
        """Another phase begins there: leave then, with the state on its way to storage."""
        self._last = min(step, self.config.run.steps)

    def run(self, progress: Progress) -> Final:
        """Train from `progress` to the last step (of the phase), or until asked to stop; on return the final state is on its
        way to storage.
        """
        self.watch.norms.extend(progress.norms)
        self.watch.losses.extend(progress.losses)
        if progress.step >= max(self.config.run.steps, self.stored_step + 1):
            self._save_now(progress, upload=True)  # the last step was reached by an attempt that could not store it
        while progress.step < self._last:
            stop = self._step(progress)
            self.reached("step", progress.step)
            if stop:
                break
        self.window.close()
        self.times.finish()
        self.saver.finish()
        return Final(step=progress.step, outcome=self._outcome(progress.step))

    def _outcome(self, step: int) -> str:
        if step >= self.config.run.steps:
            return "finished"
        return "phase" if step >= self._last else "stopped"

    def _step(self, progress: Progress) -> bool:
        self.window.before(progress.step + 1)
        begin = time.time()
        self.times.begin()
        result = self._update(progress)
        progress.step = result.step
        progress.norms = [*progress.norms, result.grad_norm][-NORMS:] if result.applied else progress.norms
        trouble = self.watch.see(step=result.step, loss=result.loss, applied=result.applied, norm=result.grad_norm)
        progress.losses = list(self.watch.losses)
        progress.read(result.sequences)
        progress.tokens += result.tokens
        with self.times.during(EVALUATE):
            evaluate_s = self._evaluate(progress)
        if result.flags.save:
            self.saves_handled = self.asked.save  # also what was asked since: the save below is newer than the request
        with self.times.during(CHECKPOINT):
            blocked_s = self.saver.take_waited() + self._save(progress, result.flags)
        self.times.end(result.step, kept=self._kept == result.step)
        if self.rank == 0:
            self.report(_step_done(result, progress, begin=begin, evaluate_s=evaluate_s, blocked_s=blocked_s))
        self.window.after(result.step)
        self._judge(trouble)
        return bool(result.flags.stop)

    def _update(self, progress: Progress) -> StepResult:
        """One update; if it was skipped, the state is the one before it, so it is repeated: a difference is the machine's."""
        self.beat("step", progress.step + 1)
        flags = self._flags(progress.step + 1)
        self._pass_over(progress)
        limit, at = self.watch.norm_limit, {"step": progress.step + 1, "first_sequence": progress.first_sequence}
        result = self.engine.train_step(**at, flags=flags, norm_limit=limit)
        suspect = math.isfinite(result.grad_norm) and result.grad_norm > limit
        if result.applied or not (self.config.recovery.nonfinite_steps or suspect):
            return result
        before = self.engine.shares
        self.engine.set_step(progress.step)
        again = self.engine.train_step(**at, flags=flags)
        told = doubt(result, again, self.engine.differing(before))
        if told is not None and self.rank == 0:
            self.report(told)
        return again

    def _pass_over(self, progress: Progress) -> None:
        """Before the first update of a range move on in the data, by what its updates would have read."""
        update, behind = progress.step + 1, {first for first, _, _ in progress.skipped}
        for first, last in self.skips:
            if first == update and update not in behind:
                progress.skipped.append((first, last, (last - first + 1) * self.engine.batch_at(progress.first_sequence)))
        began = progress.begun[-1][0]  # what earlier phases passed over, the reading of this one knows
        self.engine.passed_over = sum(sequences for first, _, sequences in progress.skipped if first > began)

    def _judge(self, trouble: Trouble | None) -> None:
        if trouble is None:
            return
        if self.rank == 0:
            self.report(Doubt(step=trouble.step, reason=trouble.reason, onset=trouble.onset))
        raise NumericsError(trouble.reason)

    def _flags(self, step: int) -> Flags:
        """What this rank wishes for `step`; how busy it is, only if that matters: to find out costs more than to ask."""
        regular = when.is_regular(self.config.checkpoint, step)
        return Flags(
            stop=int(self.asked.stop),
            save=int(self.asked.save > self.saves_handled),
            no_slot=int(regular and not self.saver.has_free_slot()),
            uploading=int(regular and self.saver.is_uploading()),
        )

    def _evaluate(self, progress: Progress) -> float:
        """Seconds that it took: exactly 0 where there is none, so that deadlines are learned from real ones."""
        if not when.is_due(progress.step, self.config.evaluate.every_steps):
            return 0.0
        begin = time.monotonic()
        self.beat("evaluate", progress.step)
        progress.eval_loss = self.engine.evaluate()
        progress.eval_step = progress.step
        return time.monotonic() - begin

    def _save(self, progress: Progress, flags: Flags) -> float:
        """Seconds that it took; exactly 0, too, where nothing was saved."""
        decision = when.decide(
            self.config.checkpoint,
            when.StepFacts(
                step=progress.step,
                last_step=self._last,
                stop=bool(flags.stop),
                save=bool(flags.save),
                no_slot=bool(flags.no_slot),
                uploading=bool(flags.uploading),
            ),
        )
        if (decision.skipped or decision.failed) and self.rank == 0:
            self.report(
                SaveSkipped(step=progress.step, reason=decision.skipped or decision.failed, failed=bool(decision.failed))
            )
        if not decision.snapshot:
            return 0.0
        begin = time.monotonic()
        self._save_now(progress, upload=decision.upload)
        return time.monotonic() - begin

    def _save_now(self, progress: Progress, *, upload: bool) -> None:
        self.beat("checkpoint", progress.step)
        self.saver.wait_until_free(upload=upload, beat=lambda: self.beat("checkpoint", progress.step))
        self.saver.save(
            [piece for piece in self.engine.pieces() if piece.owner],
            step=progress.step,
            upload=upload,
            progress={**progress.record(), "bad_since": self.watch.bad_since(progress.step), "taken_s": time.time()},
        )
        self._kept = progress.step


def _step_done(result: StepResult, progress: Progress, *, begin: float, evaluate_s: float, blocked_s: float) -> StepDone:
    return StepDone(
        step=result.step,
        t_begin=begin,
        t_end=time.time(),
        blocked_s=blocked_s,
        evaluate_s=evaluate_s,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens=result.tokens,
        sequences=result.sequences,
        applied=result.applied,
        eval_loss=progress.eval_loss if progress.eval_step == result.step else None,
    )
