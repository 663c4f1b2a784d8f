"""The plan of a drill, and what each strike is said to have led to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.drill import drill as drill_command
from ftrain.cli.drill import show
from ftrain.compose.drill import COURSES, EXIT, Orders, Outcome, drill, variant
from ftrain.compose.errors import RefusedError
from ftrain.compose.proof import first_seam, same_training, seam_proofs
from ftrain.compose.strikes import (
    BY_NAME,
    NONE,
    TABLE_5,
    Strike,
    Struck,
    confusion,
    inside,
    last_checkpoints,
    match,
    plan,
    provable,
)
from ftrain.load import load, to_toml
from recovery.events import AttemptStarted, CheckpointCommitted, Event, Ready, StepFinished
from recovery.owner import HeldError, claim
from recovery.report import InterruptionRow

NAMES = tuple(BY_NAME)
CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"


def test_a_drill_empties_no_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "broken").mkdir()
    with pytest.raises(RefusedError, match=r"no drill has left there: thesis\.tex"):
        drill(load(str(CONFIG)), tmp_path, Orders(minutes=1.0, mean_gap_s=1.0, kinds=NAMES), print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "thesis.tex"]


def test_a_drill_that_goes_on_is_not_swept_away_by_another(tmp_path: Path) -> None:
    local = tmp_path / COURSES[1] / "local"
    local.mkdir(parents=True)
    held = claim(local)
    with pytest.raises(HeldError):
        drill(load(str(CONFIG)), tmp_path, Orders(minutes=1.0, mean_gap_s=1.0, kinds=NAMES), print)
    assert local.exists()
    held.release()


def test_a_drill_leaves_alone_what_the_real_run_writes_to_and_who_watches_it(tmp_path: Path) -> None:
    """Its history would be taken for the real one's in a mirror, and fence what is there."""
    overrides = [
        'checkpoint.mirror_url="/elsewhere/mirror"',
        'checkpoint.local_url="/elsewhere/tier"',
        "checkpoint.local_every_steps=5",
        'machine.shared_dir="/elsewhere/shared"',
        "machine.port=29500",
        'recovery.webhook="http://example.org/told"',
        "recovery.metrics_port=9100",
        "slurm.requeue=true",
        'run.local_dir="/elsewhere/local"',
    ]
    made = variant(load(str(CONFIG), overrides), tmp_path / "broken")
    assert "/elsewhere" not in to_toml(made)
    assert (made.machine.port, made.recovery.webhook, made.recovery.metrics_port, made.slurm.requeue) == (0, "", 0, False)


