"""A profiler window: torch.profiler's trace of chosen steps (`machine.profile_steps`), one file a rank, for chrome://tracing or
ui.perfetto.dev.

Off, it costs two comparisons a step. While it is on, the steps are slower, and what the metrics say of
them is the profiler's time as well. On CPU the trace also shows the rank's activities (`ftrain.parallel.clock`) as ranges, so
that the buckets of a step can be seen where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ftrain.parallel.clock import Activity, Clock

if TYPE_CHECKING:
    from torch.profiler import profile, record_function


class Window(Protocol):
    """What a training loop tells of its steps."""

    def before(self, step: int) -> None:
        """A step is about to begin."""

    def after(self, step: int) -> None:
        """It has ended."""

    def close(self) -> None:
        """No step follows."""


class NoWindow:
    """Nothing is traced."""

    def before(self, step: int) -> None:
        """Nothing."""

    def after(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Profiler:
    """Traces the steps first to last, both included, of one attempt of one rank."""

    def __init__(
        self,
        steps: tuple[int, int],
        path: Path,
        clock: Clock,
        device: torch.device,
        *,
        written: Callable[[int, int, Path], None],
    ) -> None:
        """`written` is told the steps and the file, once it is there. `path` has one `{}` each for the first and last step."""
        self._first, self._last = steps
        self._path, self._clock, self._device, self._written = path, clock, device, written
        self._running: profile | None = None
        self._began = self._step = 0

    def before(self, step: int) -> None:
        """Start, if the window begins here; a run that is resumed inside it starts at once."""
        if self._running is None and self._first <= step <= self._last:
            self._start(step)

    def after(self, step: int) -> None:
        """Write the file, if the window ends here."""
        self._step = step
        if self._running is not None and step >= self._last:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        if self._running is None:
            return
        running, self._running = self._running, None
        if self._clock.watcher is not None:
            self._clock.watcher("")
            self._clock.watcher = None
        running.stop()
        path = Path(str(self._path).format(self._began, self._step))
        path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))
        self._written(self._began, self._step, path)

    def _start(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        cuda = self._device.type == "cuda"
        self._began = self._step = step
        self._running = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        self._running.start()
        if not cuda:  # there, backward runs on another thread, and ranges must not cross threads
            self._clock.watcher = _Ranges()


class _Ranges:
    """The activity that a rank is in, as a range of the trace."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def __call__(self, activity: Activity) -> None:
        from torch.profiler import record_function

        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if activity:
            name = activity if isinstance(activity, str) else f"{activity.group.axis} collective"
            self._open = record_function(f"ftrain: {name}")
            self._open.__enter__()
