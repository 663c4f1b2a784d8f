"""Token files against an independent reader and hand-made bytes; anything wrong with an index is a clear error."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data.errors import DataError, TokenFileError
from ftrain.data.tokens import TokenFile, token_dtype
from ftrain.data.writer import TokenWriter

Documents = list[list[list[int]]]  # documents of sequences of tokens


def write(prefix: Path, documents: Documents, vocab: int = 257) -> str:
    with TokenWriter(str(prefix), vocab=vocab) as out:
        for document in documents:
            for sequence in document:
                out.add(sequence)
            out.end_document()
    return str(prefix)


def read_independently(prefix: str) -> tuple[str, Documents]:
    """The pair as the public description of Megatron's format says, one field after another."""
    with Path(prefix + ".idx").open("rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        assert struct.unpack("<Q", file.read(8)) == (1,)
        code, count, boundaries = *struct.unpack("<B", file.read(1)), *struct.unpack("<QQ", file.read(16))
        sizes = np.frombuffer(file.read(4 * count), "<i4")
        pointers = np.frombuffer(file.read(8 * count), "<i8")
        document_index = np.frombuffer(file.read(8 * boundaries), "<i8").tolist()
        assert file.read() == b""
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    data = Path(prefix + ".bin").read_bytes()
    sequences = [
        np.frombuffer(data, dtype, count=size, offset=pointer).tolist() for size, pointer in zip(sizes, pointers, strict=True)
    ]
    return dtype, [sequences[a:b] for a, b in itertools.pairwise(document_index)]


tokens_below = st.integers(0, 256)
documents_strategy = st.lists(st.lists(st.lists(tokens_below, max_size=5), max_size=3), max_size=6)


@given(documents_strategy)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, documents: Documents) -> None:
    prefix = write(tmp_path_factory.mktemp("t") / "x", documents)
    assert read_independently(prefix) == ("<u2", [[sequence for sequence in document if sequence] for document in documents])
    file = TokenFile(prefix)
    flat = [token for document in documents for sequence in document for token in sequence]
    assert file.tokens(0, len(file)).tolist() == flat
    assert file.num_documents == len(documents)
    for number, document in enumerate(documents):
        assert file.document(number).tolist() == [token for sequence in document for token in sequence]


