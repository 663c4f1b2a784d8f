"""What each rank writes: boxes on one grid, every element by exactly one rank, the work shared out.

What several ranks hold is shared: large arrays are cut into runs of rows, one for each of them, small ones go to one rank.
What may differ between the ranks although it should not (buffers that each replica updates for itself) is the first holder's,
which is the one that DistributedDataParallel broadcasts from as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from zlib import crc32

import msgspec
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ftrain.checkpoint.known import identical
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.shards import Cut, Region, edges, regions, tile_of
from ftrain.checkpoint.state import Flat, Leaf, dtype_name, local_of
from ftrain.parallel.arrays import StatePiece
from storage.box import Box
from storage.grid import DTYPES, SMALL_BYTES
from storage.pack import ArraySpec, PackLayout, plan_pack

STORED_AS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Two reals for each element, in a dimension more."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A leaf as this rank holds it: its spec, the live values, and the boxes of it that are here."""

    leaf: Leaf
    spec: ArraySpec
    local: torch.Tensor
    regions: tuple[Region, ...]

    def part(self, region: Region) -> torch.Tensor:
        """The live values of a region, a view."""
        values = self.local
        for dim, (start, size) in enumerate(zip(region.local.offset, region.local.shape, strict=True)):
            values = values.narrow(dim, start, size)
        return values


def stored(values: torch.Tensor, path: str) -> tuple[torch.Tensor, str]:
    """The same memory in a type that the format has, and the type's name. Raises StateError if there is none.

    What is conjugated or negated by a mark only is done so, in other memory.
    """
    values, name = values.resolve_conj().resolve_neg(), dtype_name(values.dtype)
    if name in DTYPES:
        return values, name
    if values.dtype in STORED_AS:
        return torch.view_as_real(values), dtype_name(STORED_AS[values.dtype])
    if values.dtype.itemsize == 1:  # the types of 8 bits that NumPy and Zarr lack
        return values.view(torch.uint8), "uint8"
    raise StateError(f"{path} has the type {values.dtype}, which the format does not have; it has {', '.join(DTYPES)}")


def holding(leaf: Leaf, tied: Sequence[str] = ()) -> Holding:
    """What this rank holds of a leaf. Raises StateError if it is no shard and no replica (a partial sum)."""
    tensor = leaf.tensor
    local, dtype = stored(local_of(tensor), leaf.path)
    extra = local.shape[tensor.ndim :]
    cuts, place = _placement(tensor, leaf.path)
    shape = (*tensor.shape, *extra)
    if place is None:
        held, literally = list[Region](), False
    else:
        try:
            held, literally = regions(shape, cuts, place, tuple(local.shape))
        except ValueError as error:
            raise StateError(f"{leaf.path}: {error}") from error
    found = [edges(extent, [c for c in cuts if c.dim == dim], literally=literally) for dim, extent in enumerate(shape)]
    attributes: dict[str, Any] = {"tied": list(tied)} if tied else {}
    if dtype != dtype_name(tensor.dtype):
        attributes["torch_dtype"] = dtype_name(tensor.dtype)
    spec = ArraySpec(
        name=leaf.array, shape=shape, dtype=dtype, tile=tile_of(shape, DTYPES[dtype], found), attributes=attributes
    )
    return Holding(leaf, spec, local, tuple(held))


