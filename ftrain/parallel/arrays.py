"""The logical arrays of a run's state, as storage sees them: names, full shapes, dtypes and the grid they are stored on.

Every rank declares *all* arrays of the model, not only those it holds: what nobody writes is then a gap that stops the
commit, not an array that is quietly missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import TYPE_CHECKING

from ftrain.parallel.buckets import row_units
from ftrain.parallel.layout import Kind, ParameterSpec, Placement, row_dim
from ftrain.parallel.shape import MeshShape
from ftrain.parallel.shards import Shards
from storage.box import Box
from storage.grid import DTYPES, tile_shape
from storage.pack import ArraySpec

if TYPE_CHECKING:
    import torch

WEIGHTS, MASTER, EXP_AVG, EXP_AVG_SQ = "weights", "master", "exp_avg", "exp_avg_sq"
SLOTS = (WEIGHTS, MASTER, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class StateTypes:
    """Element types of the state. Gradients are summed in `state`, whatever the weights are.

    Kept by name, because the supervisor sizes arenas with this table and never imports torch.
    """

    weights_name: str = "bfloat16"
    state_name: str = "float32"

    def name_of(self, slot: str) -> str:
        """The name of the dtype of an array named `slot/...`."""
        return self.weights_name if slot == WEIGHTS else self.state_name

    def of(self, slot: str) -> torch.dtype:
        """The dtype of an array named `slot/...`."""
        return torch_dtype(self.name_of(slot))

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch_dtype(self.weights_name)

    @property
    def state(self) -> torch.dtype:
        """The dtype of masters, moments and summed gradients."""
        return torch_dtype(self.state_name)


EXACT = StateTypes("float64", "float64")  # what `certify` compares with


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A box of one array, live. Writers cast `tensor` to `dtype` (for weights: master rounded to nearest even)."""

    array: str  # such as "exp_avg/layers.7.attention.wq"
    box: Box  # of the logical array
    tensor: torch.Tensor  # contiguous, of the box's shape; a view of the live state
    dtype: str
    owner: bool = True  # False: another rank holds the same box and writes it


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def array_specs(
    specs: Sequence[ParameterSpec],
    mesh: MeshShape,
    *,
    bucket_bytes: float,
    types: StateTypes,
    shards: Shards | None = None,
) -> list[ArraySpec]:
    """All arrays of the state, the same list on every rank. `shards`: where FSDP cuts them instead of ZeRO-1."""
    units = row_units(specs, mesh, bucket_bytes=bucket_bytes) if shards is None else shards.row_units(specs)
    return [_array_spec(spec, slot, mesh, units.get(spec.name), types) for slot in SLOTS for spec in specs]


def _array_spec(spec: ParameterSpec, slot: str, mesh: MeshShape, row_tile: int | None, types: StateTypes) -> ArraySpec:
    dtype = types.name_of(slot)
    attributes: dict[str, str | int | float | bool | list[str]] = {"tied": list(spec.tied)} if spec.tied else {}
    return ArraySpec(
        name=f"{slot}/{spec.name}",
        shape=spec.shape,
        dtype=dtype,
        tile=_tile(spec.shape, spec.tp, mesh.tp, row_tile, DTYPES[dtype]),
        attributes=attributes,
    )


@cache
def _tile(shape: tuple[int, ...], tp: Placement, num_cuts: int, row_tile: int | None, itemsize: int) -> tuple[int, ...]:
    """The grid of storage, made finer where this layout cuts it (which only TP sizes that it does not foresee do).

    Stacked matrices have the grid of one, and none shares a tile with the next: expert parallelism may cut between any two.
    Kept, because the layers of a model are alike.
    """
    stacked = row_dim(shape)
    shape = shape[stacked:]
    if tp.kind is not Kind.CUT:
        return (1,) * stacked + tile_shape(shape, itemsize, tp_dim=None, row_tile=row_tile)
    dim = tp.dim - stacked
    if tp.is_tile:
        row_tile = gcd(tp.unit, row_tile or 0)
    tile = list(tile_shape(shape, itemsize, tp_dim=None if tp.is_tile else dim, row_tile=row_tile))
    starts = (tp.interval(shape[dim], num_cuts, index)[0] for index in range(num_cuts))
    tile[dim] = gcd(tile[dim], *(start for start in starts if start < shape[dim]))
    return (1,) * stacked + tuple(tile)
