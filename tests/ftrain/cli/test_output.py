"""Files that commands write where they are told: made again at will, and never over anything else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from ftrain.cli.entry import cli
from ftrain.cli.output import CERTIFICATE, PROFILE, why_not
from ftrain.compose.gauge import as_toml
from ftrain.plan import profile
from ftrain.starter import Facts, text
from ftrain.train.certify.verdict import Certificate
from recovery.codes import ExitCode
from tests.ledgers import Story, config

WRITERS = [
    "report runs/mine --html",
    "plan schedule my.toml --svg",
    "plan schedule my.toml --perfetto",
    "plan explain my.toml --svg",
    "plan explain my.toml --html",
    "plan explain my.toml --topic zero1 --svg",
]
COSTLY = ["doctor my.toml --measure", "certify my.toml --out"]
"""Those that compute for long before they write."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and a run."""
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(text(Facts(cores=1), url="runs/mine"))
    Story(config()).start().steps(5).end().write(tmp_path / "runs/mine")
    return tmp_path


def use(words: str) -> Result:
    return CliRunner().invoke(cli, words.split(), catch_exceptions=False)


@pytest.mark.parametrize("words", WRITERS + COSTLY)
def test_nothing_else_is_written_over(place: Path, words: str) -> None:
    """Above all not the config that was given, which somebody had named twice."""
    before = Path("my.toml").read_bytes()
    done = use(f"{words} my.toml")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "my.toml is there already" in done.output
    assert "give another name" in done.output
    assert Path("my.toml").read_bytes() == before


@pytest.mark.parametrize("words", WRITERS)
def test_what_was_made_is_made_again(place: Path, words: str) -> None:
    assert use(f"{words} made").exit_code == 0
    made = Path("made").read_bytes()
    Path("made").write_bytes(made + b"of yesterday")
    done = use(f"{words} made")
    assert done.exit_code == 0, done.output
    assert Path("made").read_bytes() == made


@pytest.mark.parametrize("words", WRITERS)
def test_an_empty_file_and_what_is_no_file_are_written_to(place: Path, words: str) -> None:
    Path("empty").touch()
    assert use(f"{words} empty").exit_code == 0
    assert Path("empty").stat().st_size
    assert use(f"{words} /dev/null").exit_code == 0


def test_a_certificate_and_a_profile_are_made_again(tmp_path: Path) -> None:
    made = Certificate(
        version="1", config_fingerprint="", environment={}, steps=1, modes=[], rows=[], ring=[], pairs=0, failures=[]
    )
    (tmp_path / "made.json").write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2))
    (tmp_path / "made.toml").write_text(as_toml(profile.load("h100")))
    assert not why_not(tmp_path / "made.json", CERTIFICATE)
    assert not why_not(tmp_path / "made.toml", PROFILE)
    assert why_not(tmp_path / "made.json", PROFILE)


def test_one_file_is_not_named_for_two(place: Path) -> None:
    done = use("plan explain my.toml --svg both --html both")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert Path("both").read_text().startswith("<svg")


@pytest.mark.parametrize("words", WRITERS + COSTLY)
def test_a_place_that_cannot_be_written_to_is_told_first(place: Path, words: str) -> None:
    done = use(f"{words} no/x.toml")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "no/x.toml: cannot be written: there is no folder no; make it (mkdir -p no)" in done.output
    assert "%" not in done.stdout
