"""metrics.jsonl: one line per finished step, for plots and other tools. The ledger is the record; this is its
convenient copy.

What only the ranks know (where the seconds went, their memory, what they compute on) comes a step or two seconds later than
the step's own report, whichever is more, so a line is held back until then, and written without if its ranks did not live to
tell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ftrain.checkpoint.messages import RankMemory, StepDone, StepTimes, Traced
from ftrain.compose.speed import Speed
from ftrain.config import Config
from ftrain.plan.rates import Rates, rate_record, speed_text
from ftrain.units import format_bytes
from recovery.events import Event, StorageNotice
from recovery.files import append_whole

log = logging.getLogger(__name__)

MAX_HELD = 256
"""Lines: of some batches of steps that are measured together (ftrain.train.times)."""
TAILS = (1 << 15, 1 << 20)
"""Bytes of the file's end in which its newest line is looked for: a few lines of few ranks, else those of thousands."""


class MetricsFile:
    """Append-only; a step that is done again appears again, with its attempt."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._fd = os.open(Path(folder) / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._missed = 0  # lines, since one was written
        self._held: list[tuple[StepDone, int, str]] = []
        self._rates: Rates | None = None
        self._basis: tuple[Config, str, str] | None = None
        self._whole: dict[str, Any] = {}

    def append(self, done: StepDone, *, attempt: int, layout: str) -> None:
        """A step was finished."""
        while self._held and (len(self._held) >= MAX_HELD or self._held[0][1] != attempt):
            self._write(None)
        self._held.append((done, attempt, layout))

    def measured(self, message: StepTimes | Traced, config: Config, attempt: int) -> list[Event]:
        """What the ranks measured, which are cut as `config` says."""
        if isinstance(message, StepTimes):
            self.times(message, config)
            return []
        text = f"steps {message.first} to {message.last} traced, one file a rank, for ui.perfetto.dev: {message.folder}"
        return [StorageNotice(t=time.time(), attempt=attempt, topic="profile", text=text, step=message.last)]

    def times(self, times: StepTimes, config: Config) -> None:
        """Where a step's time went."""
        basis = (config, times.dtype, times.device)
        if self._basis != basis:
            self._basis, self._rates = basis, Rates.of(config, dtype=times.dtype, device=times.device)
        while self._held and self._held[0][0].step < times.step:
            self._write(None)
        if self._held and self._held[0][0].step == times.step:
            self._write(times)

    def status(self, speed: Speed) -> dict[str, Any]:
        """The newest whole line, for `ftrain status`: its rates are those of the steps that `speed` is of."""
        return told(speed.paced(self._whole)) if self._whole else {}

    def close(self) -> None:
        """Write what is held back, and close the file."""
        while self._held:
            self._write(None)
        os.close(self._fd)

    def _write(self, times: StepTimes | None) -> None:
        done, attempt, layout = self._held.pop(0)
        seconds = done.t_end - done.t_begin
        record: dict[str, Any] = {
            "attempt": attempt,
            "layout": layout,
            **msgspec.to_builtins(done),
            "seconds": seconds,
            "tokens_per_s": done.tokens / seconds if seconds > 0 else None,
        }
        if times is not None and self._rates is not None:
            rate = self._rates.rate(done.sequences, seconds)
            record |= {**rate_record(rate), **self._rates.terms(), **msgspec.to_builtins(times)}
            self._whole = record
        record.pop("type", None)
        self._keep(msgspec.json.encode(record) + b"\n")

    def _keep(self, line: bytes) -> None:
        # A run does not end for want of its plots: the ledger is the record, and waits in memory for room.
        try:
            self._size = append_whole(self._fd, line, self._size)
        except OSError as error:
            if not self._missed:
                log.error("metrics.jsonl cannot be written, its lines are left out until it can: %s", error)
            self._missed += 1
            return
        if self._missed:
            log.warning("metrics.jsonl is written again; %d lines were left out", self._missed)
            self._missed = 0


def told(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a person is told of a whole line."""
    return {
        "speed": speed_text(record) if record["tflops"] is not None else "",
        "step_went_to": shares_text(record["mean"]),
        "memory": memory_text([RankMemory(*row) for row in record["memory"]]),
    }


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest whole line of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        for tail in TAILS:
            begin = file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):  # torn, or begun before the part that was read
                    record = msgspec.json.decode(line, type=dict[str, Any])
                    if "mean" in record:
                        return record
            if begin == 0:
                break
    return None


def shares_text(mean: dict[str, float]) -> str:
    """Where a step went, largest part first; what took less than half a per cent is left out."""
    total = sum(mean.values())
    shares = sorted(((seconds / total, bucket) for bucket, seconds in mean.items() if total), reverse=True)
    return ", ".join(f"{bucket} {share:.0%}" for share, bucket in shares if share >= 0.005)


def memory_text(memory: list[RankMemory]) -> str:
    """The fullest rank of each pipeline stage."""
    fullest: dict[int, RankMemory] = {}
    for of_rank in memory:
        known = fullest.get(of_rank.stage)
        if known is None or known.peak < of_rank.peak:
            fullest[of_rank.stage] = of_rank
    parts = [f"stage {stage}: {format_bytes(of_rank.peak)} (rank {of_rank.rank})" for stage, of_rank in sorted(fullest.items())]
    return "peak " + ", ".join(parts) if parts else ""
