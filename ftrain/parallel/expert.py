"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs and back (GShard, arXiv 2006.16668).

`parallel.ep` neighbours of CP x DP share out the experts: a view on ranks that exist anyway, as replicas of everything else.
Each position is sent to the experts that its router chose, as often as it chose some; what they made of it comes back, and is
added up where it came from:

    dispatch    copies of positions, sorted by expert     all-to-all     sorted by expert, then by the rank they came from
    combine     what the experts made of them             all-to-all     summed by the router's weights, in original order

Backward of each is the other's way. Which rows go where is a `Route`, made once from the router's choice and known to both; the
only thing that ranks must tell each other for it is how many rows each expert gets. All sums go over a position's choices in
their order, and over a rank's rows in the order in which they lie: no atomics, the same bits each time. Alone, a rank sends
nothing, and the rest is the same.

Under tensor parallelism every tp rank sends whole rows, and has some of the columns of each of its experts: what comes back are
summands, which `TensorGroup.narrow` adds up as it does behind a dense block.

Shape suffixes: N positions, K choices of each, M rows sent, R rows received, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from ftrain.parallel.mesh import Mesh
from ftrain.parallel.weight import precise


class Routing(NamedTuple):
    """What routers need to know of a micro-batch."""

    balance: torch.Tensor | None = None  # [B], weight of each sequence's balance loss; None: nothing is learned
    choose: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    """Given the number of a layer and the experts that it would choose, [B, T, K]: those it is to choose. For certificates."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """One rank's part among those that share out the experts."""

    mesh: Mesh

    @staticmethod
    def of(mesh: Mesh) -> ExpertGroup | None:
        """The group of a mesh; None if each rank has all experts."""
        return None if mesh.shape.ep == 1 else ExpertGroup(mesh)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.mesh.shape.ep

    def tell(self, counts: torch.Tensor) -> torch.Tensor:
        """A row for each rank of the group, and one from each."""
        one_each = [1] * self.size
        return self.mesh.exchange(counts, one_each, one_each)


@dataclass(frozen=True, slots=True)
class Route:
    """Which rows go where: positions to experts, and the way back."""

    group: ExpertGroup | None
    choices: torch.Tensor  # [M] of each row sent: the number of its choice, position x K + which
    places: torch.Tensor  # [N, K] of each choice: its row among those sent; M if it was not taken
    sent: list[int]  # rows to each rank of the group
    received: list[int]
    order: torch.Tensor | None  # [R] of each row, sorted by expert: which it was when it came; None: as they came
    counts: list[int]  # rows of each of this rank's experts

    @staticmethod
    def of(group: ExpertGroup | None, chosen_NK: torch.Tensor, kept_NK: torch.Tensor | None, experts: int) -> Route:
        """The route of what the router chose. `kept_NK`: what of it the experts have room for. Called by all of the group."""
        wanted = chosen_NK.flatten() if kept_NK is None else chosen_NK.flatten().where(kept_NK.flatten(), experts)
        choices = wanted.argsort(stable=True)
        going = torch.bincount(wanted, minlength=experts)[:experts].view(1 if group is None else group.size, -1)
        coming = going if group is None else group.tell(going)  # [rank, its expert], [rank, my expert]
        to, from_ = torch.stack([going, coming]).tolist()  # the host waits here, and only here
        sent, received = [sum(rank) for rank in to], [sum(rank) for rank in from_]
        places = torch.empty_like(choices)
        places[choices] = torch.arange(len(choices), device=choices.device).clamp_(max=sum(sent))
        return Route(
            group=group,
            choices=choices[: sum(sent)],
            places=places.view(chosen_NK.shape),
            sent=sent,
            received=received,
            order=None if group is None else _by_expert(coming, sum(received)),
            counts=[sum(rows) for rows in zip(*from_, strict=True)],
        )

    def go(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Rows to the experts, [M, D] -> [R, D] sorted by expert."""
        if self.group is None or self.order is None:
            return rows_MD
        return self.group.mesh.exchange(rows_MD, self.sent, self.received)[self.order]

    def back(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """And back, [R, D] -> [M, D]."""
        if self.group is None or self.order is None:
            return rows_RD
        came = torch.empty_like(rows_RD)
        came[self.order] = rows_RD
        return self.group.mesh.exchange(came, self.received, self.sent)

    def copies(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Each position as often as it is sent, [M, D]."""
        return x_ND[self.choices // self.places.shape[1]]

    def each(self, rows_MD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of each position, the row of its first, second, ... choice, [N, D]; zeros for one that was not taken.

        One after the other: all of them would take as much again as what the experts made.
        """
        if len(self.choices) < self.places.numel():
            rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
        for places in self.places.unbind(1):
            yield rows_MD[places]


def _by_expert(coming: torch.Tensor, total: int) -> torch.Tensor:
    """Which rows are those of the first expert, of the second, ...: rows come by rank, and of each by expert."""
    numbers = torch.arange(coming.shape[1], device=coming.device).repeat(coming.shape[0])
    return numbers.repeat_interleave(coming.flatten(), output_size=total).argsort(stable=True)


def dispatch(x_ND: torch.Tensor, route: Route) -> torch.Tensor:
    """Positions to the experts: the rows of this rank's experts, [R, D], those of the first one first."""
    rows: torch.Tensor = _Dispatch.apply(x_ND, route)
    return rows


def combine(y_RD: torch.Tensor, weights_NK: torch.Tensor, route: Route) -> torch.Tensor:
    """What the experts made of the rows, back home and summed by the router's weights: [N, D], in fp32 at least."""
    output: torch.Tensor = _Combine.apply(y_RD, weights_NK, route)
    return output


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return route.go(route.copies(x))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = ctx.route.each(ctx.route.back(dy))
        dx = next(parts).to(precise(dy.dtype))
        for part in parts:
            dx += part
        return dx.to(dy.dtype), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor, route: Route) -> torch.Tensor:
        home = route.back(y)
        ctx.save_for_backward(home, weights)
        ctx.route = route
        return _weighted(route.each(home), weights)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        home, weights = ctx.saved_tensors
        route: Route = ctx.route
        dweights = torch.stack([(dout * each).sum(-1) for each in route.each(home)], 1)
        drows = route.copies(dout) * weights.flatten()[route.choices].unsqueeze(-1)
        return route.go(drows.to(home.dtype)), dweights, None


def _weighted(parts: Iterator[torch.Tensor], weights_NK: torch.Tensor) -> torch.Tensor:
    out = next(parts).to(weights_NK.dtype) * weights_NK[:, :1]
    for index, part in enumerate(parts, 1):
        out.addcmul_(part.to(out.dtype), weights_NK[:, index : index + 1])
    return out
