"""What a state was like when it was last taken apart, and whether it still is: then the work need not be done again.

A save of a script's state stands in the way of its training, and nearly always the state has the structure of the save before:
the same modules, parameters and moments, in the same memory. Finding that out takes a fraction of a microsecond for a tensor;
finding names, cutting boxes and detaching DTensors takes a hundred times as long.

So a module's tree and an optimizer's tables are remembered as they were: every container, every key, every object in them, and
for every tensor the memory that it lies in. If one of these is another one (a parameter that was replaced, or its `.data`; a
moment that appeared with the first step; a hook that was added), all of that module or optimizer is taken apart anew. What is
compared by identity is kept alive here, so nothing else can have come to its address. Values that are no tensors (learning
rates, counts) are never remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

PLAIN = (torch.Tensor, nn.Parameter)
FIXED = (type(None), bool, int, float, str)
"""Values beside tensors that are the same as long as they are the same object."""
CONTAINERS = ("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks")
OWN_WAYS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters", "named_buffers", "named_modules")
HOOKS_KNOWN = ("torch.distributed.fsdp._fully_shard", "torch.distributed.algorithms._checkpoint")
"""Whose hooks change a state dict in no way that the tree does not show: FSDP2 puts sharded parameters back into the modules,
and activation checkpointing takes its wrapper's name away."""

Place = tuple[Any, ...]


def place_of(tensor: torch.Tensor) -> Place:
    """Where and how a tensor's values lie. While a tensor of this place is alive, another one of it is the same memory."""
    if isinstance(tensor, DTensor):
        local, spec = tensor._local_tensor, tensor._spec
    else:
        local, spec = tensor, None
    how = local.device, local.is_conj(), local.is_neg(), spec
    return local.data_ptr(), local.shape, local.stride(), local.dtype, *how


