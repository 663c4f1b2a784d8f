"""Which tensors of a script's state may still be copied after `save` has returned, and who waits before they change.

Between two steps of an optimizer nothing changes its parameters and its own state: forward and backward read the former and
write gradients. So these are what an overlapped save copies beside the next forward and backward, and a hook in front of the
optimizer's step waits for the end of the copy. All else (buffers, averages, the tensors that a `state_dict` made for the
occasion) may be changed by anybody at any time, and is copied before `save` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ftrain.checkpoint.per_rank import PerRank
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.state import local_of

Overlap = bool | Literal["manual"]
Later = Callable[[torch.Tensor], bool]
"""Whether a tensor may be copied later."""


class Beside:
    """The optimizers that wait, hooked once each."""

    def __init__(self, overlap: Overlap, wait: Callable[[], object]) -> None:
        """`wait` is called before a hooked optimizer changes anything."""
        if overlap not in (True, False, "manual"):
            raise ValueError(f'overlap={overlap!r}: True, False, or "manual"')
        self._overlap, self._wait = overlap, wait
        self._hooks: dict[int, tuple[Optimizer, list[RemovableHandle]]] = {}

    def watch(self, state: Mapping[str, Any]) -> Later | None:
        """Hook the optimizers of a state; what may be copied later (None: nothing may).

        Raises StateError if there is nobody who could wait.
        """
        if self._overlap is False:
            return None
        optimizers = list(optimizers_in(state.values()))
        self._let_go(set(self._hooks) - {id(optimizer) for optimizer in optimizers})
        for optimizer in optimizers:
            self._hook(optimizer)
        if self._overlap == "manual":
            return lambda tensor: True
        if not optimizers:
            raise StateError(
                "overlap=True waits for the copy before an optimizer of the state steps, and the state has none: put it in, or "
                'say overlap="manual" and call wait_copied() before anything in the state changes'
            )
        held = {memory_of(tensor) for optimizer in optimizers for tensor in tensors_of(optimizer)}
        return lambda tensor: memory_of(tensor) in held

    def _hook(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._hooks:
            step = optimizer.register_step_pre_hook(lambda *_: self._before())
            load = optimizer.register_load_state_dict_pre_hook(lambda *_: self._before())
            self._hooks[id(optimizer)] = optimizer, [step, load]

    def _before(self) -> None:
        self._wait()

    def _let_go(self, keys: Iterable[int]) -> None:
        """An optimizer that is not in the state any more must not be kept alive, with all that it holds."""
        for key in keys:
            for handle in self._hooks.pop(key)[1]:
                handle.remove()

    def close(self) -> None:
        """Take the hooks away."""
        self._let_go(list(self._hooks))


def optimizers_in(values: Iterable[Any]) -> Iterator[Optimizer]:
    """The optimizers in a state."""
    for value in values:
        if isinstance(value, PerRank):
            value = value.value
        if isinstance(value, Optimizer):
            yield value
        elif isinstance(value, Mapping):
            yield from optimizers_in(value.values())
        elif isinstance(value, list | tuple):
            yield from optimizers_in(value)


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What only its step changes: its parameters, and its state of each."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def memory_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Which memory a tensor's values lie in: device, address and bytes. Two tensors of one storage are two memories."""
    local = local_of(tensor)
    return str(local.device), local.data_ptr(), local.nbytes
