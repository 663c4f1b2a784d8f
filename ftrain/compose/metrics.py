"""metrics.jsonl: one line per finished step, for plots and other tools. The ledger is the record; this is its
convenient copy.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ftrain.checkpoint.messages import StepDone


class MetricsFile:
    """Append-only; a step that is done again appears again, with its attempt."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / "metrics.jsonl").open("ab")

    def append(self, done: StepDone, *, attempt: int, layout: str) -> None:
        """Write one step."""
        seconds = done.t_end - done.t_begin
        record = {
            "attempt": attempt,
            "layout": layout,
            **msgspec.to_builtins(done),
            "seconds": seconds,
            "tokens_per_s": done.tokens / seconds if seconds > 0 else None,
        }
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
