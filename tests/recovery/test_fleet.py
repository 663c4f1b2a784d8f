"""Several nodes under one coordinator, with a toy in them, under real kills, freezes and returns."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from toy import Fault
from toy_fleet import LEASE_S, toy_fleet
from toy_run import PATIENCE_S, descendants, gone, wait_until

from recovery.client import ask
from recovery.codes import ExitCode
from recovery.events import AttemptStarted, Decided, InterruptionClassified, ProcessDied, Ready, RunEnded, StepFinished
from recovery.messages import AgentHello, Exited, Shutdown, ToAgent, Welcome, WorkerInfo
from recovery.rendezvous import control_folder, dial_coordinator

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

ENDLESS = 10**9


def last_step(run) -> int:
    return max((event.step for event in run.events(StepFinished)), default=0)


def wait_for_steps(run, more: int = 3) -> None:
    goal = last_step(run) + more
    wait_until(lambda: last_step(run) >= goal, "steps")


def wait_for_attempt(run, number: int) -> AttemptStarted:
    return run.wait_event(AttemptStarted, lambda event: event.attempt == number)


def test_ranks_are_placed_over_nodes_and_meet_at_the_first(tmp_path):
    with toy_fleet(tmp_path, "n2", "n10", "n1", steps=0, ranks=3, rendezvous=True, entry="toy:describe") as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        seen = {line.split()[1]: line for line in run.diary() if line.startswith("seen")}
        assert run.attempts() == [("n1", "n2", "n10")]
        ports = {line.split('"port":')[1].split(",")[0].split("}")[0] for line in seen.values()}
        assert len(ports) == 1
        assert ['"listener":null' in seen[rank] for rank in "012"] == [False, True, True]
        assert all('"host":"127.0.0.1"' in line for line in seen.values())


def test_a_run_on_two_nodes_ends_with_all_agents_gone(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=5) as run:
        run.start()
        members = descendants(run.nodes["n1"].pid) | descendants(run.nodes["n2"].pid)
        assert run.wait() == ExitCode.DONE
        assert [run.wait_exit(name) for name in ("n1", "n2")] == [0, 0]
        assert all(gone(pid) for pid in members)
        died = {event.rank: event.node for event in run.events(ProcessDied) if event.kind == "worker"}
        assert died == {0: "n1", 1: "n2"}
        assert (control_folder(tmp_path) / "identity.pem").stat().st_mode & 0o777 == 0o600


def test_a_dead_worker_is_told_with_its_node_and_all_nodes_keep_their_memory(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=40, faults=(Fault(how="kill", rank=1, step=5),)) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        verdict = run.events(InterruptionClassified)[0].verdict
        assert (verdict.first_failing_rank, verdict.node) == (1, "n2")
        assert run.attempts() == [("n1", "n2"), ("n1", "n2")]
        assert "ready 1 1 4" in run.diary()  # rank 1 goes on behind the last step that it finished,
        last = max((event.step for event in run.events(StepFinished) if event.attempt == 0), default=0)
        ready = next(event.step for event in run.events(Ready) if event.attempt == 1)
        assert ready >= last  # and rank 0, which nobody waits for, behind the last that it told


def test_a_lost_node_is_replaced_by_the_spare_and_the_others_stay(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_attempt(run, 0)
        run.join("n3")
        wait_for_steps(run)
        waiting = {"ranks": [], "connected": True}  # nothing runs on it
        wait_until(lambda: run.agents().get("n3") == waiting, "the spare")
        killed = run.kill_node("n2")
        assert wait_for_attempt(run, 1).nodes == ("n1", "n3")
        assert all(gone(pid) for pid in killed)
        verdict = run.events(InterruptionClassified)[0].verdict
        assert (verdict.class_, run.events(Decided)[0].action) == ("node_failure", "restart_exclude_node")
        assert "node n2 was lost" in verdict.evidence[0].text
        died = next(event for event in run.events(ProcessDied) if event.kind == "agent")
        assert (died.node, died.ours) == ("n2", False)
        assert "agent lost" in run.diary()
        run.join("n2")  # it comes back, and waits
        wait_until(lambda: "n2" in run.agents(), "the returning node")
        wait_for_steps(run)
        assert run.agents()["n2"]["ranks"] == []
        assert len(run.attempts()) == 2
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


def test_a_node_whose_ranks_die_before_its_agent_is_a_lost_node(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS, spec={"fleet": {"rejoin_s": LEASE_S}}) as run:
        coordinator = run.start()
        wait_for_attempt(run, 0)
        run.join("n3")
        wait_until(lambda: "n3" in run.agents(), "the spare")
        rank, agent = run.worker_pids()[1], psutil.Process(run.nodes["n2"].pid)
        coordinator.send_signal(signal.SIGSTOP)  # it hears of both deaths, one right after the other
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(rank) and agent.status() == psutil.STATUS_SLEEPING, "its death, told")
        run.kill_node("n2")
        coordinator.send_signal(signal.SIGCONT)
        assert wait_for_attempt(run, 1).nodes == ("n1", "n3")
        assert next((it.rank, it.status) for it in run.events(ProcessDied) if it.kind == "worker") == (1, -signal.SIGKILL)
        verdict = run.events(InterruptionClassified)[0].verdict
        assert (verdict.class_, run.events(Decided)[0].action) == ("node_failure", "restart_exclude_node")
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_without_a_spare_the_run_waits_for_the_node_to_come_back(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_steps(run)
        run.kill_node("n1")
        run.wait_event(Decided)
        run.join("n1")
        assert wait_for_attempt(run, 1).nodes == ("n1", "n2")
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_too_few_nodes_end_the_run_with_the_code_for_elsewhere(tmp_path):
    with toy_fleet(tmp_path, "n1", ranks=2, spec={"fleet": {"patience_s": 6.0}}) as run:
        run.start()
        assert run.wait() == ExitCode.RETRY_ELSEWHERE
        assert "1 of 2 nodes are there after 6 s" in run.events(RunEnded)[0].reason
        assert run.wait_exit("n1") == ExitCode.DONE


def test_a_new_coordinator_takes_over_the_workers_of_all_nodes(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS, spec={"lease_s": 20.0}) as run:
        run.start()
        workers = run.worker_pids()
        wait_for_steps(run)
        run.kill_coordinator()
        run.start()
        run.wait_diary("adopted 0 memo of 0")
        wait_for_steps(run)
        assert run.worker_pids() == workers
        assert len(run.attempts()) == 1
        steps = [event.step for event in run.events(StepFinished)]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))  # what happened in between was kept and told
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_a_node_that_died_without_coordinator_is_missed_by_the_next_one(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_steps(run)
        run.kill_coordinator()
        run.kill_node("n2")
        run.start()
        run.wait_diary("adopted 0 memo of 0")
        run.join("n2")
        assert wait_for_attempt(run, 1).nodes == ("n1", "n2")
        verdict = run.events(InterruptionClassified)[0].verdict
        assert verdict.class_ == "node_failure"
        assert "node n2 was lost: it has not called again" in verdict.evidence[0].text
        assert "agent lost" in run.diary()  # what was in its memory is gone
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_a_node_that_died_with_the_coordinator_is_waited_for_as_long_as_its_lease_and_then_the_spare_is_used(tmp_path):
    """However short our patience is: the nodes that have come are enough, and must not be taken for too few."""
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS, spec={"lease_s": 6.0, "fleet": {"patience_s": 2.0}}) as run:
        run.start()
        wait_for_attempt(run, 0)
        run.join("n3")
        wait_until(lambda: "n3" in run.agents(), "the spare")
        wait_for_steps(run)
        run.kill_coordinator()
        run.kill_node("n2")
        run.start()
        assert wait_for_attempt(run, 1).nodes == ("n1", "n3")
        assert run.events(InterruptionClassified)[0].verdict.class_ == "node_failure"
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_a_frozen_node_is_replaced_only_when_its_lease_is_over_and_its_agent_is_a_zombie(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", "n3", steps=ENDLESS, ranks=2) as run:
        run.start()
        wait_for_attempt(run, 0)
        frozen = wait_for_attempt(run, 0).nodes[1]
        wait_for_steps(run)
        began = time.monotonic()
        run.signal_node(frozen, signal.SIGSTOP)
        wait_for_attempt(run, 1)
        assert time.monotonic() - began > run.lease_s  # not before the agent's own lease
        assert frozen not in run.attempts()[1]
        assert "was silent for" in run.events(InterruptionClassified)[0].verdict.evidence[0].text
        run.signal_node(frozen, signal.SIGCONT)
        assert run.wait_exit(frozen) == ExitCode.RETRY_SAME  # sent away, or its lease is over: whichever it sees first
        wait_for_steps(run)
        assert len(run.attempts()) == 2
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.slow
def test_a_short_freeze_costs_nothing(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS, spec={"lease_s": 6.0}) as run:
        run.start()
        wait_for_steps(run)
        run.signal_node("n2", signal.SIGSTOP)
        wait_until(lambda: not run.agents()["n2"]["connected"], "the silence to be noticed")
        run.signal_node("n2", signal.SIGCONT)
        wait_until(lambda: run.agents()["n2"]["connected"], "the node's return")
        wait_for_steps(run)
        assert len(run.attempts()) == 1
        assert run.events(InterruptionClassified) == []
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        pytest.param({"node": "n9", "attempt": 0, "living": True}, "workers of attempt 0, which is over", id="older attempt"),
        pytest.param({"node": "n1"}, "serves node n1 already", id="name taken", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_must_not_stay_is_sent_away_and_nothing_runs_for_it(tmp_path, hello, words):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_steps(run)
        living = hello.pop("living", False)
        workers = (WorkerInfo(rank=0, pid=os.getpid()),) if living else ()
        link = dial_coordinator(control_folder(tmp_path), ToAgent, limit_s=PATIENCE_S)
        link.send(AgentHello(pid=1, boot_id="another boot", workers=workers, **hello))
        told = [link.receive(PATIENCE_S), link.receive(PATIENCE_S)]
        link.close()
        assert isinstance(told[0].message, Welcome)
        assert isinstance(told[1].message, Shutdown)
        assert words in told[1].message.reason
        assert not told[1].message.over  # it may come again, with empty hands
        wait_for_steps(run)
        assert set(run.agents()) == {"n1", "n2"}


@pytest.mark.slow
def test_an_agent_of_a_later_epoch_is_not_for_this_coordinator(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_steps(run)
        link = dial_coordinator(control_folder(tmp_path), ToAgent, limit_s=5.0)
        link.send(AgentHello(node="n7", pid=1, boot_id="b", epoch=99))
        assert link.receive(5.0) is None
        assert link.closed
        link.close()


@pytest.mark.slow
def test_what_a_stranger_sends_ends_nothing(tmp_path):
    with toy_fleet(tmp_path, "n1", "n2", steps=ENDLESS) as run:
        run.start()
        wait_for_steps(run)
        link = dial_coordinator(control_folder(tmp_path), ToAgent, limit_s=5.0)
        link.send(Exited(kind="agent", pid=1, status=0, t=0.0))
        assert link.receive(5.0) is None
        link.close()
        wait_for_steps(run)
        assert len(run.attempts()) == 1
