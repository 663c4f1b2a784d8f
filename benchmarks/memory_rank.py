"""One rank of `benchmarks.memory`: what is alive, found by looking at it and not by asking who should hold it.

State: the storages of all tensors that the garbage collector knows after a step, when no activation is left. Activations:
every storage that an operation makes during a step is followed until it is gone; the sum of those alive is read whenever the
engine is about to begin a forward or a backward, when no operation is half done. What backward keeps is then all there is,
whoever keeps it: autograd, a queue of put-off gradients, or a link.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.text import Text
from ftrain.config import Config
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.step import Engine


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes on one rank."""

    pp: int
    tp: int
    state: int
    activations: int  # between two actions of the schedule, the most
    peak: int  # at any moment, state not included
    rss: int  # growth of the process from before the engine was built to the end of the last step


class Live(TorchDispatchMode):
    """Follows the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.between = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, and a note of what it made."""
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._follow(tensor.untyped_storage(), known)
        return result

    def _follow(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in given:  # an input given back, or a view of one
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def look(self) -> None:
        """No operation is under way."""
        self.between = max(self.between, self.now)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, value)
    return found


def look(rank: int, config: Config, steps: int) -> Found:
    """Train a little, and look."""
    text, before = Text(config, 1), _live()
    rss = psutil.Process(os.getpid()).memory_info().rss
    live = Live()
    engine = Engine(
        config,
        mesh=Mesh(mesh_shape(config), rank),
        device="cpu",
        dataset=text,
        progress=lambda phase, microbatch: live.look() if phase in ("forward", "backward") else None,
    )
    engine.init_state()
    size = config.batch.global_batch
    for step in range(1, steps):
        engine.train_step(step=step, first_sequence=(step - 1) * size)
    with live:
        engine.train_step(step=steps, first_sequence=(steps - 1) * size)
    gc.collect()
    state = sum(size for key, size in _live().items() if key not in before)
    place = engine.mesh.coordinate
    grown = psutil.Process(os.getpid()).memory_info().rss - rss
    return Found(pp=place.pp, tp=place.tp, state=state, activations=live.between, peak=live.peak, rss=grown)


def _live() -> dict[int, int]:
    """Bytes of each storage that some tensor known to the garbage collector lies in."""
    storages = (found.untyped_storage() for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
