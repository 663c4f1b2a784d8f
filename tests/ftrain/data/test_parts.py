"""Large preparations: cut anywhere, by any number of processes, interrupted and gone on with, the bytes are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import parts, slices
from ftrain.data.errors import InputError
from ftrain.data.prepare import Progress, prepare
from ftrain.data.slices import cut, documents, find_inputs
from ftrain.data.tokenizer import ByteTokenizer
from ftrain.data.tokens import TokenFile

BYTE = ByteTokenizer()


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Texts, a JSONL file and a Parquet file in several row groups."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 50)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number} " + "ü" * (number % 7)}) + "\n" for number in range(200)))
    rows = tmp_path / "rows.parquet"
    table = pyarrow.table({"id": list(range(100)), "text": [f"row {number}" for number in range(100)]})
    parquet.write_table(table, rows, row_group_size=13)
    return [folder, lines, rows]


def test_any_number_of_processes_and_units_gives_the_same_bytes(
    tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(inputs, str(tmp_path / "one"), tokenizer=BYTE)
    file = TokenFile(str(tmp_path / "one"))
    assert file.num_documents == 5 + 200 + 100
    assert BYTE.decode(file.document(5 + 200 + 99)) == "row 99<eod>"
    monkeypatch.setattr(slices, "UNIT", 700)
    assert len(cut(find_inputs(inputs)[0], 700)) > 10
    report = prepare(inputs, str(tmp_path / "two"), tokenizer=BYTE, workers=2)
    assert pair(tmp_path / "two") == pair(tmp_path / "one")
    assert (report.documents, report.tokens, report.resumed) == (file.num_documents, len(file), 0)
    assert not parts.parts_folder(str(tmp_path / "two")).exists()


@given(st.lists(st.text(alphabet="aü\r \x85", max_size=9), max_size=12), st.integers(1, 40))
def test_every_line_belongs_to_exactly_one_slice(tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "in.jsonl"
    blank = "\n" if len(texts) % 2 else ""
    path.write_text(blank + "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    found = [
        "".join(pieces)
        for group in cut(find_inputs([path])[0], unit)
        for part in group
        for pieces, _ in documents(part, "text")
    ]
    assert found == texts


class Interrupted(Exception):  # noqa: N818  what a person does is no error
    """Ctrl-C, as far as these tests go."""


def test_what_was_finished_is_not_done_again(tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "UNIT", 700)
    monkeypatch.setattr("ftrain.data.prepare.SMALL", 0)
    made: list[str] = []
    make = parts.make

    def counted(prefix: str, *rest: Any) -> None:
        made.append(prefix)
        make(prefix, *rest)

    def stop(progress: Progress) -> None:
        if len(made) == 4:
            raise Interrupted

    monkeypatch.setattr(parts, "make", counted)
    with pytest.raises(Interrupted):
        prepare(inputs, str(tmp_path / "out"), tokenizer=BYTE, progress=stop)
    assert not (tmp_path / "out.idx").exists()
    seen: list[Progress] = []
    report = prepare(inputs, str(tmp_path / "out"), tokenizer=BYTE, progress=seen.append)
    assert report.resumed == 4
    assert len(made) == len(set(made)) == len(cut(find_inputs(inputs)[0], 700))  # each once
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)
    assert seen[-1] == Progress(report.bytes_read, report.bytes_read, report.documents, report.tokens)
    prepare(inputs, str(tmp_path / "whole"), tokenizer=BYTE)
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")


def test_parts_of_another_input_are_not_used(tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "UNIT", 700)
    monkeypatch.setattr("ftrain.data.prepare.SMALL", 0)

    def stop(progress: Progress) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        prepare(inputs, str(tmp_path / "out"), tokenizer=BYTE, progress=stop)
    (inputs[0] / "0.txt").write_text("something else entirely")
    report = prepare(inputs, str(tmp_path / "out"), tokenizer=BYTE)
    assert report.resumed == 0
    assert BYTE.decode(TokenFile(str(tmp_path / "out")).document(0)) == "something else entirely<eod>"


def test_an_error_in_a_worker_is_the_same_message_and_keeps_what_is_done(
    tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "UNIT", 700)
    with inputs[1].open("a") as file:
        file.write("{broken\n")
    with pytest.raises(InputError, match=r"lines\.jsonl \(line at byte \d+\): is not JSON"):
        prepare(inputs, str(tmp_path / "out"), tokenizer=BYTE, workers=2)
    assert parts.parts_folder(str(tmp_path / "out")).is_dir()
    assert not (tmp_path / "out.idx").exists()


def test_parquet_that_cannot_be_used_says_why(tmp_path: Path, inputs: list[Path]) -> None:
    with pytest.raises(InputError, match="no column `body`; it has: id, text"):
        prepare([inputs[2]], str(tmp_path / "out"), tokenizer=BYTE, key="body")
    with pytest.raises(InputError, match="no text under `id`, but int"):
        prepare([inputs[2]], str(tmp_path / "out"), tokenizer=BYTE, key="id")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match="is no Parquet file"):
        prepare([broken], str(tmp_path / "out"), tokenizer=BYTE)
