"""`ftrain data`: what it shows is what the run is fed; wrong input is one message and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ftrain.cli.data import data
from ftrain.data.dataset import Dataset
from ftrain.data.tokenizer import ByteTokenizer
from ftrain.load import load

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.toml")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(data, list(words))


def test_inspect_shows_the_sequences_of_the_run(stdlib_root: str) -> None:
    result = invoke("inspect", DEMO, "--first", "16", "--count", "3", "--cache", stdlib_root, "--json")
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    batch = Dataset(load(DEMO), root=stdlib_root).sequences(16, 3)
    assert [sequence["text"] for sequence in view["sequences"]] == [ByteTokenizer().decode(row) for row in batch.tokens]
    assert [sequence["window"] for sequence in view["sequences"]] == batch.ids.tolist()
    assert [sequence["index"] for sequence in view["sequences"]] == [16, 17, 18]
    assert view["sources"][0]["path"] == "stdlib"


def test_inspect_marks_what_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abcde"}\n' * 40)
    assert invoke("prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "x")).exit_code == 0
    sets = [f"data.sources=[{{path = '{tmp_path / 'x'}'}}]", "evaluate.every_steps=0", "data.seq_len=8"]
    options = [word for item in [*sets, 'checkpoint.retention=[{keep = "last"}]'] for word in ("--set", item)]
    result = invoke("inspect", DEMO, "--count", "1", *options)
    assert result.exit_code == 0, result.output
    assert "<eod>" in result.stdout
    assert "not counted: targets" in result.stdout
    assert invoke("inspect", DEMO, "--heldout", "--count", "1", *options).exit_code == 0


def test_prepare_reports_and_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    (tmp_path / "in" / "b.png").write_bytes(b"\x89PNG\0")
    out = str(tmp_path / "deep" / "x")
    words = ("prepare", str(tmp_path / "in"), "--out", out)
    result = invoke(*words, "--json")
    assert json.loads(result.stdout) == {
        "prefix": out,
        "documents": 1,
        "tokens": 6,
        "bytes_read": 5,
        "dtype": "uint16",
        "skipped": [str(tmp_path / "in" / "b.png")],
        "resumed": 0,
    }
    again = invoke(*words)
    assert again.exit_code == 3
    assert "--replace" in again.stderr
    Path(out + ".idx").unlink()
    before = Path(out + ".bin").read_bytes()
    alone = invoke(*words)
    assert alone.exit_code == 3, "it may be anybody's"
    assert f"{out}.bin" in alone.stderr
    assert "is there already" in alone.stderr
    assert Path(out + ".bin").read_bytes() == before
    text = invoke(*words, "--replace")
    assert text.exit_code == 0
    assert "6 tokens (uint16) in 1 document from 5 B" in text.stdout
    assert "passed over, no text: 1 file (" in text.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(("inspect", "missing.toml"), 3, "cannot be read", id="no config"),
        pytest.param(("inspect", DEMO, "--set", "data.seq_lenn=3"), 3, "did you mean `seq_len`?", id="misspelt"),
        pytest.param(
            ("inspect", DEMO, "--set", "data.sources=[{path = 'gone'}]"), 3, "gone.idx: cannot be read", id="no tokens"
        ),
        pytest.param(("inspect", DEMO, "--count", "0"), 2, "0 is not in the range", id="usage"),
        pytest.param(("prepare", "gone", "--out", "x"), 3, "gone: no such file", id="no input"),
        pytest.param(("prepare", DEMO, "--out", "/proc/x/y"), 5, "No such file or directory", id="no folder"),
        pytest.param(("prepare", DEMO, "--out", "x", "--tokenizer", "gone"), 3, "no such file; a tokenizer is", id="tokenizer"),
    ],
)
def test_wrong_input_is_one_message(words: tuple[str, ...], code: int, message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [[], ["prepare"], ["inspect"]])
def test_help_fits_a_screen_and_ends_in_an_example(command: list[str]) -> None:
    text = invoke(*command, "--help").stdout
    assert len(text.splitlines()) <= 30
    assert "Example:" in text
    assert "ftrain data" in (text.strip().splitlines()[-1] if command else text)


def test_inspect_shows_what_a_phase_reads(stdlib_root: str) -> None:
    """Windows of another length begin a source anew; another layout alone reads on where the phase before stopped."""
    phases = "phases=[{from_tokens = 10000, parallel = {ranks = 1}}, {from_tokens = 20000, data = {seq_len = 256}}]"

    def sequences(*words: str) -> list[dict[str, Any]]:
        result = invoke("inspect", DEMO, "--set", phases, "--cache", stdlib_root, "--json", "--count", "2", *words)
        assert result.exit_code == 0, result.output
        shown = json.loads(result.output)
        return [{"seq_len": shown["seq_len"], **it} for it in shown["sequences"]]

    read_before = -(-10000 // (16 * 128)) * 16
    plain = sequences("--first", str(read_before))
    assert [it["window"] for it in sequences("--phase", "1")] == [it["window"] for it in plain]
    assert [it["seq_len"] for it in sequences("--phase", "2")] == [256, 256]
    assert invoke("inspect", DEMO, "--set", phases, "--phase", "3").exit_code == 2
