"""Anyone can read a checkpoint: the same index once more, as an fsspec reference file that shows a Zarr v3 group.

    zarr.open_group("reference::/runs/a/checkpoints/step-00001000/e0004-a0007.zarr.json", mode="r")
    zarr.open_group("reference::s3://...zarr.json", mode="r", storage_options={"remote_options": {"asynchronous": True}})

(zarr and fsspec want to be told that the store behind a remote reference is asynchronous; `open_zarr` does it.)

A chunk in a pack is exactly what Zarr's `bytes` and `crc32c` codecs make, so the references point straight into the packs and
stock zarr checks every checksum. Some things need care:

- Stock zarr has no bfloat16, and refuses even to list a consolidated group that holds one: bfloat16 arrays are shown as their
  uint16 bits with the attribute dtype="bfloat16". `open_zarr` shows them as float32 that hold exactly the bfloat16 values
  (NumPy has no bfloat16), by a codec that is registered only when it is called.
- Compressed chunks have Zarr's own codec for it between the two: `blosc`.
- A missing chunk reads as the fill value, so the fill value is NaN (for integers the most extreme one): never a plausible zero.
- The pack's folder is a template: a copy opens with storage_options={"template_overrides": {"u": NEW_FOLDER}}.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from storage.compress import Compressor
from storage.errors import FormatError
from storage.keys import view_name
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.pack import ArraySpec, PartGeometry
from storage.parts import chunk_counts
from storage.record import decode_json

if TYPE_CHECKING:
    import zarr

__all__ = [
    "MAX_COMMIT_CHUNKS",
    "MAX_GROUP_CHUNKS",
    "array_files",
    "is_reference_of",
    "num_chunks",
    "open_zarr",
    "reference_files",
    "reference_json",
    "register_bfloat16",
    "stored_views",
]

MAX_GROUP_CHUNKS = 100_000
"""Above this number of chunks there is one reference file per array, and no group file."""

MAX_COMMIT_CHUNKS = 1_000_000
"""Above this number a commit writes none (94 bytes a chunk: it would be 94 MB and more): `write_view` does, when asked."""

BFLOAT16_NAN = 0x7FC0
BFLOAT16_CODEC = "ftrain.bfloat16"

CHECKSUM = ',"crc32c":"00000000"}'
"""What a reference file ends in, with the digits of its checksum."""

Starts = Mapping[int, NDArray[np.int64]]
Find = Callable[[Iterable[int]], Starts]


def nothing_found(rows: Iterable[int]) -> Starts:
    """Of plain checkpoints."""
    return {}


_CHUNK = re.compile(r"\{\{u\}\}/[A-Za-z0-9_][A-Za-z0-9._-]*$")


def reference_files(manifest: Manifest, *, base_url: str, find: Find = nothing_found) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the reference files that come with the commit of a checkpoint in `base_url`.

    `find` says where compressed chunks begin (`storage.lengths`), here as in all functions of this module.
    """
    if num_chunks(manifest) <= MAX_GROUP_CHUNKS:
        yield view_name(manifest.epoch, manifest.attempt), reference_json(manifest, base_url=base_url, find=find)
    elif num_chunks(manifest) <= MAX_COMMIT_CHUNKS:
        yield from array_files(manifest, [spec.name for spec in manifest.arrays], base_url=base_url, find=find)


