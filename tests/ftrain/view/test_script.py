"""The report of a supervised script: what is known, and "not known" for the rest."""

from __future__ import annotations

from typing import Any

import msgspec

from ftrain.view.html import page
from ftrain.view.record import recorded
from ftrain.view.script import Script, after_stop, killed_after_stop, lines, script
from recovery.events import AttemptEnded, CheckpointCommitted, Event, ProcessDied, RunStarted, StopRequested
from tests.ledgers import Story, config


def story() -> Story:
    made = Story(config(), layout="python train.py", ranks=1)
    plain: dict[str, Any] = {"command": ["python", "my train.py"], "nproc": 0}
    made.events[0] = msgspec.structs.replace(made.events[0], config=plain)
    return made


def told(made: Story) -> tuple[Script, str]:
    run = recorded("runs/script", made.events)
    found = script(run)
    assert found is not None
    return found, "\n".join(lines(found, run))


def test_without_progress_times_and_ends_are_told_and_steps_are_not_known() -> None:
    made = story().start(start_s=10.0).die(class_="host_oom").start(start_s=20.0).end()
    found, text = told(made)
    assert not found.tells_steps
    assert [(row.ran_s, row.processes) for row in found.attempts] == [(12.0, 1), (20.0, 1)]  # two seconds of looking included
    assert found.running_s == 32.0
    assert "command: python 'my train.py'" in text
    assert "not known, for the script tells no step" in text
    assert "ftrain.progress(step)" in text
    assert "host_oom" in text
    for wrong in ("0 steps", "step 0", "storage", "init", "effective time 0", "loss"):
        assert wrong not in text.replace("effective time: not known", ""), wrong


def test_with_progress_there_are_steps_and_effective_time_and_still_no_word_on_the_state() -> None:
    found, text = told(story().start().steps(20).die().start(at=10).steps(15).end())
    assert found.tells_steps
    assert [row.steps for row in found.attempts] == [20, 15]
    assert "effective time" in text
    assert "restored" not in text
    assert "memory" not in text
    assert "the script's own affair" in text


def test_a_run_of_a_config_is_no_script() -> None:
    made = Story(config()).start().steps(3).end()
    assert script(recorded("runs/a", made.events)) is None


def test_what_a_script_does_not_tell_is_left_out_of_report_and_page() -> None:
    made = story().start().steps(3, tokens=0).end()
    text = told(made)[1]
    assert "loss 3.0000" in text
    for wrong in ("tokens", "held-out", "loss -"):
        assert wrong not in text, wrong
    assert "held-out loss</span>" not in page(recorded("runs/script", made.events))
    assert "tokens</span>" not in page(recorded("runs/script", made.events))


def test_an_attempt_that_a_person_ended_says_so_and_one_that_died_before_does_not() -> None:
    made = story().start().steps(3).die(class_="host_oom").start().steps(2)
    stop = StopRequested(t=made.t, by="SIGINT")
    left = ProcessDied(t=made.t, attempt=1, kind="worker", pid=7, status=1, rank=0)
    made.events += [stop, left, AttemptEnded(t=made.t, attempt=1, step=5)]
    found, _ = told(made.end("stopped"))
    assert [row.ended_by for row in found.attempts] == ["host_oom", "user_interrupt"]
    said = [after_stop(event) for event in (stop, left, Event(t=0.0))]
    assert said[0].startswith("stop requested by SIGINT")
    assert "sav" not in said[0]
    assert "died" not in said[1]
    assert said[2] == ""


def test_processes_that_had_to_be_killed_are_counted_and_what_is_saved_is_said() -> None:
    def ended(attempt: int, status: int, *, ours: bool) -> ProcessDied:
        return ProcessDied(t=9.0, attempt=attempt, kind="worker", pid=7, status=status, rank=0, ours=ours)

    before = [RunStarted(t=1.0, run_id="x"), ended(0, -9, ours=True)]  # of a restart, before anybody asked
    asked = [*before, StopRequested(t=5.0, by="ftrain stop")]
    assert killed_after_stop([*asked, ended(1, 0, ours=False), ended(1, -15, ours=True)], 60.0) == ""
    deaf = [*asked, ended(1, -9, ours=True), ended(1, -9, ours=True)]
    said = killed_after_stop(deaf, 60.0)
    assert said.startswith("2 processes had to be killed (SIGKILL), still running 1m 00s after the stop; ")
    assert said.endswith("the script told no checkpoint, so what is saved is not known")
    stored = CheckpointCommitted(t=4.0, attempt=0, step=40, nbytes=1)
    assert killed_after_stop([stored, *deaf], 60.0).endswith("the newest state known is the checkpoint of step 40")
    again = [*asked, StopRequested(t=6.0, by="SIGINT"), ended(1, -9, ours=True)]
    assert "still running when the stop was asked for again" in killed_after_stop(again, 60.0)
    assert killed_after_stop([*deaf, RunStarted(t=20.0, run_id="x")], 60.0) == ""
