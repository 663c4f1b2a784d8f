"""The placement table: for every parameter and mesh axis, what a rank holds of it and what its gradient is.

Everything that depends on the parallel layout is derived from this one table: which box of the logical array a rank holds,
over which axes its gradient is summed, how often it counts in the global norm, who writes it to a checkpoint, and in
which bucket it travels. A rule that is written down once cannot disagree with itself.

    CUT(dim)     the axis cuts this dim; each rank's gradient is complete for its part
    REPLICATED   every rank of the axis holds the same values and computes the same gradient
    PARTIAL      every rank of the axis holds the same values; their gradients are summands of the true one
    ABSENT       one index of the axis (a pipeline stage) holds it, the others do not

                            tp                  cp        pp        dp        ep
    embedding, head         CUT(0)              PARTIAL   ABSENT    PARTIAL   PARTIAL
    wq; wk, wv              CUT(0)              PARTIAL   ABSENT    PARTIAL   PARTIAL
    wo, w2                  CUT(1)              PARTIAL   ABSENT    PARTIAL   PARTIAL
    w1, w3                  CUT(0)              PARTIAL   ABSENT    PARTIAL   PARTIAL
    norms                   PARTIAL (sequence)  PARTIAL   ABSENT    PARTIAL   PARTIAL
    q_norm, k_norm          PARTIAL (heads)     PARTIAL   ABSENT    PARTIAL   PARTIAL
    router                  PARTIAL (sequence)  PARTIAL   ABSENT    PARTIAL   PARTIAL
    w1, w3 of experts       CUT(1)              PARTIAL   ABSENT    PARTIAL   CUT(0)
    w2 of experts           CUT(2)              PARTIAL   ABSENT    PARTIAL   CUT(0)

`ep` is a view on cp x dp: runs of ep neighbours among them. What it cuts is partial only over the ranks that have the same
part, cp x dp / ep of them. The experts' matrices of a layer are one array, [experts, rows, columns].

Without sequence parallelism every tp rank normalises (and routes) all positions: the norms of the residual stream and the
router are then REPLICATED over tp, while the norms of queries and keys still see only the rank's heads.

If tp > kv_heads, each kv head is held by tp / kv_heads neighbouring ranks (`copies`), whose gradients are partial among
them. The vocabulary is cut in whole units of rows and may leave the last ranks a short part or none: padding is never an
element of any array. A tied embedding is one parameter, held by the first and the last stage, owned by the first.

Shapes are of the logical array, never of a part. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from math import gcd, prod

from ftrain.config import Axis, Model
from ftrain.parallel.partition import partition_layers
from ftrain.parallel.schedule import Placement as StagePlacement
from ftrain.parallel.schedule import rank_of
from ftrain.parallel.shape import AXES, Coordinate, MeshShape
from storage.box import Box


class Kind(Enum):
    """What one mesh axis does to one parameter; the module docstring says what each means."""

    CUT = "cut"
    REPLICATED = "replicated"
    PARTIAL = "partial"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Placement:
    """One cell of the table."""

    kind: Kind
    dim: int = 0  # CUT: the dim that is cut
    unit: int = 1  # CUT: cuts lie at multiples of this many elements (of the dim)
    is_tile: bool = False  # CUT: the unit is also the tile, because other cuts than even ones occur
    copies: int = 1  # CUT: so many neighbouring ranks hold the same part, with partial gradients

    def interval(self, extent: int, size: int, index: int) -> tuple[int, int]:
        """Start (inclusive) and stop (exclusive) of the part at `index` of `size` along the cut dim; may be empty."""
        parts = size // self.copies
        units = -(-extent // self.unit)
        width = -(-units // parts) * self.unit
        start = min(index // self.copies * width, extent)
        return start, min(start + width, extent)


REPLICATED = Placement(Kind.REPLICATED)
PARTIAL = Placement(Kind.PARTIAL)
ABSENT = Placement(Kind.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of the model: what it is, and its row of the placement table."""

    name: str
    shape: tuple[int, ...]
    tp: Placement
    block: str  # "embedding", "layers.7", "head": buckets hold whole blocks
    stages: tuple[int, ...]  # pipeline stages that hold it; the first owns it
    decay: bool  # weight decay applies
    cp: Placement = PARTIAL
    pp: Placement = ABSENT
    dp: Placement = PARTIAL
    ep: Placement = PARTIAL
    tied: tuple[str, ...] = field(default=())  # other names under which the model uses the same values
    chunk: int = 0  # which of its rank's virtual stages it belongs to; buckets never span two of them

    @property
    def size(self) -> int:
        """Number of elements of the logical array."""
        return prod(self.shape)

    def on(self, axis: Axis) -> Placement:
        """The cell for one axis."""
        placement = getattr(self, axis)
        assert isinstance(placement, Placement)
        return placement

    def reduce_axes(self) -> tuple[Axis, ...]:
        """Axes over which this parameter's gradient is a sum of partial ones; copies of a cut not counted, and of what ep cuts
        only the ranks with the same part."""
        return tuple(axis for axis in AXES if self.on(axis).kind is Kind.PARTIAL)

    def sharers(self, ep: int) -> int:
        """Over how many neighbours of cp x dp it is cut; the others, cp x dp / that many, hold the same part."""
        return ep if self.ep.kind is Kind.CUT else 1

    def summands(self, tp: int) -> int:
        """How many neighbours along tp (of size `tp`) hold summands of this parameter's gradient; 1: mine is complete."""
        return tp if self.tp.kind is Kind.PARTIAL else self.tp.copies


