"""What is known of a state from the last time never hides that it has changed: each change, against one taken apart anew."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import ftrain
from ftrain.checkpoint.beside import Beside, memory_of
from ftrain.checkpoint.known import Known
from ftrain.checkpoint.pieces import Pieces, holdings_of, plan
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.state import Flat, flatten, local_of

State = dict[str, Any]


class Net(nn.Module):
    """A square weight (it can be transposed in place), a buffer, one that is not saved, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cached", torch.zeros(2), persistent=False)
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.b.weight
        self.here, self.there = nn.Module(), nn.Module()
        self.here.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.norm(self.b(self.a(x))))
        return out


def state_of() -> State:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    other.param_groups[0]["params"] = [net.a.bias]
    state = {
        "net": net,
        "optimizer": optimizer,
        "other": other,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "average": {"w": torch.arange(16.0).view(4, 4), "z": torch.randn(3, dtype=torch.complex64)},
        "random": ftrain.per_rank(ftrain.RandomState()),
        "seen": [1, 2.5],
    }
    train(state)
    return state


def train(state: State) -> None:
    state["optimizer"].zero_grad()
    state["net"](torch.randn(8, 4)).square().mean().backward()
    state["optimizer"].step()
    state["schedule"].step()


def moment(state: State) -> dict[str, Any]:
    held: dict[str, Any] = state["optimizer"].state[state["net"].a.weight]
    return held


def set_(of: Any, name: str, value: Any) -> None:
    setattr(of, name, value)


def replace(state: State, module: nn.Module, name: str, values: torch.Tensor) -> None:
    """Another parameter, in the optimizer as well."""
    old, new = getattr(module, name), nn.Parameter(values)
    setattr(module, name, new)
    for group in (*state["optimizer"].param_groups, *state["other"].param_groups):
        group["params"][:] = [new if each is old else each for each in group["params"]]
    held = state["optimizer"].state
    if old in held:
        held[new] = held.pop(old)


class Scaled(nn.Linear):
    """Saves more than its tree shows."""

    def get_extra_state(self) -> int:
        return self.out_features

    def set_extra_state(self, state: int) -> None:
        pass