@given(documents_strategy, st.data())
def test_document_starts_are_found_by_bisection(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, data: st.DataObject
) -> None:
    file = TokenFile(write(tmp_path_factory.mktemp("t") / "x", documents))
    lengths = [sum(len(sequence) for sequence in document) for document in documents]
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    start = data.draw(st.integers(0, len(file)))
    stop = data.draw(st.integers(start, len(file)))
    assert file.document_starts(start, stop).tolist() == sorted(s for s in starts if start <= s < stop)


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")], ids=lambda value: str(value)
)
def test_files_of_other_writers_are_read(tmp_path: Path, code: int, dtype: str) -> None:
    """Every integer dtype, two documents, one of two sequences; also with the mode column of multimodal files."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 3)
    size = np.dtype(dtype).itemsize
    index += struct.pack("<3i", 2, 1, 3) + struct.pack("<3q", 0, 2 * size, 3 * size) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "x.bin").write_bytes(np.arange(6).astype(dtype).tobytes())
    for modes in (b"", b"\x00\x01\x00"):
        (tmp_path / "x.idx").write_bytes(index + modes)
        file = TokenFile(str(tmp_path / "x"))
        assert (file.num_sequences, file.num_documents, len(file)) == (3, 2, 6)
        assert file.document(0).tolist() == [0, 1, 2]
        assert file.document(1).tolist() == [3, 4, 5]
        assert file.document_starts(0, 6).tolist() == [0, 3]


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert (token_dtype(65_499), token_dtype(65_500)) == ("uint16", "int32")
    prefix = write(tmp_path / "x", [[[128_255, 0]]], vocab=128_256)
    assert read_independently(prefix) == ("<i4", [[[128_255, 0]]])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (3, 2)])
def test_ranges_are_checked(tmp_path: Path, start: int, stop: int) -> None:
    file = TokenFile(write(tmp_path / "x", [[[1, 2, 3]], [[4, 5, 6]]]))
    with pytest.raises(IndexError, match="of 6"):
        file.tokens(start, stop)
    with pytest.raises(IndexError, match="document 2 of 2"):
        file.document(2)


def _edit(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:offset] + data + index[offset + len(data) :]


# the index of [[[1, 2, 3]], [[4, 5], [6]]]: header 34, sizes at 34, pointers at 46, documents at 70
DAMAGE = [
    pytest.param(lambda index: b"", "has 0 bytes", id="empty"),
    pytest.param(lambda index: index[:20], "has 20 bytes, an index begins with 34", id="cut in the header"),
    pytest.param(lambda index: index[:-1], "has 93 bytes; 3 sequences and 3 document boundaries take 94", id="cut"),
    pytest.param(lambda index: index + b"12", "has 96 bytes", id="longer"),
    pytest.param(_edit(0, b"RIFF"), "not a Megatron index", id="magic"),
    pytest.param(_edit(9, b"\x02"), "has version 2, this reader knows 1", id="version"),
    pytest.param(_edit(17, b"\x63"), "has dtype code 99 (unknown)", id="dtype"),
    pytest.param(_edit(17, b"\x07"), "has dtype code 7 (float32)", id="floats"),
    pytest.param(_edit(18, b"\xff" * 8), "18446744073709551615 sequences", id="absurd number of sequences"),
    pytest.param(_edit(26, b"\0" * 8), "has no document boundary", id="no boundary"),
    pytest.param(_edit(34, struct.pack("<i", -3)), "sequence 0", id="negative size"),
    pytest.param(_edit(34, struct.pack("<i", 4)), "sequence 1", id="size"),
    pytest.param(_edit(42, struct.pack("<i", 9)), "describes 28 bytes of tokens", id="last size"),
    pytest.param(_edit(54, struct.pack("<q", 2**40)), "sequence 1", id="pointer"),
    pytest.param(_edit(70, struct.pack("<q", 1)), "documents cover", id="first document"),
    pytest.param(_edit(86, struct.pack("<q", 2)), "documents cover", id="last document"),
    pytest.param(_edit(78, struct.pack("<q", 7)), "go backwards", id="document in the middle"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_index_is_a_clear_error(tmp_path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    prefix = write(tmp_path / "x", [[[1, 2, 3]], [[4, 5], [6]]])
    path = Path(prefix + ".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TokenFileError, match=r"x\.idx: ") as caught:
        TokenFile(prefix)
    assert words in str(caught.value)


def test_truncated_or_missing_data_is_a_clear_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2, 3]]])
    data = Path(prefix + ".bin")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(TokenFileError, match=r"describes 6 bytes of tokens, .* has 5"):
        TokenFile(prefix)
    data.unlink()
    with pytest.raises(TokenFileError, match="No such file"):
        TokenFile(prefix)
    with pytest.raises(TokenFileError, match="named by its prefix"):
        TokenFile(prefix + ".bin")


@given(offset=st.integers(0, 93), value=st.integers(0, 255), cut=st.integers(0, 94))
def test_a_hostile_index_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, offset: int, value: int, cut: int
) -> None:
    prefix = write(tmp_path_factory.mktemp("t") / "x", [[[1, 2, 3]], [[4, 5], [6]]])
    path = Path(prefix + ".idx")
    damaged = bytearray(path.read_bytes())
    damaged[offset] = value
    path.write_bytes(bytes(damaged[:cut]) if cut < 20 else bytes(damaged))
    try:
        file = TokenFile(prefix)
    except TokenFileError:
        return
    assert file.tokens(0, len(file)).size == len(file)
    file.document_starts(0, len(file))


@pytest.mark.parametrize("token", [-1, 257])
def test_a_token_outside_the_vocabulary_is_not_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} is outside the vocabulary"):
        write(tmp_path / "x", [[[1, token]]])
    assert list(tmp_path.iterdir()) == []


def test_a_broken_writer_leaves_the_earlier_pair(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2]]])
    with pytest.raises(DataError), TokenWriter(prefix, vocab=257) as out:
        out.add([300])
    assert read_independently(prefix)[1] == [[[1, 2]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    write(tmp_path / "x", [[[5]]])
    assert read_independently(prefix)[1] == [[[5]]]
