"""Text in, token file out: files, folders, JSONL; nothing half-made; the built-in corpus, raced."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import slices
from ftrain.data.errors import DataError, InputError, TokenizerError
from ftrain.data.prepare import PrepareReport, Progress, prepare
from ftrain.data.stdlib import MOST_BYTES, ensure_stdlib, stdlib_files
from ftrain.data.tokenizer import ByteTokenizer, load_tokenizer
from ftrain.data.tokens import TokenFile

BYTE = ByteTokenizer()


def run(inputs: list[Path], out: Path, **options: object) -> tuple[PrepareReport, list[str]]:
    report = prepare(inputs, str(out), tokenizer=BYTE, **options)  # type: ignore[arg-type]
    file = TokenFile(str(out))
    documents = [file.document(number) for number in range(file.num_documents)]
    assert all(document[-1] == BYTE.eod for document in documents)
    assert (report.documents, report.tokens) == (file.num_documents, len(file))
    return report, [BYTE.decode(document[:-1]) for document in documents]


@given(st.text())
def test_byte_tokens_are_the_bytes(text: str) -> None:
    ids = BYTE.encode(text)
    assert ids.max(initial=0) < 256
    try:
        assert ids.astype(np.uint8).tobytes() == text.encode()
        assert BYTE.decode(ids) == text
    except UnicodeEncodeError:  # half a surrogate pair has no bytes
        assert "?" in BYTE.decode(ids)


def test_the_end_of_a_document_is_shown() -> None:
    assert BYTE.decode([97, 256, 98, 255, 256]) == "a<eod>b\ufffd<eod>"
    assert (BYTE.vocab, BYTE.eod) == (257, 256)


@given(data=st.binary(max_size=200))
def test_any_bytes_survive(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("t")
    (folder / "in.txt").write_bytes(data)
    prepare([folder / "in.txt"], str(folder / "out"), tokenizer=BYTE)
    tokens = TokenFile(str(folder / "out")).document(0)
    assert tokens[:-1].astype(np.uint8).tobytes() == data
    assert tokens[-1] == 256


def test_folders_are_read_in_order_and_only_their_texts(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name, data in {
        "b.txt": b"B",
        "a/z.md": b"AZ",
        "a/empty": b"",
        ".hidden/x": b"H",
        "c.bin": b"\0\1",
        "d.jsonl": b"",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "d.jsonl").write_text('{"text": "D1"}\n\n{"text": "D2", "id": 3}\n')
    report, documents = run([source], tmp_path / "out")
    assert documents == ["", "AZ", "B", "D1", "D2"]
    assert [Path(name).name for name in report.skipped] == ["c.bin"]


def test_jsonl_under_another_key(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"body": "grüße\n\ud83d\ude00"}) + "\n")
    assert run([tmp_path / "in.jsonl"], tmp_path / "out", key="body")[1] == ["grüße\n\U0001f600"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"in\.jsonl:2: is not JSON"),
        ('{"body": "x"}', r"in\.jsonl:2: has no text under `text`; it has: body"),
        ('{"text": 3}', r"in\.jsonl:2: has no text under `text`"),
        ("[1]", r"in\.jsonl:2: .* it has: list"),
    ],
)
def test_a_broken_line_is_named_and_leaves_what_was_there(tmp_path: Path, line: str, words: str) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "in.jsonl"
    good.write_text("before")
    run([good], tmp_path / "out")
    bad.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=words):
        prepare([bad], str(tmp_path / "out"), tokenizer=BYTE)
    assert BYTE.decode(TokenFile(str(tmp_path / "out")).document(0)) == "before<eod>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.txt", "in.jsonl", "out.bin", "out.idx"]


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing: no such file or folder"):
        prepare([tmp_path / "nothing"], str(tmp_path / "out"), tokenizer=BYTE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text found"):
        prepare([tmp_path / "empty"], str(tmp_path / "out"), tokenizer=BYTE)


def test_pieces_of_a_large_text_make_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "PIECE", 10)
    text = "line one\nline two is longer than a piece\r\n\nünï\n" * 5
    (tmp_path / "in.txt").write_bytes(text.encode())
    assert run([tmp_path / "in.txt"], tmp_path / "out")[1] == [text]
    assert TokenFile(str(tmp_path / "out")).num_sequences > 2


def test_progress_only_grows_and_ends_at_the_total(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "y"}\n' * 1000)
    seen: list[Progress] = []
    report, _ = run([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", progress=seen.append)
    done = [progress.bytes_done for progress in seen]
    assert done == sorted(done)
    assert len(done) > 3
    assert seen[-1] == Progress(report.bytes_read, report.bytes_read, 1001, 101 + 2000)


def test_tokenizer_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = str(tmp_path / "tokenizer.json")
    inner.save(path)
    with pytest.raises(TokenizerError, match=r"no end-of-document token; known names: <\|endoftext\|>"):
        load_tokenizer(path)
    inner.add_special_tokens(["</s>"])
    inner.save(path)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab, tokenizer.eod) == (4, 3)
    (tmp_path / "in.txt").write_text("a b\nc a")
    report = prepare([tmp_path / "in.txt"], str(tmp_path / "out"), tokenizer=tokenizer)
    assert report.dtype == "uint16"
    tokens = TokenFile(str(tmp_path / "out")).document(0)
    assert tokens.tolist() == [1, 2, 0, 1, 3]
    assert tokenizer.decode(tokens) == "a b [UNK] a </s>"


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no such file; a tokenizer is `byte`"), ("{}", "is not a tokenizer file")]
)
def test_tokenizers_that_cannot_be_loaded(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(str(path))


def test_a_tokenizer_file_without_the_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'ftrain-runtime\[tokenizers\]'"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_the_standard_library_is_the_files_in_order(stdlib_root: str) -> None:
    files = stdlib_files()
    file = TokenFile(ensure_stdlib(stdlib_root))
    assert file.num_documents == len(files) > 200
    assert 4e6 < len(file) <= MOST_BYTES + len(files)
    names = [path.as_posix() for path in files]
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in name or "site-packages" in name]
    for number in (0, 100, len(files) - 1):
        assert file.document(number)[:-1].astype(np.uint8).tobytes() == files[number].read_bytes()


def test_preparing_at_once_gives_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = stdlib_files()[:20]
    monkeypatch.setattr("ftrain.data.stdlib.stdlib_files", lambda: few)
    barrier, prefixes = threading.Barrier(6), []

    def work() -> None:
        barrier.wait()
        prefixes.append(ensure_stdlib(str(tmp_path)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prefixes) == 6
    assert len(set(prefixes)) == 1
    assert TokenFile(prefixes[0]).num_documents == 20
    assert [path.name for path in tmp_path.iterdir()] == [Path(prefixes[0]).parent.name]  # no drafts left


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the cache folder must be writable"):
        ensure_stdlib(str(tmp_path / "file"))