def halved(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


def moved(state: State) -> None:
    """The same parameter under the same name, in the next module."""
    state["net"].there._parameters["w"] = state["net"].here._parameters.pop("w")


def patched(state: State) -> None:
    """Another attribute goes, so there are as many as before."""
    del state["net"].a.in_features
    state["net"].a.state_dict = lambda *args, **kwargs: {}


CHANGES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda s: None,
    "a step": train,
    "values in place": lambda s: s["net"].a.weight.data.fill_(3),
    "data": lambda s: set_(s["net"].a.weight, "data", torch.full((4, 4), 2.0)),
    "data, transposed": lambda s: set_(s["net"].a.weight, "data", s["net"].a.weight.data.t()),
    "data, another type": lambda s: set_(s["net"].a.weight, "data", s["net"].a.weight.data.view(torch.int32).float()),
    "data, another half of one memory": lambda s: set_(s["net"].a.weight, "data", torch.arange(32.0)[16:].view(4, 4)),
    "a new parameter": lambda s: replace(s, s["net"].a, "bias", torch.ones(4)),
    "a new parameter on the old memory": lambda s: replace(s, s["net"].norm, "bias", s["net"].norm.bias.data),
    "a buffer": lambda s: set_(s["net"].norm, "running_mean", torch.ones(4)),
    "buffers that are none": lambda s: s["net"].norm._buffers.update(running_mean=None, running_var=None),
    "a buffer that is saved now": lambda s: s["net"]._non_persistent_buffers_set.clear(),
    "a module": lambda s: set_(s["net"], "norm", nn.Identity()),
    "one more module": lambda s: s["net"].add_module("more", nn.Linear(2, 2)),
    "a module less": lambda s: s["net"].__delattr__("norm"),
    "untied": lambda s: set_(s["net"].c, "weight", nn.Parameter(s["net"].b.weight.detach().clone())),
    "tied": lambda s: set_(s["net"].a, "weight", s["net"].b.weight),
    "a hook": lambda s: s["net"].a.register_state_dict_post_hook(halved),
    "extra state": lambda s: set_(s["net"], "b", Scaled(4, 4, bias=False)),
    "a patched state dict": lambda s: set_(s["net"].a, "_save_to_state_dict", lambda state, prefix, keep: None),
    "a patched state dict instead of another attribute": patched,
    "a parameter of another module": moved,
    "a moment": lambda s: moment(s).update(exp_avg=torch.ones(4, 4)),
    "a moment more": lambda s: moment(s).update(third=torch.ones(4)),
    "a moment less": lambda s: moment(s).pop("exp_avg_sq"),
    "a number among the moments": lambda s: moment(s).update(count=7),
    "moments of nobody": lambda s: s["optimizer"].state.update({nn.Parameter(torch.ones(2)): {"exp_avg": torch.ones(2)}}),
    "moments of no tensor": lambda s: s["optimizer"].state.update({"all": {"count": 1}}),
    "a lazy module": lambda s: s["net"].add_module("lazy", nn.LazyLinear(2)),
    "another number among the moments": lambda s: moment(s).update(count=8),
    "a list among the moments": lambda s: moment(s).update(history=[1, 2]),
    "a longer list among the moments": lambda s: moment(s)["history"].append(3),
    "state that is gone": lambda s: s["optimizer"].state.clear(),
    "state that comes back": train,
    "a learning rate": lambda s: s["optimizer"].param_groups[0].update(lr=0.5),
    "a learning rate that is a tensor": lambda s: s["optimizer"].param_groups[0].update(lr=torch.tensor(0.5)),
    "a group more": lambda s: s["optimizer"].add_param_group({"params": [nn.Parameter(s["net"].a.weight.data)]}),
    "groups in another order": lambda s: s["optimizer"].param_groups[0]["params"].reverse(),
    "the average, in place": lambda s: s["average"]["w"].add_(1),
    "another average": lambda s: s["average"].update(w=torch.ones(4, 4)),
    "the average, transposed": lambda s: s["average"].update(w=s["average"]["w"].t()),
    "the average is a weight": lambda s: s["average"].update(w=s["net"].a.weight),
    "complex, conjugated": lambda s: s["average"].update(z=s["average"]["z"].conj()),
    "numbers": lambda s: s["seen"].append(9),
    "another key": lambda s: s.update(more=torch.ones(2)),
    "a key less": lambda s: s.pop("average"),
    "keys in another order": lambda s: s.update(net=s.pop("net")),
    "another net": lambda s: s.update(net=Net()),
}
NAMELESS = ("a module", "a module less", "tied", "a group more", "another net", "moments of nobody", "moments of no tensor")
"""Then a parameter of the optimizer is in no module."""
REFUSED = (*NAMELESS, "a lazy module")


def found(state: State, known: Known | None) -> tuple[Any, ...] | str:
    """All that is found of a state, values included."""
    torch.manual_seed(0)  # the generators' state is part of it
    try:
        flat = flatten(state, 0, known)
    except ftrain.StateError as error:
        return str(error)
    leaves = [(leaf.path, leaf.array, leaf.alike, leaf.own, leaf.tensor.dtype) for leaf in flat.leaves]
    values = [local_of(leaf.tensor).resolve_conj().tolist() for leaf in flat.leaves]
    assert [source.data_ptr() for source in flat.sources] == [leaf.tensor.data_ptr() for leaf in flat.leaves]
    return msgspec.json.decode(msgspec.json.encode(flat.record)), leaves, values, flat.tied


def checks(state: State, known: Known, name: str) -> None:
    """Three looks: at what has changed, and at what has not since."""
    for _ in range(3):
        known.look()
        with_known = found(state, known)
        assert with_known == found(state, None), name
        assert isinstance(with_known, str) == (name in REFUSED), name


