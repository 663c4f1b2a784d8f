"""PyTorch's own `dcp.save` and `dcp.load` on our storage: only the writer, or the reader, of an existing call changes.

    dcp.save(state_dict, storage_writer=ftrain.DcpWriter("runs/mine", step=100))
    dcp.load(state_dict, storage_reader=ftrain.DcpReader("runs/mine"))

What DCP's planner decides (who writes which chunk) stays its own; what is written are packs with a checksum for each chunk, a
manifest and a commit, so a flipped bit is an error at the load and half a checkpoint is none. DCP's metadata is rebuilt from
the manifest, as one chunk for each tensor: a load then reads what it needs and no more, however many ranks had written.

DCP hands over everything that is no tensor as a pickle. That is neither written nor read: the values themselves are looked up,
stored as data if they are numbers, text and the like, and refused by name if not.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ftrain.checkpoint.pieces import stored
from ftrain.checkpoint.record import Node, StateError, kind_of, of_mapping, of_sequence, plain, value_of
from ftrain.checkpoint.restore import bits_of
from ftrain.checkpoint.script_messages import RECORD, progress_of
from ftrain.checkpoint.shards import tile_of
from ftrain.checkpoint.state import dtype_name, stored_name
from storage.box import Box
from storage.catalog import CheckpointState
from storage.checkpoint import Checkpoint
from storage.exchange.write import Incoming, write_pack
from storage.grid import DTYPES
from storage.manifest import PackManifest
from storage.merge import merge
from storage.objects import open_store
from storage.pack import ArraySpec
from storage.reader import Want
from storage.run import RunStore

PATHS = "dcp_paths"


@dataclass(frozen=True)
class Assignment:
    """What the coordinator tells each rank: under which epoch and number it writes, and the grid of each tensor."""

    step: int
    epoch: int
    writer: int
    specs: dict[str, ArraySpec]


class DcpWriter(StorageWriter):
    """Writes one checkpoint, or one after the other, into the run at `url`."""

    def __init__(self, url: str | os.PathLike[str], *, step: int | None = None) -> None:
        """`step`: its number; without it, the one in the last part of the call's `checkpoint_id`, or else the next free one."""
        self._url, self._step, self._given = os.fspath(url), step, step
        self._world = 1
        self._epoch: tuple[int, int] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save."""
        self._step = step_of(checkpoint_id, self._given)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: take the right to commit, and give every tensor a grid that none of its chunks cuts through."""
        run = RunStore(open_store(self._url))
        known = [info.step for info in run.checkpoints() if info.state is CheckpointState.VALID]
        step = self._step if self._step is not None else max(known, default=0) + 1
        epoch = self._take_epoch(run, known, step)
        specs = _specs(plans)
        self._world = len(plans)
        return [replace(plan, storage_data=_assigned(plan, step, epoch, writer, specs)) for writer, plan in enumerate(plans)]

    def _take_epoch(self, run: RunStore, known: Sequence[int], step: int) -> int:
        """The epoch of this writer, as long as the steps grow; another one where a save goes back, or for a new writer."""
        if self._epoch is None or step <= self._epoch[1]:
            before = max((other for other in known if other < step), default=None)
            epoch = run.take_epoch(owner={"pid": os.getpid(), "host": os.uname().nodename}, starts_from=before)
        else:
            epoch = self._epoch[0]
        self._epoch = (epoch, step)
        return epoch

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's chunks into a pack."""
        assignment: Assignment = plan.storage_data
        results = [_plain_result(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO]
        results += [WriteResult(item.index, 0, None) for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        values = {(spec.name, box): item for item, spec, box in _boxes(plan, assignment)}

        def reader(name: str) -> Callable[[Box], np.ndarray[Any, Any]]:
            return lambda box: _values(planner.resolve_data(values[name, box]), name)

        if values:
            readers = {spec.name: Incoming(spec, reader(spec.name)) for spec in assignment.specs.values()}
            run = RunStore(open_store(self._url))
            pack = write_pack(
                run, readers, list(values), step=assignment.step, epoch=assignment.epoch, number=assignment.writer
            )
            results.append(WriteResult(MetadataIndex(""), pack.pack.nbytes, pack.encode()))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that the chunks make up the state, and commit."""
        assert self._epoch is not None
        epoch, step = self._epoch
        flat = [result for each in results for result in each]
        packs = [PackManifest.decode(result.storage_data) for result in flat if isinstance(result.storage_data, bytes)]
        nodes: dict[str, Node] = {r.index.fqn: r.storage_data["node"] for r in flat if isinstance(r.storage_data, dict)}
        for name, held in metadata.state_dict_metadata.items():
            if isinstance(held, TensorStorageMetadata):
                nodes[name] = _tensor_node(name, held)
        progress = progress_of(step, self._world, {"map": nodes})
        progress[PATHS] = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        run = RunStore(open_store(self._url))
        run.commit(merge(packs, step=step, epoch=epoch, attempt=0, progress=progress, created_s=time.time()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Anything names a step."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Where it is."""
        return StorageMeta(checkpoint_id=self._url)


class DcpReader(StorageReader):
    """Reads a checkpoint of the run at `url`: one of DcpWriter's, or a Checkpointer's (tensors under their dotted paths)."""

    def __init__(self, url: str | os.PathLike[str], *, step: int | None = None) -> None:
        """`step`: which one; without it, the newest that is whole."""
        self._url, self._step, self._given = os.fspath(url), step, step
        self._opened: Checkpoint | None = None
        self._nodes: dict[str, Node] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load."""
        self._step, self._opened = step_of(checkpoint_id, self._given), None

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            self._opened = RunStore(open_store(self._url)).open(self._step)
            record = self._opened.progress.get(RECORD)
            if record is None:
                raise StateError(
                    f"{self._url} holds checkpoints of `ftrain run`: `ftrain ckpt export` makes a DCP folder of one"
                )
            written_by_dcp = PATHS in self._opened.progress  # a leaf may be a dict there
            self._nodes = dict(record["map"] if written_by_dcp else _leaves(record, ""))
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's own description, made from the manifest."""
        checkpoint = self._checkpoint()
        described = {name: _described(node, checkpoint) for name, node in self._nodes.items()}
        paths = {name: tuple(path) for name, path in checkpoint.progress.get(PATHS, {}).items()}
        return Metadata(
            state_dict_metadata=described, planner_data=paths or {name: (name,) for name in described}, storage_data={}
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks read the step that it opened."""
        step = self._checkpoint().step
        return [replace(plan, storage_data=step) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that is wanted, every chunk once and checked."""
        if isinstance(plan.storage_data, int) and plan.storage_data != self._checkpoint().step:
            self._step, self._opened = plan.storage_data, None
        checkpoint = self._checkpoint()
        wants, targets = [], []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_dcp_wants_it(value_of(self._nodes[name], _no_array)))
            elif all(item.lengths):
                target = planner.resolve_tensor(item).detach()
                values, _ = stored(target, name)
                host = values if values.device.type == "cpu" else torch.empty(values.shape, dtype=values.dtype)
                wants.append(Want(self._nodes[name]["array"], _box_of(item, values), bits_of(host)))
                targets.append((item, target, values, host))
        checkpoint.load(wants)
        for item, target, values, host in targets:
            if host is not values:
                values.copy_(host)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Anything names a step."""
        return True


def step_of(checkpoint_id: str | os.PathLike[str] | None, given: int | None) -> int | None:
    """The last number in the last part of what a call names (in `runs/exp-7/latest` there is none), else the given step."""
    last = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2] if checkpoint_id is not None else ""
    found = re.search(r"(\d+)\D*$", last)
    return int(found[1]) if found else given


def _assigned(plan: SavePlan, step: int, epoch: int, writer: int, specs: Mapping[str, ArraySpec]) -> Assignment:
    return Assignment(step, epoch, writer, {item.index.fqn: specs[item.index.fqn] for item in _tensors(plan)})


def _tensors(plan: SavePlan) -> Iterator[WriteItem]:
    """Items with values: what has no element is said by the metadata alone."""
    for item in plan.items:
        if item.tensor_data is not None and all(item.tensor_data.chunk.sizes):
            yield item


def _specs(plans: Sequence[SavePlan]) -> dict[str, ArraySpec]:
    """Each tensor's array, on a grid that fits the chunks of all ranks. Raises StateError for types the format lacks."""
    cuts: dict[str, list[set[int]]] = {}
    whole: dict[str, WriteItem] = {}
    for plan in plans:
        for item in _tensors(plan):
            assert item.tensor_data is not None
            shape, chunk = item.tensor_data.size, item.tensor_data.chunk
            edges = cuts.setdefault(item.index.fqn, [{0, extent} for extent in shape])
            whole[item.index.fqn] = item
            for each, offset, size in zip(edges, chunk.offsets, chunk.sizes, strict=True):
                each |= {offset, offset + size}
    taken: dict[str, str] = {}
    return {name: _spec(name, item, cuts[name], taken) for name, item in whole.items()}


def _spec(name: str, item: WriteItem, cuts: list[set[int]], taken: dict[str, str]) -> ArraySpec:
    assert item.tensor_data is not None
    array = stored_name(name)
    if taken.setdefault(array, name) != name:
        raise StateError(f"{name} and {taken[array]} would have one name in storage ({array}): rename one of them")
    kind = item.tensor_data.properties.dtype
    like, dtype = stored(torch.empty((1,), dtype=kind), name)
    extra = tuple(like.shape[1:])
    shape = (*item.tensor_data.size, *extra)
    tile = tile_of(shape, DTYPES[dtype], [*cuts, *({0, extent} for extent in extra)])
    attributes: dict[str, Any] = {"torch_dtype": dtype_name(kind)} if dtype != dtype_name(kind) else {}
    return ArraySpec(name=array, shape=shape, dtype=dtype, tile=tile, attributes=attributes)


def _boxes(plan: SavePlan, assignment: Assignment) -> Iterator[tuple[WriteItem, ArraySpec, Box]]:
    for item in _tensors(plan):
        assert item.tensor_data is not None
        spec, chunk = assignment.specs[item.index.fqn], item.tensor_data.chunk
        extra = spec.shape[len(chunk.sizes) :]
        yield item, spec, Box((*chunk.offsets, *(0 for _ in extra)), (*chunk.sizes, *extra))


def _values(resolved: object, name: str) -> np.ndarray[Any, Any]:
    """A chunk's values, as the format has them."""
    assert isinstance(resolved, torch.Tensor)
    tensor, _ = stored(resolved.detach().cpu(), name)
    return np.ascontiguousarray(bits_of(tensor))


def _plain_result(item: WriteItem, planner: SavePlanner) -> WriteResult:
    """A value that is no tensor, as data. Raises StateError naming it if it is not of an allowed type."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise StateError(
            f"{item.index.fqn} is no tensor, and {type(planner).__name__} only gives it as a pickle: use a planner that has "
            "lookup_object, as DCP's own"
        )
    return WriteResult(item.index, 0, {"node": _encoded(look_up(item.index), item.index.fqn)})


def _encoded(value: Any, path: str) -> Node:
    if isinstance(value, Mapping):
        return of_mapping(value, path, _encoded)
    if isinstance(value, list | tuple):
        return of_sequence(value, path, _encoded)
    return plain(value, path)


def _tensor_node(name: str, held: TensorStorageMetadata) -> Node:
    kind = ["tensor", dtype_name(held.properties.dtype)]
    if not all(held.size):
        return {"empty": list(held.size), "type": kind}
    return {"array": stored_name(name), "type": kind}


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """All values of a record under dotted paths, as DCP names them; what is each rank's own is not among them."""
    kind = kind_of(node)
    if kind == "map":
        for key, each in node["map"].items():
            yield from _leaves(each, f"{path}.{key}" if path else key)
    elif kind != "rank":
        yield path, node


def _described(node: Node, checkpoint: Checkpoint) -> TensorStorageMetadata | BytesStorageMetadata:
    if kind_of(node) not in ("array", "empty"):
        return BytesStorageMetadata()
    dtype = getattr(torch, node["type"][1])
    shape = node["empty"] if kind_of(node) == "empty" else checkpoint.array(node["array"]).shape
    size = torch.Size(shape[:-1] if dtype.is_complex and kind_of(node) == "array" else shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=[chunk])


def _box_of(item: ReadItem, values: torch.Tensor) -> Box:
    extra = tuple(values.shape[len(item.lengths) :])
    return Box((*item.storage_offsets, *(0 for _ in extra)), (*item.lengths, *extra))


def _no_array(node: Node) -> Any:
    raise StateError("an array stands where a plain value was expected")


def _as_dcp_wants_it(value: Any) -> io.BytesIO:
    """DCP's planner unpickles what a reader hands it. These bytes are made here, of a value that was read as data."""
    held = io.BytesIO()
    torch.save(value, held)
    held.seek(0)
    return held
