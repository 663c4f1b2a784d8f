"""A run's recovery in the words of the simulation's assumptions: what `ftrain plan simulate --measured RUN` starts from.

What a small run measured is a lower bound for a large one: more ranks have to meet, and more bytes have to be read. The
planner says so; it is still a better beginning than a guess.
"""

from __future__ import annotations

from ftrain.view.numbers import median
from ftrain.view.record import Recorded


def assumptions(run: Recorded) -> dict[str, float]:
    """Field of `ftrain.plan.simulate.Rules` -> seconds, as far as the run has seen such a thing."""
    report, found = run.report, dict[str, float]()
    unplanned = [row for row in report.interruptions if not row.planned]
    if unplanned:
        found["detect_s"] = report.buckets["detection"] / len(unplanned)
    starts = {
        source: median([row.start_s for row in report.attempts[1:] if row.source == source and row.start_s is not None])
        for source in ("memory", "storage")
    }
    if memory := starts["memory"]:
        found |= {"restart_s": memory.value, "load_memory_s": 0.0}  # the state is there when the ranks are ready
    if storage := starts["storage"]:
        base = found.setdefault("restart_s", storage.value)
        found["load_storage_s"] = max(0.0, storage.value - base)
    if run.snapshots:
        found["stall_s"] = sum(done.record.blocked_s for done in (*run.steps, *run.undone)) / run.snapshots
    if upload := median([saved.seconds for saved in run.checkpoints]):
        found["upload_s"] = upload.value
    return found
