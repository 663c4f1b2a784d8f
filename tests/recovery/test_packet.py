"""What a person gets, and what Prometheus gets."""

from __future__ import annotations

import re

from recovery.events import EvidenceLine, Verdict
from recovery.exposition import exposition
from recovery.packet import packet
from recovery.policy import History, Limits, PastInterruption, decide
from recovery.report import report
from tests.recovery.test_state import crashed_once


def test_a_stop_carries_evidence_options_costs_and_the_command() -> None:
    line = EvidenceLine(where="log", line=3, text="CUDA out of memory")
    verdict = Verdict(
        class_="cuda_oom",
        component="gpu_memory",
        first_failing_rank=2,
        action="stop_for_human",
        confidence=0.9,
        reason="rank 2: CUDA out of memory",
        evidence=(line,),
    )
    past = PastInterruption(class_="unknown", action="restart", best_step=7, attempt=4)
    history = History(interruptions=(past,), best_step=7)
    found = packet(verdict, decide(verdict, history, Limits()), history, command="ftrain run c.toml", steps_at_risk=3)
    text = "\n".join(found.lines())
    for part in ("cuda_oom in gpu_memory, first rank 2", "log:3: CUDA out of memory", "attempt 4: unknown, then restart"):
        assert part in text
    assert "smaller micro-batch" in text
    assert "3 steps done again" in text
    assert found.lines()[-1].endswith("ftrain run c.toml")


def test_exposition_is_well_formed_and_says_what_the_report_says() -> None:
    found = report(crashed_once())
    text = exposition(found)
    sample = re.compile(r'[a-z_]+\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\} [-+0-9.e]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())
    assert 'ftrain_interruptions_total{run="r",component="unknown",class="unknown",planned="false"} 1\n' in text
    assert 'ftrain_time_seconds_total{run="r",bucket="backoff"} 1\n' in text
    total = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("ftrain_time_seconds_total"))
    assert total == found.wall_s


def test_labels_are_escaped() -> None:
    from recovery.exposition import _escaped

    assert _escaped('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
