"""The founding row about the launch: what `ftrain submit --slurm` writes for 640 servers of 8, and what the nodes then run."""

from __future__ import annotations

from ftrain.compose.slurm import batch_text, job_of
from ftrain.load import load
from recovery.placement import assign
from recovery.slurm import node_command
from tests.commands import ftrain

CONFIG = "configs/dense-500b.toml"
CONTAINER = ('slurm.container_image="/images/train.sqsh"', 'slurm.container_mounts=["/shared:/shared"]')


def test_row_42_the_batch_file_of_640_nodes_of_8_with_dp80_inferred() -> None:
    done = ftrain("submit", CONFIG, "--slurm", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[1] == "# 5120 ranks = tp 8 x cp 1 x pp 8 x dp 80, 8 on each of 640 nodes"  # dp is nowhere in the config
    for option in ("--nodes=640", "--ntasks-per-node=1", "--no-kill", "--requeue", "--signal=B:USR1@300"):
        assert f"#SBATCH {option}" in lines
    assert lines[-1].startswith("exec ")
    assert " run " in lines[-1]


def test_row_42_dp_follows_the_number_of_processes() -> None:
    for ranks, nodes, dp in ((5120, 640, 80), (4096, 512, 64), (5056, 632, 79)):
        config = load(CONFIG, [f"parallel.ranks={ranks}"])
        assert job_of(config).nodes == nodes
        assert f"x dp {dp}, 8 on each of {nodes} nodes" in batch_text(config, CONFIG, ())


def test_row_42_one_rank_per_card_and_tensor_parallel_groups_within_a_node() -> None:
    config = load(CONFIG)
    nodes = assign([f"n{number}" for number in range(640)], config.parallel.ranks, config.machine.ranks_per_node)
    tp = config.parallel.tp
    assert config.parallel.order[0] == "tp"
    groups = [{nodes[rank] for rank in range(first, first + tp)} for first in range(0, config.parallel.ranks, tp)]
    assert all(len(group) == 1 for group in groups)
    assert len({nodes[rank] for rank in range(config.parallel.ranks)}) == 640


def test_row_42_pyxis_is_given_image_and_mounts() -> None:
    slurm = load(CONFIG, CONTAINER).slurm
    argv = node_command(["ftrain", "join", "/shared"], nodes=640, image=slurm.container_image, mounts=slurm.container_mounts)
    assert {"--container-image=/images/train.sqsh", "--container-mounts=/shared:/shared", "--ntasks=640"} <= set(argv)


def test_row_42_spares_are_asked_for_and_too_few_nodes_are_refused() -> None:
    assert job_of(load(CONFIG, ["slurm.spare_nodes=4"])).nodes == 644
    told = ftrain("submit", CONFIG, "--slurm", "--dry-run", "--set", "slurm.nodes=600")
    assert told.returncode == 3
    assert "5120 ranks at 8 a node need 640" in told.stderr
    told = ftrain("submit", CONFIG, "--slurm", "--dry-run", "--set", "machine.ranks_per_node=0")
    assert told.returncode == 3
    assert "machine.ranks_per_node=8" in told.stderr
