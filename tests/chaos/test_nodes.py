"""Whole runs on several nodes: ranks, nodes and networks fail for real, and the run ends where the unbroken one did."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ftrain.compose.proof import stored_digests
from ftrain.data.dataset import Dataset
from ftrain.load import load
from recovery.client import ask
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    InterruptionClassified,
    LayoutChosen,
    ProcessDied,
    Ready,
    steps_of,
)
from tests.commands import ftrain, ftrain_json
from tests.nodes_run import logs_of, nodes_run
from tests.runs import TinyRun, finish, no_process_left
from tests.slurm_cluster import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

MACHINE = "[machine]\nranks_per_node = 1\n"
STEPS_KEPT = 9  # of a checkpoint in storage, see the run's config


def fault(kind: str, step: int, rank: int = 1) -> str:
    return f'[[faults]]\nkind = "{kind}"\nat = "step"\nstep = {step}\nrank = {rank}\n'


def started(run: TinyRun) -> list[tuple[str, tuple[str, ...]]]:
    return [(event.source, event.nodes) for event in run.events() if isinstance(event, AttemptStarted)]


def ready(run: TinyRun) -> list[int]:
    return [event.step for event in run.events() if isinstance(event, Ready)]


@pytest.mark.slow
def test_a_killed_rank_and_a_lost_node_end_bit_for_bit_where_the_unbroken_run_did(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    """A rank dies: all nodes still hold their snapshots. A node dies: a spare takes its place, and storage has the state."""
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f"{MACHINE}{fault('kill', 7)}{fault('stop', 14)}")
    with no_process_left(run), nodes_run(run, "n1", "n2") as nodes:
        parent = run.start()
        run.wait_for_step(1)
        nodes.join("n3")
        run.wait_for_step(13)
        nodes.wait_for_nodes("n1", "n2", "n3")
        wait_until(lambda: any(it.status() == psutil.STATUS_STOPPED for it in nodes.tree("n2")), "rank 1 to stand still")
        nodes.kill("n2")
        code, output = finish(parent)
        assert code == 0, output
        assert [nodes.nodes[name].wait(20) for name in ("n1", "n3")] == [0, 0]
    said = (tmp_path / "n1.out").read_text().splitlines()
    assert [line.partition(": ")[2].split()[0] for line in said] == ["waiting", "the", "done:"], said
    assert stored_digests(run.url) == (run.steps, unbroken)
    assert started(run) == [("init", ("n1", "n2")), ("memory", ("n1", "n2")), ("storage", ("n1", "n3"))]
    assert ready(run) == [0, 6, STEPS_KEPT]
    verdicts = [event.verdict for event in run.events() if isinstance(event, InterruptionClassified)]
    assert (verdicts[0].first_failing_rank, verdicts[0].node) == (1, "n2")
    assert verdicts[1].class_ == "node_failure"
    assert "node_failure" in ftrain("report", run.url).stdout
    died = [(event.kind, event.node) for event in run.events() if isinstance(event, ProcessDied) and not event.ours]
    assert ("agent", "n2") in died
    assert (logs_of(run, "n3") / "attempt-0002" / "rank-00001.log").exists()
    assert (tmp_path / "run" / "local" / "control" / "identity.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_the_key_of_a_run_is_in_no_command_line_environment_or_ledger(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=100_000, extra=MACHINE)
    with no_process_left(run), nodes_run(run, "n1", "n2") as nodes:
        parent = run.start()
        run.wait_for_step(20)
        key = (run.local / "control" / "identity.pem").read_text().splitlines()[1]
        members = [process for name in ("n1", "n2") for process in nodes.tree(name)]
        members += [process for group in run.processes().values() for process in group]
        assert len(members) >= 8
        for process in members:
            assert key not in " ".join(process.cmdline()) + str(process.environ())
        ask(run.local, "stop")
        assert finish(parent)[0] == 75
    told = [path for path in Path(run.url).rglob("*") if path.is_file() and key in path.read_text(errors="replace")]
    assert told == [run.local / "control" / "identity.pem"]


@pytest.mark.slow
def test_commands_work_from_a_machine_that_sees_only_the_shared_folder(corpus: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=100_000, extra=f'{MACHINE}shared_dir = "{shared}"\n')
    with no_process_left(run), nodes_run(run) as nodes:
        parent = run.start()
        nodes.run = run
        for name in ("n1", "n2"):
            with (tmp_path / f"{name}.out").open("ab") as out:
                argv = [*parent.args[:4], "join", str(shared), "--node", name]  # type: ignore[index]
                nodes.nodes[name] = subprocess.Popen(argv, stdout=out, stderr=out)
        run.wait_for_step(3)
        facts = ftrain_json("status", run.url, "--local-dir", str(shared))
        assert set(facts["nodes"]) == {"n1", "n2"}
        assert ftrain("save", run.url, "--local-dir", str(shared)).returncode == 0
        assert ftrain("stop", run.url, "--local-dir", str(shared)).returncode == 0
        assert finish(parent)[0] == 75
    assert ftrain("status", run.url, "--local-dir", str(shared)).returncode == 2


@pytest.mark.slow
def test_a_killed_coordinator_is_respawned_and_the_nodes_step_on(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=100_000, extra=MACHINE)
    with no_process_left(run), nodes_run(run, "n1", "n2"):
        parent = run.start()
        run.wait_for_step(20)
        workers = run.worker_pids()
        run.processes()["coordinator"][0].kill()
        run.wait_for(lambda events: any(isinstance(event, ProcessDied) and event.kind == "coordinator" for event in events))
        reached = max(ready(run)) + 40
        run.wait_for_step(reached)
        assert run.worker_pids() == workers
        assert len(started(run)) == 1
        ask(run.local, "stop")
        assert finish(parent)[0] == 75


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Sequence[str]]:
    """A bridge, and two namespaces behind it whose only way out is a veth called ftrain0; the bridge has 10.93.0.1."""
    names = [f"ft{os.getpid() % 10_000}{letter}" for letter in "ab"]
    bridge = f"ftbr{os.getpid() % 10_000}"

    def ip(*words: str, check: bool = True) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode and check:
            pytest.skip(f"network namespaces need root and iproute2: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", "10.93.0.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, start=2):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "ftrain0", "netns", name)
            ip("link", "set", f"v{name}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.93.0.{number}/24", "dev", "ftrain0")
            ip("-n", name, "link", "set", "ftrain0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield (bridge, *names)
    finally:
        for name in names:
            ip("link", "del", f"v{name}", check=False)  # a namespace goes later, with its last process, and the pair with it
            ip("netns", "del", name, check=False)
        ip("link", "del", bridge, check=False)


def link(name: str, state: str) -> None:
    """Pull the plug of a node's network, or put it in again."""
    subprocess.run(["ip", "link", "set", f"v{name}", state], check=True)


