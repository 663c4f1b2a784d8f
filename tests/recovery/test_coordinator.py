"""The whole process tree with a toy in it, under real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from toy import Fault
from toy_run import ToyRun, descendants, gone, num_fds, toy_env, toy_run, wait_until

from recovery.client import NotRunningError, ask
from recovery.codes import ExitCode
from recovery.desk import IMPATIENT_S
from recovery.events import (
    AttemptStarted,
    Decided,
    InterruptionClassified,
    ProcessDied,
    Ready,
    RunEnded,
    RunStarted,
    SignalSent,
    StepFinished,
    StopRequested,
    Suspected,
)
from recovery.ledger import Ledger

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

ENDLESS = 10**9


def workers_died(run, attempt: int) -> dict[int, int | None]:
    return {it.rank: it.status for it in run.events(ProcessDied) if it.kind == "worker" and it.attempt == attempt}


def last_step(run) -> int:
    return max((event.step for event in run.events(StepFinished)), default=0)


def wait_for_steps(run, more: int = 3) -> int:
    goal = last_step(run) + more
    wait_until(lambda: last_step(run) >= goal, "steps")
    return last_step(run)


def test_unbroken_run_is_one_attempt_and_leaves_nothing(tmp_path):
    with toy_run(tmp_path, steps=5) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        assert [event.attempt for event in run.events(AttemptStarted)] == [0]
        assert [event.step for event in run.events(StepFinished)] == [1, 2, 3, 4, 5]
        assert workers_died(run, 0) == {0: 0, 1: 0}
        assert [event.outcome for event in run.events(RunEnded)] == ["finished"]
        assert not (tmp_path / "agent.json").exists()
        assert not (tmp_path / "owner.json").exists()
        assert not (tmp_path / "coordinator.sock").exists()


@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("kill", -9, id="kill"),
        pytest.param("segv", -11, id="segfault"),
        pytest.param("abort", -6, id="abort"),
        pytest.param("exit", 7, id="exit-7"),
        pytest.param("raise", 1, id="exception"),
    ],
)
def test_dead_worker_is_reported_truly(tmp_path, how, status):
    with toy_run(tmp_path, steps=ENDLESS, faults=(Fault(how=how, rank=1, step=5),)) as run:
        run.start()
        run.wait_event(Decided)
        with contextlib.suppress(NotRunningError):  # whether it goes on after such a death is the policy's business, not ours
            ask(tmp_path, "stop")
        run.wait()
        assert workers_died(run, 0) == {0: -9, 1: status}
        assert [(event.rank, event.ours) for event in run.events(ProcessDied) if event.attempt == 0] == [(1, False), (0, True)]
        assert [(event.rank, event.signal) for event in run.events(SignalSent) if event.attempt == 0] == [(0, 9)]


def test_after_a_worker_death_the_run_goes_on_from_memory(tmp_path):
    with toy_run(tmp_path, steps=40, faults=(Fault(how="kill", rank=1, step=5),)) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        assert run.events(InterruptionClassified)[0].verdict.first_failing_rank == 1
        assert [event.action for event in run.events(Decided)] == ["restart"]
        assert [event.source for event in run.events(AttemptStarted)] == ["init", "memory"]
        assert "ready 1 1 4" in run.diary()  # the memory areas survived their workers: the one that died at step 5,
        last = max((event.step for event in run.events(StepFinished) if event.attempt == 0), default=0)
        assert next(it.step for it in run.events(Ready) if it.attempt == 1) >= last  # and rank 0, which nobody waits for
        assert workers_died(run, 1) == {0: 0, 1: 0}


def test_decision_stands_in_the_ledger_before_the_next_attempt(tmp_path):
    with toy_run(tmp_path, faults=(Fault(how="kill"),)) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        names = [type(event).__name__ for event in run.events(object)]
        story = ["AttemptStarted", "ProcessDied", "AttemptEnded", "InterruptionClassified", "Decided", "AttemptStarted"]
        positions = [names.index(story[0]), *(names.index(name) for name in story[1:5])]
        positions.append(names.index("AttemptStarted", positions[-1]))
        assert positions == sorted(positions)


@pytest.mark.parametrize("kind", ["zygote", "keeper"])
def test_dead_helper_takes_nobody_along_and_gets_a_successor(tmp_path, kind):
    with toy_run(tmp_path, steps=ENDLESS, keeper=True) as run:
        run.start()
        workers = run.worker_pids()
        memfds = '{"arena-0":4096,"arena-1":4096}'
        run.wait_diary(f"keeper memfds {memfds}")
        old = run.helper_pid(kind)
        os.kill(old, signal.SIGKILL)
        died = run.wait_event(ProcessDied)
        assert (died.kind, died.pid, died.status, died.ours) == (kind, old, -9, False)
        wait_for_steps(run)
        assert run.helper_pid(kind) != old
        assert run.worker_pids() == workers
        assert len(run.events(AttemptStarted)) == 1
        if kind == "keeper":
            run.wait_diary("keeper started restarted=True")
            wait_until(lambda: run.diary().count(f"keeper memfds {memfds}") >= 2, "memory areas for the new keeper")


def test_dead_agent_takes_its_node_along_and_the_run_starts_over(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, keeper=True) as run:
        run.start()
        run.worker_pids()
        run.helper_pid("keeper")
        wait_for_steps(run)
        members = run.members()
        assert len(members) == 5  # agent, zygote, keeper, two workers
        old = run.agent_pid()
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: all(gone(pid) for pid in members), "no orphan")
        wait_until(lambda: len(run.events(AttemptStarted)) == 2, "the second attempt")
        died = next(event for event in run.events(ProcessDied) if event.kind == "agent")
        assert (died.pid, died.status, died.ours) == (old, -9, False)
        assert [event.source for event in run.events(AttemptStarted)] == ["init", "init"]
        assert "agent lost" in run.diary()
        assert run.agent_pid() != old


def test_an_agent_that_does_not_answer_is_replaced(tmp_path):
    with toy_run(tmp_path, steps=5, faults=(Fault(how="kill", step=1),), spec={"prepare_s": 5.0}) as run:
        (tmp_path / "hold").touch()
        run.start()
        run.wait_event(Decided)
        agent = run.agent_pid()
        os.kill(agent, signal.SIGSTOP)
        (tmp_path / "hold").unlink()
        assert run.wait() == ExitCode.DONE
        assert gone(agent)
        assert next((died.pid, died.ours) for died in run.events(ProcessDied) if died.kind == "agent") == (agent, True)


def test_children_of_workers_end_with_the_agent_too(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, faults=(Fault(how="fork", step=2, rank=1),)) as run:
        run.start()
        run.worker_pids()
        wait_until(lambda: len(descendants(run.agent_pid())) == 5, "agent, zygote, two workers, a child of one")
        members = run.members()
        os.kill(run.agent_pid(), signal.SIGKILL)
        wait_until(lambda: all(gone(pid) for pid in members), "no orphan")
        wait_until(lambda: len(run.events(AttemptStarted)) == 2, "the second attempt")


def test_dead_coordinator_is_respawned_and_readopts_the_same_workers(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        parent = run.start("parent")
        workers, agent = run.worker_pids(), run.agent_pid()
        wait_for_steps(run)
        (coordinator,) = descendants(parent.pid) - descendants(agent) - {parent.pid}
        os.kill(coordinator, signal.SIGKILL)
        run.wait_diary("adopted 0 memo of 0")
        wait_for_steps(run)
        assert (run.worker_pids(), run.agent_pid()) == (workers, agent)
        died = next(event for event in run.events(ProcessDied) if event.kind == "coordinator")
        assert (died.pid, died.status) == (coordinator, None)
        assert len(run.events(AttemptStarted)) == 1
        assert "begin resumed=True epoch=2" in run.diary()
        steps = [event.step for event in run.events(StepFinished)]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))  # what happened in between was kept and told
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


def test_storage_that_is_away_for_longer_than_the_lease_does_not_cost_the_workers_of_a_dead_coordinator(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, spec={"lease_s": 6.0}, begin_s=9.0) as run:
        parent = run.start("parent")
        workers, agent = run.worker_pids(), run.agent_pid()
        wait_for_steps(run)
        (coordinator,) = descendants(parent.pid) - descendants(agent) - {parent.pid}
        os.kill(coordinator, signal.SIGKILL)
        run.wait_diary("adopted 0 memo of 0")
        wait_for_steps(run)
        assert (run.worker_pids(), run.agent_pid()) == (workers, agent)
        assert len(run.events(AttemptStarted)) == 1
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED


def lose_coordinator_and_storage(run: ToyRun) -> int:
    """A coordinator is killed in mid-run, and storage is away for the one that follows; the agent that they share."""
    parent = run.start("parent")
    agent = run.agent_pid()
    wait_for_steps(run)
    (run.folder / "away").touch()
    (coordinator,) = descendants(parent.pid) - descendants(agent) - {parent.pid}
    os.kill(coordinator, signal.SIGKILL)
    return agent


def stop_as_soon_as_somebody_hears(folder: Path) -> dict[str, object]:
    answers: list[dict[str, object]] = []

    def asked() -> bool:
        with contextlib.suppress(NotRunningError):
            answers.append(ask(folder, "stop", timeout_s=30.0))
        return bool(answers)

    wait_until(asked, "an answer")
    return answers[0]


def test_a_stop_is_heard_while_storage_is_away_and_carried_out_when_it_is_back(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        lose_coordinator_and_storage(run)
        assert stop_as_soon_as_somebody_hears(tmp_path) == {}
        assert not [line for line in run.diary() if line.startswith("adopted")]
        assert not run.events(StopRequested)
        (tmp_path / "away").unlink()
        assert run.wait() == ExitCode.STOPPED
        assert workers_died(run, 0) == {0: 0, 1: 0}, "they finished their step"
        assert [event.by for event in run.events(StopRequested)] == ["ftrain stop"]


def test_a_stop_does_not_wait_for_storage_longer_than_a_stop_may_take(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, spec={"stop_s": 1.0}) as run:
        agent = lose_coordinator_and_storage(run)
        stop_as_soon_as_somebody_hears(tmp_path)
        assert run.wait() == ExitCode.RETRY_SAME, "what the workers had in memory is not in storage"
        assert gone(agent)


def test_worker_that_dies_without_coordinator_is_told_to_the_next_one(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        first = run.start()
        victim = run.worker_pids()[1]
        first.kill()
        first.wait()
        os.kill(victim, signal.SIGALRM)  # a death that nobody else brings about
        wait_until(lambda: not Path(f"/proc/{victim}").exists(), "its end, noticed by the agent")
        run.start()
        run.wait_event(AttemptStarted, lambda event: event.attempt == 1)
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED
        died = next(event for event in run.events(ProcessDied) if event.kind == "worker")
        assert (died.rank, died.attempt, died.status, died.ours) == (1, 0, -signal.SIGALRM, False)
        assert [event.attempt for event in run.events(AttemptStarted)] == [0, 1]


def test_a_roll_back_that_an_earlier_coordinator_decided_is_carried_out(tmp_path):
    with Ledger(tmp_path / "ledger", None, 1) as ledger:
        ledger.append(RunStarted(t=1.0, run_id="toy", epoch=1))
        ledger.append(AttemptStarted(t=2.0, attempt=3, ranks=2, source="init"))
        ledger.append(Suspected(t=3.0, attempt=3, since=3.0, reason="loss spike", onset=20))
        ledger.append(Decided(t=4.0, attempt=3, action="roll_back", reason="loss spike", verdict_id="v"))
    (tmp_path / "epoch").write_text("1")
    with toy_run(tmp_path, steps=3) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        assert "back from 3" in run.diary()
        assert run.events(AttemptStarted)[-1].attempt == 4


def test_killed_parent_leaves_coordinator_and_agent_running(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        parent = run.start("parent")
        workers = run.worker_pids()
        parent.kill()
        parent.wait()
        wait_for_steps(run)
        assert run.worker_pids() == workers
        ask(tmp_path, "stop")
        run.wait_event(RunEnded)


def test_sigterm_stops_at_a_step_boundary_with_its_own_code(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        parent = run.start("parent")
        wait_for_steps(run)
        members = run.members()
        parent.send_signal(signal.SIGTERM)
        assert run.wait() == ExitCode.STOPPED
        assert run.events(StopRequested)[0].by == "SIGTERM"
        assert workers_died(run, 0) == {0: 0, 1: 0}
        assert run.events(SignalSent) == []
        assert all(gone(pid) for pid in members)


def test_a_stop_that_is_asked_for_again_does_not_wait_for_storage_and_says_so(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        (tmp_path / "owed").touch()
        coordinator = run.start()
        wait_for_steps(run)
        coordinator.send_signal(signal.SIGTERM)
        wait_until(lambda: workers_died(run, 0) == {0: 0, 1: 0}, "the end of the workers")
        asked = run.events(StopRequested)[0].t
        wait_until(lambda: time.time() - asked > 1.1 * IMPATIENT_S, "a signal that is not of the same volley")
        coordinator.send_signal(signal.SIGTERM)
        assert run.wait() == ExitCode.RETRY_SAME
        reason = run.events(RunEnded)[0].reason
        assert reason == "asked again while the last state was on its way; the newest state did not reach storage"


def test_workers_that_ignore_the_stop_are_killed_after_stop_s(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, faults=(Fault(how="hang", rank=1, step=2),), spec={"stop_s": 3.0}) as run:
        run.start()
        wait_until(lambda: run.status()["workers"].get("1", {}).get("step") == 2, "the hang of rank 1")
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED
        assert workers_died(run, 0) == {0: 0, 1: -9}


def test_client_requests(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, keeper=True) as run:
        run.start()
        run.worker_pids()
        status = run.status()
        assert status["run"] == {"toy": True}
        assert set(status["workers"]) == {"0", "1"}
        ask(tmp_path, "save")
        with pytest.raises(ValueError, match="unknown request 'nonsense'"):
            ask(tmp_path, "nonsense")
        (tmp_path / "to_worker").touch()
        run.wait_diary("echo 0 ping")
        run.wait_diary("keeper heard 0 from rank 0: ping")
        run.wait_diary("keeper told hello keeper")
        ask(tmp_path, "stop", {"by": "the test"})
        assert run.wait() == ExitCode.STOPPED
        assert run.events(StopRequested)[0].by == "the test"
    with pytest.raises(NotRunningError):
        ask(tmp_path, "status")


def test_second_coordinator_is_refused_with_the_owners_name(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS) as run:
        first = run.start()
        run.worker_pids()
        second = subprocess.run(
            [sys.executable, "-P", "-m", "toy", "coordinator", str(tmp_path)], env=toy_env(), capture_output=True, check=False
        )
        assert second.returncode == ExitCode.HELD
        assert f"process {first.pid} on" in second.stderr.decode()
        wait_for_steps(run)


def test_hang_is_suspected_with_stacks_and_ends_in_a_restart(tmp_path):
    with toy_run(tmp_path, steps=20, faults=(Fault(how="hang", rank=1, step=3),), spec={"hang_s": 4.0}) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        suspected = run.events(Suspected)[0]
        assert suspected.rank == 1
        assert "step 3, forward" in suspected.reason
        log = (tmp_path / "logs" / "attempt-0000" / "rank-00001.log").read_text()
        assert "in fail" in log  # the hung line, from the stack dump
        assert workers_died(run, 0)[1] == -9
        assert [event.attempt for event in run.events(AttemptStarted)] == [0, 1]


def test_crash_loop_is_given_up(tmp_path):
    limits = {"max_restarts": 2, "unknown_restarts": 2, "backoff_s": 0.01}
    with toy_run(tmp_path, faults=(Fault(how="kill", step=1, attempt=-1),), limits=limits) as run:
        run.start()
        assert run.wait() == ExitCode.GIVEN_UP
        assert len(run.events(AttemptStarted)) == 3
        assert run.events(RunEnded)[0].outcome == "given_up"


def test_arenas_over_the_memory_limit_are_a_clear_error(tmp_path):
    with toy_run(tmp_path, memfd_bytes=1 << 50) as run:
        run.start()
        assert run.wait() == ExitCode.CONFIG
        reason = run.events(RunEnded)[0].reason
        assert "arenas larger than the memory limit" in reason
        assert "2097152.00 GiB" in reason
        assert run.events(AttemptStarted) == []


def test_what_does_not_fit_is_planned_again_if_less_will_do(tmp_path):
    with toy_run(tmp_path, memfd_bytes=1 << 50, less_bytes=4096) as run:
        run.start()
        assert run.wait() == ExitCode.DONE
        assert [event.attempt for event in run.events(AttemptStarted)] == [0]


def test_broken_preload_is_given_up_with_its_traceback(tmp_path):
    limits = {"max_restarts": 1, "unknown_restarts": 1, "backoff_s": 0.01}
    with toy_run(tmp_path, preload="toy_that_is_not_there", limits=limits) as run:
        run.start()
        code = run.wait()
        assert code not in (ExitCode.DONE, ExitCode.STOPPED)
        assert "toy_that_is_not_there" in (tmp_path / "logs" / "zygote.log").read_text()
        assert run.events(RunEnded)[0].outcome in ("given_up", "failed")


def test_foreign_packages_in_the_current_folder_do_no_harm(tmp_path):
    foreign = tmp_path / "foreign"
    for name in ("storage", "recovery", "ftrain", "msgspec"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    folder = tmp_path / "run"
    folder.mkdir()
    with toy_run(folder, steps=3, keeper=True) as run:
        run.start("parent", cwd=foreign)
        assert run.wait() == ExitCode.DONE


def test_what_a_worker_started_dies_with_it(tmp_path):
    with toy_run(tmp_path, steps=ENDLESS, faults=(Fault(how="leave child", step=3),)) as run:
        run.start()
        run.wait_event(Ready, lambda event: event.attempt == 1)
        wait_until(lambda: len(descendants(run.agent_pid())) == 4, "agent, zygote, two workers, and nothing else")
        members = run.members()
        assert "killing left-over process" in (tmp_path / "logs" / "agent.log").read_text()
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED
        assert all(gone(pid) for pid in members)


def restarts_leave_nothing(tmp_path: Path, restarts: int) -> None:
    with toy_run(
        tmp_path,
        steps=ENDLESS,
        step_s=0.002,
        keeper=True,
        faults=(Fault(how="kill", step=ENDLESS),),
        limits={"max_restarts": 3, "backoff_s": 0.0},
        spec={"quiet_s": 0.02},
    ) as run:
        coordinator = run.start()
        run.helper_pid("keeper")
        wait_for_steps(run)
        agent, zygote = run.agent_pid(), run.helper_pid("zygote")
        counts: list[dict[int, int]] = []
        for number in range(restarts):
            pids = run.worker_pids()
            wait_for_steps(run, more=2)
            if number in (1, 2, 3):
                counts.append({pid: num_fds(pid) for pid in (coordinator.pid, agent, zygote)})
            os.kill(pids[number % 2], signal.SIGKILL)
            run.wait_event(AttemptStarted, lambda event, number=number: event.attempt == number + 1)
        run.worker_pids()
        wait_for_steps(run, more=2)
        least = {pid: min(count[pid] for count in counts) for pid in counts[0]}  # one may just be giving some back
        wait_until(lambda: all(num_fds(pid) <= least[pid] for pid in least), f"no more descriptors than {least}")
        members = run.members()
        assert len(descendants(agent)) == 5
        assert run.agent_pid() == agent
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED
        assert all(gone(pid) for pid in members)


def test_restarts_in_a_row_leave_no_descriptor_zombie_or_orphan(tmp_path):
    restarts_leave_nothing(tmp_path, 30)


@pytest.mark.slow
def test_a_hundred_restarts_in_a_row_leave_no_descriptor_zombie_or_orphan(tmp_path):
    restarts_leave_nothing(tmp_path, 100)


def test_supervisor_side_imports_neither_torch_nor_numpy():
    names = ("coordinator", "agent", "zygote", "worker", "launch", "client", "report")
    imports = ", ".join(f"recovery.{name}" for name in names)
    code = f"import sys, {imports}; print(sorted({{'torch', 'numpy', 'zarr', 'fsspec', 'storage'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def wait_for_reports(run, more: int) -> None:
    """Steps finished from now on, whatever their numbers: after the agent's death the toy starts over."""
    goal = len(run.events(StepFinished)) + more
    wait_until(lambda: len(run.events(StepFinished)) >= goal, "steps")


