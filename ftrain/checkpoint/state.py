"""From a script's state to arrays and a record: names that no wrapper touches, each memory once.

Names are those of the model as it was written: `torch.compile` and DistributedDataParallel wrap it and put `_orig_mod.` and
`module.` in front of every name, and a checkpoint that keeps them loads only under the same wrappers. An optimizer's state is
named after its parameters, not numbered, so it survives a change of their order. Two names of one memory (tied weights) are one
array.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ftrain.checkpoint.known import Known, Place, Places, identical, place_of
from ftrain.checkpoint.per_rank import PerRank, RandomState
from ftrain.checkpoint.record import Node, StateError, kind_of, of_mapping, of_sequence, plain

MAX_NAME = 400
DEEPEST = 100
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor of the state. `alike`: every rank that holds it (whole) holds the same values; else the first one's count.
    `own`: it is this rank's own. The same leaf is used again as long as its `place` is the same.
    """

    path: str
    array: str
    tensor: torch.Tensor
    alike: bool
    own: bool
    place: Place = ()
    varies: bool = False
    """Its shape may be another one on this rank alone: it is its own, and no generator's."""

    @property
    def is_there(self) -> bool:
        """Whether it lies at its place still. What is kept keeps its memory, unless somebody gives that back all the same."""
        return bool(local_of(self.tensor).data_ptr() == self.place[0])


@dataclass(slots=True)
class Flat:
    """A state, taken apart."""

    record: Node
    leaves: list[Leaf]
    sources: list[torch.Tensor]
    """Of each leaf the tensor that is in the state now: its changes are counted."""
    tied: dict[str, list[str]]
    """Array -> other names of it."""


class Part(NamedTuple):
    """A part of a state that was taken apart by itself; valid for the same `key`, which is compared by identity."""

    key: list[Any]
    node: msgspec.Raw
    leaves: list[Leaf]
    sources: list[torch.Tensor]
    names: frozenset[str]
    addresses: frozenset[int]
    memory: dict[tuple[Any, ...], str]
    tied: dict[str, list[str]]