def _placement(tensor: torch.Tensor, path: str) -> tuple[list[Cut], Sequence[int] | None]:
    """Cuts, and this rank's place (None: it holds nothing)."""
    if not isinstance(tensor, DTensor):
        return [], ()
    mesh, cuts = tensor.device_mesh, []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            cuts.append(Cut(axis, mesh.size(axis), placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append(Cut(axis, mesh.size(axis), placement.dim))
        elif not isinstance(placement, Replicate):
            kind = "a partial sum" if isinstance(placement, Partial) else f"placed as {placement}"
            raise StateError(f"{path} is {kind} over a mesh axis: reduce it before it is saved")
    return cuts, mesh.get_coordinate()


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank writes, in order: the layout of its pack, and for each part the leaf and where it lies there."""

    layout: PackLayout
    parts: tuple[tuple[int, Region], ...]
    """(index of the leaf, region)."""
    signatures: tuple[tuple[Any, ...], ...]
    """Of each leaf, what the plan depends on."""
    held: tuple[tuple[ArraySpec, tuple[Region, ...]], ...]
    """Of each leaf, what does not change while its signature does not."""
    tied: dict[str, list[str]]


class PutOff(NamedTuple):
    """What may be copied later: of each part whether it may, and the tensors that then must not change, with their names."""

    parts: list[bool]
    watched: list[tuple[str, torch.Tensor]]


class Pieces:
    """The live state of each part of a plan. What has not moved since the last time is not looked for again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._later: Callable[[torch.Tensor], bool] | None = None
        self._flags: list[bool] = [False] * len(plan.held)
        self._flagged: list[Leaf | None] = [None] * len(plan.held)
        self._sources: list[torch.Tensor] = []
        self._put_off = PutOff([False] * len(plan.parts), [])
        self._leaves: list[Leaf | None] = [None] * len(plan.held)
        self._parts_of: list[list[int]] = [[] for _ in plan.held]
        for part, (index, _) in enumerate(plan.parts):
            self._parts_of[index].append(part)
        self._copied: set[int] = set()  # leaves that are copied to be written: their values are those of one moment
        self._pieces: list[StatePiece | None] = [None] * len(plan.parts)

    def fits(self, flat: Flat) -> bool:
        """Whether the plan is right for a state, too."""
        return (
            len(flat.leaves) == len(self._leaves)
            and flat.tied == self._plan.tied
            and all(
                leaf is known or signature(leaf) == of
                for leaf, known, of in zip(flat.leaves, self._leaves, self._plan.signatures, strict=True)
            )
        )

    def of(self, flat: Flat) -> list[StatePiece]:
        """Of a state that the plan fits. A piece is the same object, and the list is, as long as nothing of it has moved."""
        if not self._copied and identical(flat.leaves, self._leaves):
            return cast("list[StatePiece]", self._pieces)
        pieces = list(self._pieces)
        for index, leaf in enumerate(flat.leaves):
            if leaf is not self._leaves[index] or index in self._copied:
                self._find(index, leaf, pieces)
        self._leaves, self._pieces = list(flat.leaves), pieces
        return cast("list[StatePiece]", pieces)

    def put_off(self, flat: Flat, later: Callable[[torch.Tensor], bool] | None) -> PutOff:
        """What of such a state may be copied later, by the rule of `later`; None: nothing."""
        if later is self._later and identical(flat.leaves, self._flagged) and identical(flat.sources, self._sources):
            return self._put_off
        if later is not self._later:
            self._later, self._flagged = later, [None] * len(flat.leaves)
        if later is not None:
            each = zip(flat.leaves, self._flagged, self._flags, strict=True)
            self._flags = [flag if leaf is known else later(leaf.tensor) for leaf, known, flag in each]
        else:
            self._flags = [False] * len(flat.leaves)
        self._flagged, self._sources = list(flat.leaves), list(flat.sources)
        written = {index for index, _ in self._plan.parts}
        named = zip(flat.leaves, flat.sources, self._flags, strict=True)
        watched = [(leaf.array, tensor) for index, (leaf, tensor, off) in enumerate(named) if off and index in written]
        self._put_off = PutOff([self._flags[index] for index, _ in self._plan.parts], watched)
        return self._put_off

    def _find(self, index: int, leaf: Leaf, pieces: list[StatePiece | None]) -> None:
        spec, regions = self._plan.held[index]
        held = Holding(leaf, spec, stored(local_of(leaf.tensor), leaf.path)[0], regions)
        live = local_of(leaf.tensor).untyped_storage().data_ptr()
        self._copied.discard(index)
        for part in self._parts_of[index]:
            piece = pieces[part] = _piece(held, self._plan.parts[part][1])
            if piece.tensor.untyped_storage().data_ptr() != live:
                self._copied.add(index)


def _piece(held: Holding, region: Region) -> StatePiece:
    values = held.part(region)
    if held.spec.itemsize == 8 and values.ndim and values.stride(-1) != 1:  # elements of 8 bytes are moved in halves
        one = values.shape[-1] == 1  # then the stride means nothing
        values = values.as_strided(values.shape, (*values.stride()[:-1], 1)) if one else values.contiguous()
    return StatePiece(held.spec.name, region.box, values, held.spec.dtype)


def signature(leaf: Leaf) -> tuple[Any, ...]:
    """What a plan depends on."""
    tensor = leaf.tensor
    layout = (tensor.placements, id(mesh := tensor.device_mesh), mesh) if isinstance(tensor, DTensor) else ()
    return leaf.path, leaf.array, tuple(tensor.shape), tensor.dtype, leaf.alike, leaf.own, layout


def holdings_of(flat: Flat) -> list[Holding]:
    """What this rank holds of every leaf."""
    return [holding(leaf, flat.tied.get(leaf.array, ())) for leaf in flat.leaves]


Holders = dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]
"""(array, offset, shape) of a box -> the ranks that hold it."""


def holders_of(holdings: Sequence[Holding], ranks: Ranks) -> Holders:
    """Who holds what. A collective: two ranks may hold one box without knowing it, on two meshes that share no axis."""
    mine = [(each.spec.name, region.box.offset, region.box.shape) for each in holdings for region in each.regions]
    found: Holders = {}
    for rank, told in enumerate(ranks.gather(msgspec.msgpack.encode(mine))):
        for name, offset, shape in msgspec.msgpack.decode(told, type=list[tuple[str, tuple[int, ...], tuple[int, ...]]]):
            found.setdefault((name, offset, shape), []).append(rank)
    return found


def plan(flat: Flat, holdings: Sequence[Holding], ranks: Ranks) -> Plan:
    """Share the state out. A collective."""
    holders = holders_of(holdings, ranks)
    parts = [(index, region) for index, each in enumerate(holdings) for region in owned(each, holders, ranks.rank)]
    specs = {each.spec.name: each.spec for each in holdings}
    boxes = [(holdings[index].spec.name, region.box) for index, region in parts]
    layout = plan_pack(specs, boxes)
    described = specs if ranks.rank == 0 else layout.specs
    held = tuple((each.spec, each.regions) for each in holdings)
    packed = PackLayout(dict(described), layout.parts, layout.nbytes)
    tied = {array: list(others) for array, others in flat.tied.items()}
    return Plan(packed, tuple(parts), tuple(map(signature, flat.leaves)), held, tied)


def owned(held: Holding, holders: Holders, rank: int) -> Iterator[Region]:
    """The regions of a holding that this rank writes."""
    shared = held.leaf.alike or isinstance(held.leaf.tensor, DTensor)
    for region in held.regions:
        ranks = holders[held.spec.name, region.box.offset, region.box.shape]
        turn, count = ranks.index(rank), len(ranks) if shared else 1
        if count == 1 or region.box.size * held.spec.itemsize < SMALL_BYTES:
            if turn == crc32(held.spec.name.encode()) % count:
                yield region
        else:
            yield from _rows(region, held.spec, turn, count)


def _rows(region: Region, spec: ArraySpec, turn: int, count: int) -> Iterator[Region]:
    """The `turn`-th of `count` runs of rows, cut between tiles."""
    rows, height = region.box.shape[0], spec.tile[0]
    tiles = -(-rows // height)
    size = -(-tiles // count) * height
    start, stop = min(turn * size, rows), min((turn + 1) * size, rows)
    if start < stop:
        yield Region(_cut(region.box, start, stop), _cut(region.local, start, stop))


def _cut(box: Box, start: int, stop: int) -> Box:
    return Box((box.offset[0] + start, *box.offset[1:]), (stop - start, *box.shape[1:]))
