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

from ftrain.checkpoint.known import Held, Known, identical
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.state import local_of, objects_in

Overlap = bool | Literal["manual"]
Later = Callable[[torch.Tensor], bool]
"""Whether a tensor may be copied later."""


class Beside:
    """The optimizers that wait, hooked once each."""

    def __init__(self, overlap: Overlap, wait: Callable[[], object]) -> None:
        """`wait` is called before a hooked optimizer changes anything."""
        self._overlap, self._wait = overlap, wait
        self._hooks: dict[int, tuple[Optimizer, list[RemovableHandle]]] = {}
        self._held: list[Held] = []
        self._later: Later = _everything

    def watch(self, state: Mapping[str, Any], known: Known) -> Later | None:
        """Hook the optimizers of a state; what may be copied later (None: nothing may). As long as they hold what they held,
        the answer is the same object.

        Raises StateError if there is nobody who could wait.
        """
        if self._overlap is False:
            return None
        optimizers = list(optimizers_in(state.values()))
        self._let_go(set(self._hooks) - {id(optimizer) for optimizer in optimizers})
        for optimizer in optimizers:
            self._hook(optimizer)
        if self._overlap == "manual":
            return _everything
        if not optimizers:
            raise StateError(
                "overlap=True waits for the copy before an optimizer of the state steps, and the state has none: put it in, or "
                'say overlap="manual" and call wait_copied() before anything in the state changes'
            )
        held = [known.held(optimizer) for optimizer in optimizers]
        if self._later is _everything or not identical(held, self._held):
            memory = {memory_of(tensor) for each in held for tensor in each.tensors}
            self._held, self._later = held, lambda tensor: memory_of(tensor) in memory
        return self._later

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
        self._held, self._later = [], _everything


def _everything(tensor: torch.Tensor) -> bool:
    """Somebody else does the waiting."""
    return True


def optimizers_in(values: Iterable[Any]) -> Iterator[Optimizer]:
    """The optimizers in a state."""
    return (value for value in objects_in(values) if isinstance(value, Optimizer))


def memory_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Which memory a tensor's values lie in: device, address and bytes. Two tensors of one storage are two memories."""
    local = local_of(tensor)
    return str(local.device), local.data_ptr(), local.nbytes
