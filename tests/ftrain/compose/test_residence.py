"""Whose a local folder is: one run's, however its URL is spelled and wherever it was moved to."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.args import Launch
from ftrain.compose.errors import RefusedError
from ftrain.compose.launch import with_absolute_url, write
from ftrain.compose.paths import local_dir
from ftrain.compose.residence import check_tenant
from ftrain.config import Config
from ftrain.load import fingerprint
from storage.objects import open_store
from tests.ledgers import Story, config


def run_at(url: Path | str, local: Path | str = "") -> Config:
    return with_absolute_url(config(f'run.url="{url}"', f'run.local_dir="{local}"'))


def past(url: Path, local: Path | None = None, *, stored: bool = True, steps: int = 5) -> None:
    """A run that has been: its launch and its ledger, of which storage has a copy."""
    wanted = run_at(url, local or "")
    folder = local_dir(wanted)
    Story(wanted).start().steps(steps).end("stopped").write(url)
    if folder != url / "local":
        folder.mkdir(parents=True)
        shutil.move(url / "local/ledger", folder / "ledger")
    write(Launch(config=msgspec.to_builtins(wanted), fingerprint=fingerprint(wanted), changes=[]), wanted)
    if stored:
        shutil.copytree(folder / "ledger", url / "ledger")


def check(url: Path | str, local: Path | str = "") -> None:
    wanted = run_at(url, local)
    check_tenant(wanted, open_store(wanted.run.url))


def test_the_local_folder_of_another_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    past(tmp_path / "a", tmp_path / "loc")
    with pytest.raises(RefusedError, match=f"{tmp_path}/loc holds the run at {tmp_path}/a, .* give run.local_dir another"):
        check(tmp_path / "b", tmp_path / "loc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "loc"]


def test_so_it_is_where_the_other_run_has_a_ledger_with_segments_of_the_same_names(tmp_path: Path) -> None:
    past(tmp_path / "a", tmp_path / "loc")
    past(tmp_path / "b", steps=6)
    with pytest.raises(RefusedError):
        check(tmp_path / "b", tmp_path / "loc")


def test_so_it_is_where_it_is_the_folder_that_this_run_would_have_by_itself(tmp_path: Path) -> None:
    past(tmp_path / "a", tmp_path / "b/local")
    with pytest.raises(RefusedError):
        check(tmp_path / "b")


@pytest.mark.parametrize("spelled", ["a", "./a", "a/", "file://{here}/a", "link/a"])
def test_the_same_run_may_be_spelled_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str) -> None:
    monkeypatch.chdir(tmp_path)
    past(tmp_path / "a", tmp_path / "loc", stored=False)
    (tmp_path / "link").symlink_to(tmp_path)
    check(spelled.format(here=tmp_path), "loc/")


def test_a_run_that_was_moved_is_known_by_its_ledger(tmp_path: Path) -> None:
    past(tmp_path / "a", tmp_path / "loc")
    (tmp_path / "a").rename(tmp_path / "b")
    check(tmp_path / "b", tmp_path / "loc")


def test_a_run_that_was_moved_with_its_local_folder_in_it_needs_no_ledger_for_that(tmp_path: Path) -> None:
    past(tmp_path / "a", stored=False)
    (tmp_path / "a").rename(tmp_path / "b")
    check(tmp_path / "b")


def test_a_folder_in_which_a_run_never_began_is_free(tmp_path: Path) -> None:
    past(tmp_path / "a", tmp_path / "loc")
    shutil.rmtree(tmp_path / "loc/ledger")
    check(tmp_path / "b", tmp_path / "loc")
