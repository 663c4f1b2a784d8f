"""Runs under a real Slurm of four nodes: submitted, started on each node, carried through what the scheduler does to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.client import ask
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    InterruptionClassified,
    ProcessDied,
    Ready,
    RunEnded,
    RunStarted,
    StopRequested,
)
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster, wait_until

pytestmark = [
    pytest.mark.dist,
    pytest.mark.chaos,
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
]

PATIENCE_S = 120.0
CONFIG = "[machine]\nranks_per_node = 1\n[slurm]\nspare_nodes = {spares}\nsignal_s = {signal_s}\n{more}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Four idle nodes."""
    with slurm_cluster(tmp_path / "slurm", 4) as found:
        yield found


class Submitted:
    """A run that Slurm has."""

    def __init__(self, cluster: SlurmCluster, run: TinyRun, *options: str) -> None:
        self.cluster, self.run = cluster, run
        done = ftrain("submit", str(run.config), "--slurm", *options, env={"SLURM_CONF": cluster.env["SLURM_CONF"]})
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[1]

    def output(self) -> str:
        """What the batch script has said."""
        return "\n".join(path.read_text() for path in self.run.local.glob("slurm-*.out"))

    def wait_for(self, what: str, patience_s: float = PATIENCE_S) -> None:
        """Until the job is in this state."""
        wait_until(lambda: self.cluster.state(self.job) == what, f"{what}: {self.output()[-2000:]}", patience_s)

    def events(self, kind: type[Event]) -> list[Event]:
        """What the ledger has of one kind."""
        return [event for event in self.run.events() if isinstance(event, kind)]

    def nodes(self) -> list[tuple[str, ...]]:
        """The nodes of each attempt."""
        return [event.nodes for event in self.events(AttemptStarted)]  # type: ignore[attr-defined]


def tiny(folder: Path, corpus: str, *, spares: int = 0, signal_s: int = 0, more: str = "", **values: int) -> TinyRun:
    extra = "nodes_s = 60\n" + CONFIG.format(spares=spares, signal_s=signal_s, more=more)
    return TinyRun(folder=folder, corpus=corpus, extra=extra, **values)


