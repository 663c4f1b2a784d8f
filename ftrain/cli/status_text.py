"""`ftrain status` for a person: a line a question, in the order in which they are asked. Scripts read --json."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ftrain.units import format_count, format_seconds, plural
from recovery.durations import format_duration

SHOWN_RANKS = 32
BUSY = "counted from the first forward of a step to the start of its last backward, not all of its compute"
OUTPUT = "output"  # the phase of a rank of which no more is known than that it writes


def lines(facts: Mapping[str, Any], run_url: str) -> list[str]:
    """What a coordinator answered, as text. Of what it does not tell, and of what is as it should be, nothing is said."""
    rows = [*_progress(facts), *_saved(facts), *_trouble(facts), *_places(facts, run_url)]
    return [*(f"{name:<14}{text}" for name, text in rows), *_ranks(facts.get("workers") or {})]


def _progress(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    run = facts.get("run") or {}
    phase = f"{facts['phase']}, stopping" if facts.get("stopping") else str(facts["phase"])
    ended = facts["attempts"] - 1
    before = f" ({ended} before it)" if ended > 0 else ""
    yield "run", f"{phase}: attempt {facts['attempt']}{before}, {facts.get('layout') or 'layout not told'}"
    of = f" of {run['steps']}" if run.get("steps") else ""
    left = f", ETA {format_duration(run['eta_s'])}" if run.get("eta_s") else ""
    loss = _told(", loss", facts.get("loss"), ".4f") + _told(", held-out loss", facts.get("eval_loss"), ".4f")
    if facts["step"] or not _is_script(facts):  # a script may tell none
        yield "step", f"{facts['step']}{of}{left}{loss}" + _told(", lr", run.get("lr"), ".3g")
    if run.get("step_s"):
        rate = _told(", tokens/s:", run.get("tokens_per_s"), ",.0f")
        yield "speed", f"{format_seconds(run['step_s'])} a step{rate}" + (f"; {run['speed']}" if run.get("speed") else "")
    yield from ((name, run[key]) for name, key in (("a step is", "step_went_to"), ("memory", "memory")) if run.get(key))
    if run.get("phases"):
        then = f"; the next begins after step {run['next_phase_step']}" if run["next_phase_step"] is not None else ""
        yield "phase", f"{run['phase']} of 0 to {run['phases'] - 1}, {format_count(run['tokens_read'])} tokens read{then}"


def _is_script(facts: Mapping[str, Any]) -> bool:
    """Whether it is a supervised command, whose state is its own affair."""
    return "command" in (facts.get("run") or {})


def _told(name: str, value: float | None, how: str) -> str:
    return "" if value is None else f"{name} {value:{how}}"


def _saved(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where the state lies, by tier."""
    run = facts.get("run") or {}
    tiers = {
        "memory": None if _is_script(facts) else facts.get("snapshot_step"),
        "another node's memory": run.get("peer_step"),
        "local disk": run.get("local_step"),
        "storage": facts.get("committed_step"),
        "mirror": run.get("mirror_step"),
    }
    held = [f"step {step} in {tier}" for tier, step in tiers.items() if step is not None]
    if held or not _is_script(facts):
        yield "saved", ", ".join(held) or "nothing yet"


def _trouble(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    run, decision = facts.get("run") or {}, facts.get("last_decision")
    if facts.get("interruptions"):
        yield "interruptions", str(facts["interruptions"])
    if decision:
        attempt = decision.get("attempt")
        yield "decided", f"{'' if attempt is None else f'after attempt {attempt}: '}{decision['action']}: {decision['reason']}"
    if facts.get("slowest"):
        yield "slowest", f"{facts['slowest']}: {BUSY}"
    if run.get("collect_error"):
        yield "clean-up", f"failed: {run['collect_error']}"
    if run.get("storage_retries"):
        yield "storage", f"{plural(run['storage_retries'], 'request')} tried again"
    if run.get("create_is_atomic") is False:
        yield "storage", "create-if-absent may have two winners there: never start two coordinators"


def _places(facts: Mapping[str, Any], run_url: str) -> Iterator[tuple[str, str]]:
    for node, found in (facts.get("nodes") or {}).items():
        ranks = ", ".join(map(str, found["ranks"])) or "none"
        yield "node", f"{node}: ranks {ranks}{'' if found['connected'] else '; not connected'}"
    if facts.get("places"):
        yield "places", ", ".join(facts["places"])
    if facts.get("taken_away"):
        yield "taken away", f"{facts['taken_away']} (back with: ftrain admit {shlex.quote(run_url)} PLACE)"


def _ranks(workers: Mapping[str, Any]) -> Iterator[str]:
    """What each rank does; of many, those that are behind or gone, and how many do as the others."""
    behind = {rank: it for rank, it in workers.items() if it.get("ended") or it.get("age_s", 0.0) > 5}
    shown = workers if len(workers) <= SHOWN_RANKS else behind
    for rank, it in shown.items():
        yield f"{f'rank {rank}':<14}{_rank(it)}"
    if len(shown) < len(workers):
        yield f"{'other ranks':<14}{len(workers) - len(shown)} that told of themselves in the last 5 s"


def _rank(it: Mapping[str, Any]) -> str:
    if it.get("ended"):
        from recovery.exits import exit_text

        return f"pid {it['pid']} ended: {exit_text(it['status'])}"
    if "phase" not in it:
        return f"pid {it['pid']}, has told nothing yet" if it["pid"] else "is being started"
    if not it["step"] and it["phase"] == OUTPUT:
        return f"pid {it['pid']}, wrote something {format_duration(it['age_s'])} ago"
    return f"pid {it['pid']}, step {it['step']}, in {it['phase']}, {format_duration(it['age_s'])} ago"
