"""How a run ends, and which exit code says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recovery.codes import ExitCode
from recovery.delegate import Saved
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
            return Ending(
                code=code_for_a_person(verdict.class_), outcome="given_up" if given_up else "failed", reason=decision.reason
            )
        case "restart_exclude_node" if num_nodes == 1:
            said = decision.reason if kept in decision.reason else f"{decision.reason}; {kept}"
            reason = f"{said}, so the run must go on elsewhere"
            return Ending(code=ExitCode.RETRY_ELSEWHERE, outcome="failed", reason=reason)
    return None


def code_for_a_person(class_: str) -> ExitCode:
    """How a run ends that stops for a person, by the class of its verdict."""
    return CODE_OF_CLASS.get(class_, ExitCode.GIVEN_UP)


def keeps_memory(code: ExitCode) -> bool:
    """Whether what only memory holds is stored when a run is left so. Not if that may make no sense, or storage is what fails;
    a run that is done has stored its end.
    """
    return code not in (ExitCode.DONE, ExitCode.NUMERICS, ExitCode.STORAGE)


def as_saved(ending: Ending, saved: Saved, *, drained: bool) -> Ending:
    """The same end, once it is known what storage has. 75 promises that it has whatever there was to save: steps may have to be
    done again, but no state that was whole may be missing.
    """
    if ending.code is not ExitCode.STOPPED:
        return ending
    newest = saved.step or 0
    lost = max(0, saved.done - newest)
    since = f"since step {newest}" if saved.step is not None else "since the beginning"
    again = f"{lost} {'step' if lost == 1 else 'steps'} {since} will be done again" if lost else ""
    whole = drained and saved.held <= newest and (saved.step is not None or not lost)
    if whole:
        return replace(ending, reason=f"{ending.reason}; {again}") if again else ending
    missing = "; ".join(part for part in (ending.reason, "the newest state did not reach storage", again) if part)
    return replace(ending, code=ExitCode.RETRY_SAME, reason=missing)


def unstored(lost: str, waited_s: float, *, hurry: bool) -> Ending:
    """All workers have left well, and their last state is not in storage: why it never will be (`lost`), or nobody knows yet.
    If it was not given its time (`hurry`), nothing can be said against storage.
    """
    if hurry and not lost:
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason="asked again while the last state was on its way")
    reason = lost or f"the last state is not in storage after {waited_s:g} s of waiting"
    return Ending(code=ExitCode.STORAGE, outcome="failed", reason=reason)
