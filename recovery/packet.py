"""What a person gets when the supervisor stops for one: enough to decide without reading a log.

A stop costs until somebody looks, so the stop must carry everything: what happened and on which evidence, what was tried,
which options there are and what each costs, and the command that goes on. It is data; who delivers it (terminal, file, mail)
draws it.
"""

from __future__ import annotations

from msgspec import Struct

from recovery.events import EvidenceLine, Verdict
from recovery.policy import Decision, History
from recovery.report_text import evidence_texts


class Option(Struct, frozen=True, kw_only=True):
    """Something a person may do, what it costs, and how."""

    what: str
    costs: str
    command: str = ""


class Packet(Struct, frozen=True, kw_only=True):
    """The whole message."""

    headline: str
    cause: str
    reason: str
    evidence: tuple[EvidenceLine, ...]
    tried: tuple[str, ...]
    options: tuple[Option, ...]
    command: str

    def lines(self) -> list[str]:
        """In plain lines."""
        shown = [self.headline, f"  cause     {self.cause}", f"  why stop  {self.reason}"]
        shown += [f"  evidence  {line}" for line in evidence_texts(self.evidence)]
        shown += [f"  tried     {attempt}" for attempt in self.tried]
        for option in self.options:
            how = f": {option.command}" if option.command else ""
            shown.append(f"  option    {option.what} ({option.costs}){how}")
        return [*shown, f"  go on     {self.command}"]


# What usually helps, by class: what to do, and what it costs.
_REMEDIES: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda_oom": (("a smaller micro-batch or a layout with more shards", "slower steps, the same result"),),
    "host_oom": (("fewer loader workers, or a larger memory limit", "slower input, or a restart of the allocation"),),
    "disk_full": (("free space or point the run elsewhere", "nothing is lost: earlier checkpoints are whole"),),
    "filesystem": (("mount or permissions, then go on", "nothing is lost"),),
    "object_store_auth": (("new credentials, then go on", "nothing is lost"),),
    "object_store_missing": (("the right bucket or path, then go on", "nothing is lost"),),
    "config_error": (("correct the configuration", "nothing is lost"),),
    "dependency_error": (("repair the environment", "nothing is lost"),),
    "software_error": (("correct the program", "nothing is lost up to the last checkpoint"),),
    "process_crash": (("another version of the library that crashed", "nothing is lost up to the last checkpoint"),),
    "data_corrupt": (
        ("repair the data", "nothing is lost"),
        ("skip the range, if that is declared allowed", "that data is not seen"),
    ),
    "data_error": (("repair the data", "nothing is lost"),),
    "checkpoint_mismatch": (("the layout or model that wrote the checkpoint", "nothing is lost"),),
    "checkpoint_corrupt": (("an older checkpoint", "the steps since it"),),
    "numeric_divergence": (("an older checkpoint and a lower learning rate", "the steps since it, and another history"),),
}


def packet(
    verdict: Verdict,
    decision: Decision,
    history: History,
    *,
    command: str,
    steps_at_risk: int,
    onset: int | None = None,
    further: tuple[Option, ...] = (),
) -> Packet:
    """The packet of a stop. `command` goes on from where the run stands; `steps_at_risk` would be done again.

    `onset`: since which step results are in doubt, so that the run goes back to before it. `further`: options that only whoever
    knows the run can name.
    """
    rank = "" if verdict.first_failing_rank is None else f", first rank {verdict.first_failing_rank}"
    node = f" on {verdict.node}" if verdict.node else ""
    again, steps = "restart as it is", f"{steps_at_risk} steps"
    if onset is not None:
        again, steps = (
            f"go back to before step {onset} and try again",
            f"the steps since the newest checkpoint before step {onset}",
        )
    cost = f"{steps} done again, and the same failure if nothing changed"
    remedies = [Option(what=what, costs=costs) for what, costs in _REMEDIES.get(verdict.class_, ())]
    return Packet(
        headline=f"the run waits for a person: {verdict.class_} in {verdict.component}{rank}{node}",
        cause=f"{verdict.reason} (confidence {verdict.confidence:.2f})",
        reason=decision.reason,
        evidence=verdict.evidence,
        tried=tuple(f"attempt {past.attempt}: {past.class_}, then {past.action}" for past in history.since_progress()),
        options=(*remedies, *further, Option(what=again, costs=cost, command=command)),
        command=command,
    )
