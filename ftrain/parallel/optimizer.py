"""AdamW with its state cut over the replicas (ZeRO-1), on flat aligned buffers.

Per bucket, N elements and R replicas (of experts that are shared out: those that have the same ones):

    weights    bf16, N      what forward and backward read; whole on every replica
    main_grad  fp32, N      what backward adds to; whole on every replica
    master, exp_avg, exp_avg_sq   fp32, N/R   the state of this replica's region

    backward adds to main_grad              (all micro-batches)
    sum partial gradients over tp           norms that saw some positions or heads, copies of kv heads
    reduce-scatter main_grad                summed gradients of my region, in place
    AdamW on my region                      bit-equal to torch.optim.AdamW(foreach=False) on the same gradients
    weights of my region = bf16(master)     round to nearest even: the invariant of the whole state
    all-gather weights                      in place

Gradients are summed in fp32, never in bf16: a bf16 reduction depends on the order of the ranks. The update goes over the
region in blocks that stay in cache, each element once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from ftrain.config import Optimizer
from ftrain.parallel.arrays import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHTS, StatePiece, StateTypes, dtype_name
from ftrain.parallel.buckets import Bucket, Part
from ftrain.parallel.layout import ParameterSpec, is_owner
from ftrain.parallel.mesh import Mesh, Pending
from ftrain.parallel.norm import sum_of_squares
from storage.box import Box

BLOCK = 1 << 15  # elements of a cache-sized block on CPU


class View(NamedTuple):
    """A parameter as the model sees it."""

    weight: torch.Tensor
    main_grad: torch.Tensor


class Placed(Protocol):
    """A stage of the model, whose parameters are put where the optimizer keeps them."""

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Its parameters, as yet without memory."""

    def place(self, views: Mapping[str, View]) -> None:
        """Take these."""


@dataclass(frozen=True, slots=True)
class Region:
    """The buffers of one bucket: whole ones for the model, and this replica's region of the state."""

    bucket: Bucket
    parts: tuple[Part, ...]  # what this replica's region holds
    weights: torch.Tensor
    main_grad: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    twin: int | None = None  # the pipeline rank at the other end of a tied embedding; the lower one owns the state

    def is_copy(self, pp: int) -> bool:
        """Whether pipeline rank `pp` has no state of it: it hands its gradients over and is given the weights."""
        return self.twin is not None and self.twin < pp


