"""AdamW with everything cut over the replicas: FSDP2 (`fully_shard`), the route to compare ZeRO-1 with. The same function.

What `fully_shard` does: each block's weights are gathered for its forward and again for its backward, and after each backward
its gradients are summed and cut (Zhao et al., arXiv 2304.11277). What it does not do by itself, and is done here:

    weights rounded on use   what is gathered are the masters rounded to bf16 (hooks of its own extension point), widened again
                             behind the gather, so that gradients are fp32; plain FSDP2 computes with the masters
    sums                     gradients are already divided by the tokens of all replicas: a divisor of 1, and plain sums
    state as boxes           rows of logical arrays (`ftrain.parallel.shards`), which any other layout loads
    hfsdp                    masters and moments cut once more over the outer group, which FSDP2's hybrid mode keeps whole in
                             each; after the update, the outer group exchanges rounded rows
    tensor parallelism       its partial gradients are summed over the neighbours at the end, on the cut

The embedding, the final norm and the head stay gathered from the first forward of an update to its end, because the loss is
computed outside of any module's forward. All replicas run as many micro-batches as each other: every forward gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ftrain.config import Optimizer
from ftrain.parallel.arrays import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHTS, StatePiece, StateTypes, dtype_name
from ftrain.parallel.buckets import Part
from ftrain.parallel.layout import ParameterSpec
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.norm import sum_of_squares
from ftrain.parallel.optimizer import BLOCK, Constants, adamw
from ftrain.parallel.shards import Shards
from storage.box import Box


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter on this rank."""

    spec: ParameterSpec
    parameter: nn.Parameter  # the DTensor whose gradient FSDP sums and cuts
    rows: torch.Tensor  # what this rank holds of it, in the state's dtype: a view
    box: Box  # of the logical array
    kept: Box | None  # of which it keeps masters and moments; None: of no row
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    writes: bool

    @property
    def part(self) -> slice:
        """The kept rows among those held."""
        if self.kept is None:
            return slice(0, 0)
        first = self.kept.offset[0] - self.box.offset[0]
        return slice(first, first + self.kept.shape[0])

    @property
    def master(self) -> torch.Tensor:
        """The kept rows, live."""
        return self.rows[self.part]

    @property
    def grad(self) -> torch.Tensor:
        """Their summed gradients, live."""
        return local_of(self.parameter.grad)[self.part]