def test_a_job_on_four_nodes_loses_a_rank_and_a_node_and_ends_bit_for_bit_where_the_unbroken_run_did(
    cluster: SlurmCluster, corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    """A rank dies: all nodes still hold their snapshots. A node dies: a spare takes its place, and storage has the state."""
    point = 'at = "step"\nrank = 1\n'
    faults = f'[[faults]]\nkind = "kill"\nstep = 7\n{point}[[faults]]\nkind = "stop"\nstep = 14\n{point}'
    job = Submitted(cluster, tiny(tmp_path, corpus, spares=2, more=faults))
    job.wait_for("RUNNING")
    job.run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
    wait_until(lambda: len(ask(job.run.local, "status")["nodes"]) == 4, "the spares")
    facts = ftrain_json("status", job.run.url)
    assert sorted(facts["nodes"]) == ["n1", "n2", "n3", "n4"]
    (first, second) = job.nodes()[0]
    wait_until(lambda: cluster.stands_still(second), "the rank of that node to stand still", PATIENCE_S)
    assert facts["nodes"][second]["ranks"] == [1]
    cluster.kill_node(second)
    job.wait_for("COMPLETED")
    assert stored_digests(job.run.url) == (job.run.steps, unbroken)
    assert job.nodes()[1] == (first, second)
    assert job.nodes()[2][0] == first
    assert second not in job.nodes()[2]
    assert [event.source for event in job.events(AttemptStarted)] == ["init", "memory", "storage"]  # type: ignore[attr-defined]
    assert [event.step for event in job.events(Ready)] == [0, 6, 9]  # type: ignore[attr-defined]
    verdicts = [event.verdict for event in job.events(InterruptionClassified)]  # type: ignore[attr-defined]
    assert (verdicts[0].first_failing_rank, verdicts[0].node) == (1, second)
    assert verdicts[1].class_ == "node_failure"
    assert "node_failure" in ftrain("report", job.run.url).stdout
    died = [(event.kind, event.node) for event in job.events(ProcessDied) if not event.ours]  # type: ignore[attr-defined]
    assert ("agent", second) in died


@pytest.mark.slow
def test_the_time_limit_is_announced_the_run_saves_and_the_requeued_job_goes_on(
    cluster: SlurmCluster, corpus: str, tmp_path: Path
) -> None:
    """Slurm counts time limits in minutes, so the warning is sent by hand, as `--signal=B:USR1@...` does at the end."""
    job = Submitted(cluster, tiny(tmp_path, corpus, steps=100_000), "--set", "slurm.time='60'")
    job.wait_for("RUNNING")
    job.run.wait_for_step(20)
    cluster.run("scancel", "--batch", "--signal=USR1", job.job)
    wait_until(lambda: len(job.events(RunStarted)) == 2, "the second life", PATIENCE_S)
    stops = job.events(StopRequested)
    assert [event.by for event in stops] == ["SIGUSR1"]  # type: ignore[attr-defined]
    assert "goes back into the queue" in job.output()
    verdict = job.events(InterruptionClassified)[0].verdict  # type: ignore[attr-defined]
    assert (verdict.planned, verdict.class_) == (True, "time_limit")
    wait_until(lambda: len(job.events(Ready)) == 2, "its workers", PATIENCE_S)
    second = job.events(RunStarted)[1]
    assert second.resumed_from_step == job.events(Ready)[1].step >= 20  # type: ignore[attr-defined]
    assert ftrain("stop", job.run.url).returncode == 0
    wait_until(lambda: len(job.events(RunEnded)) == 2, "the end", PATIENCE_S)
    wait_until(lambda: cluster.state(job.job) in ("FAILED", "COMPLETED"), "no third life", PATIENCE_S)  # a person stopped it


@pytest.mark.slow
def test_the_coordinators_node_is_lost_and_the_requeued_job_resumes_elsewhere(
    cluster: SlurmCluster, corpus: str, tmp_path: Path
) -> None:
    job = Submitted(cluster, tiny(tmp_path, corpus, steps=100_000), "--set", "recovery.lease_s=8")
    job.wait_for("RUNNING")
    job.run.wait_for_step(20)
    batch_node = cluster.run("squeue", "-h", "-j", job.job, "-o", "%B")
    assert batch_node in job.nodes()[0]
    cluster.kill_node(batch_node)
    wait_until(lambda: len(job.events(RunStarted)) == 2, "the second life", PATIENCE_S)
    wait_until(lambda: len(job.events(Ready)) == 2, "its workers", PATIENCE_S)
    assert batch_node not in job.nodes()[1]
    assert job.events(Ready)[1].step >= 9  # type: ignore[attr-defined]
    assert ftrain("stop", job.run.url).returncode == 0
    wait_until(lambda: len(job.events(RunEnded)) == 1, "the end", PATIENCE_S)


@pytest.mark.slow
def test_a_cancelled_job_saves_before_it_is_killed(cluster: SlurmCluster, corpus: str, tmp_path: Path) -> None:
    job = Submitted(cluster, tiny(tmp_path, corpus, steps=100_000))
    job.wait_for("RUNNING")
    job.run.wait_for_step(20)
    cluster.run("scancel", job.job)
    wait_until(lambda: bool(job.events(RunEnded)), "the end", PATIENCE_S)
    assert [event.outcome for event in job.events(RunEnded)] == ["stopped"]  # type: ignore[attr-defined]
    step, _ = stored_digests(job.run.url)
    assert step >= 20


@pytest.mark.slow
def test_a_drained_node_is_replaced_by_a_spare_at_a_step_boundary(cluster: SlurmCluster, corpus: str, tmp_path: Path) -> None:
    job = Submitted(cluster, tiny(tmp_path, corpus, spares=2, steps=100_000))
    job.wait_for("RUNNING")
    job.run.wait_for_step(20)
    drained = job.nodes()[0][1]
    done = ftrain("drain", job.run.url, drained)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(job.events(Ready)) == 2, "the next attempt", PATIENCE_S)
    assert drained not in job.nodes()[1]
    assert job.events(InterruptionClassified) == []
    before = job.events(AttemptEnded)[0].step  # type: ignore[attr-defined]
    assert job.events(Ready)[1].step == before  # nothing is done twice
    assert ftrain("stop", job.run.url).returncode == 0
    wait_until(lambda: len(job.events(RunEnded)) == 1, "the end", PATIENCE_S)


def test_submit_without_slurm_says_what_to_do(corpus: str, tmp_path: Path) -> None:
    run = tiny(tmp_path, corpus)
    (tmp_path / "empty").mkdir()
    told = ftrain("submit", str(run.config), "--slurm", env={"PATH": str(tmp_path / "empty")})
    assert told.returncode == 2
    assert "there is no sbatch here" in told.stderr
