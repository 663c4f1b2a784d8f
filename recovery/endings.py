"""How a run ends, and which exit code says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recovery.codes import ExitCode
from recovery.events import Outcome, Verdict
from recovery.policy import Decision

CODE_OF_CLASS = {
    "numeric_divergence": ExitCode.NUMERICS,
    "silent_corruption": ExitCode.NUMERICS,
    "config_error": ExitCode.CONFIG,
    "dependency_error": ExitCode.CONFIG,
    "checkpoint_corrupt": ExitCode.DAMAGED,
    "checkpoint_mismatch": ExitCode.DAMAGED,
    "disk_full": ExitCode.STORAGE,
    "filesystem": ExitCode.STORAGE,
    "object_store_auth": ExitCode.STORAGE,
    "object_store_missing": ExitCode.STORAGE,
    "object_store_network": ExitCode.STORAGE,
    "object_store_throttle": ExitCode.STORAGE,
}
ONLY_NODE = "this is the only node"
"""Why a place that is to be left out stays, where nothing more is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run for this supervisor."""

    code: ExitCode
    outcome: Outcome
    reason: str = ""


def ending_of(
    decision: Decision, verdict: Verdict, *, stopping: bool, num_nodes: int = 1, kept: str = ONLY_NODE
) -> Ending | None:
    """What a decision means for the run: its end, or None if another attempt is to be made.

    `kept`: why the place that is to be left out was not.
    """
    if stopping:
        reason = f"stopped while handling an interruption: {decision.reason}"
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=reason)
    match decision.action:
        case "finish":
            return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=decision.reason)
        case "stop_for_human":
            given_up = decision.given_up or verdict.class_ not in CODE_OF_CLASS
            code = CODE_OF_CLASS.get(verdict.class_, ExitCode.GIVEN_UP)
            return Ending(code=code, outcome="given_up" if given_up else "failed", reason=decision.reason)
        case "restart_exclude_node" if num_nodes == 1:
            said = decision.reason if kept in decision.reason else f"{decision.reason}; {kept}"
            reason = f"{said}, so the run must go on elsewhere"
            return Ending(code=ExitCode.RETRY_ELSEWHERE, outcome="failed", reason=reason)
    return None


def unsaved(ending: Ending) -> Ending:
    """The same end, when the newest state did not reach storage in time: 75 would promise that it had."""
    if ending.code is not ExitCode.STOPPED:
        return ending
    return replace(ending, code=ExitCode.RETRY_SAME, reason=f"{ending.reason}; the newest state did not reach storage")
