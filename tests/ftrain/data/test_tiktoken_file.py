"""Tokenizers in tiktoken's form: the ids are those of the file's merges, worked out by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ftrain.data.errors import TokenizerError
from ftrain.data.tiktoken_file import GPT2, TiktokenTokenizer
from ftrain.data.tokenizer import load_tokenizer

MERGES = [b"th", b"the", b" the", b"in"]


def write(path: Path, tokens: list[bytes]) -> str:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """All bytes, then four merges: 256 th, 257 the, 258 _the, 259 in."""
    return write(tmp_path / "mine.tiktoken", [*(bytes([byte]) for byte in range(256)), *MERGES])


def test_ids_are_those_of_the_merges(path: str) -> None:
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.encode("the thing").tolist() == [257, ord(" "), 256, 259, ord("g")]
    assert tokenizer.encode(" the").tolist() == [258]
    assert tokenizer.encode("ü").tolist() == list("ü".encode())
    assert (tokenizer.eod, tokenizer.vocab) == (260, 261)  # the end token comes after the ranks
    assert tokenizer.decode([257, 258, 260]) == "the the<|endoftext|>"


def test_what_looks_like_a_special_token_is_text(path: str) -> None:
    tokenizer = load_tokenizer(path)
    assert tokenizer.eod not in tokenizer.encode("<|endoftext|>").tolist()


def test_the_json_beside_it_goes_before(path: str) -> None:
    special = {"<stop>": 300, "<|endoftext|>": 301}
    Path(path + ".json").write_text(json.dumps({"pattern": GPT2, "special_tokens": special, "eod": "<stop>"}))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eod, tokenizer.vocab) == (300, 302)


def test_published_names_bring_their_definition(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    llama = load_tokenizer(write(tmp_path / "tokenizer.model", tokens))
    assert (llama.eod, llama.vocab) == (128001, 128002)
    assert load_tokenizer(write(tmp_path / "cl100k_base.tiktoken", tokens)).eod == 100257


@pytest.mark.parametrize(
    ("content", "beside", "words"),
    [
        ("no base64 here", "", "is not a tiktoken file"),
        ("", "", "no token for 256 single bytes, the first is 0"),
        (None, "{", "is not JSON"),
        (None, '{"special": 1}', "other keys than"),
        (None, '{"special_tokens": {"<x>": 300}}', "no end-of-document token"),
        (None, '{"pattern": "("}', "is refused by tiktoken"),
    ],
)
def test_what_is_wrong_is_said(path: str, content: str | None, beside: str, words: str) -> None:
    if content is not None:
        Path(path).write_text(content)
    if beside:
        Path(path + ".json").write_text(beside)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(path)