class ShardedAdamW:
    """The optimizer of one rank. Every method that communicates is called by all ranks in the same order."""

    def __init__(
        self, buckets: Sequence[Bucket], *, mesh: Mesh, device: torch.device, types: StateTypes, options: Optimizer
    ) -> None:
        self.mesh, self.device, self.types, self.options = mesh, device, types, options
        self.regions = tuple(self._allocate(bucket) for bucket in buckets)
        self._pending: dict[int, Pending] = {}  # collectives under way, by bucket
        self._scratch = torch.empty(self._block, dtype=types.state, device=device)

    def _allocate(self, bucket: Bucket) -> Region:
        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=self.device)

        weights, main_grad = zeros(bucket.numel, self.types.weights), zeros(bucket.numel, self.types.state)
        twin = self._twin_of(bucket)
        is_copy = twin is not None and twin < self.mesh.coordinate.pp
        parts = () if is_copy else bucket.parts(bucket.region_of(self.mesh.shard))
        master, exp_avg, exp_avg_sq = (zeros(0 if is_copy else bucket.region, self.types.state) for _ in range(3))
        return Region(bucket, parts, weights, main_grad, master, exp_avg, exp_avg_sq, twin)

    def _twin_of(self, bucket: Bucket) -> int | None:
        """The pipeline rank that holds the same bucket, if one does: that of a tied embedding, whose ends are two ranks."""
        stages = {stage for slot in bucket.slots for stage in slot.spec.stages}
        return next((stage for stage in stages if stage != self.mesh.coordinate.pp), None)

    @property
    def _block(self) -> int:
        largest = max((region.bucket.region for region in self.regions), default=1)
        return min(BLOCK, largest) if self.device.type == "cpu" else largest

    def place(self, modules: Mapping[int, Placed]) -> None:
        """Every parameter to the stages that use it; one that nobody uses, or that a stage misses, is an error."""
        views, used = self.views(), set[str]()
        for module in modules.values():
            names = {name for name, _ in module.named_parameters()} & views.keys()
            module.place({name: views[name] for name in views if name in names})
            used |= names
        if views.keys() - used:
            raise ValueError(f"no stage has {', '.join(sorted(views.keys() - used))}")

    def weights_in_use(self) -> Iterator[tuple[ParameterSpec, Box, torch.Tensor]]:
        """What forward reads on this rank."""
        for region in self.regions:
            for slot in region.bucket.slots:
                yield slot.spec, slot.box, region.weights[slot.start : slot.stop].view(slot.box.shape)

    def views(self) -> dict[str, View]:
        """The weights and gradients of every parameter this rank computes with, by name: views, valid for good."""
        return {
            slot.spec.name: View(
                region.weights[slot.start : slot.stop].view(slot.box.shape),
                region.main_grad[slot.start : slot.stop].view(slot.box.shape),
            )
            for region in self.regions
            for slot in region.bucket.slots
        }

    def pieces(self) -> list[StatePiece]:
        """The state this rank holds, box by box; the `owner` of several identical ones writes it."""
        return list(self._state)

    @cached_property
    def _state(self) -> tuple[StatePiece, ...]:
        """Made once: the memory is the same for good, and training waits while a save asks for it."""
        return tuple(piece for region in self.regions for part in region.parts for piece in self._pieces(region, part))

    def _pieces(self, region: Region, part: Part) -> Iterator[StatePiece]:
        owner = is_owner(part.spec, self.mesh.coordinate)
        slots = {WEIGHTS: region.master, MASTER: region.master, EXP_AVG: region.exp_avg, EXP_AVG_SQ: region.exp_avg_sq}
        for slot, flat in slots.items():
            tensor = flat[part.start : part.stop].view(part.box.shape)
            yield StatePiece(f"{slot}/{part.spec.name}", part.box, tensor, dtype_name(self.types.of(slot)), owner)

    def grad_pieces(self) -> list[StatePiece]:
        """The gradients of this rank's regions, as `pieces()` has the state: live views, complete between the sums of an update
        and the update itself, which scales them.
        """
        name = dtype_name(self.types.state)
        return [
            StatePiece(
                f"grad/{part.spec.name}",
                part.box,
                self._mine(region.main_grad, region)[part.start : part.stop].view(part.box.shape),
                name,
                is_owner(part.spec, self.mesh.coordinate),
            )
            for region in self.regions
            for part in region.parts
        ]

    def fill_masters(self, fill: Callable[[torch.Tensor, Part], None]) -> None:
        """Set every box of the master weights by `fill`, moments to zero, and the weights accordingly."""
        for region in self.regions:
            for part in region.parts:
                fill(region.master[part.start : part.stop].view(part.box.shape), part)
            region.exp_avg.zero_()
            region.exp_avg_sq.zero_()
        self.publish()

    def publish(self) -> None:
        """Weights of this region = rounded masters, then everybody's to everybody. Also after a load."""
        for index, region in enumerate(self.regions):
            if not region.is_copy(self._pp):
                self._mine(region.weights, region).copy_(region.master)
            self.start_gather(index)
        self.finish()

    def zero_grad(self) -> None:
        """Before the first micro-batch of an update."""
        for region in self.regions:
            region.main_grad.zero_()

    def _mine(self, flat: torch.Tensor, region: Region) -> torch.Tensor:
        """This replica's region of a whole buffer."""
        return self.mesh.region(flat, region.bucket.sharers)

    @property
    def _pp(self) -> int:
        return self.mesh.coordinate.pp

    def reduce_grads(self) -> None:
        """All sums of an update, one after the other."""
        for index in range(len(self.regions)):
            self.start_reduce(index)
        self.reduce_twins()

    def start_reduce(self, index: int, *, beside: bool = False) -> None:
        """Sum a bucket's gradients over the replicas, each of which ends with those of its own region.

        `beside`: return at once, `finish` waits.
        """
        region = self.regions[index]
        self._sum_partial(region)
        self._under_way(index, self.mesh.start_reduce_scatter(region.main_grad, region.bucket.sharers), beside)

    def reduce_twins(self) -> None:
        """The last stage's summed region of a tied embedding is added to the first stage's, which updates it for both."""
        self.finish()
        for region in self.regions:
            if region.twin is not None:
                mine = self._mine(region.main_grad, region)
                if region.is_copy(self._pp):
                    self.mesh.start_transfers([(mine, region.twin, True)])[0].wait()
                else:
                    mine += self.mesh.start_transfers([(torch.empty_like(mine), region.twin, False)])[0].wait()

    def start_gather(self, index: int, *, beside: bool = False) -> None:
        """Give everybody a bucket's weights, each replica those of its region; a twin gets them from its owner first."""
        region = self.regions[index]
        if region.twin is not None:
            mine = self._mine(region.weights, region)
            self.mesh.start_transfers([(mine, region.twin, not region.is_copy(self._pp))])[0].wait()
        self._under_way(index, self.mesh.start_all_gather(region.weights, region.bucket.sharers), beside)

    def _under_way(self, index: int, pending: Pending, beside: bool) -> None:
        if beside:
            self._pending[index] = pending
        else:
            pending.wait()

    def wait(self, index: int) -> None:
        """Until what is under way on a bucket has ended."""
        if (pending := self._pending.pop(index, None)) is not None:
            pending.wait()

    def finish(self) -> None:
        """Until nothing is under way."""
        for index in list(self._pending):
            self.wait(index)

    def _sum_partial(self, region: Region) -> None:
        """Complete the gradients of which tp neighbours hold summands: the same bits on all of them.

        By name, because a short part of the vocabulary makes a rank place the same parameters in another order.
        """
        by_width: dict[int, list[torch.Tensor]] = {}
        for slot in sorted(region.bucket.slots, key=lambda slot: slot.spec.name):
            if (width := slot.spec.summands(self.mesh.shape.tp)) > 1:
                by_width.setdefault(width, []).append(region.main_grad[slot.start : slot.stop])
        for width, grads in sorted(by_width.items()):
            summed = self.mesh.sum_neighbours(torch.cat(grads), width)
            torch._foreach_copy_(grads, summed.split([grad.numel() for grad in grads]))

    def sum_of_squares(self) -> torch.Tensor:
        """This rank's share of the squared norm of the reduced gradients, fp64."""
        return sum_of_squares(self._owned_grads(), self.device)

    def _owned_grads(self) -> Iterator[torch.Tensor]:
        for region in self.regions:
            mine = self._mine(region.main_grad, region)
            if region.parts and all(is_owner(part.spec, self.mesh.coordinate) for part in region.parts):
                yield mine  # padding is zero
            else:
                yield from (mine[part.start : part.stop] for part in region.parts if is_owner(part.spec, self.mesh.coordinate))

    def update(self, *, lr: float, number: int, factor: float, order: Sequence[int] = (), beside: bool = False) -> None:
        """AdamW number `number` (from 1) on this rank's region, with gradients times `factor`; each bucket is then published.

        `order`: of the buckets, the same on all replicas. `beside`: the gathering goes on after the return.
        """
        adam = Constants.of(self.options, lr, number)
        for index in order or range(len(self.regions)):
            self._update(self.regions[index], adam, factor)
            self.start_gather(index, beside=beside)

    def _update(self, region: Region, adam: Constants, factor: float) -> None:
        grad, weights = self._mine(region.main_grad, region), self._mine(region.weights, region)
        for block, decay in self._blocks(region):
            if factor != 1.0:
                grad[block].mul_(factor)
            state = (region.master[block], region.exp_avg[block], region.exp_avg_sq[block])
            adamw(grad[block], *state, self._scratch[: block.stop - block.start], adam, decay)
            weights[block].copy_(region.master[block])

    def _blocks(self, region: Region) -> Iterator[tuple[slice, bool]]:
        """The region in cache-sized blocks of one weight-decay group each; padding goes with what it follows."""
        for start, stop, decay in _decay_runs(region):
            for first in range(start, stop, self._block):
                yield slice(first, min(first + self._block, stop)), decay


