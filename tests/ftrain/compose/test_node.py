"""What a node is told and makes of it."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest

from ftrain.cli.join import doubt, ending
from ftrain.compose.args import Launch
from ftrain.compose.launch import keeper_args
from ftrain.compose.node import NoRunError, agent_spec, read_args
from ftrain.compose.nodes import arena_nbytes, fleet_spec, node_args, num_nodes, tell_nodes
from ftrain.config import Config
from ftrain.load import load
from recovery.codes import ExitCode
from recovery.network import NoInterfaceError
from recovery.rendezvous import control_folder
from tests.commands import ftrain
from tests.runs import FTRAIN

DEMO = str(Path(__file__).parents[3] / "configs/demo.toml")


def config(*overrides: str) -> Config:
    return load(DEMO, ["parallel.ranks=4", "batch.micro_batch=4", "machine.ranks_per_node=2", *overrides])


def test_a_node_has_a_folder_and_a_keeper_of_its_own_and_knows_its_own_network(tmp_path: Path) -> None:
    found = config("machine.interface=none0,lo")
    tell_nodes(tmp_path, node_args(found, tmp_path, preload="torch", keeper=keeper_args(found, tmp_path), env={"A": "1"}))
    args = read_args(tmp_path, patience_s=0.0)
    spec = agent_spec(args, tmp_path, "n7")
    assert spec.node == "n7"
    assert spec.local_dir == str(tmp_path / "nodes" / "n7")
    assert spec.host == "127.0.0.1"
    assert spec.node_env["GLOO_SOCKET_IFNAME"] == "lo"
    assert spec.control == str(control_folder(tmp_path))
    assert (spec.env, spec.lease_s) == ({"A": "1"}, found.recovery.lease_s)
    keeper = msgspec.json.decode((tmp_path / "nodes" / "n7" / "keeper.json").read_bytes())
    assert keeper["url"] == found.run.url
    assert (control_folder(tmp_path) / "node.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("command", ["run", "supervise"])
def test_a_port_that_somebody_else_listens_on_is_refused_before_anything_starts(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = str(tmp_path / "run")
        ways = {
            "run": f"run {DEMO} --set run.url={folder} --set machine.ranks_per_node=1 --set machine.port={port} "
            "--set parallel.ranks=2 --set machine.interface=lo",
            "supervise": f"supervise --run {folder} --nnodes 2 --nproc 1 --interface lo --port {port} -- true",
        }
        done = ftrain(*ways[command].split())
    assert done.returncode == 3, done.stderr
    named = {"run": "machine.port", "supervise": "--port"}[command]
    assert f"{named}: port {port} of 127.0.0.1 is in use" in done.stderr
    assert not (tmp_path / "run" / "local" / "ledger").exists()


def test_a_node_waits_for_its_run_and_then_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"within 0 s.*control/node\.json"):
        read_args(tmp_path, patience_s=0.0)
    told = ftrain("join", str(tmp_path), "--wait", "0")
    assert told.returncode == ExitCode.USAGE
    assert f"waiting for the run of {tmp_path}, 0 s at most" in told.stderr
    assert f"no run has asked for machines in {tmp_path}. FOLDER is the run's machine.shared_dir, or RUN/local" in told.stderr
    assert "Errno" not in told.stderr


def test_a_folder_that_no_machines_share_is_doubted_before_the_wait(tmp_path: Path) -> None:
    (tmp_path / "run" / "local").mkdir(parents=True)
    told = ftrain("join", str(tmp_path / "run"), "--wait", "0")
    assert f"its machines share {tmp_path / 'run' / 'local'}, unless machine.shared_dir is set" in told.stderr
    assert doubt(tmp_path / "run" / "local") == ""
    record = tmp_path / "run" / "local" / "launch.json"
    alone = "the run of this folder was started for one machine, and asks for no other"
    for wanted, said in ((config(), ""), (load(DEMO), alone)):
        record.write_bytes(msgspec.json.encode(Launch(config=msgspec.to_builtins(wanted), fingerprint="", changes=[])))
        assert doubt(record.parent) == said
    record.with_name("supervise.json").write_text('{"nnodes": 2}')
    assert doubt(record.parent) == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_waits_for_its_run_can_be_taken_away(tmp_path: Path, number: signal.Signals) -> None:
    command = [*FTRAIN, "join", str(tmp_path / "none"), "--wait", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "none (no such folder yet), 10m 00s at most" in waiting.stderr.readline()
        while not listens(waiting.pid):
            assert waiting.poll() is None
        waiting.send_signal(number)
        assert "left before there was a run" in waiting.stderr.read()
    assert waiting.returncode == ExitCode.STOPPED


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, which is the last that a node installs."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_node_says_how_its_part_ended() -> None:
    assert "the run has ended" in ending(ExitCode.DONE)
    assert "another `ftrain join`" in ending(ExitCode.HELD)
    assert "code 10; the same command" in ending(ExitCode.RETRY_SAME)


def test_one_machine_has_no_fleet_and_several_need_their_network(tmp_path: Path) -> None:
    assert fleet_spec(load(DEMO), tmp_path) is None
    spec = fleet_spec(config(), tmp_path)
    assert spec is not None
    assert (spec.host, spec.ranks_per_node, spec.control) == ("127.0.0.1", 2, control_folder(tmp_path))
    shared = fleet_spec(config(f"machine.shared_dir={tmp_path / 'shared'}"), tmp_path)
    assert shared is not None
    assert shared.control == tmp_path / "shared" / "control"
    with pytest.raises(NoInterfaceError, match="none0"):
        fleet_spec(config("machine.interface=none0"), tmp_path)


def test_a_machine_that_is_not_on_the_runs_network_is_refused_before_anything_starts(tmp_path: Path) -> None:
    told = ftrain(
        "run",
        DEMO,
        "--set",
        f"run.url={tmp_path / 'run'}",
        "--set",
        "machine.ranks_per_node=1",
        "--set",
        "machine.interface=none0",
    )
    assert told.returncode == 3
    assert "no IPv4 address on none0" in told.stderr


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_nodes_for_ranks(ranks: int, nodes: int) -> None:
    assert num_nodes(config(), ranks) == nodes


def test_memory_is_asked_for_by_node() -> None:
    whole, half = arena_nbytes(config("machine.ranks_per_node=4")), arena_nbytes(config())
    assert 0.4 * whole < half < whole
    assert arena_nbytes(config("machine.ranks_per_node=0")) == whole
