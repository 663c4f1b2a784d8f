"""Where the activations of one rank are whole, where they are cut or partial, and the two collectives that lead over.

Inside a block every tensor-parallel rank sees all positions and computes with its own heads or columns. Between the blocks
there are two ways to live (`parallel.sp`):

                      between the blocks                 widen: into a block   narrow: out of it
    sp                positions cut over tp              all-gather            reduce-scatter
    without sp        all positions, the same on all     nothing               all-reduce

The two are each other's transposes, so backward widens where forward narrowed and narrows where it widened: per layer two and
two of each (attention, MLP), in forward and in backward. A cut activation is 1/tp of the memory and of the work of the norms.

The cut is of the micro-batch's positions in a row, [B x T] flattened, in tp equal runs: for one sequence its first, second,
... part; for several, whole sequences where that divides. Nothing between the blocks looks across positions, so it does not
matter which are where, and neither collective needs a copy to bring rows into order. Shapes say [B, T / tp, D].

Sums of half-width activations are made in fp32 on CPU, whose backend would round after each summand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftrain.config import Axis, Parallel
from ftrain.parallel.layout import Placement
from ftrain.parallel.mesh import Mesh, Pending
from ftrain.parallel.weight import precise

TP: tuple[Axis, ...] = ("tp",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """One rank's part in its tensor-parallel group."""

    mesh: Mesh
    vocabulary: range  # the rows of embedding and head that this rank holds; may be none
    sequence: bool = True  # between the blocks, positions are cut
    regather: bool = True  # backward widens the input of a block again instead of keeping it
    overlap: bool = False  # collectives run beside matmuls that do not need them

    @staticmethod
    def of(mesh: Mesh, parallel: Parallel, vocabulary: Placement, vocab: int) -> TensorGroup | None:
        """The group a config asks for; None if tensor parallelism is off."""
        if mesh.shape.tp == 1:
            return None
        return TensorGroup(
            mesh=mesh,
            vocabulary=range(*vocabulary.interval(vocab, mesh.shape.tp, mesh.coordinate.tp)),
            sequence=parallel.sp,
            regather=parallel.sp_regather,
            overlap=parallel.tp_overlap,
        )

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.mesh.shape.tp

    def widen(self, x: torch.Tensor) -> Pending:
        """From between the blocks into one: [B, T / tp, D] -> [B, T, D]; without sp nothing happens."""
        if not self.sequence:
            return Pending(x)
        out = x.new_empty(*x.shape[:-2], x.shape[-2] * self.size, x.shape[-1])
        return self._started(self.mesh.start_gather(out, x.contiguous(), TP))

    def narrow(self, y: torch.Tensor) -> Pending:
        """Out of a block, summing the ranks' shares: [B, T, D] -> [B, T / tp, D], or the whole without sp. Consumes `y`."""
        y = y.to(self._sum_dtype(y)).contiguous()
        if not self.sequence:
            return self._started(self.mesh.start_sum(y, TP))
        if y.shape[-2] % self.size:
            raise ValueError(f"sequence parallelism cuts {y.shape[-2]} positions over {self.size} ranks: they must divide")
        out = y.new_empty(*y.shape[:-2], y.shape[-2] // self.size, y.shape[-1])
        return self._started(self.mesh.start_scatter(out, y, TP))

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the group, in place."""
        return self.mesh.start_max(x, TP).wait()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each element over the group, in place."""
        return self.mesh.start_sum(x, TP).wait()

    def _started(self, pending: Pending) -> Pending:
        return pending if self.overlap else Pending(pending.wait())

    def _sum_dtype(self, y: torch.Tensor) -> torch.dtype:
        return y.dtype if y.is_cuda else precise(y.dtype)
