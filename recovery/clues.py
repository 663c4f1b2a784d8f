"""The agent gathers evidence of an interruption on its node, without ever waiting for it.

Sources may hang (a log on a dead file system), so they are asked from threads under one deadline, and the answer comes back
to the agent's loop when it is there. What is asked: exit statuses and their order, which deaths were our own doing, the last
lines of each rank, uncaught exceptions, OOM counters of the cgroups, full or read-only file systems, the kernel's log.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from recovery import paths
from recovery.crew import Crew
from recovery.evidence import (
    Evidence,
    Finding,
    Source,
    error_files,
    filesystem_state,
    gather,
    kernel_and_kills,
    log_tails,
)
from recovery.loop import Loop
from recovery.messages import CollectEvidence, EvidenceCollected
from recovery.procfs import activity, samples

LIMIT_S = 0.8
STACKS_S = 0.3
UNBORN_BYTES = 16 * 1024
LOG_BYTES = 192 * 1024  # of all ranks together: reading them takes time, and a restart waits for the verdict
LEAST_BYTES = 8 * 1024


class Clues:
    """Collector of one agent."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        """Nothing is being collected."""
        self._loop = loop
        self._folder = folder

    def collect(self, request: CollectEvidence, crew: Crew | None, answer: Callable[[EvidenceCollected], None]) -> None:
        """Gather in the background and answer from the loop."""
        if crew is None:
            answer(EvidenceCollected(id=request.id, evidence=Evidence()))
            return
        if request.dump_stacks:  # into each rank's own log, which is read a moment later
            pids = {rank: worker.pid for rank, worker in crew.workers.items() if not worker.ended and worker.pid}
            before = samples(pids)
            crew.signal(signal.SIGUSR1, "stack dump")
            self._loop.after(STACKS_S, lambda: self._begin(request, crew, answer, activity(pids, before, STACKS_S)))
        else:
            self._begin(request, crew, answer)

    def _begin(
        self, request: CollectEvidence, crew: Crew, answer: Callable[[EvidenceCollected], None], seen: tuple[str, ...] = ()
    ) -> None:
        facts, sources = _facts(crew), self._sources(crew)

        def work() -> None:
            finding = gather(sources, limit_s=LIMIT_S)
            host = seen + finding.scheduler
            evidence = replace(facts, log=finding.log, kernel=finding.kernel, scheduler=host, notes=finding.notes)
            self._loop.call_soon(lambda: answer(EvidenceCollected(id=request.id, evidence=evidence)))

        threading.Thread(target=work, name="evidence", daemon=True).start()

    def _sources(self, crew: Crew) -> dict[str, Source]:
        ranks = [*crew.order, *(rank for rank in crew.workers if rank not in crew.order)]
        logs = {rank: paths.rank_log(self._folder, crew.attempt, rank) for rank in ranks}
        unborn = {
            rank: paths.process_log(self._folder, "zygote") for rank, it in crew.workers.items() if it.ended and not it.pid
        }
        errors = {rank: paths.error_file(self._folder, crew.attempt, rank) for rank in ranks}
        return {
            "logs": lambda: log_tails(logs, max_bytes=max(LOG_BYTES // max(1, len(logs)), LEAST_BYTES)),
            "zygote's log": lambda: log_tails(dict(list(unborn.items())[:1]), max_bytes=UNBORN_BYTES),
            "error files": lambda: _unsaid(error_files(errors), logs),
            "file systems": lambda: filesystem_state([str(self._folder)]),
            "kernel log": lambda: kernel_and_kills(crew.oom, since_s=crew.began),
        }


def _unsaid(finding: Finding, logs: dict[int, Path]) -> Finding:
    """Exceptions are in the logs too (printed before they are written to the file), unless a log could not be written."""
    missing = [rank for rank, path in logs.items() if not path.exists() or path.stat().st_size == 0]
    return finding if missing else Finding(notes=finding.notes)


def _facts(crew: Crew) -> Evidence:
    """What the agent knows by itself."""
    ended = {rank: worker for rank, worker in crew.workers.items() if worker.ended}
    return Evidence(
        exit={str(rank): worker.status for rank, worker in crew.workers.items()},
        ours=tuple(str(rank) for rank, worker in ended.items() if worker.ours),
        order=tuple(str(rank) for rank in crew.order),
    )