def identical(found: list[Any], known: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(found) == len(known) and all(map(is_, found, known))


class Places:
    """Tensors, and where they lay."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        each = list({id(tensor): tensor for tensor in tensors}.values())
        self.told = all(_ordinary(tensor) for tensor in each)
        self._places = [(tensor, place_of(tensor), *_memory(tensor)) for tensor in each] if self.told else []

    def hold(self, places: Iterable[Place]) -> bool:
        """Whether all of these are among them."""
        return {place for _, place, *_ in self._places}.issuperset(places)

    def same(self) -> bool:
        """Whether they lie there still."""
        try:
            for tensor, place, memory, address in self._places:
                if place_of(tensor) != place or memory.data_ptr() != address:
                    return False
        except RuntimeError:  # of a kind that has no address any more
            return False
        return self.told


def _memory(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    """The memory and where it begins. It is kept, so that nothing else can come to lie there, unless somebody gives it back all
    the same (`resize_`, to have room on a GPU for a while): then it begins elsewhere.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    memory = local.untyped_storage()
    return memory, memory.data_ptr()


def _ordinary(tensor: torch.Tensor) -> bool:
    local = tensor._local_tensor if type(tensor) is DTensor else tensor
    return type(local) in PLAIN and local.layout is torch.strided and not local.is_quantized


class Tree:
    """A module with all that is in it, as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parts: list[tuple[nn.Module, type, tuple[Any, ...], set[str]]] = []
        told = True
        for part in _unique_modules(module):
            held = part.__dict__
            told = told and all(isinstance(held.get(name), dict) for name in CONTAINERS)
            if told:
                kept = tuple(held[name] for name in CONTAINERS)
                self._parts.append((part, type(part), kept, set(part._non_persistent_buffers_set)))
        self._kinds = {kind for _, kind, *_ in self._parts}
        self._objects = self._inside() if told else None
        tensors = [value for value in self._objects or () if isinstance(value, torch.Tensor)]
        self.places = Places(tensors)
        self.explains = self._objects is not None and self.places.told and all(_hooks_known(part) for part, *_ in self._parts)
        """Whether the state dict follows from what is seen here."""

    def same(self) -> bool:
        """Whether it still is."""
        found = self._inside() if self._objects is not None else None
        return found is not None and identical(found, self._objects or []) and self.places.same()

    def _inside(self) -> list[Any] | None:
        """All keys and values of all containers, in order, and which module they are of; None if a container is another one, or
        if a module has a state dict of its own way.
        """
        if not all(map(_by_the_book, self._kinds)):
            return None
        found: list[Any] = []
        for part, kind, (parameters, buffers, modules, hooks, pre_hooks), apart in self._parts:
            held = part.__dict__
            if (
                part.__class__ is not kind
                or held["_parameters"] is not parameters
                or held["_buffers"] is not buffers
                or held["_modules"] is not modules
                or held["_state_dict_hooks"] is not hooks
                or held["_state_dict_pre_hooks"] is not pre_hooks
                or not held.keys().isdisjoint(OWN_WAYS)
                or held["_non_persistent_buffers_set"] != apart
            ):
                return None
            found.append(part)
            for each in (parameters, buffers, modules, hooks, pre_hooks):
                if each:
                    found += each
                    found += each.values()
        return found


def _unique_modules(module: nn.Module) -> list[nn.Module]:
    found, waiting = dict[int, nn.Module](), [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += [child for child in part._modules.values() if child is not None]
    return list(found.values())


def _by_the_book(kind: type) -> bool:
    """Whether modules of this class make their part of a state dict as `nn.Module` does."""
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in OWN_WAYS)


def _hooks_known(module: nn.Module) -> bool:
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return all(str(getattr(hook, "__module__", "")).startswith(HOOKS_KNOWN) for hook in hooks)


class Held:
    """What an optimizer holds, as it was: its parameters in their groups, and its state of each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._objects = self._inside()
        values = [value for held in optimizer.state.values() if isinstance(held, dict) for value in held.values()]
        known = all(isinstance(held, dict) for held in optimizer.state.values())
        known = known and all(isinstance(value, (torch.Tensor, *FIXED)) for value in values)
        parameters = [parameter for group in self._groups for parameter in group]
        self.tensors = [*parameters, *(value for value in values if isinstance(value, torch.Tensor))]
        self.places = Places(self.tensors)
        self.explains = known and self.places.told
        """Whether the state follows from what is seen here."""

    def same(self) -> bool:
        """Whether it still is."""
        groups = self.optimizer.param_groups
        return (
            self.explains
            and len(groups) == len(self._groups)
            and all(identical(group["params"], known) for group, known in zip(groups, self._groups, strict=True))
            and identical(self._inside(), self._objects)
            and self.places.same()
        )

    def _inside(self) -> list[Any]:
        found: list[Any] = []
        for parameter, held in self.optimizer.state.items():
            found.append(parameter)
            if isinstance(held, dict):
                found += held
                found += held.values()
        return found


class Known:
    """What is known of the modules and optimizers of a state, and what follows from it. One thread.

    The same object is given for a module or optimizer as long as it is unchanged: whoever keeps something that follows from it
    compares by identity.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tree | Held] = {}
        self._seen: dict[int, Tree | Held] = {}
        self._parts: dict[str, Any] = {}
        self._parts_seen: dict[str, Any] = {}
        self.leaves: dict[str, Any] = {}
        """By path, the leaves of the last time."""

    def look(self) -> None:
        """Everything may have changed since. What the last look did not meet is let go."""
        self._held, self._seen = self._seen, {}
        self._parts, self._parts_seen = self._parts_seen, {}

    def over(self) -> None:
        """Nothing more is met in this look: what was kept for it alone is let go at once, it may be gigabytes."""
        self._held, self._parts = {}, {}

    def part(self, path: str) -> Any:
        """What was kept under a path the last time, or before in this look; None if nothing was."""
        return self._parts_seen.get(path) or self._parts.get(path)

    def keep(self, path: str, part: Any) -> None:
        """Something that follows from trees and holdings, which it is to be compared with when it is used again."""
        self._parts_seen[path] = part

    def tree(self, module: nn.Module) -> Tree:
        """The tree of a module now."""
        found = self._of(module, Tree)
        assert isinstance(found, Tree)
        return found

    def held(self, optimizer: Optimizer) -> Held:
        """What an optimizer holds now."""
        found = self._of(optimizer, Held)
        assert isinstance(found, Held)
        return found

    def _of(self, what: Any, make: Callable[[Any], Tree | Held]) -> Tree | Held:
        key = id(what)  # of something that is kept alive here, so no other has it
        found = self._seen.get(key)
        if found is None:
            known = self._held.get(key)
            found = self._seen[key] = known if known is not None and known.same() else make(what)
        return found
