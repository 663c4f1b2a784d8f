"""`ftrain supervise` on several nodes, with and without Slurm: ranks and nodes die, and the script goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.agent_record import living_agent
from recovery.client import ask
from recovery.events import (
    AttemptStarted,
    CheckpointCommitted,
    Event,
    InterruptionClassified,
    ProcessDied,
    Ready,
)
from recovery.ledger import read_all
from storage.local import LocalStore
from storage.run import RunStore
from tests.commands import ftrain
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster, wait_until
from tests.supervised import python, supervised

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

EXAMPLES = Path(__file__).parents[2] / "examples"
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
            found = [event for event in self.events(kind) if getattr(event, "step", 0) >= step]
            return len(found) >= count

        wait_until(there, f"{count} x {kind.__name__}: {self.output()[-3000:]}", PATIENCE_S)

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


def finals(run_folder: Path) -> tuple[int, dict[str, int]]:
    """Newest step and its digests, recomputed from storage; NumPy's generator, which the script never seeds, apart."""
    checkpoint = RunStore(LocalStore(str(run_folder))).open()
    assert checkpoint.verify().ok
    return checkpoint.step, {name: value for name, value in checkpoint.manifest.digests.items() if "/numpy/" not in name}


def final_words(text: str) -> str:
    """The script's last line."""
    return next(line for line in reversed(text.splitlines()) if line.startswith("final "))


DDP = (str(EXAMPLES / "ddp.py"), "--steps", "240", "--batch", "256", "--width", "256")


@needs_slurm
def test_a_job_on_two_nodes_loses_a_rank_and_an_agent_and_ends_where_one_machine_did(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Two ranks compute the same wherever they are."""
    (tmp_path / "one").mkdir()
    with supervised(tmp_path / "one", "--nproc", "2", *python(*DDP)) as run:
        code, out, err = run.wait()
    assert code == 0, err
    job = Job(cluster, tmp_path, "--nnodes", "2", "--nproc", "1", *python(*DDP))
    job.wait_for(CheckpointCommitted, step=20)
    job.kill_rank(1)
    job.wait_for(Ready, 2)
    job.wait_for(CheckpointCommitted, step=80)
    job.kill_agent("n2")
    job.wait_state("COMPLETED")
    assert final_words(job.output()) == final_words(out)
    assert finals(tmp_path / "run") == finals(tmp_path / "one" / "run")
    assert [event.nodes for event in job.events(AttemptStarted)] == [("n1", "n2")] * 3  # type: ignore[attr-defined]
    verdicts = [event.verdict for event in job.events(InterruptionClassified)]  # type: ignore[attr-defined]
    assert (verdicts[0].first_failing_rank, verdicts[0].node) == (1, "n2")
    assert verdicts[1].class_ == "node_failure"
    resumed = [event.step for event in job.events(Ready)]  # type: ignore[attr-defined]
    assert resumed[0] == 0
    assert resumed[1] >= 20
    assert resumed[2] >= 80
    died = [(event.kind, event.node) for event in job.events(ProcessDied) if not event.ours]  # type: ignore[attr-defined]
    assert ("agent", "n2") in died