def _decay_runs(region: Region) -> list[tuple[int, int, bool]]:
    runs: list[tuple[int, int, bool]] = []
    for part in region.parts:
        if runs and runs[-1][2] == part.spec.decay:
            runs[-1] = (runs[-1][0], part.stop, part.spec.decay)
        else:
            runs.append((part.start, part.stop, part.spec.decay))
    return runs


class Constants(NamedTuple):
    """The scalars of one update, as torch.optim.AdamW computes them."""

    beta1: float
    beta2: float
    eps: float
    shrink: float  # 1 - lr x weight decay
    step_size: float
    root_correction2: float

    @staticmethod
    def of(options: Optimizer, lr: float, number: int) -> Constants:
        correction1 = 1 - options.beta1**number
        correction2 = 1 - options.beta2**number
        shrink = 1 - lr * options.weight_decay
        return Constants(options.beta1, options.beta2, options.eps, shrink, lr / correction1, correction2**0.5)


def adamw(
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scratch: torch.Tensor,
    adam: Constants,
    decay: bool,
) -> None:
    """One block, in the order of operations of torch.optim.AdamW(foreach=False) (Loshchilov and Hutter, arXiv 1711.05101)."""
    if decay:
        master.mul_(adam.shrink)
    exp_avg.lerp_(grad, 1 - adam.beta1)
    exp_avg_sq.mul_(adam.beta2).addcmul_(grad, grad, value=1 - adam.beta2)
    denominator = torch.sqrt(exp_avg_sq, out=scratch).div_(adam.root_correction2).add_(adam.eps)
    master.addcdiv_(exp_avg, denominator, value=-adam.step_size)
