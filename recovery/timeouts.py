"""The time limits of all layers in one place: who must give up before whom.

Each layer knows more than the one above it: a collective's own time-out names the missing peer, the supervisor only sees
silence, the scheduler only sees a job. So the inner one must give up first; where the order is wrong, the one that knows less
ends the run, and the reason is lost. All that is wrong is said at once, with all the values, because changing one limit
usually moves another.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

HEARTBEAT_S = 1.0


class Timeouts(Struct, frozen=True, kw_only=True):
    """Seconds; the names are those of the config."""

    collective_s: float
    hang_s: float
    start_s: float
    stop_s: float
    lease_s: float
    scheduler_s: float | None = None
    """Until the scheduler ends the job, if that is known."""
    warning_s: float | None = None
    """Between the scheduler's warning and its kill, if that is known."""


def misordered(limits: Timeouts) -> list[str]:
    """A sentence for each pair in the wrong order."""
    return list(_wrong(limits))


def explain(limits: Timeouts) -> str:
    """One message that says what is wrong and lists all limits; empty if nothing is."""
    wrong = misordered(limits)
    if not wrong:
        return ""
    known = {name: getattr(limits, name) for name in limits.__struct_fields__}
    values = ", ".join(f"{name} = {value:g}" for name, value in known.items() if value is not None)
    return f"time limits in the wrong order: {'; '.join(wrong)} (heartbeat = {HEARTBEAT_S:g}, {values})"


def _wrong(limits: Timeouts) -> Iterator[str]:
    rules: tuple[tuple[str, float, str, float | None, str], ...] = (
        ("heartbeat", HEARTBEAT_S, "recovery.collective_s", limits.collective_s, "a rank that lives would look hung"),
        (
            "recovery.collective_s",
            limits.collective_s,
            "recovery.hang_s",
            limits.hang_s,
            "the collective's error names the missing peer, the supervisor only sees silence",
        ),
        ("recovery.hang_s", limits.hang_s, "the scheduler's limit", limits.scheduler_s, "a hang would eat the whole job"),
        ("recovery.stop_s", limits.stop_s, "the scheduler's kill", limits.warning_s, "the last save would be killed"),
        ("heartbeat", HEARTBEAT_S, "recovery.lease_s", limits.lease_s, "agents would leave a coordinator that lives"),
        ("recovery.collective_s", limits.collective_s, "recovery.start_s", limits.start_s, "a start would never see its error"),
    )
    for inner, inner_s, outer, outer_s, why in rules:
        if outer_s is not None and inner_s >= outer_s:
            yield f"{inner} ({inner_s:g} s) must be shorter than {outer} ({outer_s:g} s): {why}"
