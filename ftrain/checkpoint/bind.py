"""Putting a checkpoint into a live state, whatever layout that has: first everything is checked and the destinations of all
values are found, then arrays are read straight into the live memory, then what is no array is set.

So a state of another shape is refused before a byte of it is changed, and the second half cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from ftrain.checkpoint.per_rank import PerRank, dealt
from ftrain.checkpoint.pieces import Holding, holders_of, holding, owned
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.record import Node, StateError, items_of, kind_of, value_of
from ftrain.checkpoint.restore import batches, bits_of
from ftrain.checkpoint.state import Leaf, Names, dtype_name, local_of, module_state, modules_in, names_itself, parameter_names
from storage.checkpoint import Checkpoint
from storage.digest import digest_box
from storage.reader import Want

Setter = Callable[[], Any]
"""Called when all arrays are loaded: sets what is no array, and gives the value for whoever holds this one."""


@dataclass(slots=True)
class Binder:
    """One load of one checkpoint into one state."""

    checkpoint: Checkpoint
    rank: int
    world: int
    models: list[nn.Module]
    strict: bool = True
    targets: list[Holding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unwanted: set[str] = field(default_factory=set)
    """In the checkpoint, but not in this rank's state: another stage may want it."""
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def bind(self, live: Any, node: Node, path: str) -> Setter:
        """How `node` gets into `live`. What does not fit is added to the problems."""
        if isinstance(live, PerRank):
            return self._per_rank(live, node, path)
        if isinstance(live, torch.Tensor):
            return self._tensor(live, node, path)
        if isinstance(live, nn.Module):
            return self._module(live, node, path)
        if isinstance(live, Optimizer) and names_itself(live):
            return self._optimizer(live, node, path)
        if isinstance(live, MutableMapping):
            return self._mapping(live, node, path)
        if isinstance(live, list) and kind_of(node) == "list" and len(live) == len(node["list"]):
            return self._list(live, node, path)
        if callable(getattr(live, "load_state_dict", None)):
            found = self.build(node, path)
            return lambda: _with_state(live, found())
        return self.build(node, path)

    def build(self, node: Node, path: str) -> Setter:
        """A new value: arrays are made, whole."""
        made: dict[str, Any] = {}

        def make(each: Node) -> Any:
            if kind_of(each) == "dtype":
                return getattr(torch, each["dtype"])
            kind, dtype = each["type"]
            if kind_of(each) == "empty":
                tensor = torch.empty(each["empty"], dtype=getattr(torch, dtype))
            elif each["array"] in made:
                tensor = made[each["array"]]
            else:
                tensor = made[each["array"]] = self._made(each, path)
            return tensor.numpy() if kind == "numpy" else tensor

        try:
            value = value_of(node, make)
        except StateError as error:
            self.problems.append(f"{path}: {error}")
            return lambda: None
        return lambda: value

    def _made(self, node: Node, path: str) -> torch.Tensor:
        spec = self.checkpoint.array(node["array"])
        dtype = getattr(torch, node["type"][1])
        shape = spec.shape[:-1] if dtype.is_complex else spec.shape
        tensor = torch.empty(shape, dtype=dtype)
        self._target(tensor, node, path)
        return tensor

    def _target(self, tensor: torch.Tensor, node: Node, path: str) -> None:
        """Have the array of a node loaded into a tensor."""
        local = local_of(tensor)
        if local.is_conj() or local.is_neg():
            self.problems.append(f"{path} is conjugated or negated by a mark, and cannot be filled: resolve_conj, resolve_neg")
            return
        held = holding(Leaf(path, node["array"], tensor.detach(), True, False))
        stored = self.checkpoint.array(node["array"])
        if (stored.shape, stored.dtype, node["type"][1]) != (held.spec.shape, held.spec.dtype, dtype_name(tensor.dtype)):
            here = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            self.problems.append(f"{path} is {here}, in the checkpoint {node['type'][1]} {stored.shape}")
            return
        key = (node["array"], held.local.data_ptr())
        if key not in self._seen:
            self._seen.add(key)
            self.targets.append(held)

    def _tensor(self, live: torch.Tensor, node: Node, path: str) -> Setter:
        if kind_of(node) == "array":
            self._target(live, node, path)
        elif kind_of(node) != "empty" or list(live.shape) != node["empty"]:
            self.problems.append(f"{path} is a tensor of shape {tuple(live.shape)}, in the checkpoint it is {kind_of(node)}")
        return lambda: live

    def _parts(self, node: Node, wanted: Iterator[Any] | Sequence[Any], path: str, *, all_of_it: bool) -> dict[Any, Node]:
        """The parts of a dict that are wanted; those that are missing, and if `all_of_it` those nobody wants, are problems."""
        try:
            parts = items_of(node)
        except StateError as error:
            self.problems.append(f"{path}: {error}")
            return {}
        names = list(wanted)
        if self.strict:
            self.problems += [f"{path}.{name} is not in the checkpoint" for name in names if name not in parts]
            self.unwanted |= {f"{path}.{name}" for name in parts if name not in names} if all_of_it else set()
        return {name: parts[name] for name in names if name in parts}

    def _mapping(self, live: MutableMapping[Any, Any], node: Node, path: str) -> Setter:
        top = not path
        setters = {
            key: self.bind(live[key], each, f"{path}.{key}" if path else str(key))
            for key, each in self._parts(node, list(live), path or "state", all_of_it=top).items()
        }
        fresh = {} if top else {key: each for key, each in items_of(node).items() if key not in live}
        setters |= {key: self.build(each, f"{path}.{key}") for key, each in fresh.items()}

        def apply() -> Any:
            for key, setter in setters.items():
                live[key] = setter()
            return live

        return apply

    def _list(self, live: list[Any], node: Node, path: str) -> Setter:
        setters = [self.bind(each, part, f"{path}[{i}]") for i, (each, part) in enumerate(zip(live, node["list"], strict=True))]

        def apply() -> Any:
            live[:] = [setter() for setter in setters]
            return live

        return apply

    def _module(self, module: nn.Module, node: Node, path: str) -> Setter:
        names, raw = Names(module), module_state(module)
        held = {names.plain(name): value for name, value in raw.items()}
        setters = {
            name: self.bind(held[name], each, f"{path}.{name}")
            for name, each in self._parts(node, list(held), path, all_of_it=True).items()
        }
        plain = {name: setter for name, setter in setters.items() if not isinstance(held[name], torch.Tensor)}

        def apply() -> Any:
            if plain:  # what get_extra_state gave; set_extra_state takes it
                extra = {name: plain[names.plain(name)]() for name in raw if names.plain(name) in plain}
                set_model_state_dict(module, extra, options=StateDictOptions(strict=False))
            return module

        return apply

    def _optimizer(self, optimizer: Optimizer, node: Node, path: str) -> Setter:
        names = parameter_names(optimizer, self.models, path)
        whole = items_of(node)
        state, groups, group_of = items_of(whole["state"]), whole["groups"]["list"], items_of(whole["group_of"])
        setters: list[tuple[torch.Tensor, dict[str, Setter]]] = []
        settings: list[Setter] = []
        for index, group in enumerate(optimizer.param_groups):
            ours = [names[parameter] for parameter in group["params"]]
            moved = [name for name in ours if group_of.get(name) != index]
            if moved:
                there = group_of.get(moved[0])
                self.problems.append(f"{path}: {moved[0]} is in parameter group {index}, in the checkpoint in {there}")
                continue
            settings.append(self.build(groups[index], f"{path}.groups[{index}]"))
            for parameter, name in zip(group["params"], ours, strict=True):
                if name in state:
                    setters.append((parameter, self._slots(optimizer, group, parameter, state[name], f"{path}.{name}")))

        def apply() -> Any:
            for group, setting in zip(optimizer.param_groups, settings, strict=True):
                group.update(setting())
            optimizer.state.clear()
            for parameter, parts in setters:
                optimizer.state[parameter] = {key: setter() for key, setter in parts.items()}
            return optimizer

        return apply

    def _slots(
        self, optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, node: Node, path: str
    ) -> dict[str, Setter]:
        """An optimizer's state of one parameter: into what is there, or into new memory, cut as the parameter is."""
        live = optimizer.state.get(parameter, {})
        found = {}
        for key, each in items_of(node).items():
            here = live.get(key)
            if here is None and kind_of(each) == "array":
                here = self._like(parameter, group, each)
            found[key] = self.bind(here, each, f"{path}.{key}")
        return found

    def _like(self, parameter: torch.Tensor, group: Mapping[str, Any], node: Node) -> torch.Tensor:
        shape, dtype = self.checkpoint.array(node["array"]).shape, getattr(torch, node["type"][1])
        if shape == tuple(parameter.shape):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")

    def _per_rank(self, live: PerRank, node: Node, path: str) -> Setter:
        if kind_of(node) != "rank":
            self.problems.append(f"{path} is each rank's own, in the checkpoint it is one for all")
            return lambda: live
        values, rule = node["values"], live.other_world
        if len(values) == self.world:
            setter = self.bind(live.value, values[self.rank], path)
        elif rule == "first":
            setter = self.bind(live.value, values[0], path)
        elif rule == "split" and all(kind_of(each) == "list" for each in values):
            setter = self.build({"list": dealt([each["list"] for each in values], self.rank, self.world)}, path)
        else:
            why = "only lists can be dealt out anew" if rule == "split" else 'other_world="first" or "split" would allow it'
            self.problems.append(
                f"{path} was saved by {len(values)} ranks, each its own; this is a world of {self.world}: {why}"
            )
            return lambda: live

        def apply() -> Any:
            live.value = setter()
            return live

        return apply

    def check(self, ranks: Ranks) -> None:
        """Raise StateError on all ranks if something does not fit on one of them. A collective."""
        told = [
            set(msgspec.json.decode(each, type=list[str])) for each in ranks.gather(msgspec.json.encode(list(self.unwanted)))
        ]
        nobody = sorted(set.intersection(*told))
        problems = [*self.problems, *(f"{path} is in the checkpoint, but not in the state" for path in nobody)]
        said = ranks.agreed("; ".join(problems[:8]) if problems else None)
        if said is not None:
            step = self.checkpoint.step
            raise StateError(f"the checkpoint of step {step} does not fit the state ({said}); nothing was changed")

    # -- values ----------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Fill every destination from storage."""
        for some in batches(self.targets, lambda held: held.local):
            wants, staged = [], []
            for held in some:
                for region in held.regions:
                    values = held.part(region)
                    host = values if values.device.type == "cpu" else torch.empty(values.shape, dtype=values.dtype)
                    wants.append(Want(held.spec.name, region.box, bits_of(host)))
                    if host is not values:
                        staged.append((values, host))
            self.checkpoint.load(wants)
            for values, host in staged:
                values.copy_(host)

    def digests(self, ranks: Ranks) -> dict[str, int]:
        """The digest of every loaded array as it is live now. A collective."""
        holders = holders_of(self.targets, ranks)
        mine: dict[str, int] = {}
        done: set[str] = set()
        for held in self.targets:
            name = held.spec.name
            if name in done:  # two tensors of one array: each holds all of it
                continue
            done.add(name)
            for region in owned(held, holders, ranks.rank):
                values = np.ascontiguousarray(bits_of(held.part(region).cpu()))
                mine[name] = (mine.get(name, 0) + digest_box(values, held.spec.shape, region.box)) % 2**64
        total: dict[str, int] = {}
        for each in ranks.gather(msgspec.msgpack.encode(mine)):
            for name, value in msgspec.msgpack.decode(each, type=dict[str, int]).items():
                total[name] = (total.get(name, 0) + value) % 2**64
        return total


def _with_state(live: Any, held: Any) -> Any:
    live.load_state_dict(held)
    return live


def binder_of(checkpoint: Checkpoint, state: Mapping[str, Any], ranks: Ranks, *, strict: bool) -> Binder:
    """For a load of `checkpoint` into `state`."""
    return Binder(checkpoint, ranks.rank, ranks.world, list(modules_in(state.values())), strict)