@dataclass(slots=True)
class _Flattener:
    """One walk through a state, in the order of its keys."""

    rank: int
    models: list[nn.Module]
    known: Known
    asks: bool = True
    leaves: list[Leaf] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    addresses: set[int] = field(default_factory=set)
    memory: dict[tuple[Any, ...], str] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    own: bool = False
    varies: bool = False
    alike: bool = False

    def node(self, value: Any, path: str, name: str) -> Node:
        """The node of any value; its tensors are added to the leaves."""
        if isinstance(value, PerRank):
            return self._per_rank(value, path, name)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, name, "tensor")
        if isinstance(value, np.ndarray):
            return self._tensor(from_numpy(value, path), path, name, "numpy")
        if isinstance(value, nn.Module):
            tree = self.known.tree(value)
            key = [tree] if tree.explains else None
            return self._apart(path, name, key, lambda walk: walk._module(value, path, name))
        if isinstance(value, Optimizer) and names_itself(value):
            return self._optimizer(value, path, name)
        if isinstance(value, Mapping):
            return of_mapping(value, path, lambda each, at: self.node(each, at, f"{name}/{segment(at, path)}"))
        if isinstance(value, list | tuple):
            return of_sequence(value, path, lambda each, at: self.node(each, at, f"{name}/{segment(at, path)}"))
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, np.generic):
            return plain(value.item(), path)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return self.node(value.state_dict(), path, name) if self.asks else None
        return plain(value, path)

    def _apart(self, path: str, name: str, key: list[Any] | None, walk: Callable[[_Flattener], Node]) -> Node:
        """A part of the state, as it was found the last time if its key says so. (None: it has none.) What is found must lie
        where the key's first says: an FSDP2 module that is gathered just now shows other tensors than it saves.
        """
        if key is None:
            return walk(self)
        places: Places = key[0].places
        key = [*key, *map(sys.intern, (name, path)), self.own, self.alike]
        part: Part | None = self.known.part(path)
        told = part is not None and identical(part.key, key)
        if part is None or not told:
            inner = _Flattener(self.rank, self.models, self.known, self.asks)
            inner.own, inner.varies, inner.alike = self.own, self.varies, self.alike
            node = msgspec.Raw(msgspec.json.encode(walk(inner)))
            names, addresses = frozenset(inner.names), frozenset(inner.addresses)
            part = Part(key, node, inner.leaves, inner.sources, names, addresses, inner.memory, inner.tied)
            told = places.hold(leaf.place for leaf in part.leaves)
        if told:
            self.known.keep(path, part)
        if not (self.names.isdisjoint(part.names) and self.addresses.isdisjoint(part.addresses)):
            return walk(self)  # something of it may be met for the second time: it is named after the first
        self.leaves += part.leaves
        self.sources += part.sources
        self.names |= part.names
        self.addresses |= part.addresses
        self.memory |= part.memory
        self.tied |= {array: list(others) for array, others in part.tied.items()}
        return part.node

    def _per_rank(self, value: PerRank, path: str, name: str) -> Node:
        before = self.own, self.varies
        self.own, self.varies = True, not isinstance(value.value, RandomState)
        node = self.node(value.value, path, f"{name}/rank-{self.rank:05d}")
        self.own, self.varies = before
        return {"rank": value.other_world, "values": [node]}

    def _module(self, module: nn.Module, path: str, name: str) -> Node:
        names = Names(module)
        held = {names.plain(each): value for each, value in module_state(module).items()}
        twins = {each: first for each, first in names.twins.items() if each in held and first in held}
        parts: dict[str, Node] = {}
        for each, value in held.items():
            if each not in twins:
                parts[each] = self._alike(value, f"{path}.{each}", f"{name}/{each}", each in names.parameters)
        for each, first in twins.items():
            parts[each] = parts[first]
            if kind_of(parts[first]) == "array":
                self.tied.setdefault(parts[first]["array"], []).append(stored_name(f"{name}/{each}"))
        return {"map": parts}

    def _alike(self, value: Any, path: str, name: str, alike: bool) -> Node:
        before, self.alike = self.alike, alike
        node = self.node(value, path, name)
        self.alike = before
        return node

    def _optimizer(self, optimizer: Optimizer, path: str, name: str) -> Node:
        held, trees = self.known.held(optimizer), [self.known.tree(model) for model in self.models]
        key = [held, *trees] if held.explains and all(tree.explains for tree in trees) else None
        state = self._apart(f"{path}.state", name, key, lambda walk: walk._moments(optimizer, path, name))
        group_of = self._apart(f"{path}.group_of", name, key, lambda walk: walk._group_of(optimizer, path))
        groups: list[Node] = []
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: each for key, each in group.items() if key != "params"}
            groups.append(self._alike(settings, f"{path}.groups[{index}]", f"{name}/group-{index}", True))
        return {"map": {"state": state, "groups": {"list": groups}, "group_of": group_of}}

    def _moments(self, optimizer: Optimizer, path: str, name: str) -> Node:
        names = parameter_names(optimizer, self.models, path)
        state: dict[str, Node] = {}
        for parameter, held in optimizer.state.items():
            of = names.get(parameter)
            if of is None:
                what = f"a tensor of shape {tuple(parameter.shape)}" if isinstance(parameter, torch.Tensor) else repr(parameter)
                raise StateError(f"{path} holds state of {what}, which is in none of its groups and in no module of the state")
            parts = {key: self._alike(each, f"{path}.{of}.{key}", f"{name}/{key}/{of}", True) for key, each in held.items()}
            state[of] = {"map": parts}
        return {"map": state}

    def _group_of(self, optimizer: Optimizer, path: str) -> Node:
        names = parameter_names(optimizer, self.models, path)
        groups = enumerate(optimizer.param_groups)
        return {"map": {names[parameter]: index for index, group in groups for parameter in group["params"]}}

    def _tensor(self, tensor: torch.Tensor, path: str, name: str, kind: str) -> Node:
        if nn.parameter.is_lazy(tensor):
            raise StateError(f"{path} has no shape yet: run the lazy module once before its state is saved or loaded")
        kind_and_type = [kind, dtype_name(tensor.dtype)]
        if tensor.numel() == 0:
            return {"empty": list(tensor.shape), "type": kind_and_type}
        check(tensor, path)
        place = place_of(tensor)
        key = (place, self.own)
        whole = kind == "tensor" and not isinstance(tensor, DTensor)  # of a shard some rank may hold nothing, and cannot tell
        if whole and key in self.memory:
            self.tied.setdefault(self.memory[key], []).append(stored_name(name))
            return {"array": self.memory[key], "type": kind_and_type}
        array = self._unique(name)
        if whole:
            self.memory[key] = array
            self.addresses.add(place[0])
        self.leaves.append(self._leaf(path, array, tensor, place))
        self.sources.append(tensor)
        return {"array": array, "type": kind_and_type}

    def _leaf(self, path: str, array: str, tensor: torch.Tensor, place: Place) -> Leaf:
        """That of the last time, if it lies where it did."""
        known: Leaf | None = self.known.leaves.get(path)
        wanted = array, self.alike, self.own, place
        if known is not None and (known.array, known.alike, known.own, known.place) == wanted and known.is_there:
            return known
        return Leaf(path, array, tensor.detach(), self.alike, self.own, place, self.varies)

    def _unique(self, name: str) -> str:
        name = stored_name(name)
        found, number = name, 1
        while found in self.names:
            number += 1
            found = f"{name}.{number}"
        self.names.add(found)
        return found


