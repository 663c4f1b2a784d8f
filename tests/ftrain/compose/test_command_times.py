"""When steps were finished that a script's log says, where several lines are found in one look."""

from __future__ import annotations

from pathlib import Path

from recovery.events import Ready, StepFinished
from tests.ftrain.compose.test_command_found import Desk


def look(desk: Desk, log: Path, told: str, now: float) -> list[StepFinished | Ready]:
    """The supervisor reads what the script has written since the last time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(told)
    found = desk.delegate._read_logs(now)
    return [event for event in found if isinstance(event, StepFinished | Ready)]


def test_lines_of_one_look_share_the_time_since_the_look_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path, patterns=[r"step (\d+)"])
    desk.begin(0)
    log = desk.delegate._log(0)
    start = desk.delegate._looked
    assert look(desk, log, "imports\n", start + 1.0) == []
    ready, *steps = look(desk, log, "step 10\nstep 20\nstep 40\n", start + 5.0)
    assert isinstance(ready, Ready)
    assert (ready.step, ready.assumed) == (9, True)
    ends = [event.t_end - start for event in steps if isinstance(event, StepFinished)]
    assert ends[-1] == 5.0
    assert all(abs(end - (1 + 4 * (step - 9) / 31)) < 1e-3 for end, step in zip(ends, (10, 20, 40), strict=True))
    (later,) = look(desk, log, "step 50\n", start + 7.0)
    assert isinstance(later, StepFinished)
    assert (later.t_begin, later.t_end) == (start + 5.0, start + 7.0)
