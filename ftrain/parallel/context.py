"""Context parallelism: each rank has some positions of every sequence, and keys and values go round.

Everything but attention looks at one position at a time and notices nothing. A sequence is cut into 2 x cp equal pieces, of
which rank i has number i and number 2 cp - 1 - i, head and tail: under a causal mask every rank then has the same work, and
against the keys of any *other* rank the work is a plain rectangle without a mask (all its queries against the other's head, or
its tail's queries against all of the other's). A contiguous cut would leave rank 0 idle most of the time.

    all_gather   keys and values of all positions are gathered for one layer at a time, again in backward; their gradients are
                 summed and scattered home. Few messages, but cp blocks of keys and values (Llama 3, arXiv 2407.21783)
    ring         a block computes with what it has while the next rank's are on their way; never more than two blocks. In
                 backward the blocks' gradients travel with them, each rank adding its share, and come home after cp places
                 (Liu et al., arXiv 2310.01889)

Both show the blocks in the same order, so forward has the same bits under both. Gradients of keys and values are added up in
fp32, wherever they are. A sequence is the whole of it: loss and gradients are sums over ranks, as they are over replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ftrain.config import Axis, CpExchange, Parallel
from ftrain.parallel.mesh import Mesh, Pending
from ftrain.parallel.weight import precise

CP: tuple[Axis, ...] = ("cp",)

Spans = tuple[range, ...]
"""Positions of a sequence, in ascending order, as runs."""


def head_tail(length: int, size: int, index: int) -> Spans:
    """The positions of one of `size` ranks; `length` is a multiple of 2 x size."""
    if length % (2 * size):
        raise ValueError(f"context parallelism cuts {length} positions into 2 x {size} pieces: they must divide")
    piece = length // (2 * size)
    starts = (index * piece, (2 * size - 1 - index) * piece)
    return tuple(range(start, start + piece) for start in starts)


def take(x_BT: torch.Tensor, spans: Spans) -> torch.Tensor:
    """These positions of [B, T, ...]."""
    return torch.cat([x_BT[:, span.start : span.stop] for span in spans], 1)


class Gradients(Protocol):
    """Where the gradients of blocks of keys and values are added up, in fp32 at least."""

    def add(self, source: int, rows: slice, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Gradients of some rows (maybe none) of the block that rank `source` made, [B, rows, H, K]; once for each block."""

    def home(self) -> torch.Tensor:
        """The whole gradients of this rank's own keys and values, once all blocks were seen: [2, B, T / cp, H, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """One rank's part in its context-parallel group."""

    mesh: Mesh
    exchange: CpExchange

    @staticmethod
    def of(mesh: Mesh, parallel: Parallel) -> ContextGroup | None:
        """The group a config asks for; None if context parallelism is off."""
        return None if mesh.shape.cp == 1 else ContextGroup(mesh=mesh, exchange=parallel.cp_exchange)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.mesh.shape.cp

    @property
    def index(self) -> int:
        """This rank's place in it."""
        return self.mesh.coordinate.cp

    def spans(self, local_length: int, index: int | None = None) -> Spans:
        """The positions of a rank of the group (this one by default), which has `local_length` of them."""
        return head_tail(local_length * self.size, self.size, self.index if index is None else index)

    def cut(self, x_BT: torch.Tensor) -> torch.Tensor:
        """This rank's positions of whole sequences, [B, T] -> [B, T / cp]."""
        return take(x_BT, self.spans(x_BT.shape[1] // self.size))

    def whole(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Everybody's positions of something small, in their order: [B, T / cp, ...] -> [B, T, ...]. No gradients."""
        gathered = x_BT.new_empty(self.size, *x_BT.shape)
        self.mesh.start_gather(gathered, x_BT.contiguous(), CP).wait()
        length = x_BT.shape[1]
        out = x_BT.new_empty(x_BT.shape[0], length * self.size, *x_BT.shape[2:])
        for source, part in enumerate(gathered):
            for span, piece in zip(self.spans(length, source), part.chunk(2, 1), strict=True):
                out[:, span.start : span.stop] = piece
        return out

    def blocks(self, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Everybody's `kv` [2, B, T / cp, H, K], one block after the other with its rank: mine first, then as the ring turns.

        Each may be used until the next is asked for, `kv` included, whose memory the ring takes. All ranks of the group go
        through all blocks.
        """
        if self.exchange == "ring":
            yield from self._ring(kv)
            return
        gathered = kv.new_empty(self.size, *kv.shape)
        self.mesh.start_gather(gathered, kv.contiguous(), CP).wait()
        for source in self._order():
            yield source, gathered[source]

    def gradients(self, kv: torch.Tensor) -> Gradients:
        """An empty account of gradients, to be used beside `blocks(kv)` and in its order."""
        return _Travelling(self, kv) if self.exchange == "ring" else _Whole(self, kv)

    def _order(self) -> list[int]:
        return [(self.index - step) % self.size for step in range(self.size)]

    def _ring(self, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        held = kv.contiguous()
        other = torch.empty_like(held)
        for step, source in enumerate(self._order()):
            moving = self.pass_on(held, other) if step + 1 < self.size else []
            yield source, held
            for pending in moving:
                pending.wait()
            held, other = other, held  # what was shown has left, and makes room for the next but one

    def pass_on(self, block: torch.Tensor, into: torch.Tensor) -> list[Pending]:
        """Begin to send a block to the next rank, and to receive another from the one before."""
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        return self.mesh.start_transfers([(block, after, True), (into, before, False)], "cp")


class _Whole:
    """All blocks' gradients, as the blocks themselves are gathered; then summed and scattered."""

    def __init__(self, group: ContextGroup, kv: torch.Tensor) -> None:
        self.group = group
        self._sums = kv.new_zeros((group.size, *kv.shape), dtype=precise(kv.dtype))

    def add(self, source: int, rows: slice, dk: torch.Tensor, dv: torch.Tensor) -> None:
        block = self._sums[source]
        block[0, :, rows] += dk
        block[1, :, rows] += dv

    def home(self) -> torch.Tensor:
        mine = torch.empty_like(self._sums[0])
        return self.group.mesh.start_scatter(mine, self._sums, CP).wait()


class _Travelling:
    """The gradients of one block at a time: they follow it round the ring, one place behind.

    What a rank adds to in its step t is what the rank before it has added to in its step t - 1. It leaves at once, and travels
    beside the work on the next block; after cp places it is home.
    """

    def __init__(self, group: ContextGroup, kv: torch.Tensor) -> None:
        self.group = group
        self._sums = kv.new_zeros(kv.shape, dtype=precise(kv.dtype))
        self._other = torch.empty_like(self._sums)
        self._moving: list[Pending] = []

    def add(self, source: int, rows: slice, dk: torch.Tensor, dv: torch.Tensor) -> None:
        sums = self.home()
        sums[0, :, rows] += dk
        sums[1, :, rows] += dv
        self._moving = self.group.pass_on(sums, self._other)
        self._sums, self._other = self._other, sums

    def home(self) -> torch.Tensor:
        for pending in self._moving:
            pending.wait()
        self._moving = []
        return self._sums
