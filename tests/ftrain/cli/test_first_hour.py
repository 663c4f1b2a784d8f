"""`ftrain init` and `ftrain completion`: what a newcomer types first."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.entry import COMMANDS, cli
from ftrain.data.dataset import Dataset
from ftrain.data.writer import TokenWriter
from ftrain.load import load, num_parameters, parse
from ftrain.starter import Facts, corpus, facts, text
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


def made(folder: Path, tokens: list[int] | range) -> str:
    """A token file of one document; its prefix."""
    with TokenWriter(str(folder / "mine"), vocab=32_000) as writer:
        writer.add(tokens)
        writer.end_document()
    return str(folder / "mine")


@pytest.mark.parametrize(
    ("tokens", "seq_len", "sequences"), [(400_000, 128, 64), (40_000, 128, 15), (4_000, 128, 1), (1_040, 32, 1), (200, 16, 0)]
)
def test_what_init_writes_fits_the_data(tmp_path: Path, tokens: int, seq_len: int, sequences: int) -> None:
    """Two ranks take 16 sequences an update, and 5 % are held out: of 40,000 tokens 1,999 targets, 15 sequences of 128."""
    prefix = made(tmp_path, [7] * tokens)
    config = parse(text(Facts(cores=2), data=prefix, corpus=corpus(prefix)))
    assert config.data.seq_len == seq_len
    assert config.evaluate.sequences == (sequences or 64)
    assert bool(config.evaluate.every_steps) == bool(sequences)
    data = Dataset(config, root=str(tmp_path))  # raises where a run would
    assert data.num_heldout >= sequences
    assert data.train_tokens_per_pass >= (16 if tokens > 1_000 else 1) * seq_len


def initialised(folder: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["init", str(folder / "my.toml"), *words])
    return done.exit_code, done.stderr


def test_init_looks_at_the_data(tmp_path: Path) -> None:
    prefix = made(tmp_path, range(31_990))
    code, said = initialised(tmp_path, "--data", prefix)
    assert code == 0
    assert f"{prefix} holds token 31989 and model.vocab is 257: another tokenizer made it" in said
    assert initialised(tmp_path, "--data", prefix + ".idx") == (
        2,
        f"--data {prefix}.idx: give the prefix of the pair, {prefix}\n",
    )
    Path(prefix + ".idx").write_bytes(b"no index")
    assert initialised(tmp_path, "--data", prefix)[0] == 3


def test_init_says_that_nothing_can_be_held_out(tmp_path: Path) -> None:
    code, said = initialised(tmp_path, "--data", made(tmp_path, range(43)))
    assert code == 0
    assert "mine has 43 tokens, too few to hold any out: nothing is evaluated" in said


@pytest.mark.parametrize(("words", "code"), [(("",), 2), (("/proc/my.toml",), 2), (("no/such/folder/my.toml",), 2)])
def test_init_that_cannot_write_says_so(words: tuple[str, ...], code: int) -> None:
    done = CliRunner().invoke(cli, ["init", *words])
    assert done.exit_code == code
    assert "FILE is empty" in done.stderr or "cannot be written" in done.stderr
    if "no/such/folder/my.toml" in words:
        assert "there is no folder no/such/folder; make it (mkdir -p no/such/folder)" in done.stderr


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
    words = tmp_path / "mine.tiktoken"
    words.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    assert parse(text(gpu, data="d", tokenizer=str(words))).model.vocab == 257, "256 bytes and the end of a document"


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
