"""Facts about an attempt, and the pure questions asked of them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from recovery.attempt import Attempt
from recovery.classify import classify
from recovery.codes import ExitCode
from recovery.crew import Worker
from recovery.delegate import Saved
from recovery.endings import Ending, as_saved, ending_of, keeps_memory, unstored
from recovery.events import CheckpointCommitted, Ready, StopRequested, Verdict
from recovery.evidence import Evidence
from recovery.files import append_whole
from recovery.heartbeat import Beat
from recovery.inquiry import judge
from recovery.journal import Journal
from recovery.ledger import Ledger, read_all
from recovery.messages import AgentHello, Exited, FromKeeper, Spawned, WorkerInfo, WorkerSpec
from recovery.outbox import Outbox
from recovery.policy import Decision, Limits
from recovery.state import RunState


def exited(rank: int, status: int | None, *, ours: bool = False) -> Exited:
    return Exited(kind="worker", rank=rank, attempt=4, pid=100 + rank, status=status, t=0.0, ours=ours)


def attempt_with(*beats: Beat, ranks: int = 3) -> Attempt:
    attempt = Attempt.of(4, range(ranks))
    attempt.began = 0.0
    attempt.report(beats)
    attempt.beats_at = dict.fromkeys(attempt.beats, 100.0)
    return attempt


def beat(rank: int, *, step: int = 5, age_s: float = 0.0, collective: int = 0, attempt: int = 4) -> Beat:
    return Beat(rank=rank, attempt=attempt, step=step, phase="forward", age_s=age_s, collective=collective)


def test_well_in_trouble_or_on_the_way():
    attempt = Attempt.of(4, range(2))
    assert not attempt.all_ended
    assert not attempt.in_trouble
    attempt.exited(exited(0, 0))
    assert not attempt.in_trouble
    attempt.exited(exited(1, 0))
    assert attempt.all_well
    attempt.exited(exited(1, None))
    assert attempt.in_trouble
    assert not attempt.all_well


@pytest.mark.parametrize(
    ("status", "t", "stop"),
    [(1, 11.0, True), (1, 9.0, False), (-signal.SIGTERM, 9.9, True), (-signal.SIGKILL, 9.0, False), (0, 9.0, True)],
)
def test_only_what_ends_after_a_stop_or_by_its_signal_can_be_the_stop(status: int, t: float, stop: bool) -> None:
    attempt = Attempt.of(4, range(2))
    attempt.exited(replace(exited(0, status), t=t))
    assert attempt.told_to_stop(10.0) is stop


def test_a_worker_that_says_it_fails_is_trouble_before_it_has_ended():
    attempt = Attempt.of(4, range(2))
    attempt.fails(1, "RuntimeError")
    assert attempt.in_trouble


def test_adopted_workers_keep_what_is_known_of_them():
    infos = (WorkerInfo(rank=0, pid=7), WorkerInfo(rank=1, pid=8, ended=True, status=-9, ours=True))
    attempt = Attempt.adopted(AgentHello(node="n", pid=1, boot_id="b", attempt=4, workers=infos))
    assert attempt.number == 4
    assert [(it.rank, it.pid, it.status, it.ours) for it in attempt.dead()] == [(1, 8, -9, True)]


def test_the_least_advanced_stalled_rank_comes_first():
    attempt = attempt_with(beat(0, age_s=50.0, collective=12), beat(1, age_s=40.0, collective=11), beat(2, age_s=1.0))
    stalled = attempt.stalled(110.0, hang_s=30.0, start_s=600.0)  # read 10 s ago
    assert [(it.rank, it.age_s) for it in stalled] == [(1, 50.0), (0, 60.0)]
    assert stalled[0].describe() == "no progress of rank 1 for 50.0 s (step 5, forward)"


def test_before_its_first_step_a_rank_has_start_s():
    attempt = attempt_with(beat(0, step=-1, age_s=300.0), ranks=2)
    assert attempt.stalled(400.0, hang_s=30.0, start_s=600.0) == ()
    stalled = attempt.stalled(700.0, hang_s=30.0, start_s=600.0)
    assert [it.rank for it in stalled] == [1, 0]  # rank 1 has not said a word since the start
    assert stalled[0].describe() == "no progress of rank 1 for 700.0 s (not one report since its start)"


def test_the_dead_do_not_stall_and_another_attempts_beats_do_not_count():
    attempt = attempt_with(beat(0, age_s=99.0), beat(1, age_s=99.0, attempt=3), ranks=2)
    attempt.exited(exited(0, -9))
    assert [it.rank for it in attempt.stalled(100.0, hang_s=30.0, start_s=50.0)] == [1]
    assert attempt.stalled(100.0, hang_s=30.0, start_s=600.0) == ()


def test_evidence_keeps_the_statuses_from_before_our_teardown():
    attempt = Attempt.of(4, range(2))
    attempt.exited(exited(0, -9, ours=True))
    gathered = Evidence(exit={"0": None, "1": -11}, log=("[rank1]: boom",))
    complete = attempt.complete(gathered, ("supervisor: seen",), "n3")
    assert complete.exit == {"0": None, "1": -11}
    assert complete.scheduler == ("supervisor: seen",)
    assert complete.nodes == {"0": "n3", "1": "n3"}


@pytest.mark.parametrize(
    "gathered",
    [pytest.param(Evidence(), id="no answer"), pytest.param(Evidence(exit={"2": None}), id="no answer of that node")],
)
def test_what_an_agent_did_not_answer_in_time_is_filled_in_and_our_teardown_is_no_cause(gathered):
    attempt = Attempt.of(4, range(3), {0: "a", 1: "a", 2: "b"})
    attempt.exited(replace(exited(1, -9), t=1.0))
    attempt.exited(replace(exited(0, -9, ours=True), t=2.0))
    attempt.exited(replace(exited(2, -9, ours=True), t=3.0))
    complete = attempt.complete(gathered, (), "n3")
    assert complete.exit == {"0": -9, "1": -9, "2": -9, **gathered.exit}
    assert (complete.order[:2], set(complete.ours)) == (("1", "0"), set("02") - set(gathered.exit))
    assert classify(complete).first_failing_rank == 1


def test_a_failure_that_left_no_log_speaks_for_itself():
    attempt = Attempt.of(4, range(1))
    attempt.fails(0, "not started: fork: Cannot allocate memory")
    assert attempt.complete(Evidence(), (), "n").log == ("[rank0]: not started: fork: Cannot allocate memory",)


@pytest.mark.parametrize(
    ("status", "sent", "ours"),
    [
        pytest.param(-9, {signal.SIGKILL}, True, id="killed-by-us"),
        pytest.param(-9, set(), False, id="killed-by-another"),
        pytest.param(-11, {signal.SIGKILL}, False, id="crashed-while-we-killed"),
        pytest.param(1, {signal.SIGTERM}, True, id="left-when-asked"),
        pytest.param(1, set(), False, id="left-by-itself"),
        pytest.param(None, set(), False, id="never-known"),
    ],
)
def test_whose_doing_a_death_was(status, sent, ours):
    worker = Worker(spec=WorkerSpec(rank=0, entry="a:b"), index=0, status=status, sent=sent)
    assert worker.ours is ours


def verdict(class_: str) -> Verdict:
    return Verdict(class_=class_, component="unknown")


@pytest.mark.parametrize(
    ("decision", "class_", "stopping", "expected"),
    [
        (Decision(action="restart", reason="r"), "unknown", False, None),
        (Decision(action="restart_after_wait", reason="r"), "unknown", False, None),
        (Decision(action="roll_back", reason="r"), "unknown", False, None),
        (Decision(action="restart", reason="r"), "unknown", True, (ExitCode.STOPPED, "stopped")),
        (Decision(action="finish", reason="r"), "time_limit", False, (ExitCode.STOPPED, "stopped")),
        (Decision(action="stop_for_human", reason="r", given_up=True), "unknown", False, (ExitCode.GIVEN_UP, "given_up")),
        (Decision(action="stop_for_human", reason="r"), "numeric_divergence", False, (ExitCode.NUMERICS, "failed")),
        (Decision(action="stop_for_human", reason="r"), "config_error", False, (ExitCode.CONFIG, "failed")),
        (Decision(action="stop_for_human", reason="r"), "disk_full", False, (ExitCode.STORAGE, "failed")),
        (Decision(action="restart_exclude_node", reason="r"), "gpu_lost", False, (ExitCode.RETRY_ELSEWHERE, "failed")),
    ],
)
def test_endings(decision, class_, stopping, expected):
    ending = ending_of(decision, verdict(class_), stopping=stopping)
    assert (ending and (ending.code, ending.outcome)) == expected


def test_with_other_nodes_an_excluded_one_is_no_end():
    decision = Decision(action="restart_exclude_node", reason="r")
    assert ending_of(decision, verdict("gpu_lost"), stopping=False, num_nodes=2) is None


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ("this is the only node", "r; this is the only node, so the run must go on elsewhere"),
        ("no layout is left", "r; no layout is left, so the run must go on elsewhere"),
        ("r", "r, so the run must go on elsewhere"),
    ],
)
def test_an_end_for_another_machine_says_why_once(kept: str, expected: str):
    decision = Decision(action="restart_exclude_node", reason="r")
    ending = ending_of(decision, verdict("gpu_lost"), stopping=False, kept=kept)
    assert ending is not None
    assert ending.reason == expected


@pytest.mark.parametrize(
    ("lost", "hurry", "code", "reason"),
    [
        ("", False, ExitCode.STORAGE, "the last state is not in storage after 60 s of waiting"),
        ("no room", True, ExitCode.STORAGE, "no room"),
        (
            "",
            True,
            ExitCode.STOPPED,
            "asked again while the last state was on its way",
        ),
    ],
)
def test_a_last_state_that_is_not_in_storage(lost, hurry, code, reason):
    ending = unstored(lost, 60.0, hurry=hurry)
    assert (ending.code, ending.reason) == (code, reason)


def test_who_leaves_takes_along_what_memory_holds_unless_it_is_no_good_or_storage_is_not():
    left = {code for code in ExitCode if not keeps_memory(code)}
    assert left == {ExitCode.DONE, ExitCode.NUMERICS, ExitCode.STORAGE}


STOPPED = Ending(code=ExitCode.STOPPED, outcome="stopped", reason="r")


@pytest.mark.parametrize(
    ("saved", "drained", "code", "reason"),
    [
        (Saved(), True, ExitCode.STOPPED, "r"),
        (Saved(step=9, held=9, done=9), True, ExitCode.STOPPED, "r"),
        (Saved(step=9, held=9, done=10), True, ExitCode.STOPPED, "r; 1 step since step 9 will be done again"),
        (
            Saved(step=9, held=12, done=14),
            True,
            ExitCode.RETRY_SAME,
            "r; the newest state did not reach storage; 5 steps since step 9 will be done again",
        ),
        (
            Saved(done=2),
            True,
            ExitCode.RETRY_SAME,
            "r; the newest state did not reach storage; 2 steps since the beginning will be done again",
        ),
        (Saved(step=9, held=9, done=9), False, ExitCode.RETRY_SAME, "r; the newest state did not reach storage"),
    ],
)
def test_a_stop_is_one_with_the_state_saved_only_if_storage_has_what_there_was_to_save(saved, drained, code, reason):
    ending = as_saved(STOPPED, saved, drained=drained)
    assert (ending.code, ending.reason) == (code, reason)
    other = Ending(code=ExitCode.GIVEN_UP, outcome="given_up", reason="r")
    assert as_saved(other, saved, drained=drained) == other


def test_an_outbox_forgets_only_what_is_acknowledged():
    box = Outbox(limit_bytes=1000)
    for number in range(3):
        assert box.add(Spawned(attempt=0, rank=number, pid=1)).seq == number + 1
    box.acknowledge(2)
    box.acknowledge(1)
    assert [it.seq for it in box] == [3]
    assert not box.full
    box.add(FromKeeper(payload=b"x" * 1000))
    assert box.full
    box.acknowledge(4)
    assert (len(box), box.full) == (0, False)


class FullDisk:
    """A ledger whose disk is full for a while."""

    def __init__(self) -> None:
        self.full = False
        self.lines: list[str] = []

    def append(self, *together) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.lines += [type(event).__name__ for event in together]

    def rotate(self) -> None:
        self.lines.append("rotate")

    def close(self) -> bool:
        self.lines.append("close")
        return True


def test_a_full_disk_delays_the_ledger_but_not_the_run():
    disk, seen = FullDisk(), []
    journal = Journal(disk, RunState(), seen.append)
    journal.append(Ready(t=1.0, attempt=0, step=3))
    disk.full = True
    journal.append(StopRequested(t=2.0, by="x"))
    assert journal.state.stop_by == "x"
    assert not journal.write()
    disk.full = False
    journal.append(CheckpointCommitted(t=3.0, step=4))
    journal.close()
    assert disk.lines == ["Ready", "rotate", "StopRequested", "CheckpointCommitted", "rotate", "close"]
    assert [type(event).__name__ for event in seen] == ["Ready", "StopRequested", "CheckpointCommitted"]


@pytest.mark.parametrize("status", [None, 1, -signal.SIGABRT])
def test_of_a_node_that_was_lost_its_rank_failed_first(status: int | None) -> None:
    """Whether the other one, which waits for it in a collective, has noticed by now or not."""
    ended = attempt_with(ranks=2)
    ended.workers[0].node, ended.workers[1].node = "n1", "n2"
    ended.lost({"n2"})
    lost = "supervisor: node n2 was lost: its connection ended and it has not called again for 5.1 s"
    verdict = classify(ended.complete(Evidence(exit={"0": status}), (lost,), "n1"))
    assert (verdict.class_, verdict.first_failing_rank) == ("node_failure", 1)


def test_whenever_a_coordinator_dies_its_verdict_has_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor would judge the same deaths a second time, and count two interruptions."""
    written: list[list[str]] = []

    def looked_at(fd: int, data: bytes, size: int) -> int:
        grown = append_whole(fd, data, size)
        written.append([type(event).__name__ for event in read_all(tmp_path)])
        return grown

    monkeypatch.setattr("recovery.ledger.append_whole", looked_at)
    with Ledger(tmp_path, None, 1) as ledger:
        ended = attempt_with()
        for rank in range(3):
            ended.exited(exited(rank, 1))
        evidence = ended.complete(Evidence(), (), "n1")
        journal = Journal(ledger, RunState())
        judge(journal, evidence, Limits(), attempt=ended, verdict_id="v", agent_survived=True, spared=lambda *_: "it stays")
    assert written == [["InterruptionClassified", "Decided"]]
    assert [past.action for past in journal.state.interruptions] == ["restart"]
    assert journal.state.last_decision is not None
    assert journal.state.last_decision.reason.endswith("; it stays"), "what overrules a decision is in the ledger with it"


def test_the_age_of_a_beat_goes_on_after_it_was_looked_at() -> None:
    """Beats are looked at once a second, steps are told as they end: 65 steps later the rank was not there 10 ms ago."""
    attempt = attempt_with(beat(0, age_s=0.01))
    attempt.beats_at[0] = time.monotonic() - 0.9
    assert attempt.describe()["0"]["age_s"] >= 0.91
