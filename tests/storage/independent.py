"""A second reader of format versions 1 and 2, written from docs/format.md alone: it shares no code with `storage`.

If this file has to change for a checkpoint that `storage` wrote, the format has changed. (Version 2 is compressed: the dozen
lines that name `compressed`. Blosc itself is numcodecs', which is nobody's of us.)
"""

import json
import re
import struct
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
MASK = (1 << 64) - 1


def crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def read_record(path: Path) -> dict[str, Any]:
    frame = re.fullmatch(rb'\{"crc32c":"([0-9a-f]{8})","body":(\{.*\})\}\n', path.read_bytes(), re.DOTALL)
    assert frame, f"{path} is no record"
    assert crc32c(frame[2]) == int(frame[1], 16), f"{path} is damaged"
    body: dict[str, Any] = json.loads(frame[2])
    return body


def newest_commit(run: Path) -> dict[str, Any]:
    """The commit of the highest step that no later epoch contradicts; of several for a step, the newest epoch's."""
    starts = {}
    for path in run.glob("epochs/e*.json"):
        epoch = read_record(path)
        starts[epoch["epoch"]] = -1 if epoch["starts_from"] is None else epoch["starts_from"]
    commits = [read_record(path) for path in run.glob("checkpoints/step-*/commit-e*.json")]
    counting = [c for c in commits if not any(e > c["epoch"] and start < c["step"] for e, start in starts.items())]
    return max(counting, key=lambda c: (c["step"], c["epoch"]))


def read_manifest(data: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    magic, crc, length = struct.unpack_from("<8sII", data)
    assert magic == b"ftrainM1"
    assert crc32c(data[12:]) == crc, "the manifest is damaged"
    header = json.loads(data[16 : 16 + length])
    columns, at = {}, 16 + length
    for column in header["columns"]:
        raw = zlib.decompress(data[at : at + column["nbytes"]])
        columns[column["name"]] = np.frombuffer(raw, column["dtype"]).tolist()
        at += column["nbytes"]
    assert at == len(data)
    return header, columns


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header of the newest checkpoint, and the bits of every array, all checksums and digests checked."""
    commit = newest_commit(run)
    folder = run / "checkpoints" / f"step-{commit['step']:08d}"
    data = (folder / commit["manifest"]).read_bytes()
    assert (len(data), f"{crc32c(data):08x}") == (commit["manifest_nbytes"], commit["manifest_crc32c"])
    header, columns = read_manifest(data)
    packs = [(folder / pack["name"]).read_bytes() for pack in header["packs"]]
    assert [len(p) for p in packs] == [pack["nbytes"] for pack in header["packs"]]
    arrays = {a["name"]: np.zeros(a["shape"], f"<u{ITEM_BYTES[a['dtype']]}") for a in header["arrays"]}
    seen = {name: np.zeros(values.shape, int) for name, values in arrays.items()}
    compressed = "compressor" in header
    sums: dict[int, bytes] = {}
    for row in range(header["num_parts"]):
        spec = header["arrays"][columns["array"][row]]
        ndim = len(spec["shape"])
        box = [(columns[f"offset{k}"][row], columns[f"shape{k}"][row]) for k in range(ndim)]
        at = 64 * columns["position"][row]
        number = columns["pack"][row]
        end = at + columns["stored"][row] if compressed else None
        found = place_part(packs[number], (at, end), spec, box, (arrays[spec["name"]], seen[spec["name"]]))
        sums[number] = sums.get(number, b"") + found
    if compressed:
        assert [f"{crc32c(sums[i]):08x}" for i in range(len(packs))] == [p["chunks_crc32c"] for p in header["packs"]]
    assert all((count == 1).all() for count in seen.values()), "the boxes do not tile"
    for name, values in arrays.items():
        assert f"{digest(values):016x}" == header["digests"][name], f"digest of {name}"
    return header, arrays


def place_part(
    pack: bytes, ends: tuple[int, int | None], spec: dict[str, Any], box: list[tuple[int, int]], into: tuple[Any, Any]
) -> bytes:
    """Put the chunks of a part where they belong; returns their checksums."""
    (values, seen), tile, shape, sums, (at, compressed) = into, spec["tile"], spec["shape"], b"", ends
    nbytes = int(np.prod(tile)) * values.itemsize
    cells = list(product(*(range(-(-n // t)) for (_, n), t in zip(box, tile, strict=True))))
    lengths = [nbytes + 4] * len(cells)
    if compressed is not None:
        table = pack[compressed - 4 * len(cells) - 4 : compressed]
        assert crc32c(table[:-4]) == int.from_bytes(table[-4:], "little")
        lengths = np.frombuffer(table[:-4], "<u4").tolist()
        assert at + sum(lengths) + len(table) == compressed
    for cell, length in zip(cells, lengths, strict=True):
        end = at + length
        chunk, stored = pack[at : end - 4], pack[end - 4 : end]
        assert crc32c(chunk) == int.from_bytes(stored, "little"), f"{spec['name']} at byte {at}"
        if compressed is not None:
            chunk = blosc.decompress(chunk)
            assert len(chunk) == nbytes
        start = [o + c * t for (o, _), c, t in zip(box, cell, tile, strict=True)]
        size = [min(t, n - s) for t, n, s in zip(tile, shape, start, strict=True)]
        where = (*(slice(s, s + n) for s, n in zip(start, size, strict=True)), ...)
        values[where] = np.frombuffer(chunk, values.dtype).reshape(tile)[(*(slice(0, n) for n in size), ...)]
        seen[where] += 1
        at, sums = end, sums + stored
    return sums


def key(seed: int, index: int) -> int:
    z = (seed + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def digest(values: np.ndarray) -> int:
    rows = values.reshape(len(values) if values.ndim else 1, -1).tolist()
    columns = [key(0x13198A2E03707344, i) for i in range(len(rows[0]))]
    return sum(key(0x243F6A8885A308D3, r) * sum(map(int.__mul__, row, columns)) for r, row in enumerate(rows)) & MASK