class FullyShardedAdamW:
    """The optimizer of one rank, with the interface of `ShardedAdamW`. What communicates is called by all ranks."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        shards: Shards,
        *,
        mesh: Mesh,
        device: torch.device,
        types: StateTypes,
        options: Optimizer,
    ) -> None:
        self.specs, self.shards, self.mesh, self.device, self.types, self.options = specs, shards, mesh, device, types, options
        self.held: tuple[Held, ...] = ()
        self._roots: list[FSDPModule] = []
        self._parameters: list[nn.Parameter] = []
        self._scratch = torch.empty(BLOCK, dtype=types.state, device=device)

    def place(self, modules: Mapping[int, nn.Module]) -> None:
        """Cut the stages of this rank, block by block: no more than one block is ever whole."""
        device_mesh = self.mesh.replicas(self.shards.inner, self.device.type)
        found: dict[str, nn.Parameter] = {}
        for module in modules.values():
            layers = module.get_submodule("layers")
            for unit in (*layers.children(), module):
                ignored = _materialise(unit, self.types.state, self.device)
                policy = MixedPrecisionPolicy(cast_forward_inputs=False)
                fully_shard(unit, mesh=device_mesh, mp_policy=policy, ignored_params=ignored)
                assert isinstance(unit, FSDPModule)
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
            assert isinstance(module, FSDPModule)
            module.set_reshard_after_backward(False, recurse=False)
            self._roots.append(module)
            found |= {name: p for name, p in module.named_parameters() if p.numel()}
        mine = [spec for spec in self.specs if self.shards.held(spec, self.mesh.coordinate) is not None]
        for spec in self.specs:
            if spec.name in found:
                self._round_on_use(found[spec.name])
        self.held = tuple(self._hold(spec, found[spec.name]) for spec in mine)
        self._parameters = list(found.values())

    def _hold(self, spec: ParameterSpec, parameter: nn.Parameter) -> Held:
        here, rows = self.mesh.coordinate, local_of(parameter)
        box, kept = self.shards.held(spec, here), self.shards.kept(spec, here)
        assert box is not None
        if tuple(rows.shape) != box.shape:
            raise ValueError(f"{spec.name}: fully_shard holds {tuple(rows.shape)} here, the layout {box.shape}")
        shape = (0 if kept is None else kept.shape[0], *box.shape[1:])
        exp_avg, exp_avg_sq = (torch.zeros(shape, dtype=self.types.state, device=self.device) for _ in range(2))
        return Held(spec, parameter, rows, box, kept, exp_avg, exp_avg_sq, self.shards.writes(spec, here))

    def _round_on_use(self, parameter: nn.Parameter) -> None:
        """Gather the masters rounded, and widen them."""
        if self.types.weights == self.types.state:
            return
        rows = local_of(parameter)
        padded = (-(-parameter.shape[0] // self.shards.inner), *parameter.shape[1:])
        weights, wide = self.types.weights, self.types.state

        def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[torch.Tensor, ...], None]:
            out = torch.zeros(padded, dtype=weights, device=rows.device)
            out[: rows.shape[0]] = rows
            return (out,), None

        def after(
            gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
            (rounded,) = gathered
            if out is not None:
                with torch.no_grad(), _unsafe_preserve_version_counter(out):
                    out.view(-1).copy_(rounded.view(-1)[: out.numel()])
                return None
            widened = rounded.to(wide)
            return widened, (rounded, widened)

        rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]

    # --- the state --------------------------------------------------------------------------------------------------------

    def pieces(self) -> list[StatePiece]:
        """The state this rank keeps, box by box; the `owner` of several identical ones writes it."""
        return [piece for held in self.held if held.kept is not None for piece in self._pieces(held, held.kept)]

    def _pieces(self, held: Held, kept: Box) -> Iterator[StatePiece]:
        slots = {WEIGHTS: held.master, MASTER: held.master, EXP_AVG: held.exp_avg, EXP_AVG_SQ: held.exp_avg_sq}
        for slot, tensor in slots.items():
            yield StatePiece(f"{slot}/{held.spec.name}", kept, tensor, dtype_name(self.types.of(slot)), held.writes)

    def grad_pieces(self) -> list[StatePiece]:
        """The gradients of what this rank keeps, live, between the sums of an update and the update itself."""
        name = dtype_name(self.types.state)
        return [
            StatePiece(f"grad/{held.spec.name}", held.kept, held.grad, name, held.writes)
            for held in self.held
            if held.kept is not None
        ]

    def weights_in_use(self) -> Iterator[tuple[ParameterSpec, Box, torch.Tensor]]:
        """What forward would gather from this rank."""
        for held in self.held:
            yield held.spec, held.box, held.rows.to(self.types.weights)

    def fill_masters(self, fill: Callable[[torch.Tensor, Part], None]) -> None:
        """Set every box of the masters by `fill`, and moments to zero."""
        with torch.no_grad():
            for held in self.held:
                if held.kept is not None:
                    fill(held.master, Part(held.spec, held.kept, 0, held.kept.size))
                held.exp_avg.zero_()
                held.exp_avg_sq.zero_()
        self.publish()

    def publish(self) -> None:
        """Masters have changed: nothing gathered before is used again, and the outer group is told."""
        for root in self._roots:
            root.reshard()
        if self.shards.split:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """hfsdp: everybody's kept rows, rounded, to all who hold them."""
        runs = {held.spec.name: -(-self._inner_rows(held) // self.shards.outer) for held in self.held}
        parts = []
        for held in self.held:
            out = held.rows.new_zeros((runs[held.spec.name], *held.rows.shape[1:]), dtype=self.types.weights)
            out[: held.master.shape[0]] = held.master
            parts.append(out.view(-1))
        mine = torch.cat(parts)
        everybody = self.mesh.gather_outer(mine, self.shards.inner)
        sizes = [part.numel() for part in parts]
        for member, flat in enumerate(everybody):
            if member != self.shards.place(self.mesh.coordinate)[0]:
                for held, values in zip(self.held, flat.split(sizes), strict=True):
                    run = runs[held.spec.name]
                    rows = held.rows[member * run : (member + 1) * run]
                    rows.copy_(values.view(run, *held.rows.shape[1:])[: rows.shape[0]])

    def _inner_rows(self, held: Held) -> int:
        return -(-held.parameter.shape[0] // self.shards.inner)

    # --- an update --------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Before the first micro-batch of an update."""
        for parameter in self._parameters:
            parameter.grad = None

    def start_reduce(self, index: int, *, beside: bool = False) -> None:
        """Nothing: FSDP sums a block's gradients behind each of its backwards."""

    def wait(self, index: int) -> None:
        """Nothing: FSDP waits for what it gathers."""

    def finish(self) -> None:
        """Nothing is under way between updates."""

    def reduce_twins(self) -> None:
        """The sums that are left: over the tensor-parallel neighbours that hold summands."""
        by_width: dict[int, list[torch.Tensor]] = {}
        for held in sorted(self.held, key=lambda held: held.spec.name):
            if (width := held.spec.summands(self.mesh.shape.tp)) > 1:
                by_width.setdefault(width, []).append(held.grad.reshape(-1))
        for width, grads in sorted(by_width.items()):
            summed = self.mesh.sum_neighbours(torch.cat(grads), width)
            torch._foreach_copy_(grads, summed.split([grad.numel() for grad in grads]))

    def sum_of_squares(self) -> torch.Tensor:
        """This rank's share of the squared norm of the summed gradients, fp64."""
        return sum_of_squares((held.grad for held in self.held if held.writes), self.device)

    @torch.no_grad()
    def update(self, *, lr: float, number: int, factor: float, order: Sequence[int] = (), beside: bool = False) -> None:
        """AdamW number `number` (from 1) on what this rank keeps, with gradients times `factor`."""
        adam = Constants.of(self.options, lr, number)
        for held in self.held:
            grad, master = held.grad.reshape(-1), held.master.view(-1)
            for first in range(0, grad.numel(), BLOCK):
                block = slice(first, min(first + BLOCK, grad.numel()))
                if factor != 1.0:
                    grad[block].mul_(factor)
                state = (master[block], held.exp_avg.view(-1)[block], held.exp_avg_sq.view(-1)[block])
                adamw(grad[block], *state, self._scratch[: block.stop - block.start], adam, held.spec.decay)
        self.publish()


def local_of(tensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor: the very tensor, not a view of it that autograd would know of."""
    local = tensor._local_tensor
    assert isinstance(local, torch.Tensor)
    return local


def _materialise(unit: nn.Module, dtype: torch.dtype, device: torch.device) -> set[nn.Parameter]:
    """Give the parameters of a unit, which have shapes only, memory. Those without elements (a part of the vocabulary without
    rows) are returned: nothing of them is cut.
    """
    ignored = set()
    for name, parameter in list(unit.named_parameters()):
        if parameter.is_meta:
            path, _, leaf = name.rpartition(".")
            made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
            setattr(unit.get_submodule(path), leaf, made)
            if not made.numel():
                ignored.add(made)
    return ignored
