"""The commands beside a live run, and `ftrain run` itself: stopped, started again, started twice, changed."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ftrain.compose.proof import stored_digests
from recovery.client import ask
from recovery.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    ConfigChanged,
    Event,
    Ready,
    RunEnded,
    RunStarted,
    StopRequested,
    steps_of,
)
from tests.chaos.table import SLOWLY
from tests.commands import copy_of, ftrain, ftrain_json
from tests.runs import TinyRun, asked_to_stop, finish, halt, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

ENDLESS = 100_000


def committed(events: Sequence[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, CheckpointCommitted)]


def last_step(events: Sequence[Event]) -> int:
    return max(record.step for event in events for record in steps_of(event))


def test_status_save_stop_and_a_second_run(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=ENDLESS)
    parent = run.start("--set", "checkpoint.every_steps=0")
    run.wait_for_step(4)
    status = ftrain_json("status", run.url)
    assert status["step"] >= 4
    assert "dp2" in status["layout"]
    assert {worker["pid"] for worker in status["workers"].values()} == {p.pid for p in run.processes()["worker"]}
    assert status["run"]["steps"] == ENDLESS
    assert str(status["step"])[0] in ftrain("status", run.url).stdout

    launched = (run.local / "launch.json").read_bytes()
    second = ftrain("run", str(run.config), "--set", "optimizer.lr=0.5")
    assert second.returncode == 6
    assert str(run.processes()["coordinator"][0].pid) in second.stderr
    assert (run.local / "launch.json").read_bytes() == launched  # a coordinator of the live run may read it at any time

    assert committed(run.events()) == []
    assert ftrain("save", run.url).returncode == 0
    run.wait_for(committed)
    listed = ftrain_json("ckpt", "ls", run.url)
    assert [(info["step"], info["state"]) for info in listed] == [(committed(run.events())[0], "valid")]

    assert ftrain("stop", run.url).returncode == 0
    with no_process_left(run):
        code, output = finish(parent)
    assert code == 75, output
    events = run.events()
    assert [event.by for event in events if isinstance(event, StopRequested)] == ["ftrain stop"]
    ends = [event for event in events if isinstance(event, RunEnded)]
    assert [(end.outcome, end.step) for end in ends] in ([("stopped", last_step(events))], [("stopped", None)])
    assert stored_digests(run.url)[0] == last_step(events)
    gone = ftrain("status", run.url)
    assert gone.returncode == 2
    assert "run" in gone.stderr


def test_a_save_asked_for_while_a_worker_is_dead_is_made_by_its_successors(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=ENDLESS)
    parent = run.start("--set", "checkpoint.every_steps=0")
    run.wait_for_step(4)
    run.processes()["worker"][1].kill()
    ask(run.local, "save")  # nobody can finish a step until there is a new attempt
    run.wait_for(committed)
    events = run.events()
    assert max(event.attempt for event in events if isinstance(event, AttemptStarted)) == 1
    # soon: the steps since the snapshot are redone, and the save does not wait for them
    resumed_at = [event.step for event in events if isinstance(event, Ready)][-1]
    assert committed(events)[0] > resumed_at
    assert ftrain("stop", run.url).returncode == 0
    code, output = finish(parent)
    assert code == 75, output


@pytest.mark.parametrize(
    "how",
    ["ftrain stop", "SIGTERM", "SIGTERM to all", pytest.param("SIGINT", marks=pytest.mark.slow)],
)
def test_a_stopped_run_saves_and_goes_on_to_the_same_end(
    how: str, corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=SLOWLY + halt(4))
    parent = run.start()
    halted = run.halted()
    if how == "SIGTERM to all":  # what systemd, scancel and a killed process group do
        for process in [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]:
            process.send_signal(signal.SIGTERM)
    elif how.startswith("SIG"):
        parent.send_signal(signal.Signals[how])
    else:
        ask(run.local, "stop")
    run.wait_for(asked_to_stop)
    halted.resume()
    with no_process_left(run):
        code, output = finish(parent)
    assert code == 75, output
    events = run.events()
    stopped_at = last_step(events)
    assert stopped_at < run.steps
    assert committed(events)[-1] == stopped_at
    assert [event.by for event in events if isinstance(event, StopRequested)] == [how.removesuffix(" to all")]
    code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    started = [event for event in run.events() if isinstance(event, AttemptStarted)]
    assert (started[-1].source, started[-1].restored_step) == ("storage", stopped_at)


# -- a config that changed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param("run.seed=4", "choose another run.url", id="refused"),
        pytest.param("model.hidden=64", "choose another run.url", id="another-model"),
        pytest.param("batch.global_batch=16", "--accept-change", id="not-accepted"),
    ],
)
def test_a_change_that_needs_a_word_stops_the_start(change: str, says: str, unbroken_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(unbroken_run, tmp_path)
    before = run.events()
    code, output = run.run("--set", change)
    assert code == 3
    assert change.partition("=")[0] in output
    assert says in output
    assert run.events() == before


def test_changes_take_effect_and_stand_in_the_ledger(unbroken_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(unbroken_run, tmp_path)

    def changed(*options: str) -> list[tuple[str, object, object, str]]:
        before = len(run.events())
        code, output = run.run(*options)
        assert code == 0, output
        found = [event for event in run.events()[before:] if isinstance(event, ConfigChanged)]
        return [(c["path"], c["old"], c["new"], c["kind"]) for event in found for c in event.changes]

    longer = ("--set", "run.steps=32", "--set", "optimizer.lr=2e-3", "--set", "checkpoint.snapshot_steps=5")
    expected = [("run.steps", 30, 32, "recorded"), ("optimizer.lr", 1e-3, 2e-3, "recorded")]
    assert changed(*longer) == expected
    bigger = ("--set", "run.steps=33", "--set", "optimizer.lr=2e-3", "--set", "batch.global_batch=16", "--accept-change")
    assert changed(*bigger) == [("run.steps", 32, 33, "recorded"), ("batch.global_batch", 8, 16, "accept")]
    steps = {record.step: record for event in run.events() for record in steps_of(event)}
    assert steps[33].tokens > 1.5 * steps[32].tokens


def test_a_run_goes_on_without_its_tokenizer_which_training_does_not_need(corpus: str, tmp_path: Path) -> None:
    run, words = TinyRun(folder=tmp_path, corpus=corpus), tmp_path / "words.tiktoken"
    wanted = ("--set", f"data.tokenizer={words}", "--set", "model.vocab=300")
    code, output = run.run(*wanted, "--set", "run.steps=4")
    assert code == 3, output
    assert "words.tiktoken" in output
    assert "No such file" in output
    words.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    assert run.run(*wanted, "--set", "run.steps=4")[0] == 0
    words.unlink()
    code, output = run.run(*wanted, "--set", "run.steps=6")
    assert code == 0, output
    assert last_step(run.events()) == 6


def test_a_run_begins_with_the_state_of_another(unbroken_run: TinyRun, unbroken: dict[str, str], tmp_path: Path) -> None:
    run = replace(unbroken_run, folder=tmp_path, url=str(tmp_path / "run"))
    missing, output = run.run("--from", f"{unbroken_run.url}@17")
    assert missing == 4
    assert "17" in output
    with no_process_left(run):
        code, output = run.run("--from", f"{unbroken_run.url}@18")
    assert code == 0, output
    started = [event for event in run.events() if isinstance(event, AttemptStarted)]
    assert [(event.source, event.restored_step) for event in started] == [("storage", 18)]
    begun = [event.origin for event in run.events() if isinstance(event, RunStarted)]
    assert begun == [f"{unbroken_run.url}@18"]
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        ("@18", ["run.steps=18"], "nothing to do: that is the state after step 18, and run.steps is 18; more run.steps"),
        ("@18", ["run.steps=10"], "nothing to do: that is the state after step 18, and run.steps is 10; more run.steps"),
        ("@18", ["model.ffn=96"], "model.ffn is 64 there, 96 here; layers.0.mlp.w1 is (64, 32) there, (96, 32) here; "),
        ("@18", ["model.heads=4"], "the config's model is not the checkpoint's: model.heads is 2 there, 4 here"),
    ],
)
def test_what_a_state_is_of_no_use_for_is_said_before_the_start(
    unbroken_run: TinyRun, tmp_path: Path, step: str, options: list[str], says: str
) -> None:
    run = replace(unbroken_run, folder=tmp_path, url=str(tmp_path / "run"))
    code, output = run.run("--from", unbroken_run.url + step, *(word for option in options for word in ("--set", option)))
    assert code == 3, output
    assert says in " ".join(output.split())
    assert not run.local.exists()


@pytest.mark.parametrize("step", ["@18", ""])
def test_a_run_does_not_begin_with_a_state_of_its_own(unbroken_run: TinyRun, tmp_path: Path, step: str) -> None:
    run = copy_of(unbroken_run, tmp_path)
    before = run.events()
    code, output = run.run("--set", "run.steps=32", "--from", f"{run.url}/{step}")
    assert code == 3, output
    assert f"begin another run with that state: --set run.url=ANOTHER --from {run.url}{step}" in " ".join(output.split())
    assert run.events() == before


def test_a_dry_run_starts_nothing(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    done = ftrain("run", str(run.config), "--dry-run", "--json", "--set", "parallel.ranks=4")
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert shown["config"]["parallel"]["ranks"] == 4
    assert "dp 4" in shown["layout"]
    assert len(shown["fingerprint"]) == 16
    text = ftrain("run", str(run.config), "--dry-run").stdout
    assert "snapshot_steps = 3" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_a_wrong_config_is_refused_with_all_errors(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    code, output = run.run("--set", "model.hiden=4", "--set", "parallel.ranks=0", "--set", "optimizer.lr=true")
    assert code == 3
    assert all(word in output for word in ("model.hiden", "hidden", "parallel.ranks", "optimizer.lr"))
    assert not Path(run.url).exists()


# -- what is kept, and what a slow store does ----------------------------------------------------------------------------------


def test_the_last_three_are_kept_and_nothing_of_the_others(unbroken_run: TinyRun) -> None:
    listed = ftrain_json("ckpt", "ls", unbroken_run.url)
    assert [info["step"] for info in listed if info["state"] == "valid"] == [18, 27, 30]
    packs = (Path(unbroken_run.url) / "checkpoints").rglob("*.pack")
    assert {path.parent.name for path in packs} == {"step-00000018", "step-00000027", "step-00000030"}


def test_every_and_best_are_kept_together(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    policies = 'checkpoint.retention=[{keep = "every", steps = 12}, {keep = "best", n = 1}]'
    code, output = run.run("--set", policies, "--set", "checkpoint.every_steps=6")
    assert code == 0, output
    assert committed(run.events()) == [6, 12, 18, 24, 30]
    kept = [info["step"] for info in ftrain_json("ckpt", "ls", run.url) if info["state"] == "valid"]
    assert kept == [12, 24, 30]


SLOW_STORE = ("--set", "checkpoint.upload_mib_s=0.5")  # about a second for each of the four checkpoints


def failures(run: TinyRun) -> list[str]:
    return [event.reason for event in run.events() if isinstance(event, CheckpointFailed)]


def test_a_save_waits_for_a_slow_store(corpus: str, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    code, output = run.run(*SLOW_STORE)
    assert code == 0, output
    assert committed(run.events()) == [9, 18, 27, 30]
    assert failures(run) == []
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_save_is_skipped_when_the_store_is_slow(corpus: str, tmp_path: Path, unbroken: dict[str, str]) -> None:
    """The keeper stands still in the upload of step 9 until that of step 18 was due."""
    run = TinyRun(folder=tmp_path, corpus=corpus, extra='[[faults]]\nkind = "stop"\nat = "upload"\nstep = 9\n')
    parent = run.start("--set", "checkpoint.if_busy=skip")
    run.wait_for(lambda events: any(isinstance(event, CheckpointFailed) and event.step == 18 for event in events))
    run.processes()["keeper"][0].resume()
    code, output = finish(parent)
    assert code == 0, output
    assert 18 not in committed(run.events())
    assert any("if_busy = 'skip'" in reason for reason in failures(run))
    assert stored_digests(run.url) == (run.steps, unbroken)  # the last one is never skipped


@pytest.mark.slow
def test_a_busy_save_that_fails_may_stop_the_run(corpus: str, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    with no_process_left(run):
        code, output = run.run(*SLOW_STORE, "--set", "checkpoint.if_busy=fail", "--set", "checkpoint.if_failed=stop")
    assert code == 75, output
    assert "if_busy = 'fail'" in output
    assert "if_failed" in output
    code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


# -- looking at a finished run -------------------------------------------------------------------------------------------------


def test_sample_continues_a_prompt(unbroken_run: TinyRun) -> None:
    words = ("sample", unbroken_run.url, "--prompt", "The ", "--tokens", "12", "--seed", "5")
    first = ftrain_json(*words)
    assert first["text"].startswith("The ")
    assert len(first["text"]) > 4
    assert ftrain(*words).stdout.strip() == first["text"].strip()


def test_the_report_accounts_for_every_second(unbroken_run: TinyRun) -> None:
    report = ftrain_json("report", unbroken_run.url)
    assert sum(report["buckets"].values()) == pytest.approx(report["wall_s"], abs=1e-6)
    assert report["outcome"] == "finished"
    assert (report["step"], report["steps_finished"], report["steps_lost"]) == (30, 30, 0)
    assert report["tokens"] == sum(record.tokens for event in unbroken_run.events() for record in steps_of(event))
    assert report["interruptions"] == []
    assert report["checkpoints"]["committed"] == 4
    for key in ("attempts", "effective_time", "formula", "mtbf_s", "causes", "loss", "eval_loss"):
        assert key in report
    assert "finished" in ftrain("report", unbroken_run.url).stdout
    nothing = ftrain("report", unbroken_run.url + "-elsewhere")
    assert nothing.returncode in (2, 5)
    assert unbroken_run.url in nothing.stderr


def test_checkpoints_are_shown_and_compared(unbroken_run: TinyRun, unbroken: dict[str, str], tmp_path: Path) -> None:
    shown = ftrain_json("ckpt", "show", f"{unbroken_run.url}@30")
    assert {array["name"]: array["digest"] for array in shown["arrays"]} == unbroken
    assert shown["step"] == 30
    assert shown["progress"]["sequences"] == 30 * unbroken_run.global_batch
    assert shown["packs"] == 2
    copy = copy_of(unbroken_run, tmp_path)
    assert ftrain("ckpt", "diff", f"{unbroken_run.url}@30", copy.url).returncode == 0
    other = ftrain("ckpt", "diff", f"{unbroken_run.url}@27", f"{copy.url}@30", "--json")
    assert other.returncode == 1
    assert "master/embedding" in json.dumps(json.loads(other.stdout))
    assert ftrain("ckpt", "show", f"{copy.url}@29").returncode == 4
