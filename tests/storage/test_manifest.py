"""The manifest: what is written is read back, problems are listed all at once, hostile bytes end in a FormatError."""

import random
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import google_crc32c
import msgspec
import pytest

from storage.box import Box
from storage.commit import read_commit
from storage.errors import CoverageError, FormatError
from storage.keys import commit_name, step_folder
from storage.manifest import MAGIC, Manifest, PackManifest, decode
from storage.memory import MemoryStore
from storage.merge import merge
from storage.pack import ArraySpec
from storage.record import decode_record, encode_record
from storage.run import RunStore
from tests.storage.building import SPECS, build_pack, deal, random_values, save

VALUES = random_values(SPECS, 3)


def deliveries(writers: int = 3) -> list[PackManifest]:
    return [build_pack(SPECS, VALUES, hand, f"p{n}.pack")[1] for n, hand in enumerate(deal(SPECS, writers))]


def merged(parts: list[PackManifest], **how: Any) -> Manifest:
    return merge(parts, step=7, epoch=1, attempt=2, progress={"step": 7, "nested": [1, {"a": None}]}, created_s=5.5, **how)


def test_what_is_written_is_read_back() -> None:
    manifest = merged([PackManifest.decode(d.encode()) for d in deliveries()])
    again = decode(manifest.encode())
    assert list(again.parts) == list(manifest.parts)
    for name in (
        "step",
        "epoch",
        "attempt",
        "created_s",
        "arrays",
        "packs",
        "digests",
        "progress",
        "format_version",
        "min_reader",
    ):
        assert getattr(again, name) == getattr(manifest, name)
    assert again.encode() == manifest.encode()


def test_digests_do_not_depend_on_the_writers() -> None:
    assert merged(deliveries(1)).digests == merged(deliveries(3)).digests == merged(deliveries(5)).digests


def test_arrays_may_arrive_in_any_order() -> None:
    forward, backward = merged(deliveries()), merged(deliveries()[::-1])
    assert forward.arrays == backward.arrays
    assert {(p.name, part) for p, part in forward.parts} == {(p.name, part) for p, part in backward.parts}


def test_every_missing_box_and_double_box_is_listed() -> None:
    packs = deliveries()
    with pytest.raises(CoverageError) as caught:
        merged([*packs[1:], packs[1]])
    text = "\n".join(caught.value.problems)
    assert "gap" in text
    assert "covered 2 times" in text
    assert len({problem.split(":")[0] for problem in caught.value.problems}) >= 4


def test_arrays_that_nobody_delivers_and_strangers_are_listed() -> None:
    extra = ArraySpec(name="master/lost", shape=(3,), dtype="float32", tile=(3,))
    with pytest.raises(CoverageError, match=r"master/lost: gap: \[0:3\]"):
        merged(deliveries(), expected=[*SPECS.values(), extra])
    with pytest.raises(CoverageError, match="array steps is not part of the state"):
        merged(deliveries(), expected=[s for s in SPECS.values() if s.name != "steps"])


def test_two_writers_must_mean_the_same_array() -> None:
    packs = deliveries()
    arrays = [msgspec.structs.replace(s, attributes={"x": 1}) if s.name == "master/layers.0.wq" else s for s in packs[1].arrays]
    with pytest.raises(CoverageError, match="described in another way"):
        merged([packs[0], msgspec.structs.replace(packs[1], arrays=arrays), packs[2]])


def test_parts_of_arrays_without_description_are_refused() -> None:
    packs = deliveries()
    with pytest.raises(CoverageError, match="do not fit its arrays"):
        merged([packs[0], msgspec.structs.replace(packs[1], arrays=[]), packs[2]])