def parameters(
    model: Model,
    mesh: MeshShape,
    *,
    layer_counts: tuple[int, ...] = (),
    placement: StagePlacement = "loop",
    sequence_parallel: bool = True,
) -> tuple[ParameterSpec, ...]:
    """All parameters of the model, in canonical order: embedding, layers, final norm, head.

    `layer_counts` are of virtual stages, which `placement` deals to the pipeline ranks; by default one even stage a rank.
    `sequence_parallel` only matters for gradients of norms: no box depends on it.
    """
    stages = partition_layers(model.layers, len(layer_counts) or mesh.pp, layer_counts)
    ranks = [rank_of(stage, num_ranks=mesh.pp, placement=placement) for stage in range(len(stages))]
    first, last = ranks[0], ranks[-1]
    vocabulary = Placement(Kind.CUT, dim=0, unit=vocabulary_unit(model.vocab), is_tile=True)
    ends = (first,) if not model.tied or first == last else (first, last)
    matrix = (model.vocab, model.hidden)
    specs = [
        ParameterSpec(
            name="embedding",
            shape=matrix,
            tp=vocabulary,
            block="embedding",
            stages=ends,
            decay=True,
            tied=("head",) if model.tied else (),
        )
    ]
    stream = PARTIAL if sequence_parallel else REPLICATED
    for stage, (rank, layers) in enumerate(zip(ranks, stages, strict=True)):
        for layer in layers:
            specs += (replace(spec, chunk=stage // mesh.pp) for spec in _layer(model, mesh, stream, layer, rank))
    head = [_norm("norm", model.hidden, stream, "head", last)]
    if not model.tied:
        head.append(ParameterSpec(name="head", shape=matrix, tp=vocabulary, block="head", stages=(last,), decay=True))
    return (*specs, *(replace(spec, chunk=(len(stages) - 1) // mesh.pp) for spec in head))


def vocabulary_unit(vocab: int) -> int:
    """Rows at whose multiples the vocabulary may be cut: a power of two up to 64, so that it is also a good tile.

    Even cuts over 2, 4, 8 and 16 ranks where the vocabulary has them; otherwise as large as pads it by less than 1/128.
    """
    if vocab % 16 == 0:
        return gcd(vocab // 16, 64)
    units = (64, 32, 16, 8, 4, 2)
    return next((unit for unit in units if 16 * unit <= vocab and 128 * (-vocab % unit) <= vocab), 1)


def head_dim(model: Model) -> int:
    """Size of an attention head."""
    return model.head_dim or model.hidden // model.heads


def num_kv_heads(model: Model) -> int:
    """Number of key/value heads."""
    return model.kv_heads or model.heads


def _norm(name: str, size: int, tp: Placement, block: str, stage: int) -> ParameterSpec:
    return ParameterSpec(name=name, shape=(size,), tp=tp, block=block, stages=(stage,), decay=False)


def _layer(model: Model, mesh: MeshShape, stream: Placement, layer: int, stage: int) -> Iterator[ParameterSpec]:
    block, dim, kv = f"layers.{layer}", head_dim(model), num_kv_heads(model)
    queries = Placement(Kind.CUT, dim=0, unit=dim)
    keys = Placement(Kind.CUT, dim=0, unit=dim, copies=max(1, mesh.tp // kv))

    def matrix(name: str, rows: int, columns: int, tp: Placement) -> ParameterSpec:
        return ParameterSpec(name=f"{block}.{name}", shape=(rows, columns), tp=tp, block=block, stages=(stage,), decay=True)

    yield _norm(f"{block}.attention_norm", model.hidden, stream, block, stage)
    yield matrix("attention.wq", model.heads * dim, model.hidden, queries)
    yield matrix("attention.wk", kv * dim, model.hidden, keys)
    yield matrix("attention.wv", kv * dim, model.hidden, keys)
    yield matrix("attention.wo", model.hidden, model.heads * dim, Placement(Kind.CUT, dim=1, unit=dim))
    if model.qk_norm:
        yield _norm(f"{block}.attention.q_norm", dim, PARTIAL, block, stage)
        yield _norm(f"{block}.attention.k_norm", dim, PARTIAL, block, stage)
    yield _norm(f"{block}.mlp_norm", model.hidden, stream, block, stage)
    if model.experts:
        yield from _experts(model, stream, block, stage)
        return
    yield matrix("mlp.w1", model.ffn, model.hidden, Placement(Kind.CUT, dim=0))
    yield matrix("mlp.w2", model.hidden, model.ffn, Placement(Kind.CUT, dim=1))
    yield matrix("mlp.w3", model.ffn, model.hidden, Placement(Kind.CUT, dim=0))


def _experts(model: Model, stream: Placement, block: str, stage: int) -> Iterator[ParameterSpec]:
    def spec(name: str, shape: tuple[int, ...], tp: Placement, ep: Placement) -> ParameterSpec:
        return ParameterSpec(name=f"{block}.moe.{name}", shape=shape, tp=tp, ep=ep, block=block, stages=(stage,), decay=True)

    experts = Placement(Kind.CUT, dim=0)
    up, down = (model.experts, model.ffn, model.hidden), (model.experts, model.hidden, model.ffn)
    yield spec("router", (model.experts, model.hidden), stream, PARTIAL)
    yield spec("w1", up, Placement(Kind.CUT, dim=1), experts)
    yield spec("w2", down, Placement(Kind.CUT, dim=2), experts)
    yield spec("w3", up, Placement(Kind.CUT, dim=1), experts)


def local_box(spec: ParameterSpec, mesh: MeshShape, coordinate: Coordinate) -> Box | None:
    """The box of the logical array that this place computes with, or None if it holds nothing of it."""
    if coordinate.pp not in spec.stages:
        return None
    if spec.sharers(mesh.ep) > 1:
        cuts = ((spec.tp, mesh.tp, coordinate.tp), (spec.ep, mesh.ep, mesh.shard(coordinate) % mesh.ep))
        return _cut_box(spec.shape, cuts)
    return _cut_box(spec.shape, ((spec.tp, mesh.tp, coordinate.tp),))


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _cut_box(whole: tuple[int, ...], cuts: tuple[tuple[Placement, int, int], ...]) -> Box | None:
    """What remains of an array behind its cuts: (placement, size of the axis, index along it) each."""
    offset, shape = [0] * len(whole), list(whole)
    for placement, size, index in cuts:
        if placement.kind is Kind.CUT:
            start, stop = placement.interval(whole[placement.dim], size, index)
            if start == stop:
                return None
            offset[placement.dim], shape[placement.dim] = start, stop - start
    return Box(tuple(offset), tuple(shape))


def row_dim(shape: tuple[int, ...]) -> int:
    """Along which dim an array is a list of rows: the first, or that of each matrix of a stack."""
    return max(0, len(shape) - 2)


def is_owner(spec: ParameterSpec, coordinate: Coordinate) -> bool:
    """Whether, of all places that hold the same values up to ZeRO-1, this one counts them in the norm and writes them."""
    if coordinate.pp != spec.stages[0]:
        return False
    if spec.tp.kind is Kind.CUT:
        return coordinate.tp % spec.tp.copies == 0
    return coordinate.tp == 0
