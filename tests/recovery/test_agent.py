"""One real agent, its coordinator played by the test: what it promises about processes, memory and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from toy_agent import driven_agent
from toy_run import descendants, gone, num_fds, toy_env, wait_until

from recovery.codes import ExitCode
from recovery.launch import python
from recovery.messages import (
    CollectEvidence,
    EvidenceCollected,
    Exited,
    Failing,
    FromKeeper,
    FromWorker,
    Heartbeats,
    Prepare,
    Prepared,
    PrepareFailed,
    Refused,
    SetControl,
    Shutdown,
    Signalled,
    Spawned,
    StartAttempt,
    Started,
    StopWorkers,
    ToWorker,
    Welcome,
    WorkerSpec,
)
from recovery.spec import LEAVE

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

KEEPER = (sys.executable, "-P", "-m", "toy", "keeper")


def fault(how: str, step: int = 2) -> dict:
    return {"faults": [{"how": how, "step": step, "rank": 0, "attempt": -1}]}


@pytest.mark.parametrize(
    ("how", "status"),
    [("kill", -9), ("segv", -11), ("abort", -6), ("exit", 7), ("raise", 1)],
)
def test_the_true_status_of_a_worker(tmp_path, how, status):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        pids = agent.start(args=fault(how))
        exited = agent.wait_exit()
        assert (exited.pid, exited.status, exited.ours, exited.attempt) == (pids[0], status, False, 0)
        if how == "raise":
            assert "RuntimeError: the toy is broken" in [it.error for it in agent.seen if isinstance(it, Failing)]
            error_file = tmp_path / "logs" / "attempt-0000" / "rank-00000.error.json"
            assert "the toy is broken" in error_file.read_text()


def test_a_worker_that_dies_before_its_hello_is_noticed(tmp_path):
    with driven_agent(tmp_path, zygote_preload="toy_early") as agent:
        agent.accept()
        agent.send(StartAttempt(attempt=0, epoch=1, workers=(WorkerSpec(rank=0, entry="toy:work"),)))
        exited = agent.wait_exit()
        assert exited.status == 9
        assert not any(isinstance(it, Spawned) for it in agent.seen)


def test_a_zygote_that_cannot_start_is_a_failed_worker_not_a_silence(tmp_path):
    with driven_agent(tmp_path, zygote_preload="toy_threads") as agent:
        agent.accept()
        agent.send(StartAttempt(attempt=0, epoch=1, workers=(WorkerSpec(rank=0, entry="toy:work"),)))
        exited = agent.wait_exit()
        assert exited.status is None
        assert any("zygote" in it.error for it in agent.seen if isinstance(it, Failing))
        assert "the zygote has 2 threads" in (tmp_path / "logs" / "zygote.log").read_text()


def test_workers_of_a_stuck_zygote_can_be_stopped(tmp_path):
    with driven_agent(tmp_path, zygote_preload="toy_stuck") as agent:
        agent.accept()
        agent.send(StartAttempt(attempt=0, epoch=1, workers=(WorkerSpec(rank=0, entry="toy:work"),)))
        agent.send(StopWorkers(reason="the test", grace_s=0.0))
        assert agent.wait_exit().status is None
        zygote = next(it for it in agent.seen if isinstance(it, Exited) and it.kind == "zygote")
        assert zygote.status == -9


def test_a_worker_sees_exactly_what_it_was_given(tmp_path):
    with driven_agent(tmp_path, host="127.0.0.1") as agent:
        agent.accept()
        agent.start("toy:describe", ranks=2, rendezvous=True, args={"steps": 0})
        seen = {}
        while len(seen) < 2:
            message = agent.expect(FromWorker, lambda it: it.payload.startswith(b"seen ") and it.rank not in seen)
            seen[message.rank] = msgspec.json.decode(message.payload[5:])
        for rank, it in seen.items():
            assert it["ppid"] == agent.process.pid
            assert it["threads"] == 1
            assert it["modules"] == []
            assert it["names"] == [f"arena-{rank}"]
            kinds = sorted(target.split(":")[0].split(" ")[0] for target in it["fds"].values())
            log = str(tmp_path / "logs" / "attempt-0000" / f"rank-{rank:05d}.log")
            sockets = ["socket", "socket"] if rank == 0 else ["socket"]  # its channel; the listener
            areas = ["/memfd", "/memfd", "/memfd"]  # heartbeat, control, its own
            assert kinds == sorted(["/dev/null", log, log, "anon_inode", *areas, *sockets]), it["fds"]  # and the bell
        assert seen[0]["args"]["port"] == seen[1]["args"]["port"] > 0
        assert seen[1]["listener"] is None


def test_stopping_with_grace_first_asks(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        pids = agent.start(ranks=2)
        agent.send(StopWorkers(reason="the test", grace_s=60.0))
        exited = {agent.wait_for(Exited).rank: it for it in [None, None]}
        assert set(exited) == {0, 1}
        ended = [it for it in agent.seen if isinstance(it, Exited)]
        assert [(it.status, it.ours) for it in ended] == [(0, True), (0, True)]
        sent = [(it.pid, it.signal) for it in agent.seen if isinstance(it, Signalled)]
        assert sorted(sent) == sorted((pid, signal.SIGTERM) for pid in pids.values())


def test_stopping_ends_even_a_stopped_worker(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        pids = agent.start()
        os.kill(pids[0], signal.SIGSTOP)
        agent.send(StopWorkers(reason="the test", grace_s=0.05))
        exited = agent.wait_exit()
        assert (exited.status, exited.ours) == (-9, True)
        assert [it.signal for it in agent.seen if isinstance(it, Signalled)] == [signal.SIGTERM, signal.SIGKILL]


def test_memory_survives_workers_and_attempts(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start(args=fault("kill", step=5))
        agent.wait_exit()
        agent.start(attempt=1)
        ready = agent.wait_for(FromWorker, lambda it: it.payload.startswith(b"ready"))
        assert ready.payload == b"ready 4"
        kept = [it.kept for it in agent.seen if isinstance(it, Prepared)]
        assert kept == [(), ("arena-0",)]


def test_too_large_an_arena_is_refused_and_the_agent_goes_on(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.send(Prepare(memfds={"a": 1 << 55}))
        assert "arenas larger than the memory limit: 33554432.00 GiB are needed" in agent.wait_for(PrepareFailed).reason
        agent.start()


def test_a_second_attempt_beside_the_first_is_refused(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start()
        agent.send(StartAttempt(attempt=1, epoch=1, workers=()))
        assert agent.wait_for(Refused).reason == "attempt 0 still has workers"


def test_heartbeats_and_control_reach_their_ends(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start()
        (beat,) = agent.wait_for(Heartbeats, lambda it: bool(it.beats)).beats
        assert (beat.rank, beat.attempt, beat.phase) == (0, 0, "forward")
        agent.send(ToWorker(rank=0, payload=b"ping"))
        agent.wait_for(FromWorker, lambda it: it.payload == b"echo ping")
        agent.send(SetControl(stop=True, save=0))
        assert agent.wait_exit().status == 0


def test_evidence_has_statuses_order_log_and_our_own_part(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start(ranks=2, args=fault("raise"))
        agent.expect(Exited, lambda it: it.rank == 0)  # perhaps before the other's hello
        agent.send(StopWorkers(reason="the test", grace_s=0.0))
        agent.wait_exit(1)
        agent.send(CollectEvidence(id=7))
        answer = agent.wait_for(EvidenceCollected)
        assert answer.id == 7
        evidence = answer.evidence
        assert evidence.exit == {"0": 1, "1": -9}
        assert (evidence.order, evidence.ours) == (("0", "1"), ("1",))
        assert "[rank0]: RuntimeError: the toy is broken" in evidence.log


def test_stack_dumps_are_in_the_evidence(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start(args=fault("hang"))
        agent.wait_for(Heartbeats, lambda it: it.beats != () and it.beats[0].step == 2)  # where it hangs
        agent.send(CollectEvidence(id=1, dump_stacks=True))
        evidence = agent.wait_for(EvidenceCollected).evidence
        assert any("in fail" in line for line in evidence.log)


def test_what_was_not_acknowledged_is_told_again(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        pids = agent.start(args=fault("exit", step=30), memo=b"the memo")
        agent.wait_for(FromWorker, lambda it: it.payload.startswith(b"step 2 "))
        agent.acknowledge()
        agent.wait_for(FromWorker, lambda it: it.payload.startswith(b"step 4 "))
        agent.hang_up(unreachable=True)
        wait_until(lambda: not psutil.pid_exists(pids[0]), "the worker's end, noticed by the agent")
        agent.listen()
        hello = agent.accept(epoch=2)
        assert (hello.attempt, hello.memo, hello.memfds) == (0, b"the memo", {"arena-0": 4096})
        assert [(it.rank, it.pid, it.ended, it.status) for it in hello.workers] == [(0, pids[0], True, 7)]
        agent.seen.clear()
        exited = agent.wait_exit()
        assert exited.status == 7
        steps = [it.payload.split()[1] for it in agent.seen if isinstance(it, FromWorker) and it.payload.startswith(b"step")]
        assert [int(step) for step in steps] == list(range(3, 30))


@pytest.mark.parametrize("dies", [True, False])
def test_reports_that_wait_are_read_all_the_same(tmp_path, dies):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start("toy_entries:murmur", args={"reports": 50, "dies": dies})
        if dies:
            agent.wait_exit()
        else:
            agent.expect(FromWorker, lambda it: it.payload == b"49")
        assert [it.payload for it in agent.seen if isinstance(it, FromWorker)] == [b"%d" % number for number in range(50)]


def test_who_reports_more_than_anybody_takes_down_waits_and_loses_nothing(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start("toy_entries:shout", args={"reports": 80})
        told = [int(it.payload.split(b" ")[0]) for it in agent.seen if isinstance(it, FromWorker)]
        while len(told) < 80:
            told.append(int(agent.wait_for(FromWorker).payload.split(b" ")[0]))
            if len(told) >= 64:  # the agent keeps 64 MiB until it hears that they are on record
                agent.acknowledge()
        assert told == list(range(80))
        assert agent.wait_exit().status == 0


def test_a_coordinator_of_an_older_epoch_is_refused(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept(epoch=5)
        agent.hang_up()
        agent.meet()
        agent.send(Welcome(epoch=4))
        assert agent.link is not None
        while agent.link.receive(20.0) is not None:
            pass
        assert agent.link.closed
        agent.accept(epoch=6)
        agent.start()


def test_without_a_coordinator_the_lease_ends_everything(tmp_path):
    with driven_agent(tmp_path, lease_s=6.0, keeper_argv=KEEPER) as agent:
        agent.accept()
        pids = agent.start()
        agent.expect(FromKeeper)
        members = descendants(agent.process.pid)
        assert len(members) == 4
        agent.hang_up(unreachable=True)
        assert agent.wait_gone() == ExitCode.RETRY_SAME
        assert all(gone(pid) for pid in members | set(pids.values()))
        assert "the lease is 6 s" in (tmp_path / "agent.out").read_text()


def test_a_silent_coordinator_is_no_coordinator(tmp_path):
    with driven_agent(tmp_path, lease_s=6.0) as agent:
        agent.accept()
        pids = agent.start()
        assert agent.wait_gone() == ExitCode.RETRY_SAME  # the connection stands, but nothing is said
        assert gone(pids[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, LEAVE, signal.SIGSEGV])
def test_the_agents_death_leaves_no_orphan(tmp_path, number):
    with driven_agent(tmp_path, keeper_argv=KEEPER) as agent:
        agent.accept()
        agent.start(ranks=2)
        agent.expect(FromKeeper)
        members = descendants(agent.process.pid)
        assert len(members) == 5
        agent.process.send_signal(number)
        agent.wait_gone()
        wait_until(lambda: all(gone(pid) for pid in members), "no orphan")


def test_a_scheduler_that_signals_every_process_of_the_job_ends_none_of_the_supervisor_s(tmp_path):
    with driven_agent(tmp_path, keeper_argv=KEEPER) as agent:
        agent.accept()
        pids = agent.start()
        agent.expect(FromKeeper)
        members = {agent.process.pid, *descendants(agent.process.pid)} - set(pids.values())
        assert len(members) == 3  # agent, zygote, keeper
        for pid in members:
            os.kill(pid, signal.SIGTERM)
        keeper = next(it for it in agent.seen if isinstance(it, Started) and it.kind == "keeper")
        os.kill(keeper.pid, signal.SIGKILL)  # what comes after it: the only one that died is the one that was killed
        exited = agent.wait_for(Exited)
        assert (exited.kind, exited.pid) == ("keeper", keeper.pid)
        assert not any(gone(pid) for pid in members - {keeper.pid})
        assert not any(gone(pid) for pid in pids.values())


def test_a_dead_keeper_gets_a_successor_with_all_memory(tmp_path):
    with driven_agent(tmp_path, keeper_argv=KEEPER) as agent:
        agent.accept()
        agent.start()
        keeper = next(it for it in agent.seen if isinstance(it, Started) and it.kind == "keeper")
        agent.expect(FromKeeper, lambda it: it.payload == b'memfds {"arena-0":4096}')
        os.kill(keeper.pid, signal.SIGKILL)
        exited = agent.wait_for(Exited)
        assert (exited.kind, exited.pid, exited.status, exited.ours) == ("keeper", keeper.pid, -9, False)
        assert agent.wait_for(Started).restarted
        agent.wait_for(FromKeeper, lambda it: it.payload == b'memfds {"arena-0":4096}')


def test_a_dead_zygote_does_not_disturb_the_workers(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        zygote = agent.expect(Started).pid
        pids = agent.start()
        os.kill(zygote, signal.SIGKILL)
        exited = agent.wait_for(Exited)
        assert (exited.kind, exited.status) == ("zygote", -9)
        agent.wait_for(FromWorker, lambda it: it.payload.startswith(b"step"))
        assert not gone(pids[0])
        agent.send(StopWorkers(reason="the test", grace_s=0.0))
        agent.wait_exit()
        agent.start(attempt=1)  # by the new zygote


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_an_attempt_does_not_fail_because_the_zygote_has_just_died(tmp_path, delay):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        zygote = agent.expect(Started).pid
        agent.start()
        agent.send(StopWorkers(reason="the test", grace_s=0.0))
        agent.wait_exit()
        os.kill(zygote, signal.SIGKILL)
        if delay == 1:
            wait_until(lambda: gone(zygote), "its end")
        elif delay == 2:
            agent.wait_for(Exited, lambda it: it.kind == "zygote")
        elif delay == 3:
            agent.wait_for(Started, lambda it: it.kind == "zygote")
        agent.start(ranks=2, attempt=1)  # by its successor


def test_descendants_of_a_worker_go_with_it(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        agent.start(args=fault("leave child"))
        agent.wait_exit()
        left = [child.pid for child in psutil.Process(agent.process.pid).children() if child.pid != _zygote(agent)]
        assert len(left) == 1  # it left its worker's process group
        agent.start(attempt=1)
        wait_until(lambda: gone(left[0]), "the left-over's end")


def _zygote(agent) -> int:
    return next(it.pid for it in agent.seen if isinstance(it, Started) and it.kind == "zygote")


def test_a_second_agent_for_the_same_folder_leaves(tmp_path):
    with driven_agent(tmp_path) as agent:
        agent.accept()
        done = subprocess.run(
            python("recovery.agent", str(tmp_path / "spec.json")), env=toy_env(), stderr=subprocess.PIPE, check=False
        )
        assert done.returncode == ExitCode.HELD
        assert "another agent already serves" in done.stderr.decode()


def test_shutdown_leaves_nothing(tmp_path):
    with driven_agent(tmp_path, keeper_argv=KEEPER) as agent:
        agent.accept()
        agent.start(ranks=2)
        members = descendants(agent.process.pid)
        agent.send(Shutdown(reason="the test"))
        assert agent.wait_gone() == ExitCode.DONE
        assert all(gone(pid) for pid in members)
        assert not Path(tmp_path / "agent.json").exists()


def test_attempts_leave_no_descriptor(tmp_path):
    """Ten more attempts need no more than the second left: a descriptor kept by each would be ten."""
    with driven_agent(tmp_path) as agent:
        agent.accept()
        zygote = agent.wait_for(Started).pid
        counts = []
        for attempt in range(12):
            agent.start(ranks=2, attempt=attempt, rendezvous=True)
            agent.send(StopWorkers(reason="the test", grace_s=0.0))
            ended = [agent.wait_for(Exited, lambda message: message.kind == "worker").rank for _ in range(2)]
            assert sorted(ended) == [0, 1]
            wait_until(lambda: len(descendants(agent.process.pid)) == 2, "all reaped")
            agent.acknowledge()
            counts.append((num_fds(agent.process.pid), num_fds(zygote)))

        def no_more() -> bool:
            now = num_fds(agent.process.pid), num_fds(zygote)
            return now[0] <= counts[1][0] and now[1] <= counts[1][1]

        wait_until(no_more, f"no more descriptors than {counts[1]}, after {counts}")
