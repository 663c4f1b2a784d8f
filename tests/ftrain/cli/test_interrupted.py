"""Ctrl-C in the middle of a command that only looks or copies: one word, a number of its own, and nothing half done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ftrain.cli.entry import cli
from ftrain.starter import Facts, text
from recovery.codes import ExitCode
from storage.objects import open_store
from storage.run import RunStore
from tests.ledgers import Story, config
from tests.storage.building import SPECS, random_values, save


def use(words: str) -> Result:
    """One command."""
    return CliRunner().invoke(cli, words.split(), catch_exceptions=False)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is heard as on a terminal, also if the tests were started in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a text, and a run that has a checkpoint."""
    run = RunStore(open_store(str(tmp_path / "run")))
    save(run, random_values(SPECS, 1), step=10, epoch=run.take_epoch(owner={}))
    (tmp_path / "my.toml").write_text(text(Facts(cores=1), url=str(tmp_path / "run")))
    (tmp_path / "book.txt").write_text("once upon a time")
    Story(config()).start().steps(5).end().write(tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "amid"),
    [
        pytest.param("ckpt verify run", "storage.checkpoint.Checkpoint.verify", id="verify"),
        pytest.param("ckpt export run --to zarr out", "ftrain.compose.stores.open_place", id="export"),
        pytest.param("ckpt cp run out", "storage.copy._prove", id="cp"),
        pytest.param("ckpt diff run run", "storage.diff.diff", id="diff"),
        pytest.param("data prepare book.txt --out out", "ftrain.data.prepare.documents", id="prepare"),
        pytest.param("compare run run", "ftrain.view.compare.compare", id="compare"),
        pytest.param("plan time my.toml", "ftrain.load.parse", id="plan"),
    ],
)
def test_an_interrupted_command_says_so_and_leaves_nothing_that_looks_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch, words: str, amid: str
) -> None:
    """Ctrl-C in its middle. 1 would be a difference to whoever asked `ckpt diff`."""

    def struck(*given: object, **more: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(saved)
    with monkeypatch.context() as patch:
        patch.setattr(amid, struck)
        done = use(words)
    assert done.exit_code == ExitCode.INTERRUPTED, done.output
    assert done.stderr == "interrupted\n"
    left = [path for path in saved.rglob("*") if path.name.startswith(("out", "commit")) and path.is_file()]
    assert [path for path in left if "out" in str(path.relative_to(saved))] == []
    if words.startswith("ckpt cp"):
        assert "committed" in use(words).output, "started again, it goes on"
