"""One state, written by four FSDP2 ranks with dims that nothing divides, read under every other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ftrain
from ftrain.checkpoint.record import StateError
from storage.local import LocalStore
from storage.run import RunStore
from tests.world import run_world

pytestmark = pytest.mark.dist

STEP = 3


class Odd(nn.Module):
    """Dims that no world size divides, a tied weight, a buffer, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(103, 30)
        self.up = nn.Linear(30, 62)
        self.down = nn.Linear(62, 30)
        self.head = nn.Linear(30, 103, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.emb(tokens)))) * self.scale


def sharded(layout: str, world: int) -> nn.Module:
    """The model under a layout, its values the same under all."""
    torch.manual_seed(0)
    model = Odd()
    tensor_parallel = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), tensor_parallel)
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], tensor_parallel)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer as one process would hold it, by an own way to its name."""
    model, optimizer = state["model"], state["optimizer"]
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        held = {"value": parameter, **optimizer.state[parameter]}
        for key, tensor in held.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name}:{key}"] = full.detach().clone()
    return found


def trained(layout: str, world: int) -> dict[str, Any]:
    """A state whose every tensor holds something that is not what it began with."""
    model = sharded(layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": "written"}


def write(rank: int, url: str, layout: str, world: int) -> dict[str, torch.Tensor]:
    """Save under a layout; what was saved."""
    state = trained(layout, world)
    checkpointer = ftrain.Checkpointer(url)
    assert checkpointer.load(state) == 0
    checkpointer.save(STEP, state)
    assert checkpointer.wait() == STEP
    found = whole(state)
    checkpointer.close()
    return found


def read(rank: int, url: str, layout: str, world: int) -> dict[str, torch.Tensor]:
    """Load under another layout into a state that holds other values."""
    model = sharded(layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0, foreach=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model, "optimizer": optimizer, "note": ""}
    checkpointer = ftrain.Checkpointer(url)
    assert checkpointer.load(state) == STEP
    assert state["note"] == "written"
    assert optimizer.param_groups[0]["lr"] == 0.1
    found = whole(state)
    checkpointer.close()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_four_fsdp_ranks_are_read_on_three_two_and_one_and_under_tp(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    written = run_world(write, 4, url, "fsdp", 4)[0]
    for layout, world in [("fsdp", 3), ("fsdp", 2), ("", 1), ("tp", 2)]:
        for found in run_world(read, world, url, layout, world):
            assert_equal(found, written)
    checkpoint = RunStore(LocalStore(url)).open(STEP)
    assert checkpoint.verify().ok
    assert checkpoint.array("model/emb.weight").attributes["tied"] == ["model/head.weight"]
    assert not any("head" in name for name in checkpoint.names)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world"), [("fsdp+tp", 4), ("hsdp", 4), ("tp", 2), ("ddp", 3), ("", 1)])
def test_every_layout_is_read_under_every_other(tmp_path: Path, layout: str, world: int) -> None:
    url = str(tmp_path / "run")
    written = run_world(write, world, url, layout, world)[0]
    for other, ranks in [("fsdp", 3), ("fsdp+tp", 4), ("hsdp", 4), ("tp", 2), ("ddp", 2), ("", 1)]:
        for found in run_world(read, ranks, url, other, ranks):
            assert_equal(found, written)


def own_state(rank: int, url: str) -> str:
    """Save what differs between ranks, marked and unmarked; what the unmarked number is answered with."""
    checkpointer = ftrain.Checkpointer(url)
    state: dict[str, Any] = {"seen": rank, "buffer": torch.full((3,), float(rank))}
    checkpointer.load(state)
    with pytest.raises(StateError) as caught:
        checkpointer.save(1, state)
    state["seen"] = ftrain.per_rank([rank, rank], other_world="split")
    state["rng"] = ftrain.per_rank({"bits": torch.full((2,), rank)}, other_world="first")
    checkpointer.save(1, state)
    checkpointer.close()
    return str(caught.value)


def found_state(rank: int, url: str) -> tuple[list[int], list[int], list[float]]:
    checkpointer = ftrain.Checkpointer(url)
    rng = ftrain.per_rank({"bits": torch.zeros(2, dtype=torch.int64)}, other_world="first")
    state = {"seen": ftrain.per_rank([], other_world="split"), "rng": rng, "buffer": torch.zeros(3)}
    checkpointer.load(state)
    checkpointer.close()
    return state["seen"].value, rng.value["bits"].tolist(), state["buffer"].tolist()


def test_what_each_rank_has_for_itself_must_be_marked(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    refusals = run_world(own_state, 2, url)
    assert all("seen differs between ranks (0 and 1)" in text for text in refusals)
    assert run_world(found_state, 2, url) == [([0, 0], [0, 0], [0.0] * 3), ([1, 1], [1, 1], [0.0] * 3)]
    assert run_world(found_state, 1, url) == [([0, 0, 1, 1], [0, 0], [0.0] * 3)]


def refused_saves(rank: int, url: str) -> str:
    """Save for a run that has gone on without us; what the next save is answered with."""
    checkpointer = ftrain.Checkpointer(url, on_error="raise")
    state: dict[str, Any] = {"seen": torch.ones(3)}
    checkpointer.load(state)
    torch.distributed.barrier()
    if rank == 0:
        RunStore(LocalStore(url)).take_epoch(owner={})
    torch.distributed.barrier()
    checkpointer.save(1, state)
    checkpointer._keepers.wait()
    with pytest.raises(ftrain.SaveError) as caught:
        checkpointer.save(2, state)
    checkpointer.close()
    return str(caught.value)


def test_a_commit_that_fails_on_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_world(refused_saves, 2, str(tmp_path / "run"))
    assert first == second
    assert "rank 0: step 1 is not saved: Fenced" in first


def write_overlapped(rank: int, url: str, layout: str, world: int) -> dict[str, torch.Tensor]:
    """Save with overlap, and go on at once: a forward and backward beside the copy, and a step that waits for it."""
    state = trained(layout, world)
    model, optimizer = state["model"], state["optimizer"]
    checkpointer = ftrain.Checkpointer(url, overlap=True)
    assert checkpointer.load(state) == 0
    found = whole(state)
    checkpointer.save(STEP, state)
    module = model.module if layout == "ddp" else model
    if layout == "fsdp":
        model(torch.arange(30)[None]).square().mean().backward()
    else:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpointer.wait() == STEP
    checkpointer.close()
    return found


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_an_overlapped_save_of_several_ranks_is_the_state_at_the_call(tmp_path: Path, layout: str) -> None:
    url = str(tmp_path / "run")
    written = run_world(write_overlapped, 2, url, layout, 2)[0]
    assert_equal(run_world(read, 1, url, "", 1)[0], written)


def saves_in_a_row(rank: int, url: str) -> list[bool]:
    """Overlapped saves of a state that changes between them in every way, and a checkpointer that is new to it each time.
    Whether anything had to be planned anew.
    """
    model = sharded("fsdp", 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    average = torch.zeros(5)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": average, "seen": 0}
    checkpointer = ftrain.Checkpointer(f"{url}/overlapped", overlap=True, on_error="raise")
    checkpointer.load(state)
    changed, pieces = [], None
    for step in range(1, 7):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.01
        if step == 4:
            model.up.bias.data = model.up.bias.data.clone()  # type: ignore[union-attr]
        if step == 5:
            state["average"] = torch.full((5,), 7.0)
        fresh = ftrain.Checkpointer(f"{url}/fresh-{step}")
        fresh.load(state)
        fresh.save(step, state)
        fresh.close()
        checkpointer.save(step, state)
        changed.append(checkpointer._pieces is not pieces)
        pieces = checkpointer._pieces
        state["seen"] = step
        optimizer.zero_grad()
        model(torch.arange(30)[None]).square().mean().backward()
        optimizer.step()
    checkpointer.close()
    return changed


@pytest.mark.slow
def test_overlapped_saves_in_a_row_are_what_somebody_who_knows_nothing_saves(tmp_path: Path) -> None:
    planned = run_world(saves_in_a_row, 2, str(tmp_path))
    assert planned == [[True, True, False, False, False, False]] * 2  # moments appear with the first step
    for step in range(1, 7):
        found, expected = (RunStore(LocalStore(str(tmp_path / name))).open(step) for name in ("overlapped", f"fresh-{step}"))
        assert found.manifest.digests == expected.manifest.digests
        assert found.progress == expected.progress


def wrong_on_one_rank(rank: int, url: str) -> list[str]:
    """All that one rank alone can get wrong; what each is answered with. What is right in between is saved."""
    checkpointer = ftrain.Checkpointer(url, on_error="raise")
    state: dict[str, Any] = {"w": torch.ones(3), "own": ftrain.per_rank(torch.ones(2))}
    with pytest.raises(StateError) as at_load:
        checkpointer.load(state | ({"bad": object()} if rank else {}))
    checkpointer.load(state)
    answers = []

    def refused(step: int, **more: Any) -> None:
        with pytest.raises((ValueError, StateError, ftrain.SaveError)) as caught:
            checkpointer.save(step, state | more)
        answers.append(f"{type(caught.value).__name__}: {caught.value}")

    checkpointer.save(1, state)
    refused(2, **({"bad": object()} if rank else {}))
    refused(2, **({"bad": torch.empty(3, device="meta")} if rank else {}))
    refused(2 + rank)
    refused(2 - rank)
    checkpointer.save(2, state)
    state["own"] = ftrain.per_rank(torch.ones(2 + rank))
    checkpointer.save(3, state)
    assert checkpointer.wait() == 3
    checkpointer.close()
    return [*answers, str(at_load.value)]


def test_what_is_wrong_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_world(wrong_on_one_rank, 2, str(tmp_path))
    whole = "bad is a builtins.object, which is not saved"
    assert first[0].startswith(f"SaveError: rank 1: {whole}")
    assert second[0].startswith(f"StateError: {whole}")
    assert (first[1], second[1]) == (
        "SaveError: rank 1: bad is a meta tensor: only plain tensors and DTensors are saved",
        "StateError: bad is a meta tensor: only plain tensors and DTensors are saved",
    )
    assert first[2] == second[2] == "ValueError: the ranks save steps 2 to 3: all save after the same step"
    assert first[3].startswith("SaveError: rank 1: step 1 comes after step 1")
    assert second[3].startswith("ValueError: step 1 comes after step 1")
    assert first[4] == second[4]
    assert first[4].startswith(f"this state could not be saved (rank 1: {whole}")
    checkpoint = RunStore(LocalStore(str(tmp_path))).open(3)
    assert [checkpoint.array(f"own/rank-0000{rank}").shape for rank in range(2)] == [(2,), (3,)]


def gathered(rank: int, url: str) -> None:
    """Save an FSDP2 model while its parameters are gathered (odd steps), and while they are not, when they are changed."""
    model = fully_shard(nn.Linear(6, 4), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    state = {"model": model}
    checkpointer = ftrain.Checkpointer(url)
    checkpointer.load(state)
    for step in range(1, 7):
        with torch.no_grad():
            if step % 2:
                model(torch.ones(2, 6))
            for parameter in model.parameters():
                if isinstance(parameter, DTensor):
                    parameter.fill_(step)
        checkpointer.save(step, state)
    checkpointer.close()


@pytest.mark.slow
def test_a_model_that_is_gathered_just_now_is_saved_by_its_shards(tmp_path: Path) -> None:
    run_world(gathered, 2, str(tmp_path))
    run = RunStore(LocalStore(str(tmp_path)))
    found = [run.open(step).read("model/weight") for step in range(1, 7)]
    assert all(values.shape == (4, 6) for values in found)
    assert [float(values.max()) for values in found[1:]] == [2, 2, 4, 4, 6]


def wrong_while_others_go_on(rank: int, url: str) -> list[str]:
    """The same with overlap, where a rank that has no doubt of a save does not wait for the others."""
    checkpointer = ftrain.Checkpointer(url, on_error="raise", overlap="manual")
    state: dict[str, Any] = {"w": torch.ones(3), "rng": ftrain.per_rank(ftrain.RandomState())}
    checkpointer.load(state)
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    checkpointer.wait()
    answers = []
    for step, more in ((3, {"bad": object()}), (5, {}), (7, {"more": torch.ones(2)})):
        try:
            checkpointer.save(step + (step == 5 and rank), state | (more if rank else {}))
        except (StateError, ftrain.SaveError, ValueError) as error:
            answers.append(f"{type(error).__name__}: {error}")
        try:
            checkpointer.wait()
        except ftrain.SaveError as error:
            answers.append(str(error))
    for step in (7, 11, 12):  # what did not take place can be saved yet
        state["w"].fill_(step)
        checkpointer.save(step, state | ({"more": torch.ones(2)} if rank and step > 7 else {}))
        checkpointer.wait_copied()
    assert checkpointer.wait() == 12
    checkpointer.close()
    return answers


def test_a_rank_that_goes_on_hears_of_what_is_wrong_on_another_one(tmp_path: Path) -> None:
    first, second = run_world(wrong_while_others_go_on, 2, str(tmp_path))
    bad = "bad is a builtins.object, which is not saved"
    assert second[0].startswith(f"StateError: {bad}")
    differ = "step 5 is not saved: the ranks save steps 5 to 6: all save after the same step"
    alone = "step 7 is not saved: the structure of the state has changed on some ranks alone; the next save plans anew"
    assert first[0].startswith(f"rank 0: step 3 is not saved: rank 1: {bad}")
    assert second[1].startswith(f"rank 0: step 3 is not saved: rank 1: {bad}")
    assert [text.replace("step 6 is", "step 5 is") for text in (first[1], second[2])] == [f"rank 0: {differ}"] * 2
    assert (first[2:], second[3:]) == ([f"rank 0: {alone}"], [f"rank 0: {alone}"])
    run = RunStore(LocalStore(str(tmp_path)))
    assert [info.step for info in run.checkpoints() if str(info.state) == "valid"] == [1, 2, 7, 11, 12]
    assert [float(run.open(step).read("w").max()) for step in (7, 11, 12)] == [7, 11, 12]