@pytest.mark.slow
def test_a_network_that_is_down_for_a_moment_costs_nothing_and_for_longer_than_the_lease_the_node(
    corpus: str, tmp_path: Path, network: Sequence[str]
) -> None:
    bridge, one, two = network
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=100_000, extra=f'{MACHINE}interface = "ftrain0,{bridge}"\n')

    def inside(name: str) -> Sequence[str]:
        return ["ip", "netns", "exec", {"n1": one, "n2": two}[name]] if name in ("n1", "n2") else []

    with no_process_left(run), nodes_run(run, "n1", "n2", inside=inside) as nodes:
        parent = run.start("--set", "recovery.lease_s=6")
        run.wait_for_step(20)
        link(two, "down")
        run.wait_for(lambda events: not nodes.known()["n2"]["connected"])
        link(two, "up")
        run.wait_for(lambda events: bool(nodes.known()["n2"]["connected"]))
        reached = max(record for record in [ask(run.local, "status")["step"]])
        run.wait_for_step(reached + 20)
        assert len(started(run)) == 1
        nodes.join("n3")  # a spare on the bridge's side
        nodes.wait_for_nodes("n3")
        link(two, "down")
        run.wait_for(lambda events: sum(isinstance(event, AttemptStarted) for event in events) == 2)
        run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 2)
        assert started(run)[1][1] == ("n1", "n3")
        assert not any("worker" in " ".join(process.cmdline()) for process in nodes.tree("n2")[3:])
        link(two, "up")
        nodes.wait_for_nodes("n2")  # it comes back with empty hands, and waits
        assert nodes.known()["n2"]["ranks"] == []
        ask(run.local, "stop")
        assert finish(parent)[0] == 75


@pytest.mark.slow
def test_one_of_four_nodes_is_lost_for_good_and_the_run_goes_on_with_three_and_with_four_when_it_is_back(
    corpus: str, tmp_path: Path
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4, steps=100_000, extra=MACHINE)
    names = ("n1", "n2", "n3", "n4")
    with no_process_left(run), nodes_run(run, *names) as nodes:
        parent = run.start("--set", "recovery.nodes_s=15", "--set", "recovery.layout_hold_s=0")
        run.wait_for_step(20)
        nodes.kill("n4")
        run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 2)
        assert started(run)[1] == ("storage", ("n1", "n2", "n3"))
        nodes.join("n4")
        run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 3)
        assert started(run)[2][1] == names
        assert [event.source for event in run.events() if isinstance(event, Ready)] == ["init", "storage", "storage"]
        ends = [event.step for event in run.events() if isinstance(event, AttemptEnded)]
        assert ready(run)[2] == ends[1]  # the change was planned: nothing is done twice
        ask(run.local, "stop")
        assert finish(parent)[0] == 75
    chosen = [(event.ranks, event.reason) for event in run.events() if isinstance(event, LayoutChosen)]
    assert [ranks for ranks, _ in chosen] == [3, 4]
    assert "3 of 4 nodes are there" in chosen[0][1]
    assert "node n4 has joined" in chosen[1][1]
    order, batch = Dataset(load(run.config, []), root=str(tmp_path)), run.global_batch
    for record in [record for event in run.events() for record in steps_of(event)]:
        assert record.tokens == order.num_valid((record.step - 1) * batch, batch)  # the same batches, however many nodes
