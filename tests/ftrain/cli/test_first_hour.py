"""`ftrain init` and `ftrain completion`: what a newcomer types first."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.entry import COMMANDS, cli
from ftrain.load import load, num_parameters, parse
from ftrain.starter import Facts, facts, text
from tests.commands import ftrain
from tests.runs import FTRAIN


@pytest.mark.parametrize(
    ("machine", "ranks", "hardware"),
    [
        (facts(), None, ""),
        (Facts(cores=1), 1, ""),
        (Facts(cores=64), 2, ""),
        (Facts(cores=96, gpus=("NVIDIA H200",) * 8, gpu_gib=139), 8, "h200"),
        (Facts(cores=8, gpus=("Tesla T4",), gpu_gib=15), 1, ""),
        (Facts(cores=8, gpus=("GeForce GT 1030",), gpu_gib=2), 1, ""),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "tokenizer.json"])
def test_what_init_writes_is_a_legal_config_for_the_machine(
    machine: Facts, ranks: int | None, hardware: str, tokenizer: str
) -> None:
    config = parse(text(machine, data="data/mine", tokenizer=tokenizer))
    assert ranks is None or config.parallel.ranks == ranks
    assert config.parallel.ranks * config.machine.threads <= max(machine.cores, len(machine.gpus))
    assert config.machine.hardware == hardware
    state = 18 * num_parameters(config)  # bytes of a rank without a second one to share with
    assert not machine.gpus or state <= 0.5 * machine.gpu_gib * 2**30


def test_what_a_cluster_needs_is_in_the_starter_as_comments() -> None:
    """`ftrain submit` asks for it: a newcomer finds where it is said."""
    written = text(Facts(cores=2))
    lines = written.splitlines()
    assert "# ranks_per_node = 0" in lines[lines.index(next(it for it in lines if it.startswith("[machine]"))) :]
    assert any(it.startswith("[slurm]") for it in lines)
    assert parse(written.replace("# ranks_per_node = 0", "ranks_per_node = 2")).machine.ranks_per_node == 2


def test_init_says_what_it_names_and_is_not_there(tmp_path: Path) -> None:
    done = ftrain("init", "my.toml", "--data", "mine", "--tokenizer", "words.json", cwd=tmp_path)
    assert done.returncode == 0
    assert "mine.idx is not there yet: `ftrain data prepare" in done.stderr
    assert "words.json is not there yet" in done.stderr


def test_every_comment_of_a_field_is_the_schemas_word_for_it() -> None:
    written = text(Facts(cores=2))
    reference = Path(__file__).parents[3].joinpath("docs/config.md").read_text()
    lines = written.splitlines()
    for before, line in pairwise(lines):
        if " = " in line and before.startswith("# ") and not before.startswith("#  "):
            assert before.removeprefix("# ") in reference, before


def test_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 511}}, "added_tokens": [{"id": 512}]}))
    gpu = Facts(cores=8, gpus=("NVIDIA H200",), gpu_gib=139)
    assert parse(text(gpu, data="d", tokenizer=str(path))).model.vocab == 513


def test_init_never_overwrites_and_says_what_to_do_next(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    first = CliRunner().invoke(cli, ["init", str(path), "--url", str(tmp_path / "run")])
    assert first.exit_code == 0, first.output
    assert "ftrain doctor" in first.stderr
    assert load(str(path)).run.url == str(tmp_path / "run")
    second = CliRunner().invoke(cli, ["init", str(path)])
    assert second.exit_code == 2
    assert "is there already" in second.stderr
    assert load(str(path)).run.url == str(tmp_path / "run")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for(shell: str) -> None:
    done = ftrain("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_FTRAIN_COMPLETE" in done.stdout
    assert done.stderr == ""


def test_what_bash_completes_is_what_the_command_line_has() -> None:
    env = {**os.environ, "_FTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "ftrain ", "COMP_CWORD": "1"}
    done = subprocess.run(FTRAIN, env=env, capture_output=True, text=True, check=False)
    assert {line.partition(",")[2] for line in done.stdout.split()} == set(COMMANDS)
    env.update(COMP_WORDS="ftrain run --", COMP_CWORD="2")
    done = subprocess.run(FTRAIN, env=env, capture_output=True, text=True, check=False)
    assert "plain,--take-over" in done.stdout.split()
