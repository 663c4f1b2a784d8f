"""Where a run is in its data, from what its workers say and its updates read: not what today's config says of one from 0 on."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ftrain.compose.phasing import Phasing, at_boundary, phase_status
from ftrain.config import Config
from ftrain.course import Begun, Cursor, cursor_at
from ftrain.load import load
from recovery.events import Ready, StepFinished

CONFIG = str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml")
T0 = 1_700_000_000.0


def config(*overrides: str) -> Config:
    """8 sequences of 64 tokens an update; phase 1 begins at 50 of those."""
    phases = f"phases=[{{from_tokens = {50 * 8 * 64}, data = {{seq_len = 128}}}}]"
    return load(CONFIG, ("run.steps=100", "batch.global_batch=8", "batch.micro_batch=1", phases, *overrides))


def ready(cursor: Cursor) -> Ready:
    begun = tuple((part.first_step, part.sequences) for part in cursor.begun)
    return Ready(t=T0, attempt=0, step=cursor.step, begun=begun)


def finished(step: int, sequences: int) -> StepFinished:
    return StepFinished(t=T0, attempt=0, step=step, t_begin=T0, t_end=T0 + 1, sequences=sequences)


def test_the_status_after_a_change_of_batch_is_of_what_was_read() -> None:
    """40 updates of 8 sequences, then of 4: 20 are needed for what 10 would have been."""
    now = config("batch.global_batch=4")
    known = Phasing()
    known.recall(now, {"step": 40, "sequences": 320, "begun": [[0, 320]]})
    told = phase_status(now, 0, known.cursor)
    assert (told["phase"], told["tokens_read"], told["next_phase_step"]) == (0, 320 * 64, 60)
    known.stepped(now, 41, 4)
    assert phase_status(now, 0, known.cursor)["tokens_read"] == 324 * 64
    assert not at_boundary(now, 0, cursor_at(now, 59, known.cursor))
    assert at_boundary(now, 0, cursor_at(now, 60, known.cursor))
    assert not at_boundary(now, 0, replace_step(known.cursor, 100)), "its own end is none"


def replace_step(cursor: Cursor, step: int) -> Cursor:
    return Cursor(step, cursor.begun)


def test_the_status_of_a_run_begun_from_another_one_counts_what_that_one_read() -> None:
    """Its 30 updates had 16 sequences each: phase 1 is over after 30 + (400 - 480 < 0), that is, at once."""
    now, known = config(), Phasing()
    known.recall(now, {"step": 30, "sequences": 30 * 16})
    assert known.cursor.begun == (Begun(0, 480), Begun(30, 0))
    assert phase_status(now, 1, known.cursor) == {
        "phase": 1, "phases": 2, "tokens_read": 480 * 64, "seq_len": 128, "next_phase_step": None,
    }  # fmt: skip


def test_a_ledger_is_followed_through_a_roll_back_and_a_boundary() -> None:
    now, known = config("batch.global_batch=4"), Phasing()
    for event in (ready(Cursor(40, (Begun(0, 320),))), finished(41, 4), finished(42, 4), ready(Cursor(40, (Begun(0, 320),)))):
        known.see(now, event)
    assert known.cursor == Cursor(40, (Begun(0, 320),))
    known.see(now, ready(Cursor(60, (Begun(0, 400), Begun(60, 0)))))
    known.see(now, finished(61, 4))
    assert known.cursor == Cursor(61, (Begun(0, 400), Begun(60, 4)))
    assert known.of(59) == 0
    assert known.of(60) == 1


def test_updates_that_nobody_heard_of_were_as_the_config_says() -> None:
    """A coordinator that takes over: the newest commit is of step 40, the ledger goes to 47, the next update heard of is 50."""
    now, known = config("batch.global_batch=4"), Phasing()
    known.recall(now, {"step": 40, "sequences": 320, "begun": [[0, 320]], "skipped": [(3, 4, 16)]})
    known.stepped(now, 47, sequences=0)
    assert known.cursor == Cursor(47, (Begun(0, 348, 16),))
    known.stepped(now, 50, 4)
    assert known.cursor == Cursor(50, (Begun(0, 360, 16),))
    known.stepped(now, 50, 4)
    assert known.cursor.step == 50, "said twice, done once"


def test_a_ledger_that_does_not_tell_is_taken_for_one_of_the_config() -> None:
    now, known = replace(config(), phases=()), Phasing()
    known.see(now, Ready(t=T0, attempt=0, step=10))
    known.see(now, finished(11, 0))
    assert known.cursor == cursor_at(now, 11)
