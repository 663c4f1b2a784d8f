"""The child that looks into pickles: run by path in an isolated interpreter, standard library only.

Requests on stdin: one byte (m: metadata, t: tensor), 8 bytes of length, the pickle. Answers on stdout: 8 bytes of length, JSON.
A pickle can call whatever `find_class` returns, so it returns only stand-ins that remember their arguments; any other name ends
in an error. A pickle can also ask for any amount of memory or time, so both have limits, and no file can be opened or written.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
from typing import Any, BinaryIO

MEMORY_BYTES = 4 << 30
CPU_S = 300

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "",
}
DTYPES = set(STORAGES.values()) | {"uint16", "uint32", "uint64"}


class Standin:
    """Something that was called, or made, with `args` and given `state`. It does nothing."""

    def __new__(cls, *args: Any) -> Standin:
        made = object.__new__(cls)
        made.args = args
        made.state = None
        return made

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None:
        """`__new__` has done everything: pickles do not always call this."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """A field of a dataclass's state; what has its default value may not be in it."""
        return self.state.get(name)


def _names() -> dict[tuple[str, str], Any]:
    """Everything a pickle may name."""
    metadata = "torch.distributed.checkpoint.metadata"
    classes = (
        "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata MetadataIndex StorageMeta"
    )
    known: dict[tuple[str, str], Any] = {(metadata, name): type(name, (Standin,), {}) for name in classes.split()}
    known |= {(metadata, name): type(name, (Standin,), {}) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")}
    known |= {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (Standin,), {}),
        ("torch.serialization", "_get_layout"): type("_get_layout", (Standin,), {}),
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): dict,
        ("torch._utils", "_rebuild_tensor_v2"): type("v2", (Standin,), {}),
        ("torch._utils", "_rebuild_tensor_v3"): type("v3", (Standin,), {}),
        ("torch.storage", "UntypedStorage"): "",
    }
    for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath"):
        known["pathlib", name] = known["pathlib._local", name] = type(name, (Standin,), {})
    known |= {("torch", name): f"storage:{dtype}" for name, dtype in STORAGES.items()}
    known |= {("torch", dtype): dtype for dtype in DTYPES if dtype}
    return known


KNOWN = _names()


class Reader(pickle.Unpickler):
    """Only what is known."""

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, or an error."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which no checkpoint needs")
        return KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage: its type and its name in the file."""
        kind, storage, key, _, numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError("a persistent object that is no storage")
        return {"dtype": storage.removeprefix("storage:"), "key": str(key), "numel": int(numel)}


def metadata(found: Any) -> dict[str, Any]:
    """Tensors by name: type, shape, and where each chunk lies; names of everything that is no tensor."""
    places = {}
    for index, info in found["storage_data"].items():
        offset = None if index["offset"] is None else tuple(index["offset"])
        places[index["fqn"], offset] = info
    tensors, others = {}, []
    for name, entry in found["state_dict_metadata"].items():
        if type(entry).__name__ != "TensorStorageMetadata":
            others.append(name)
            continue
        chunks = []
        for chunk in entry["chunks"]:
            offset = tuple(chunk["offsets"])
            info = places[name, offset]
            if info.state.get("transform_descriptors"):
                raise ValueError(f"{name} is stored by way of transforms (compression), which are not known here")
            place = {"file": info["relative_path"], "start": info["offset"], "length": info["length"]}
            chunks.append({"offset": offset, "shape": tuple(chunk["sizes"]), **place})
        properties = entry["properties"].state
        dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
        tensors[name] = {"dtype": dtype, "shape": tuple(entry["size"]), "chunks": chunks}
    return {"tensors": tensors, "others": others}


def tensor(found: Any) -> dict[str, Any]:
    """Where in its file's storage a tensor's values lie."""
    storage, offset, size, stride = found.args[:4]
    dtype = storage["dtype"] or found.args[6]
    return {"dtype": dtype, "key": storage["key"], "offset": offset, "shape": tuple(size), "stride": tuple(stride)}


def answer(kind: bytes, data: bytes) -> dict[str, Any]:
    """What a pickle says, or what is wrong with it."""
    try:
        found = Reader(io.BytesIO(data)).load()
        return metadata(found) if kind == b"m" else tensor(found)
    except MemoryError:
        return {"error": "the pickle asks for more memory than any checkpoint needs"}
    except Exception as problem:  # whatever a hostile pickle makes go wrong, the answer is that it cannot be read
        return {"error": f"{type(problem).__name__}: {problem}"}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until stdin ends."""
    while head := requests.read(9):
        (length,) = struct.unpack("<Q", head[1:])
        raw = json.dumps(answer(head[:1], requests.read(length))).encode()
        answers.write(struct.pack("<Q", len(raw)) + raw)
        answers.flush()


if __name__ == "__main__":
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    serve(sys.stdin.buffer, sys.stdout.buffer)
