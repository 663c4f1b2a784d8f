"""`ftrain compare` of scripts under the supervisor: what they told is compared, and what they did not is not known."""

from __future__ import annotations

from typing import Any

import msgspec

from ftrain.view.compare import Comparison, compare, lines
from ftrain.view.record import Recorded, recorded
from tests.ledgers import Story, config, fading


def script(name: str = "train.py") -> Story:
    made = Story(config(), layout=f"python {name}", ranks=1)
    plain: dict[str, Any] = {"command": ["python", name], "nproc": 0}
    made.events[0] = msgspec.structs.replace(made.events[0], config=plain)
    return made


def told(made: Story, url: str) -> Recorded:
    return recorded(url, made.events)


def rows(found: Comparison) -> dict[str, tuple[object, object]]:
    return {row.key: (row.a, row.b) for row in found.rows}


def mute(step: int) -> Any:
    """A loss that nobody told."""
    return None


def test_two_scripts_are_compared_by_their_steps() -> None:
    slow, quick = (script(name).start().steps(300, seconds=each, tokens=0) for name, each in (("a.py", 1.0), ("b.py", 0.5)))
    found = compare(told(slow, "runs/a"), told(quick, "runs/b"))
    assert [item.text for item in found.suggestions] == ["not yet a gain: B had 100.0 % more steps/s"]
    assert "how much a step holds is not told: compared is the time of a step" in found.suggestions[0].evidence
    assert rows(found)["tokens_per_update"] == (None, None)
    text = "\n".join(lines(found))
    assert "config: not known of A and B, supervised scripts\n  A is python a.py\n  B is python b.py" in text
    assert "identical, digit by digit, over 300 common steps" in text  # both told their losses
    assert "0 tokens" not in text
    both = (told(slow, "runs/a2"), told(quick, "runs/b2"))
    again = compare(told(slow, "runs/a"), told(quick, "runs/b"), again=[both])
    assert again.suggestions[0].text == "keep B: 100.0 % more steps per second, the least of 2 pairs"


def test_losses_that_no_script_told_are_not_identical() -> None:
    made = script().start().steps(30, tokens=0, loss=mute)
    text = "\n".join(lines(compare(told(made, "runs/a"), told(made, "runs/b"))))
    assert "loss: not known: A and B told none" in text
    assert "identical" not in text
    assert "at step" not in text


def test_a_script_beside_a_run_of_a_config_has_no_zeros_where_nothing_is_known() -> None:
    run = Story(config()).start().steps(30)
    for loss in (fading, mute):
        found = compare(told(run, "runs/a"), told(script().start().steps(30, tokens=0, loss=loss), "runs/b"))
        text = "\n".join(lines(found))
        assert [item.text for item in found.suggestions] == [
            "no speed is compared: how many tokens a step of B holds is not told"
        ]
        assert rows(found)["tokens_per_update"] == (1024, None)
        assert rows(found)["blocked_s"] == (0.0, None)
        assert "config: not known of B, a supervised script\n  B is python train.py" in text
        assert "-100.0 %" not in text
        assert "loss: not " in text


def test_a_script_that_tells_no_step_is_asked_to_tell_them() -> None:
    found = compare(told(script().start().steps(30, tokens=0), "runs/a"), told(script("b.py").start().end(), "runs/b"))
    assert [item.text for item in found.suggestions] == ["no step of B is told: `ftrain.progress(step)` in the script tells it"]
    assert [rows(found)[key] for key in ("steps", "steps_lost")] == [(30, None), (0, None)]
    assert rows(found)["effective_time"][1] is None


def test_of_scripts_with_other_numbers_of_processes_no_rank_is_said_to_be_slower() -> None:
    """What a step of either holds is not told, so its time says nothing of a rank's share."""
    two = script()
    two.ranks = 2
    found = compare(
        told(script().start().steps(30, tokens=0), "runs/a"), told(two.start().steps(30, seconds=0.5, tokens=0), "runs/b")
    )
    assert [item.text for item in found.suggestions] == ["not yet a gain: B had 100.0 % more steps/s"]
