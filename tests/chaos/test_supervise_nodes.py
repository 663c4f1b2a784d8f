"""`ftrain supervise` on several nodes, with and without Slurm: ranks and nodes die, and the script goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recovery.agent_record import living_agent
from recovery.client import ask
from recovery.events import (
    AttemptStarted,
    Event,
    InterruptionClassified,
    LayoutChosen,
    ProcessDied,
    Ready,
    RunEnded,
    RunStarted,
    StepFinished,
    StopRequested,
)
from recovery.ledger import read_all
from recovery.paths import rank_log
from storage.local import LocalStore
from storage.run import RunStore
from tests.commands import ftrain
from tests.nodes_run import NodesRun, nodes_run
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster, wait_until
from tests.supervised import Supervised, python, standing, supervised
from tests.undisturbed import DDP, EXAMPLES, Ends, ends

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

PATIENCE_S = 120.0
needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")


class Job:
    """A supervised script that Slurm has, in one folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *words: str, settings: tuple[str, ...] = ()) -> None:
        self.cluster, self.url, self.local = cluster, str(folder / "run"), folder / "run" / "local"
        asked = [word for setting in settings for word in ("--set", setting)]
        argv = ["submit", "--slurm", *asked, "--", "ftrain", "supervise", "--run", self.url, *words]
        done = ftrain(*argv, env={"SLURM_CONF": cluster.env["SLURM_CONF"], "GLOO_SOCKET_IFNAME": "lo"}, cwd=folder)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[1]

    def events(self, kind: type[Event]) -> list[Event]:
        """The ledger's events of one kind."""
        ledger = self.local / "ledger"
        return [event for event in read_all(ledger) if isinstance(event, kind)] if ledger.is_dir() else []

    def wait_for(self, kind: type[Event], count: int = 1, step: int = 0) -> None:
        """So many such events, of this step or a later one."""

        def there() -> bool:
            found = [event for event in self.events(kind) if (getattr(event, "step", 0) or 0) >= step]
            return len(found) >= count

        wait_until(there, f"{count} x {kind.__name__}: {self.output()[-3000:]}", PATIENCE_S)

    def wait_stored(self, step: int) -> None:
        """Until a checkpoint of this step or a later one exists. The ledger hears of it with the script's next save only,
        to which a rank that stands still does not come.
        """

        def there() -> bool:
            found = RunStore(LocalStore(self.url)).checkpoints() if Path(self.url).is_dir() else []
            return any(info.step >= step and info.state == "valid" for info in found)

        wait_until(there, f"a checkpoint of step {step}: {self.output()[-3000:]}", PATIENCE_S)

    def wait_state(self, *states: str) -> None:
        """Until the job is in one of these states."""
        wait_until(lambda: self.cluster.state(self.job) in states, f"{states}: {self.output()[-3000:]}", PATIENCE_S)

    def output(self) -> str:
        """What the batch script has said."""
        return "\n".join(path.read_text() for path in self.local.glob("slurm-*.out"))

    def kill_rank(self, rank: int) -> None:
        """As any accident would."""
        os.kill(ask(self.local, "status")["workers"][str(rank)]["pid"], signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        """Of one node; its workers die with it."""
        agent = living_agent(self.local / "nodes" / node)
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Two idle nodes."""
    with slurm_cluster(tmp_path / "slurm", 2) as found:
        yield found


@needs_slurm
def test_a_job_on_two_nodes_loses_a_rank_and_an_agent_and_ends_where_one_machine_did(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: Ends
) -> None:
    """Two ranks compute the same wherever they are."""
    job = Job(cluster, tmp_path, "--nnodes", "2", "--nproc", "1", *standing("1:0:65,1:1:185", *DDP))
    job.wait_stored(20)
    job.kill_rank(1)
    job.wait_for(Ready, 2)
    job.wait_stored(100)
    job.kill_agent("n2")
    job.wait_state("COMPLETED")
    assert ends(job.output(), tmp_path / "run") == undisturbed
    assert [event.nodes for event in job.events(AttemptStarted)] == [("n1", "n2")] * 3  # type: ignore[attr-defined]
    verdicts = [event.verdict for event in job.events(InterruptionClassified)]  # type: ignore[attr-defined]
    assert (verdicts[0].first_failing_rank, verdicts[0].node) == (1, "n2")
    assert verdicts[1].class_ == "node_failure"
    resumed = [event.step for event in job.events(Ready)]  # type: ignore[attr-defined]
    assert resumed[0] == 0
    assert resumed[1] >= 20
    assert resumed[2] >= 100
    died = [(event.kind, event.node) for event in job.events(ProcessDied) if not event.ours]  # type: ignore[attr-defined]
    assert ("agent", "n2") in died


# -- without Slurm: nodes as processes -----------------------------------------------------------------------------------------

COUNTS = """
import os, time
import ftrain

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
first = int(open("state").read()) if os.path.exists("state") else 0
print("begins at", first, "of", world, flush=True)
for step in range(first + 1, 10**9):
    time.sleep(0.02)
    if ftrain.progress(step):
        if rank == "0":
            open("state", "w").write(str(step))
        print("leaves after", step, flush=True)
        break
"""


@dataclass
class Announced:
    """A run that is going to be started in this folder."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: {"GLOO_SOCKET_IFNAME": "lo"})

    @property
    def local(self) -> Path:
        """Its local folder."""
        return self.folder / "run" / "local"


@contextlib.contextmanager
def offered(folder: Path, *names: str) -> Iterator[NodesRun]:
    """Nodes that wait for a run which is still to be started, and which will wait for them only so long."""
    with nodes_run(Announced(folder), *names) as nodes:
        for name in names:
            wait_until(lambda name=name: "waiting for the run" in (folder / f"{name}.out").read_text(), f"{name} to wait")
        yield nodes


def leaves(run: Supervised, attempt: int, *ranks: tuple[int, str]) -> set[str]:
    """The last words of these ranks (rank, node)."""
    return {run.log(attempt, rank, node).splitlines()[-1] for rank, node in ranks}


def test_a_lost_node_is_gone_on_without_if_that_is_allowed_and_taken_back_when_it_returns(tmp_path: Path) -> None:
    """All ranks leave after the same step, for the node that is back and for a stop."""
    (tmp_path / "train.py").write_text(COUNTS)
    words = ("--nnodes", "2", "--min-nodes", "1", "--nodes-s", "5", "--nproc", "2", *python("train.py"))
    with offered(tmp_path, "n1", "n2") as nodes, supervised(tmp_path, *words) as run:
        run.wait_event(StepFinished, lambda event: event.step >= 5)
        nodes.kill("n2")
        run.wait_event(Ready, lambda event: event.attempt == 1)
        run.wait_event(StepFinished, lambda event: event.attempt == 1 and event.step >= 5)
        nodes.join("n2")
        run.wait_event(Ready, lambda event: event.attempt == 2)
        run.wait_event(StepFinished, lambda event: event.attempt == 2 and event.step >= 5)
        assert ftrain("stop", run.url).returncode == 0
        code, out, err = run.wait()
    assert code == 75, err
    assert [event.nodes for event in run.events(AttemptStarted)] == [("n1", "n2"), ("n1",), ("n1", "n2")]
    assert [event.ranks for event in run.events(LayoutChosen)] == [2, 4]
    assert [event.verdict.class_ for event in run.events(InterruptionClassified)] == ["node_failure"]
    assert len(leaves(run, 1, (0, "n1"), (1, "n1"))) == 1
    assert len(leaves(run, 2, (0, "n1"), (1, "n1"), (2, "n2"), (3, "n2"))) == 1
    moved = int(run.log(1, 0, "n1").split()[-1])
    assert f"begins at {moved} of 4" in out.splitlines()
    assert [event.step for event in run.events(Ready)] == [0, 0, moved]


@pytest.mark.slow
def test_a_node_whose_processes_die_just_before_it_is_gone_on_without_too(tmp_path: Path) -> None:
    """The wait for nodes is over before anybody can say that this one is lost; until then it is neither used nor replaced."""
    (tmp_path / "train.py").write_text(COUNTS)
    words = ("--nnodes", "2", "--min-nodes", "1", "--nodes-s", "1", "--nproc", "1", *python("train.py"))
    with supervised(tmp_path, *words) as run, nodes_run(run, "n1", "n2") as nodes:
        run.wait_event(StepFinished, lambda event: event.step >= 5)
        os.kill(run.workers()[1], signal.SIGKILL)
        run.wait_event(ProcessDied)
        nodes.kill("n2")
        run.wait_event(StepFinished, lambda event: event.attempt == run.events(AttemptStarted)[-1].attempt >= 1)
        run.wait_event(AttemptStarted, lambda event: event.nodes == ("n1",))
        assert ftrain("stop", run.url).returncode == 0
        code, _, err = run.wait()
    assert code == 75, err


@pytest.mark.slow
def test_a_node_too_few_ends_the_run_with_code_11_and_says_what_would_help(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTS)
    words = ("--nnodes", "2", "--nproc", "1", "--nodes-s", "2", *python("train.py"))
    with supervised(tmp_path, *words) as run, nodes_run(run, "n1"):
        code, _, err = run.wait()
    assert code == 11, err
    assert "1 of 2 nodes are there after 2 s" in err
    assert run.events(AttemptStarted) == []


@pytest.mark.slow
def test_patterns_are_read_on_every_node_of_a_shared_folder_and_a_drained_node_is_replaced(tmp_path: Path) -> None:
    """A script that says nothing to us moves when it restarts; one that does moves at once."""
    (tmp_path / "quiet.py").write_text(
        "import itertools, time\nfor n in itertools.count(1): time.sleep(0.02); print('step', n)"
    )
    words = ("--nnodes", "2", "--nproc", "1", "--progress-pattern", r"step (\d+)", *python("quiet.py"))
    with supervised(tmp_path, *words) as run, nodes_run(run, "n1", "n2", "n3") as nodes:
        run.wait_event(StepFinished, lambda event: event.step >= 5)
        nodes.wait_for_nodes("n1", "n2", "n3")
        first, second = run.events(AttemptStarted)[0].nodes
        (spare,) = {"n1", "n2", "n3"} - {first, second}
        refused = ftrain("drain", run.url, second)
        assert refused.returncode == 2
        assert "does not call ftrain.progress" in refused.stderr
        nodes.kill(first)  # where the teller is
        run.wait_event(StepFinished, lambda event: event.attempt == 1 and event.step >= 5)
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.wait()
    assert code == 75, err
    assert [event.nodes for event in run.events(AttemptStarted)] == [(first, second), (spare, second)]
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "train.py").write_text(COUNTS)
    words = ("--nnodes", "2", "--nproc", "1", *python("train.py"))
    with supervised(tmp_path / "talks", *words) as run, nodes_run(run, "n1", "n2", "n3") as nodes:
        run.wait_event(StepFinished, lambda event: event.step >= 5)
        nodes.wait_for_nodes("n1", "n2", "n3")
        first, second = run.events(AttemptStarted)[0].nodes
        (spare,) = {"n1", "n2", "n3"} - {first, second}
        assert ftrain("drain", run.url, second).returncode == 0
        run.wait_event(StepFinished, lambda event: event.attempt == 1)
        assert ftrain("stop", run.url).returncode == 0
        code, _, err = run.wait()
    assert code == 75, err
    assert [event.nodes for event in run.events(AttemptStarted)] == [(first, second), (first, spare)]
    assert run.events(InterruptionClassified) == []


