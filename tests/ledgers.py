"""Ledgers of runs that did not happen: events by the second, for tests of what is said about a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftrain.config import Config
from ftrain.load import parse
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    Evaluated,
    Event,
    InterruptionClassified,
    LayoutChosen,
    ProcessDied,
    Ready,
    RunEnded,
    RunStarted,
    StepRecord,
    StepsFinished,
    Verdict,
    encode_line,
)

BASE = """
[run]
url = "runs/a"
steps = 100
[model]
layers = 8
hidden = 64
heads = 4
ffn = 128
vocab = 512
[data]
sources = [{ path = "stdlib" }]
seq_len = 64
[batch]
global_batch = 16
micro_batch = 1
[parallel]
ranks = 4
[optimizer]
lr = 1e-3
"""

T0 = 1_700_000_000.0


def config(*overrides: str) -> Config:
    """A small legal config."""
    return parse(BASE, overrides)


def fading(step: int) -> float:
    """A loss that falls."""
    return 2.0 + 3.0 / step


class Story:
    """A ledger under construction: time only moves on as told."""

    def __init__(self, config: Config, *, layout: str = "", ranks: int = 0, origin: str = "") -> None:
        self.config, self.t, self.attempt = config, T0, -1
        self.layout = layout or f"tp{config.parallel.tp} x pp{config.parallel.pp}"
        self.ranks = ranks or config.parallel.ranks
        self.step = 0
        plain = msgspec.to_builtins(config)
        self.events: list[Event] = [RunStarted(t=self.t, run_id="test", config=plain, layout=self.layout, origin=origin)]

    def launch(self, *overrides: str) -> Story:
        """Somebody starts the run once more, with these values."""
        self.config = config(*overrides)
        self.layout = f"tp{self.config.parallel.tp} x pp{self.config.parallel.pp}"
        self.ranks, plain = self.config.parallel.ranks, msgspec.to_builtins(self.config)
        self._add(RunStarted(t=self.t, run_id="test", config=plain, layout=self.layout))
        return self

    def start(
        self,
        *,
        at: int | None = None,
        start_s: float = 5.0,
        layout: str = "",
        ranks: int = 0,
        source: Any = "",
        ready: bool = True,
    ) -> Story:
        """A new attempt, ready after `start_s` (or never) with the state of step `at`; another `layout` is decided first."""
        self.attempt += 1
        self.step = self.step if at is None else at
        if layout and layout != self.layout:
            change = {"path": "parallel.ranks", "old": self.ranks, "new": ranks}
            self._add(LayoutChosen(t=self.t, ranks=ranks, layout=layout, was=self.layout, reason="told to", changes=(change,)))
        self.layout, self.ranks = layout or self.layout, ranks or self.ranks
        source = source or ("memory" if self.attempt else "init")
        self._add(AttemptStarted(t=self.t, attempt=self.attempt, layout=self.layout, ranks=self.ranks, source=source,
                                 restored_step=self.step))  # fmt: skip
        self.t += start_s
        if ready:
            self._add(Ready(t=self.t, attempt=self.attempt, step=self.step))
        return self

    def steps(
        self,
        count: int,
        *,
        seconds: float | Sequence[float] = 1.0,
        loss: Callable[[int], float] = fading,
        tokens: int = 1024,
        blocked_s: float = 0.0,
    ) -> Story:
        """So many finished steps."""
        times = [seconds] * count if isinstance(seconds, float) else [seconds[n % len(seconds)] for n in range(count)]
        records = []
        for each in times:
            self.step += 1
            records.append(
                StepRecord(step=self.step, t_begin=self.t, t_end=self.t + each + blocked_s, loss=loss(self.step), grad_norm=1.0,
                           tokens=tokens, sequences=tokens // 64, lr=1e-3, blocked_s=blocked_s)
            )  # fmt: skip
            self.t += each + blocked_s
        self._add(StepsFinished(t=self.t, attempt=self.attempt, steps=tuple(records)))
        return self

    def evaluate(self, loss: float) -> Story:
        """A held-out loss at the step reached."""
        self._add(Evaluated(t=self.t, attempt=self.attempt, step=self.step, loss=loss))
        return self

    def die(self, *, class_: str = "gpu", component: str = "gpu", rank: int = 1, planned: bool = False, **more: Any) -> Story:
        """A rank dies, is classified, and a restart is decided; one second each."""
        self._add(ProcessDied(t=self.t, attempt=self.attempt, kind="worker", pid=7, status=-9, rank=rank))
        self.t += 1
        verdict = Verdict(
            class_=class_, component=component, planned=planned, first_failing_rank=rank, **{"reason": "it died", **more}
        )
        self._add(InterruptionClassified(t=self.t, attempt=self.attempt, verdict_id=f"v{self.attempt}", verdict=verdict))
        self._add(Decided(t=self.t, attempt=self.attempt, action="restart", reason="first time", verdict_id=f"v{self.attempt}"))
        self.t += 1
        self._add(AttemptEnded(t=self.t, attempt=self.attempt, step=self.step))
        return self

    def end(self, outcome: Any = "finished") -> Story:
        """The coordinator leaves."""
        self._add(RunEnded(t=self.t, outcome=outcome, step=self.step))
        return self

    def write(self, run: Path) -> Path:
        """Put the ledger where a run of that folder has it; returns the segment, which may be appended to."""
        folder = run / "local" / "ledger"
        folder.mkdir(parents=True)
        segment = folder / "e0000-000000.jsonl"
        segment.write_bytes(b"".join(encode_line(event) for event in self.events))
        return segment

    def _add(self, event: Event) -> None:
        self.events.append(event)
