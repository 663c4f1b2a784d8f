"""How a retry differs from the attempt that failed: what the policy wishes (`recovery.policy.Change`), as a run does it.

The same thing once more finds out nothing. First more is recorded; then the state may be what is wrong, so it is not taken from
memory; then an older checkpoint is tried. What is newer is not thrown away by that: if the older one loads, the run goes on
from it under a new epoch (as after any checkpoint that did not load), and only then do the newer ones not count any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage.catalog import CheckpointInfo

EVIDENCE_ENV = {"TORCH_SHOW_CPP_STACKTRACES": "1", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
"""What more evidence means in a worker; the supervisor takes everybody's stacks besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an attempt begins: the newest step of storage it may load; whether memory and the local disk are tried before."""

    step: int | None
    nearer: bool = True
    evidence: bool = False


def retry(differently: Sequence[str], infos: Callable[[], Iterable[CheckpointInfo]], newest: int | None, *, own: bool) -> Start:
    """The start of an attempt that should differ so. `newest`: the step of storage it would begin with; `own`: of this run.

    Where storage holds nothing, memory is all there is, and it stays.
    """
    evidence = "more_evidence" in differently
    if newest is None or "from_storage" not in differently:
        return Start(step=newest, evidence=evidence)
    step = newest
    if own and "older_checkpoint" in differently:
        step = max((info.step for info in infos() if info.state == "valid" and info.step < newest), default=newest)
    return Start(step=step, nearer=False, evidence=evidence)