# -- under Slurm, at length ----------------------------------------------------------------------------------------------------


@pytest.fixture
def four(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Four idle nodes."""
    with slurm_cluster(tmp_path / "slurm", 4) as found:
        yield found


@needs_slurm
@pytest.mark.slow
def test_a_plain_script_on_four_nodes_survives_a_rank_an_agent_and_a_node(four: SlurmCluster, tmp_path: Path) -> None:
    """It knows nothing of us, so it begins anew each time; its steps are read from what it writes, wherever rank 0 is."""
    plain = (str(EXAMPLES / "plain_ddp.py"), "--steps", "600", "--batch", "256", "--width", "256")
    words = ("--nnodes", "3", "--nproc", "1", "--progress-pattern", r"step (\d+) loss (?P<loss>\S+)", *python(*plain))
    job = Job(four, tmp_path, *words, settings=("slurm.spare_nodes=1",))
    job.wait_for(StepFinished, step=20)
    job.kill_rank(2)
    job.wait_for(Ready, 2)
    first, second, _ = job.events(AttemptStarted)[1].nodes  # type: ignore[attr-defined]
    job.kill_agent(second)
    job.wait_for(Ready, 3)
    four.kill_node(second)
    job.wait_state("COMPLETED")
    assert "\nfinal " in job.output()
    nodes = [event.nodes for event in job.events(AttemptStarted)]  # type: ignore[attr-defined]
    assert nodes[0] == nodes[1]
    assert nodes[-1][0] == first
    assert second not in nodes[-1]
    killed, *lost = job.events(InterruptionClassified)
    assert killed.verdict.first_failing_rank == 2  # type: ignore[attr-defined]
    assert [event.verdict.class_ for event in lost[:2]] == ["node_failure"] * 2  # type: ignore[attr-defined]
    for event in lost[2:]:  # PyTorch's own threads, seen in the end of a rank that had done its work (as in test_supervise)
        attempt, rank = event.attempt, event.verdict.first_failing_rank  # type: ignore[attr-defined]
        log = rank_log(job.local / "nodes" / nodes[attempt][rank], attempt, rank)
        assert "terminate called without an active exception" in log.read_text()


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("how", ["the time limit", "a cancelled job"])
def test_a_warned_script_saves_where_it_stands_and_the_job_goes_on_there(
    cluster: SlurmCluster, tmp_path: Path, how: str
) -> None:
    """Slurm counts limits in minutes, so the warning is sent by hand, as `--signal=B:USR1@...` does at the end. A cancelled
    job's processes get a SIGTERM each; its script saves all the same."""
    words = ("--nnodes", "2", "--nproc", "1", *python(str(EXAMPLES / "ddp.py"), "--steps", "1000000", "--width", "256"))
    job = Job(cluster, tmp_path, *words)
    job.wait_stored(20)
    if how == "the time limit":
        cluster.run("scancel", "--batch", "--signal=USR1", job.job)
        job.wait_for(RunStarted, 2)
        job.wait_for(Ready, 2)
        assert "goes back into the queue" in job.output()
        resumed = job.events(Ready)[1].step  # type: ignore[attr-defined]
        ended = job.events(RunEnded)[0]
        assert ended.outcome == "stopped"  # type: ignore[attr-defined]
        assert job.events(StopRequested)[0].by == "SIGUSR1"  # type: ignore[attr-defined]
        verdict = job.events(InterruptionClassified)[0].verdict  # type: ignore[attr-defined]
        assert (verdict.planned, verdict.class_) in ((True, "time_limit"), (True, "preemption"))
        before = [event.step for event in job.events(StepFinished) if event.attempt == 0]  # type: ignore[attr-defined]
        assert resumed == before[-1]  # nothing is done twice
        assert ftrain("stop", job.url).returncode == 0
        job.wait_for(RunEnded, 2)
    else:
        cluster.run("scancel", job.job)
        job.wait_for(RunEnded)
        steps = [event.step for event in job.events(StepFinished)]  # type: ignore[attr-defined]
        assert RunStore(LocalStore(job.url)).open().step == steps[-1]
        assert job.events(InterruptionClassified)[0].verdict.planned  # type: ignore[attr-defined]
