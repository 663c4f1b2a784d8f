"""A measured hardware profile: complete, readable by the planner, and the way out where no peak is known."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from ftrain.compose.errors import RefusedError
from ftrain.compose.gauge import as_toml, gauge, layer
from ftrain.load import parse
from ftrain.plan import cost, profile
from ftrain.plan.setup import Setup, options_of
from ftrain.starter import Facts, text
from tests.commands import ftrain


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ftrain init` writes on a machine without a GPU."""
    path = tmp_path_factory.mktemp("laptop") / "my.toml"
    path.write_text(text(Facts(cores=1)))
    return path


@pytest.mark.parametrize("command", ["time", "search"])
def test_an_unknown_peak_names_the_ways_out_and_one_of_them_works(laptop: Path, command: str) -> None:
    lost = ftrain("plan", command, str(laptop))
    said = lost.stdout + lost.stderr
    assert all(way in said for way in ("--peak", "machine.hardware", "ftrain doctor CONFIG --measure")), said
    found = ftrain("plan", command, str(laptop), "--peak", "0.05", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["figures"]["step_s" if command == "time" else "best"]["value"]


def test_a_peak_of_twice_the_size_halves_the_compute_of_a_step(laptop: Path) -> None:
    def compute(peak: str) -> float:
        reply = ftrain("plan", "time", str(laptop), "--peak", peak, "--json")
        figures = json.loads(reply.stdout)["figures"]
        return float(figures["step_s"]["value"] * figures["mfu"]["value"] * float(peak))  # model FLOPs, whatever the peak

    assert compute("0.05") == pytest.approx(compute("0.1"))


@pytest.mark.dist
def test_a_measured_profile_is_read_back_and_predicts_a_step(laptop: Path) -> None:
    path = laptop.parent / "here.toml"
    done = ftrain("doctor", str(laptop), "--measure", str(path))
    assert done.returncode == 0, done.stderr
    assert f"--hardware {path}" in done.stderr
    found = profile.load(str(path))
    assert found.gpu.peak_dtype == "float32"
    assert found.peak_flops > 0
    assert 0 < found.assumed.kernel_share <= 1
    assert as_toml(found) == path.read_text()
    for source in ("gpu", "server"):
        assert "measured" in found.sources[source]
    reply = ftrain("plan", "time", str(laptop), "--hardware", str(path), "--json")
    figures = json.loads(reply.stdout)["figures"]
    assert figures["step_s"]["value"] > 0
    assert "float32" in figures["mfu"]["label"]


def test_the_layer_counts_the_operations_that_the_planner_counts() -> None:
    """Of a token: the planner's FLOPs without the head, over the layers."""
    config = parse(text(Facts(cores=1)))
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    model, tokens = config.model, config.batch.micro_batch * config.data.seq_len
    counted, run = layer(micro=config.batch.micro_batch, seq_len=config.data.seq_len, hidden=model.hidden, heads=model.heads,
                         queries=model.hidden, kv=model.hidden, ffn=model.ffn)  # fmt: skip
    head = 6 * model.hidden * model.vocab
    assert counted / tokens == pytest.approx((cost.token_flops(setup) - head) / model.layers)
    run()


def test_a_profile_writes_only_what_its_reader_knows() -> None:
    for name in profile.names():
        assert tomllib.loads(as_toml(profile.load(name)))["name"] == name


def test_a_run_on_gpus_is_pointed_at_printed_peaks() -> None:
    config = parse(text(Facts(cores=1)), ("machine.device=cuda",))
    with pytest.raises(RefusedError, match=r"machine\.hardware"):
        gauge(config)


def test_a_profile_that_cannot_be_written_is_said_before_anything_is_measured(laptop: Path) -> None:
    assert ftrain("doctor", str(laptop), "--measure", "here.json").returncode == 2
