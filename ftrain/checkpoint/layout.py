"""What each rank writes to a checkpoint, computed without torch: the supervisor sizes the arenas before any worker lives.

The order of the boxes is the one in which the optimizer lists its live pieces; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ftrain.checkpoint.arena import slot_nbytes
from ftrain.config import Config
from ftrain.parallel.arrays import EXACT, SLOTS, WEIGHTS, StateTypes, array_specs
from ftrain.parallel.buckets import Bucket, bucket_key, plan_buckets, state_boxes
from ftrain.parallel.shape import Coordinate, MeshShape, mesh_shape
from ftrain.parallel.shards import Shards
from ftrain.parallel.stages import config_parameters
from storage.pack import PackLayout, plan_pack


def rank_layout(config: Config, coordinate: Coordinate) -> PackLayout:
    """The pack that one place of the mesh writes. It declares every array of the state, so that what nobody writes is found."""
    return _Planner(config).layout(coordinate)


def rank_layouts(config: Config) -> Iterator[PackLayout]:
    """Those of all places, in rank order."""
    planner = _Planner(config)
    return (planner.layout(coordinate) for coordinate in planner.mesh.coordinates())


def rank_slot_nbytes(config: Config) -> list[int]:
    """Bytes of one arena slot of each rank, in rank order."""
    return [slot_nbytes(layout) for layout in rank_layouts(config)]


def layout_text(config: Config) -> str:
    """The layout in words: what the ledger and the checkpoints say of who wrote them."""
    mesh, parallel = mesh_shape(config), config.parallel
    groups = f" in groups of {parallel.fsdp_inner}" if parallel.fsdp_inner > 1 else ""
    return str(mesh) if parallel.sharding == "zero1" else f"{mesh}, {parallel.sharding}{groups}"


class _Planner:
    """Everything that is the same for all places of a mesh."""

    def __init__(self, config: Config) -> None:
        types = EXACT if config.machine.compute_dtype == "float64" else StateTypes()
        self.mesh: MeshShape = mesh_shape(config)
        self._specs = config_parameters(config, self.mesh)
        self._bucket_bytes = config.parallel.bucket_mib * 2**20
        self._shards = Shards.of(self.mesh, config.parallel)
        arrays = array_specs(self._specs, self.mesh, bucket_bytes=self._bucket_bytes, types=types, shards=self._shards)
        self._buckets: dict[tuple[int, int, int], tuple[Bucket, ...]] = {}
        self._slots = [slot for slot in SLOTS if slot != WEIGHTS or config.checkpoint.weights]
        self._arrays = {spec.name: spec for spec in arrays if spec.name.partition("/")[0] in self._slots}

    def layout(self, coordinate: Coordinate) -> PackLayout:
        if self._shards is not None:
            owned = self._shards.state_boxes(self._specs, coordinate)
        else:
            owned = state_boxes(self._buckets_of(coordinate), self.mesh, coordinate)
        boxes = [(f"{slot}/{name}", box) for name, box in owned for slot in self._slots]
        return replace(plan_pack(self._arrays, boxes), specs=self._arrays)

    def _buckets_of(self, coordinate: Coordinate) -> tuple[Bucket, ...]:
        key = bucket_key(self.mesh, coordinate)
        if key not in self._buckets:
            self._buckets[key] = plan_buckets(self._specs, self.mesh, coordinate, bucket_bytes=self._bucket_bytes)
        return self._buckets[key]
