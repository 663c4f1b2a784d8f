"""Which rows of each parameter a place holds when `fully_shard` cuts them, as pure arithmetic: for checkpoints and tests.

ZeRO-1 cuts flat buffers (`ftrain.parallel.buckets`); FSDP2 cuts every parameter by itself, along dim 0, into as many runs of
rows as there are members: ceil(rows / members) rows each, the last ones fewer or none. What is cut is what tensor parallelism
left of it.

              weights and gradients      masters and moments
    fsdp      over all replicas          the same rows
    hsdp      over an inner group        the same rows, as often as there are such groups; the first one writes them
    hfsdp     over an inner group        each inner part again over the outer group: 1 / (inner x outer)

Replicas are the ranks of DP x CP. Inner groups are neighbours in that order, so that they may share a server; the members of an
outer group have the same place in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from ftrain.config import Parallel
from ftrain.parallel.layout import ParameterSpec, is_owner, local_box
from ftrain.parallel.shape import Coordinate, MeshShape
from storage.box import Box


@dataclass(frozen=True, slots=True)
class Shards:
    """How the replicas share parameters by rows."""

    mesh: MeshShape
    inner: int  # members of an inner group, over which weights and gradients are cut
    split: bool = False  # an inner part's masters and moments are cut once more, over the outer group

    @staticmethod
    def of(mesh: MeshShape, parallel: Parallel) -> Shards | None:
        """What a config asks for; None for ZeRO-1."""
        if parallel.sharding == "zero1":
            return None
        inner = mesh.shards if parallel.sharding == "fsdp" else parallel.fsdp_inner
        return Shards(mesh, inner, parallel.sharding == "hfsdp")

    @property
    def outer(self) -> int:
        """Inner groups."""
        return self.mesh.shards // self.inner

    def place(self, coordinate: Coordinate) -> tuple[int, int]:
        """(which inner group, which member of it)."""
        return divmod(self.mesh.shard(coordinate), self.inner)

    def held(self, spec: ParameterSpec, coordinate: Coordinate) -> Box | None:
        """The rows whose weights and gradients this place holds."""
        box = local_box(spec, self.mesh, coordinate)
        return None if box is None else _run(box, self.inner, self.place(coordinate)[1])

    def kept(self, spec: ParameterSpec, coordinate: Coordinate) -> Box | None:
        """The rows whose masters and moments this place keeps and updates."""
        whole, held = local_box(spec, self.mesh, coordinate), self.held(spec, coordinate)
        if not self.split or whole is None or held is None:
            return held
        rows = -(-whole.shape[0] // self.inner)
        return _run(held, self.outer, self.place(coordinate)[0], of=rows)

    def writes(self, spec: ParameterSpec, coordinate: Coordinate) -> bool:
        """Whether this place counts and stores what it keeps, of all that keep the same."""
        return is_owner(spec, coordinate) and (self.split or self.place(coordinate)[0] == 0)

    def state_boxes(self, specs: Sequence[ParameterSpec], coordinate: Coordinate) -> list[tuple[str, Box]]:
        """What one place writes to a checkpoint, in the order of the optimizer's pieces."""
        kept = ((spec, self.kept(spec, coordinate)) for spec in specs if coordinate.pp in spec.stages)
        return [(spec.name, box) for spec, box in kept if box is not None and self.writes(spec, coordinate)]

    def row_units(self, specs: Sequence[ParameterSpec]) -> dict[str, int]:
        """For every parameter: rows at whose multiples any place's run of them starts."""
        known: dict[tuple[object, ...], int] = {}
        for spec in specs:
            if (spec.shape, spec.tp) not in known:
                known[spec.shape, spec.tp] = self._row_unit(spec)
        return {spec.name: known[spec.shape, spec.tp] for spec in specs}

    def _row_unit(self, spec: ParameterSpec) -> int:
        starts = {
            box.offset[0]
            for tp, cp, dp in product(*map(range, (self.mesh.tp, self.mesh.cp, self.mesh.dp)))
            if (box := self.kept(spec, Coordinate(tp=tp, cp=cp, pp=spec.stages[0], dp=dp))) is not None
        }
        return gcd(*starts) or spec.shape[0]


def _run(box: Box, members: int, member: int, *, of: int = 0) -> Box | None:
    """A member's rows of a box; `of`: rows to be shared out, where the box has been cut short."""
    rows = -(-(of or box.shape[0]) // members)
    start, stop = (min(rows * number, box.shape[0]) for number in (member, member + 1))
    if start == stop:
        return None
    return Box((box.offset[0] + start, *box.offset[1:]), (stop - start, *box.shape[1:]))
