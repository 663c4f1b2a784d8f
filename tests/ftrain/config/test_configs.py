"""The config files that come with the project: all load, and have the shapes their names promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.combinations import replicas
from ftrain.compose.checks import timeouts
from ftrain.load import load, num_parameters
from ftrain.reference import reference
from recovery.timeouts import explain

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    load(str(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_its_time_limits_in_the_right_order(path: Path) -> None:
    assert explain(timeouts(load(str(path)), {}, 0.0)) == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_gpus_says_how_they_stand_on_nodes(path: Path) -> None:
    config = load(str(path))
    if config.machine.device == "cuda":
        assert config.machine.ranks_per_node == 8
        assert config.machine.shared_dir.endswith(path.stem)


def test_the_documented_configs_are_there() -> None:
    wanted = {"demo", "tiny-dp2", "tiny-dp8", "llama3-8b", "llama3-405b", "dense-500b", "mixtral-8x7b"}
    assert wanted <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("name", "parameters", "dp"),
    [
        # the exact counts are those of the published shapes
        pytest.param("llama3-8b", 8_030_261_248, 32),
        pytest.param("llama3-405b", 405_853_388_800, 128),
    ],
)
def test_llama_shapes(name: str, parameters: int, dp: int) -> None:
    config = load(str(ROOT / "configs" / f"{name}.toml"))
    assert num_parameters(config) == parameters
    assert replicas(config) == dp


def test_dense_500b_is_the_plan_on_5120_gpus() -> None:
    config = load(str(ROOT / "configs" / "dense-500b.toml"))
    assert abs(num_parameters(config) / 500e9 - 1) < 1e-3
    assert (config.parallel.ranks, config.parallel.tp, config.parallel.pp, replicas(config)) == (5120, 8, 8, 80)
    assert config.batch.global_batch == 1 * 32 * 80
    assert config.batch.global_batch * config.data.seq_len == 10_485_760


def test_demo_is_what_the_readme_says() -> None:
    config = load(str(ROOT / "configs" / "demo.toml"))
    assert 0.8e6 <= num_parameters(config) <= 1.3e6
    assert (config.parallel.ranks, config.run.steps, config.batch.global_batch, config.data.seq_len) == (2, 150, 16, 128)
    assert [fault.kind for fault in config.faults] == ["kill"]


def test_config_reference_is_fresh() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run: python -m ftrain.reference > docs/config.md"