def random_kills(tmp_path: Path, seed: int, kills: int) -> None:
    """Kill random members at random moments, the coordinator's among them; the run must go on after each, and leave nothing."""
    random = Random(seed)
    limits = {"max_restarts": 10**6, "unknown_restarts": 10**6, "backoff_s": 0.0}
    with toy_run(tmp_path, steps=ENDLESS, step_s=0.02, keeper=True, limits=limits, spec={"quiet_s": 0.02}) as run:
        parent = run.start("parent")
        everybody: set[int] = set()
        for _ in range(kills):
            wait_for_reports(run, more=random.randint(1, 5))
            agent = run.agent_pid()
            members = descendants(parent.pid) - {parent.pid} | descendants(agent)
            everybody |= members
            for victim in random.sample(sorted(members), min(random.choice([1, 1, 2]), len(members))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        attempts = len(run.events(AttemptStarted))
        wait_until(lambda: not run.status()["stopping"] and run.worker_pids(), "workers")
        wait_for_reports(run, more=3)
        assert len(run.events(AttemptStarted)) <= attempts + 1
        everybody |= descendants(parent.pid) | descendants(run.agent_pid())
        ask(tmp_path, "stop")
        assert run.wait() == ExitCode.STOPPED
        wait_until(lambda: all(gone(pid) for pid in everybody), "no orphan")


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(6)])
def test_random_kills(tmp_path, seed):
    random_kills(tmp_path, seed, 8 if seed == 0 else 20)