def test_an_empty_pack_is_left_out() -> None:
    empty = msgspec.structs.replace(deliveries()[0], parts=[], digests={})
    assert len(merged([*deliveries(), empty]).packs) == 3


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A manifest with a right checksum whose header was changed."""
    data = merged(deliveries()).encode()
    length = struct.unpack_from("<I", data, 12)[0]
    header = msgspec.json.decode(data[16 : 16 + length])
    change(header)
    raw = msgspec.json.encode(header)
    return sealed(struct.pack("<I", len(raw)) + raw + data[16 + length :])


def sealed(body: bytes) -> bytes:
    return MAGIC + struct.pack("<I", google_crc32c.value(body)) + body


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = header
        for name in parents:
            place = place[int(name) if name.isdigit() else name]
        place[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("packs.0.name", "../../etc/passwd", "pack name"),
        ("packs.0.name", "/etc/passwd", "pack name"),
        ("packs.0.name", "a/b", "pack name"),
        ("packs.0.name", "..", "pack name"),
        ("packs.0.name", "p1.pack", "not unique"),
        ("packs.0.nbytes", 64, "past the end of its pack"),
        ("packs.0.nbytes", -1, "cannot be parsed"),
        ("packs.0.nbytes", 2**60, "cannot be parsed"),
        ("arrays.0.name", "../x", "array name"),
        ("arrays.0.name", "a//b", "array name"),
        ("arrays.0.name", "master/norm", "not sorted"),
        ("arrays.0.name", "exp_avg/zarr.json", "array name"),
        ("arrays.0.dtype", "object", "unknown dtype"),
        ("arrays.0.dtype", "float64", "past the end|overlap"),
        ("arrays.0.shape", [12, 0], "does not fit shape"),
        ("arrays.0.shape", [2**40, 2**40], "too large"),
        ("arrays.0.shape", [-12, 10], "does not fit shape"),
        ("arrays.0.shape", [24, 10], "boxes of 120 elements for 240"),
        ("arrays.0.shape", [10, 10], "outside its array"),
        ("arrays.0.shape", [12], "tile sizes"),
        ("arrays.0.shape", [1] * 9, "dimensions"),
        ("arrays.0.tile", [5, 5], "cuts through tiles"),
        ("arrays.0.tile", [0, 5], "does not fit"),
        ("num_parts", 2**40, "claims"),
        ("num_parts", 1, "does not have 1 rows"),
        ("ndim", 8, "unknown columns"),
        ("ndim", 99, "cannot be parsed"),
        ("columns.0.dtype", "<f8", "unknown columns"),
        ("columns.0.dtype", "<u8", "does not have"),
        ("columns.1.nbytes", 1, "says otherwise"),
        ("digests", {}, "digests"),
        ("digests.steps", "xyz", "16 hexadecimal"),
        ("format", "other", "not a checkpoint manifest"),
        ("min_reader", 3, "install a newer release"),
        ("progress", [], "cannot be parsed"),
        ("step", -1, "cannot be parsed"),
    ],
)
def test_each_rule_of_the_format_is_checked(path: str, value: Any, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        decode(rewritten(setting(path, value)), key="the key")
    assert caught.value.key == "the key"


def test_unknown_fields_are_ignored_for_the_sake_of_later_versions() -> None:
    data = rewritten(setting("codec", {"name": "new"}))
    assert decode(data).step == 7


def test_a_decompression_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(1 << 26), 9)

    def change(header: dict[str, Any]) -> None:
        for column in header["columns"]:
            column["nbytes"] = 0
        header["columns"][0]["nbytes"] = len(bomb)

    data = rewritten(change)
    length = struct.unpack_from("<I", data, 12)[0]
    with pytest.raises(FormatError, match="does not have"):
        decode(sealed(data[12 : 16 + length] + bomb))


def test_every_single_flipped_bit_is_noticed() -> None:
    data = merged(deliveries()).encode()
    rng = random.Random(0)
    for position in [*range(16 * 8), *rng.sample(range(len(data) * 8), 500)]:
        bad = bytearray(data)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError):
            decode(bytes(bad))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes replaced, cut out, doubled or inserted; the checksum is made right again, or nothing behind it would be tested."""
    body = bytearray(data[12:])
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(body)), rng.randrange(4)
        if kind == 0:
            body[at] = rng.randrange(256)
        elif kind == 1:
            del body[at : at + rng.randint(1, 9)]
        elif kind == 2:
            body[at:at] = body[at : at + rng.randint(1, 40)]
        else:
            body[at:at] = rng.choice([b"[" * 3000, b"9" * 30, b"\xff\xfe", b"-1", b"1e999", b"null", b'"', b"\\ud800"])
    return sealed(bytes(body))


def fuzz(rounds: int) -> None:
    rng = random.Random(1)
    data = merged(deliveries()).encode()
    for _ in range(rounds):
        try:
            manifest = decode(mutated(rng, data))
        except FormatError:
            continue
        assert all(re.fullmatch(r"[\w.-]+", p.name) for p in manifest.packs)
        assert manifest.problems() == []


def test_mutations_end_in_format_errors_or_valid_manifests() -> None:
    fuzz(1500)


@pytest.mark.slow
def test_very_many_mutations_end_in_format_errors_or_valid_manifests() -> None:
    fuzz(100_000)


class Something(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    text: str


def test_records_notice_every_single_flipped_bit() -> None:
    record = Something(number=3, text="abc \u00e4")
    data = encode_record(record)
    assert decode_record(data, Something, key="k") == record
    for position in range(len(data) * 8):
        bad = bytearray(data)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError):
            decode_record(bytes(bad), Something, key="k")


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"x" * (1 << 20) + b"y", b'{"crc32c":"00000000","body":{}}\n'])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_record(data, Something, key="k")


def test_boxes_are_columns_that_know_their_array() -> None:
    manifest = merged(deliveries())
    number = manifest.index["master/odd"]
    rows = manifest.table.rows_of(number)
    assert {manifest.table.part(int(r), manifest.arrays).array for r in rows} == {"master/odd"}
    assert sum(Box(*manifest.table.box(int(r), 3)).size for r in rows) == 5 * 3 * 7


def fuzz_commits(rounds: int) -> None:
    """Whatever stands in a commit whose checksum is right, it names no object outside its own folder."""
    rng, store = random.Random(2), MemoryStore()
    run = RunStore(store)
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}))
    key = step_folder(10) + commit_name(0)
    body = store.get(key)[len('{"crc32c":"00000000","body":') : -2]
    for _ in range(rounds):
        raw = mutated(rng, bytes(12) + body)[12:]
        store.put(key, b'{"crc32c":"%08x","body":%b}\n' % (google_crc32c.value(raw), raw))
        try:
            record = read_commit(store, key)
        except FormatError:
            continue
        assert (record.step, record.epoch, record.manifest) == (10, 0, f"e0000-a{record.attempt:04d}.manifest")


def test_mutated_commits_end_in_format_errors_or_name_their_own_manifest() -> None:
    fuzz_commits(1500)


@pytest.mark.slow
def test_very_many_mutated_commits_end_in_format_errors_or_name_their_own_manifest() -> None:
    fuzz_commits(100_000)