def test_a_seed_is_a_drill() -> None:
    one, again, other = (plan(NAMES, seed=seed, seconds=600.0, mean_gap_s=5.0, ranks=4) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert all(0 <= strike.rank < 4 and 0 < strike.after_s <= 600.0 for strike in one)
    assert [strike.after_s for strike in one] == sorted(strike.after_s for strike in one)


def test_each_kind_comes_before_any_comes_again() -> None:
    strikes = plan(NAMES, seed=3, seconds=1200.0, mean_gap_s=5.0, ranks=2)
    rounds = [strikes[first : first + len(NAMES)] for first in range(0, len(strikes) - len(NAMES), len(NAMES))]
    assert len(rounds) > 10
    assert all(Counter(strike.kind for strike in turn) == Counter(NAMES) for turn in rounds)


def test_gaps_have_the_mean_that_was_asked_for() -> None:
    strikes = plan(NAMES, seed=4, seconds=50_000.0, mean_gap_s=10.0, ranks=2)
    assert 50_000.0 / len(strikes) == pytest.approx(10.0, rel=0.05)  # 5000 gaps: a standard deviation is 1.4 %


def test_the_shortest_drill_strikes_once() -> None:
    assert len(plan(NAMES, seed=5, seconds=0.1, mean_gap_s=1000.0, ranks=1)) == 1


def row(t: float, class_: str) -> InterruptionRow:
    return InterruptionRow(
        verdict_id=str(t),
        t=t,
        attempt=0,
        class_=class_,
        component="",
        planned=False,
        first_failing_rank=None,
        node="",
        confidence=0.5,
        reason="",
        evidence=(),
        action="restart",
        steps_lost=2,
    )


def test_strikes_meet_their_interruptions_and_nothing_is_explained_twice() -> None:
    struck = [Struck(kind=kind, t=t, pid=1, rank=0, step=1) for kind, t in [("worker-kill", 10.0), ("keeper-kill", 20.0)]]
    struck.append(Struck(kind="worker-stop", t=30.0, pid=1, rank=0, step=1))
    rows = [row(10.2, "unknown"), row(34.0, "data_error"), row(35.0, "unknown")]
    matched, left = match(struck, rows)
    assert [(it.class_, it.action, it.right) for it in matched] == [
        ("unknown", "restart", True),
        (NONE, NONE, True),
        ("data_error", "restart", False),
    ]
    assert [it.t for it in left] == [35.0]
    assert confusion(matched) == {"keeper-kill": {NONE: 1}, "worker-kill": {"unknown": 1}, "worker-stop": {"data_error": 1}}


def test_a_strike_that_should_have_led_to_an_interruption_and_did_not_is_wrong() -> None:
    """Also one with another right after it: who hides a strike behind the next has not recognised it."""
    struck = [Struck(kind=kind, t=t, pid=1, rank=0, step=1) for kind, t in [("gpu-error", 10.5), ("worker-kill", 10.0)]]
    matched, left = match(struck, [row(10.6, "gpu_memory_error")])
    assert [(it.kind, it.class_, it.right) for it in matched] == [
        ("worker-kill", NONE, False),
        ("gpu-error", "gpu_memory_error", True),
    ]
    assert left == []


def test_what_processes_do_to_themselves_are_faults_of_the_config_in_their_order() -> None:
    strikes = [
        Strike(after_s=10.0, kind=kind, rank=1) for kind in ("flip", "keeper-kill", "loop", "gpu-error", "keeper-upload")
    ]
    faults = inside(strikes)
    assert [(it.kind, it.at, it.step, it.rank) for it in faults] == [
        ("flip", "gradients", 20, 1),
        ("loop", "step", 1, 1),
        ("raise", "step", 1, 1),
        ("kill", "upload", 1, 1),
    ]
    assert faults[2].text == "CUDA error: uncorrectable ECC error encountered"


def test_the_mix_of_table_5_has_its_shares_and_all_of_its_interruptions() -> None:
    assert sum(TABLE_5.values()) == 419
    strikes = plan(NAMES, seed=6, seconds=50_000.0, mean_gap_s=10.0, ranks=8, weights=TABLE_5)
    counts = Counter(strike.kind for strike in strikes)
    assert counts.keys() <= TABLE_5.keys()
    assert counts["gpu-error"] / len(strikes) == pytest.approx(262 / 419, abs=0.03)  # 5000 draws: a deviation is 0.7 %


def course(*layouts: tuple[str, int, str], loss: float = 1.0) -> list[Event]:
    """Attempts (layout, restored step, proof) of two steps each."""
    told: list[Event] = []
    for number, (layout, step, proof) in enumerate(layouts):
        start = {"ranks": 2, "source": "memory", "restored_step": step}
        told.append(AttemptStarted(t=0.0, attempt=number, layout=layout, **start))  # type: ignore[arg-type]
        told.append(Ready(t=0.0, attempt=number, step=step, source="memory", proof=proof))
        told += [
            StepFinished(t=0.0, attempt=number, step=step + more, t_begin=0.0, t_end=1.0, loss=loss, tokens=5)
            for more in (1, 2)
        ]
    return told


def test_a_change_of_layout_needs_the_proof_of_its_seam() -> None:
    proved, bare = "digests of 84 arrays", "crc32c of every chunk"
    assert seam_proofs(course(("dp4", 0, bare), ("dp4", 2, bare))) == []
    assert seam_proofs(course(("dp4", 0, bare), ("dp3", 2, proved), ("dp3", 4, bare), ("dp4", 6, bare))) == [True, False]
    assert first_seam(course(("dp4", 0, bare), ("dp3", 2, proved))) == 2


def test_up_to_the_seam_bit_for_bit_and_the_same_tokens_after_it() -> None:
    whole = course(("dp4", 0, ""), ("dp4", 2, ""))
    other = course(("dp4", 0, "")) + course(("dp3", 2, ""), loss=1.0000001)
    assert same_training(whole, other, 4, 2)
    assert not same_training(whole, other, 4, 3)
    assert not same_training(whole, course(("dp4", 0, "")), 4, 2), "two steps are missing"


def attempt(number: int, restored: int, to: int, *, t: float) -> list[Event]:
    """An attempt that makes a step a second from `t` on, the first being `restored` + 1."""
    told: list[Event] = [AttemptStarted(t=t, attempt=number, ranks=2, source="memory", restored_step=restored)]
    for step in range(restored + 1, to + 1):
        t += 1.0
        told.append(StepFinished(t=t, attempt=number, step=step, t_begin=t - 1.0, t_end=t))
    return told


def committed(number: int, step: int) -> Event:
    return CheckpointCommitted(t=1000.0, attempt=number, step=step)


def test_a_checkpoint_from_before_the_last_strike_proves_nothing() -> None:
    """Steps 1 to 56 with a commit at 50; struck at 56; from 50 again to 105."""
    kill = [Struck(kind="worker-kill", t=156.0, pid=1, rank=0, step=56)]
    told = [*attempt(0, 0, 56, t=100.0), committed(0, 50)]
    assert provable(last_checkpoints(told, 50), []) == 50
    assert provable(last_checkpoints(told, 50), kill) is None
    told += attempt(1, 50, 105, t=160.0)
    assert provable(last_checkpoints(told, 50), kill) is None, "not committed yet"
    told += [committed(1, 60), committed(1, 100)]  # 60 is no periodic one: a stop made it
    assert last_checkpoints(told, 50) == {100: 210.0}
    assert provable(last_checkpoints(told, 50), kill) == 100


def test_an_upload_that_outlives_its_attempt_is_no_proof() -> None:
    told = [*attempt(0, 0, 101, t=0.0), *attempt(1, 90, 101, t=110.0), committed(0, 100)]
    assert last_checkpoints(told, 50) == {}


def test_a_strike_that_interrupts_nothing_must_also_come_before() -> None:
    told = [*attempt(0, 0, 101, t=0.0), committed(0, 50), committed(0, 100)]
    checkpoints = last_checkpoints(told, 50)
    found = [provable(checkpoints, [Struck(kind="keeper-kill", t=t, pid=1, rank=None, step=1)]) for t in (49, 51, 100.5)]
    assert found == [50, 100, None]


@pytest.mark.parametrize(("covered", "code"), [(0, 4), (1, 0)])
def test_without_a_strike_before_it_an_equal_state_is_no_proof(
    covered: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(
        step=50,
        equal=True,
        covered=covered,
        different=(),
        seams=0,
        struck=[],
        unexplained=[],
        confusion={},
        restarts=0,
        effective_time=1.0,
    )
    assert EXIT[outcome.good] == code
    show(outcome)
    assert ("NOT PROVED: no fault came before" in capsys.readouterr().out) == (covered == 0)


def test_every_kind_is_told_in_a_line_that_a_person_understands() -> None:
    told = CliRunner().invoke(drill_command, ["no.toml", "--faults", "help"])
    assert told.exit_code == 0
    assert told.stderr == ""
    rows = told.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows[: len(BY_NAME)]] == list(BY_NAME)
    for name, kind in BY_NAME.items():
        assert f"{name} " in told.stdout
        assert kind.about in told.stdout
        assert len(kind.about.split()) > 3
    assert "table5" in rows[-1]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("kil", "'kil' is no kind of fault (did you mean worker-kill or keeper-kill or zygote-kill or coordinator-kill or "),
        ("worker-kll", "'worker-kll' is no kind of fault (did you mean worker-kill?)"),
        ("worker-kill,typo", "--faults: 'typo' is no kind of fault. "),
        ("all,loop", "'all' stands alone"),
        (",", "no kind of fault is named"),
    ],
)
def test_a_wrong_kind_is_named(faults: str, said: str) -> None:
    told = CliRunner().invoke(drill_command, ["no.toml", "--faults", faults])
    assert told.exit_code == 2
    assert said in told.stderr
    assert "worker-kill:" not in told.stderr
    assert told.stdout == ""