def flatten(state: Mapping[str, Any], rank: int = 0, known: Known | None = None, *, asks: bool = True) -> Flat:
    """Take a state apart. Raises StateError, naming what cannot be saved.

    `known`: what is known from the last time, its `look` just begun. `asks`: objects that are neither modules nor PyTorch's own
    optimizers are asked for their `state_dict`; else they stand for themselves.
    """
    known = known or Known()
    walk = _Flattener(rank, list(modules_in(state.values())), known, asks)
    record = of_mapping(state, "", lambda each, at: walk.node(each, at, segment(at, "")))
    known.over()
    if not identical(walk.leaves, list(known.leaves.values())):
        known.leaves = {leaf.path: leaf for leaf in walk.leaves}
    return Flat(record, walk.leaves, walk.sources, walk.tied)


def modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules in a state, to name the optimizers' parameters by."""
    return (value for value in objects_in(values) if isinstance(value, nn.Module))


def objects_in(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """All that is in a state, but nothing of what modules and optimizers hold. Raises StateError if it holds itself."""
    if depth > DEEPEST:
        raise StateError(f"the state is nested deeper than {DEEPEST} levels: does a part of it hold itself?")
    for value in values:
        if isinstance(value, PerRank):
            value = value.value
        if isinstance(value, Mapping):
            yield from objects_in(value.values(), depth + 1)
        elif isinstance(value, list | tuple):
            yield from objects_in(value, depth + 1)
        else:
            yield value


def module_state(module: nn.Module) -> dict[str, Any]:
    """A module's own state dict, its tensors live."""
    return dict(get_model_state_dict(module))


class Names:
    """The names of a model's parameters and buffers, without those of the wrappers around it or in it."""

    def __init__(self, model: nn.Module) -> None:
        inside = [name for name, part in model.named_modules() if isinstance(part, nn.parallel.DistributedDataParallel)]
        self._skipped = {f"{name}.module" if name else "module" for name in inside}
        self.parameters: dict[str, torch.Tensor] = {}
        self.twins: dict[str, str] = {}
        """Name -> the first name of the same parameter or buffer."""
        first: dict[torch.Tensor, str] = {}
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            ours = self.plain(name)
            if isinstance(value, nn.Parameter):
                self.parameters[ours] = value
            if first.setdefault(value, ours) != ours:
                self.twins[ours] = first[value]

    def plain(self, name: str) -> str:
        """A name as the model alone has it."""
        parts, raw = [], ""
        for part in name.split("."):
            raw = f"{raw}.{part}" if raw else part
            if part not in WRAPPERS and raw not in self._skipped:
                parts.append(part)
        return ".".join(parts)


def parameter_names(optimizer: Optimizer, models: Iterable[nn.Module], path: str) -> dict[torch.Tensor, str]:
    """The name of each parameter of an optimizer. Raises StateError if its model is not in the state."""
    names: dict[torch.Tensor, str] = {}
    taken: set[str] = set()
    for number, model in enumerate(models):
        for name, parameter in Names(model).parameters.items():
            if parameter not in names:
                names[parameter] = name if name not in taken else f"{number}.{name}"
                taken.add(names[parameter])
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise StateError(
                    f"{path}: parameter {index} of a group, of shape {tuple(parameter.shape)}, belongs to no module of the "
                    "state, so it has no name: put its model into the state, too"
                )
    return names


def names_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is what PyTorch's base class says it is (others are asked for their state_dict)."""
    kind = type(optimizer)
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict


def segment(path: str, parent: str) -> str:
    """The last part of a path, as a part of an array's name."""
    last = path[len(parent) :].strip(".[]'\"")
    return last or "value"


@functools.lru_cache(1 << 16)
def stored_name(name: str) -> str:
    """A name that storage takes: letters, digits and `_.-` between slashes."""
    parts = [re.sub(r"[^A-Za-z0-9_.-]", "_", part) or "_" for part in name.split("/")]
    parts = [f"x{part}" if part.startswith("__") or part in (".", "..", "zarr.json") else part for part in parts]
    whole = "/".join(parts)
    if len(whole) <= MAX_NAME:
        return whole
    return f"{whole[: MAX_NAME - 20]}-{blake2b(whole.encode(), digest_size=8).hexdigest()}"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def check(tensor: torch.Tensor, path: str) -> None:
    """Refuse what is more than memory and a shape. Raises StateError."""
    odd = not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)
    if odd or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "a meta tensor" if tensor.is_meta else f"a {type(tensor).__name__} with layout {tensor.layout}"
        raise StateError(f"{path} is {what}: only plain tensors and DTensors are saved")


def from_numpy(values: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """The same memory as a tensor (a copy if NumPy does not let it be written). Raises StateError for types torch lacks."""
    try:
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    except TypeError as error:
        raise StateError(f"{path} is a NumPy array of {values.dtype}, which has no type of torch: {error}") from error
