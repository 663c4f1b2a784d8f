"""`ftrain status` in words: facts as a coordinator answers them, and no Python in what a person reads."""

from __future__ import annotations

from typing import Any

from ftrain.cli.status_text import lines


def facts(**changes: Any) -> dict[str, Any]:
    """A healthy run of two ranks, resized once."""
    return {
        "phase": "running",
        "epoch": 0,
        "attempt": 1,
        "attempts": 2,
        "layout": "tp1 x cp1 x pp1 x dp2",
        "step": 67,
        "loss": 2.42453154,
        "eval_loss": None,
        "snapshot_step": 60,
        "committed_step": 26,
        "interruptions": 0,
        "last_decision": None,
        "agent_pid": 8308,
        "stopping": False,
        "workers": {
            "0": {"pid": 9, "ended": False, "status": None, "step": 67, "phase": "backward", "age_s": 0.15},
            "1": {"pid": 10, "ended": False, "status": None},
            "2": {"pid": 0, "ended": False, "status": None},
        },
        "slowest": None,
        "places": ["localhost/0", "localhost/1"],
        "taken_away": "",
        "run": {"steps": 3000, "lr": 0.002, "step_s": 0.62, "tokens_per_s": 3178.98, "speed": "", "local_step": None,
                "mirror_step": 20, "collect_error": "", "storage_retries": 0, "create_is_atomic": True},
        **changes,
    }  # fmt: skip


def told(**changes: Any) -> str:
    text = "\n".join(lines(facts(**changes), "runs/my run"))
    assert not any(sign in text for sign in ("{", "}", "None", "True", "False", "'0'")), text
    return text


def test_what_is_left_is_not_told_in_milliseconds() -> None:
    run = facts()["run"]
    assert "67 of 3000, ETA 0.90 s, loss" in told(run={**run, "eta_s": 0.9})
    assert "67 of 3000, ETA 2h 01m, loss" in told(run={**run, "eta_s": 7260.0})


def test_a_healthy_run_in_a_dozen_lines() -> None:
    said = told()
    assert said.splitlines() == [
        "run           running: attempt 1 (1 before it), tp1 x cp1 x pp1 x dp2",
        "step          67 of 3000, loss 2.4245, lr 0.002",
        "speed         620.0 ms a step, tokens/s: 3,179",
        "saved         step 60 in memory, step 26 in storage, step 20 in mirror",
        "places        localhost/0, localhost/1",
        "rank 0        pid 9, step 67, in backward, 0.15 s ago",
        "rank 1        pid 10, has told nothing yet",
        "rank 2        is being started",
    ]


def test_a_decision_names_the_attempt_that_it_followed() -> None:
    said = told(interruptions=1, last_decision={"action": "restart", "reason": "first time", "attempt": 0})
    assert "decided       after attempt 0: restart: first time" in said


def test_a_run_in_phases_says_which_and_when_the_next_begins() -> None:
    run = {"steps": 100, "eta_s": 75.0, "phase": 0, "phases": 2, "tokens_read": 20_480, "next_phase_step": 60}
    said = told(run=run)
    assert "phase         0 of 0 to 1, 20.5K tokens read; the next begins after step 60" in said
    assert "step          67 of 100, ETA 1m 15s, loss 2.4245" in said
    assert "begins after" not in told(run={**run, "phase": 1, "next_phase_step": None})


def test_what_is_wrong_is_told() -> None:
    workers = {"0": {"pid": 9, "ended": True, "status": -9}}
    run = {"collect_error": "disk full", "storage_retries": 3, "create_is_atomic": False}
    said = told(workers=workers, run=run, slowest="rank 1 computes 2.00 times as long", taken_away="localhost/1: drained")
    for text in ("SIGKILL", "disk full", "3 requests", "two winners", "2.00 times"):
        assert text in said
    assert "2.00 times as long: counted from the first forward of a step to the start of its last backward, not all" in said
    assert "localhost/1: drained (back with: ftrain admit 'runs/my run' PLACE)" in said


def test_of_many_ranks_only_those_that_stand_out_are_listed() -> None:
    well = {"pid": 1, "ended": False, "status": None, "step": 5, "phase": "forward", "age_s": 0.1}
    workers = {str(rank): well for rank in range(64)} | {"7": {**well, "age_s": 60.0}}
    said = told(workers=workers)
    assert sum(line.startswith("rank ") for line in said.splitlines()) == 1
    assert "rank 7" in said
    assert "63 that told of themselves" in said


def test_of_a_script_nothing_is_said_that_it_has_not_told() -> None:
    workers = {"0": {"pid": 9, "ended": False, "status": None, "step": 0, "phase": "output", "age_s": 2.0}}
    run = {"command": ["python", "my.py"], "nproc": 1, "logs": "somewhere"}
    said = told(
        run=run, step=0, loss=None, snapshot_step=0, committed_step=None, layout="1 process", places=[], workers=workers
    )
    assert said.splitlines() == [
        "run           running: attempt 1 (1 before it), 1 process",
        "rank 0        pid 9, wrote something 2.0 s ago",
    ]
    assert "saved         step 26 in storage" in told(run=run, snapshot_step=0)  # one that uses ftrain.Checkpointer
