"""The report as Prometheus reads it: text exposition format 0.0.4, written by hand because it is twenty lines.

Names follow the conventions of that system: base units, `_total` for what only grows, labels for what is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recovery.report import Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(report: Report) -> str:
    """All metrics of a run."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    run = {"run": report.run_id}
    yield from _metric("ftrain_step", "gauge", "Last finished step.", [(run, report.step)])
    yield from _metric("ftrain_effective_time_ratio", "gauge", report.formula, [(run, report.effective_time)])
    yield from _metric("ftrain_tokens_total", "counter", "Tokens of all finished steps.", [(run, report.tokens)])
    yield from _metric("ftrain_steps_finished_total", "counter", "Finished steps.", [(run, report.steps_finished)])
    yield from _metric("ftrain_steps_lost_total", "counter", "Steps that a roll-back undid.", [(run, report.steps_lost)])
    yield from _metric("ftrain_attempts_total", "counter", "Attempts started.", [(run, len(report.attempts))])
    times = [({**run, "bucket": name}, seconds) for name, seconds in report.buckets.items()]
    yield from _metric("ftrain_time_seconds_total", "counter", "Time since the first launch, by bucket.", times)
    causes = [
        ({**run, "component": row.component, "class": row.class_, "planned": str(row.planned).lower()}, row.count)
        for row in report.causes
    ]
    yield from _metric("ftrain_interruptions_total", "counter", "Interruptions, by cause.", causes)
    committed = report.checkpoints.committed
    yield from _metric("ftrain_checkpoints_committed_total", "counter", "Checkpoints in storage.", [(run, committed)])
    if report.loss is not None:
        yield from _metric("ftrain_loss", "gauge", "Loss of the last finished step.", [(run, report.loss)])


def _metric(name: str, kind: str, about: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{shown}}} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