@pytest.mark.parametrize(
    "name", [name for name in CHANGES if not name.startswith(("another number", "a longer", "state that"))]
)
def test_every_change_is_seen(name: str) -> None:
    state, known = state_of(), Known()
    checks(state, known, "at the beginning")
    CHANGES[name](state)
    checks(state, known, name)


def test_changes_one_after_the_other() -> None:
    state, known = state_of(), Known()
    checks(state, known, "at the beginning")
    for name, change in CHANGES.items():
        if name not in (*REFUSED, "a hook", "extra state") and "a patched state dict" not in name:
            change(state)
            checks(state, known, name)


def at(address: int) -> torch.Tensor:
    """A tensor that lies there, whatever does."""
    memory = (ctypes.c_char * 64).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(4, 4)


def test_memory_that_was_given_back_and_is_another_tensor_s_now() -> None:
    """As on a GPU whose memory was needed for something else for a while."""
    state, known = state_of(), Known()
    known.look()
    flatten(state, 0, known)
    weight, average = state["net"].a.weight, state["average"]
    memory = [weight.untyped_storage(), average["w"].untyped_storage()]
    weight.data, average["w"] = (at(each.data_ptr()) for each in memory)
    for each in memory:
        each.resize_(0)
    known.look()
    flat = flatten(state, 0, known)
    assert [leaf.tensor.data_ptr() for leaf in flat.leaves] == [source.data_ptr() for source in flat.sources]
    assert {leaf.path: leaf.tensor.data_ptr() for leaf in flat.leaves}["net.a.weight"] == weight.data_ptr()
    assert {leaf.path: leaf.tensor.data_ptr() for leaf in flat.leaves}["average.w"] == average["w"].data_ptr()


def test_a_class_that_is_patched_later() -> None:
    class Own(nn.Linear):
        pass

    state: State = {"net": nn.Sequential(Own(4, 4), nn.Linear(4, 4))}
    known = Known()
    checks(state, known, "at the beginning")
    Own.state_dict = lambda *args, **kwargs: {}  # type: ignore[assignment]
    checks(state, known, "patched")


def pieces_of(flat: Flat) -> Pieces:
    return Pieces(plan(flat, holdings_of(flat), Ranks()))


def test_nothing_is_done_twice() -> None:
    """The same leaves, pieces and choice of what may wait, by identity: so nothing was worked out again but the generators'."""
    state, known = state_of(), Known()
    beside = Beside(True, lambda: None)
    pieces, before = None, None
    for look in range(3):
        train(state)
        known.look()
        later = beside.watch(state, known)
        flat = flatten(state, 0, known)
        pieces = pieces or pieces_of(flat)
        assert pieces.fits(flat)
        now = [flat.leaves, pieces.of(flat)]
        chosen = (later, pieces.put_off(flat, later))
        if before is not None:
            for one, other in zip(now, before[0], strict=True):
                moved = [a for a, b in zip(one, other, strict=True) if a is not b]
                assert len(moved) == 1 + ("numpy" in str(moved))
            assert chosen[0] is before[1][0]
        held = {memory_of(t) for o in (state["optimizer"], state["other"]) for t in known.held(o).tensors}
        assert chosen[1].parts == [memory_of(piece.tensor) in held for piece in now[1]], look
        before = now, chosen
    beside.close()


def test_what_is_not_there_any_more_is_let_go() -> None:
    state, known = state_of(), Known()
    for _ in range(2):
        known.look()
        flatten(state, 0, known)
    net, optimizer = weakref.ref(state.pop("net")), weakref.ref(state.pop("optimizer"))
    del state["other"], state["schedule"]
    known.look()
    flatten(state, 0, known)
    gc.collect()
    assert net() is None
    assert optimizer() is None
    assert not known._held
    assert not known._seen
    assert not known._parts
    assert not any(path.startswith(("net", "optimizer")) for path in known.leaves)