def array_files(
    manifest: Manifest, arrays: Collection[str], *, base_url: str, find: Find = nothing_found
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the reference files of single arrays, each made when it is asked for."""
    wanted = [number for number, spec in enumerate(manifest.arrays) if spec.name in arrays]
    together = num_chunks(manifest) <= MAX_COMMIT_CHUNKS
    found = _found(manifest, wanted, find) if together else {}
    for number in wanted:
        spec, starts = manifest.arrays[number], found if together else _found(manifest, [number], find)
        refs = [_entry("zarr.json", array_metadata(spec, manifest.compressor)), *_chunk_refs(manifest, number, "", starts)]
        yield view_name(manifest.epoch, manifest.attempt, spec.name), _reference(refs, base_url)


def stored_views(
    store: ObjectStore, manifest: Manifest, *, prefix: str, base_url: str, find: Find
) -> Iterator[tuple[str, bytes]]:
    """What the reference files of a checkpoint must hold: those that come with the commit, and those that were added since."""
    yield from reference_files(manifest, base_url=base_url, find=find)
    if num_chunks(manifest) > MAX_COMMIT_CHUNKS:
        names = {prefix + view_name(manifest.epoch, manifest.attempt, spec.name): spec.name for spec in manifest.arrays}
        stem = (prefix + view_name(manifest.epoch, manifest.attempt)).removesuffix(".json") + "/"
        added = {names[info.key] for info in store.list(stem) if info.key in names}
        yield from array_files(manifest, added, base_url=base_url, find=find)


def reference_json(manifest: Manifest, *, base_url: str, find: Find = nothing_found) -> bytes:
    """The reference file of the whole checkpoint, as one Zarr group."""
    names = [spec.name for spec in manifest.arrays]
    groups = {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
    metadata = {group: group_metadata({}) for group in sorted(groups)}
    metadata |= {spec.name: array_metadata(spec, manifest.compressor) for spec in manifest.arrays}
    metadata = {name: metadata[name] for name in sorted(metadata, key=_parent)}
    root = group_metadata({"format": "ftrain-checkpoint", "step": manifest.step})
    refs = [_entry("zarr.json", root | {"consolidated_metadata": _consolidated(metadata)})]
    refs += [_entry(f"{name}/zarr.json", content) for name, content in metadata.items()]
    starts = _found(manifest, range(len(names)), find)
    for number, name in enumerate(names):
        refs += _chunk_refs(manifest, number, f"{name}/", starts)
    return _reference(refs, base_url)


def _parent(name: str) -> str:
    """The group that a member is in. Members of one stand together: stock zarr sorts consolidated metadata by depth alone, then
    takes each run of siblings for all there are, and cannot open a checkpoint in which a group's arrays and groups lie apart.
    """
    return name.rpartition("/")[0]


def group_metadata(attributes: dict[str, Any]) -> dict[str, Any]:
    """The zarr.json of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _consolidated(metadata: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Without it, stock zarr cannot list the members of an inner group through a reference file system."""
    return {"kind": "inline", "must_understand": False, "metadata": metadata}


def array_metadata(spec: ArraySpec, compressor: Compressor | None = None) -> dict[str, Any]:
    """The zarr.json of one array, for stock zarr."""
    bfloat16 = spec.dtype == "bfloat16"
    endian = {"configuration": {"endian": "little"}} if spec.itemsize > 1 else {}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": spec.shape,
        "data_type": "uint16" if bfloat16 else spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": spec.tile}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(spec.dtype),
        "codecs": [{"name": "bytes", **endian}, *_compressing(compressor, spec), {"name": "crc32c"}],
        "attributes": {**spec.attributes, **({"dtype": "bfloat16"} if bfloat16 else {})},
        "storage_transformers": [],
    }


def _compressing(compressor: Compressor | None, spec: ArraySpec) -> list[dict[str, Any]]:
    """The codec between the bytes and their checksum."""
    if compressor is None:
        return []
    how = {"cname": compressor.cname, "clevel": compressor.clevel, "shuffle": compressor.shuffle}
    return [{"name": compressor.name, "configuration": {**how, "typesize": spec.itemsize, "blocksize": 0}}]


def _fill_value(dtype: str) -> str | int | bool:
    if dtype == "bfloat16":
        return BFLOAT16_NAN
    if dtype == "bool":
        return True
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return "NaN"
    return int(np.iinfo(kind).max if kind.kind == "u" else np.iinfo(kind).min)


def num_chunks(manifest: Manifest) -> int:
    """Chunks of all arrays."""
    return int(chunk_counts(manifest.table, manifest.arrays).sum())


def _entry(key: str, content: dict[str, Any]) -> str:
    """A member of the references whose value is a text."""
    return f'"{key}":{msgspec.json.encode(_text(content)).decode()}'


def _found(manifest: Manifest, numbers: Iterable[int], find: Find) -> Starts:
    """Where the chunks of some arrays begin. In the order of the packs: what is asked of one is asked at the same time, and
    array by array each part would be a request that is waited for.
    """
    return find(sorted(row for number in numbers for row in manifest.table.rows_of(number).tolist()))


def _chunk_refs(manifest: Manifest, number: int, prefix: str, found: Starts) -> Iterator[str]:
    """`"key":[pack, byte offset, length]` for the chunks of one array, in the order they lie.

    Written as text at once (names have no character that JSON escapes): a commit with 100,000 chunks makes as many of these.
    """
    spec, table = manifest.arrays[number], manifest.table
    for row in table.rows_of(number).tolist():
        offset, shape = table.box(row, len(spec.shape))
        geometry = PartGeometry.of(spec, shape)
        names = [f'"{prefix}c']
        for start, tile, count in zip(offset, spec.tile, geometry.grid, strict=True):
            cells = [f"/{cell}" for cell in range(start // tile, start // tile + count)]
            names = [name + cell for name in names for cell in cells]
        middle = f'":["{{{{u}}}}/{manifest.packs[int(table.pack[row])].name}",'
        starts = found.get(row)
        if starts is None:
            starts = int(table.position[row]) + geometry.stride * np.arange(geometry.num_chunks + 1)
        places = itertools.pairwise(starts.tolist())
        yield from [f"{name}{middle}{at},{stop - at}]" for name, (at, stop) in zip(names, places, strict=True)]


def _reference(refs: list[str], base_url: str) -> bytes:
    """The file, with its own checksum as last field: that of all bytes before it. fsspec ignores fields it does not know."""
    templates = msgspec.json.encode({"u": base_url.rstrip("/")})
    body = b'{"version":1,"templates":%b,"refs":{%b}' % (templates, ",".join(refs).encode())
    return b'%b,"crc32c":"%08x"}' % (body, google_crc32c.value(body))


def is_reference_of(data: bytes, wanted: bytes, *, key: str) -> bool:
    """Whether a reference file is `wanted` (which was made with an empty base URL), wherever it says the packs are."""
    base_url = decode_json(data, _Templates, key=key).templates.get("u", "")
    body = wanted[: -len(CHECKSUM)].replace(b'"u":""', b'"u":%b' % msgspec.json.encode(base_url), 1)
    return data == b'%b,"crc32c":"%08x"}' % (body, google_crc32c.value(body))


class _Templates(msgspec.Struct, frozen=True):
    templates: dict[str, str]


class _View(_Templates, frozen=True):
    refs: dict[str, str | tuple[str, int, int]]


def _text(content: dict[str, Any]) -> str:
    return msgspec.json.encode(content).decode()


def open_zarr(url: str, *, storage_options: dict[str, Any] | None = None) -> zarr.Group:
    """The Zarr group of a reference file (a path or URL), with bfloat16 arrays as float32 of the same values.

    `storage_options` go to fsspec's reference file system, for example {"template_overrides": {"u": NEW_FOLDER}}.
    """
    import fsspec
    import zarr

    register_bfloat16()
    with fsspec.open(url, "rb") as file:
        view = _read_view(file.read(), url)
    for key in [key for key in view["refs"] if key.endswith("zarr.json")]:
        metadata = decode_json(view["refs"][key].encode(), dict[str, Any], key=f"{url}: {key}")
        view["refs"][key] = _text(_as_bfloat16(metadata))
    given = storage_options or {}
    remote_options = {"asynchronous": True, **given.get("remote_options", {})}
    options = {"fo": view, **given, "remote_options": remote_options}
    return zarr.open_group("reference://", mode="r", storage_options=options)


def _read_view(data: bytes, url: str) -> dict[str, Any]:
    """The reference file; `FormatError` if it is not, bit for bit, one that was written, or points outside its folder."""
    body, tail = data[: -len(CHECKSUM)], data[-len(CHECKSUM) :]
    if tail != b',"crc32c":"%08x"}' % google_crc32c.value(body):
        raise FormatError(
            f"{url} does not match its own checksum; to open a copy, give template_overrides instead of editing it", url
        )
    view = decode_json(data, _View, key=url)
    for key, ref in view.refs.items():
        inside = isinstance(ref, str) if key.endswith("zarr.json") else not isinstance(ref, str) and _CHUNK.match(ref[0])
        if not inside:
            raise FormatError(f"{url}: {key} is no chunk of a pack in its own folder", url)
    return {"version": 1, "templates": view.templates, "refs": view.refs}


def _as_bfloat16(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same metadata, with every array of bfloat16 bits shown as float32."""
    consolidated = metadata.get("consolidated_metadata")
    if consolidated:
        consolidated["metadata"] = {name: _as_bfloat16(member) for name, member in consolidated["metadata"].items()}
    if metadata.get("node_type") == "array" and metadata["attributes"].get("dtype") == "bfloat16":
        metadata |= {"data_type": "float32", "fill_value": "NaN", "codecs": [{"name": BFLOAT16_CODEC}, *metadata["codecs"]]}
    return metadata


def register_bfloat16() -> None:
    """Teach this process's zarr the codec that shows bfloat16 bits as float32. Imports zarr; harmless when called again."""
    from zarr.registry import register_codec

    from storage.zarr_bfloat16 import BFloat16Codec

    register_codec(BFLOAT16_CODEC, BFloat16Codec)
