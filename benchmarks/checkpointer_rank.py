"""One rank of benchmarks.checkpointer: an FSDP2 model with AdamW, its state saved by ftrain.Checkpointer and by DCP in turns.

Every case starts at a barrier and ends when what was saved is in storage; the stall is when the training loop might have gone
on. In the overlapped cases a step of training follows the save at once. Their stall is the call and what the step waits for
before the optimizer changes the state; how long call and step took together is held against a step without a save. Both write
to the same disk with fsync, and both are given the very same tensors.

Each stall is also told by its phases. Ours: `look` (what of the state has changed, and its plain values), `settle` (the vote
of the ranks, beside the copy of what cannot wait), `publish`, and `hook` (what the step waited for). DCP's: `state`
(get_state_dict), `call` (async_save), and `hook`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import ftrain
from benchmarks.common import turns
from benchmarks.peers.dcp import BESIDE, FORMS, begin, planner_of, stager_of
from ftrain.checkpoint.script_save import Save

BLOCKS = {"full": (10, 2048), "tiny": (2, 96)}
BATCH = 32

T = TypeVar("T")


class Times(msgspec.Struct):
    """Seconds of one round: the loop stood still, until everything was stored, and of the save and the step beside it; and what
    the stall is made of.
    """

    stall: float
    wall: float
    step: float = 0.0
    phases: dict[str, float] = {}


class Result(msgspec.Struct):
    """What a rank measured: case -> rounds."""

    times: dict[str, list[Times]]
    nbytes: int


def model_of(size: str) -> nn.Module:
    """Layers of one width, each a unit of FSDP."""
    layers, width = BLOCKS[size]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


class Timed(ftrain.Checkpointer):
    """With a clock at each phase of a save."""

    def phases(self) -> dict[str, float]:
        """Seconds of the last save's."""
        return dict(self._phases)

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """As ever."""
        self._phases: dict[str, float] = {}
        return super().save(step, state)

    def _begin(self, step: int, state: Mapping[str, Any]) -> Save:
        return self._timed("look", lambda: super(Timed, self)._begin(step, state))

    def _settle(self, save: Save) -> bool:
        return self._timed("settle", lambda: super(Timed, self)._settle(save))

    def _publish(self, save: Save) -> None:
        self._timed("publish", lambda: super(Timed, self)._publish(save))

    def _timed(self, phase: str, action: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return action()
        finally:
            self._phases[phase] = time.perf_counter() - begin


class Bench:
    """The state and the ways to save it."""

    def __init__(self, folder: Path, size: str) -> None:
        self._folder = folder
        self._model = model_of(size)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, foreach=False)
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._checkpointer = Timed(str(folder / "ours"), on_error="raise")
        self._state = {"model": self._model, "optimizer": self._optimizer}
        self._checkpointer.load(self._state)
        self._overlapped = Timed(str(folder / "overlapped"), on_error="raise", overlap=True)
        self._overlapped.load(self._state)
        self._group = dist.new_group(backend="gloo")
        self._stagers = {form: stager_of(form) for form in (*FORMS, *BESIDE)}
        self._batch = torch.randn(BATCH, BLOCKS[size][1])
        self._target = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's share."""
        held = [*self._model.parameters(), *(t for s in self._optimizer.state.values() for t in s.values() if t.ndim)]
        return sum(tensor.to_local().nbytes for tensor in held)

    def ours(self, number: int) -> Times:
        """ftrain.Checkpointer."""
        self._change(number)
        begin = time.perf_counter()
        self._checkpointer.save(number + 1, self._state)
        stall = time.perf_counter() - begin
        self._checkpointer.wait()
        times = Times(stall, time.perf_counter() - begin, phases=self._checkpointer.phases())
        return self._done(times, self._folder / "ours" / "checkpoints" / f"step-{number:08d}")

    def dcp_sync(self, number: int) -> Times:
        """dcp.save: the loop waits for all of it."""
        self._change(number)
        path = self._folder / "sync" / str(number)
        begin = time.perf_counter()
        dcp.save(self._dcp_state(), checkpoint_id=path, process_group=self._group, planner=planner_of())
        seconds = time.perf_counter() - begin
        return self._done(Times(seconds, seconds), path)

    def dcp_async(self, form: str) -> Callable[[int], Times]:
        """dcp.async_save in one of its forms."""

        def run(number: int) -> Times:
            self._change(number)
            path = self._folder / form / str(number)
            start = time.perf_counter()
            state = self._dcp_state()
            taken = time.perf_counter()
            begun = begin(state, form, self._stagers[form], path, self._group)
            called = time.perf_counter()
            assert begun.staged is None, "that is what a stager with a thread of its own returns"
            begun.stored.result()
            phases = {"state": taken - start, "call": called - taken}
            return self._done(Times(called - start, time.perf_counter() - start, phases=phases), path)

        return run

    def step(self, number: int) -> Times:
        """A step of training without a save."""
        self._change(number)
        start = time.perf_counter()
        self._train(lambda: 0.0)
        return Times(0.0, 0.0, time.perf_counter() - start)

    def ours_beside(self, number: int) -> Times:
        """ftrain.Checkpointer with overlap, and a step."""
        self._change(number)
        start = time.perf_counter()
        self._overlapped.save(number + 1, self._state)
        stall = time.perf_counter() - start
        waited = self._train(self._overlapped.wait_copied)  # as its hook does: here the waiting is measured
        step = time.perf_counter() - start
        self._overlapped.wait()
        phases = self._overlapped.phases() | {"hook": waited}
        times = Times(stall + waited, time.perf_counter() - start, step, phases)
        return self._done(times, self._folder / "overlapped" / "checkpoints" / f"step-{number:08d}")

    def dcp_beside(self, form: str) -> Callable[[int], Times]:
        """dcp.async_save with staging in a thread, and a step."""

        def run(number: int) -> Times:
            self._change(number)
            path = self._folder / form / str(number)
            start = time.perf_counter()
            state = self._dcp_state()
            taken = time.perf_counter()
            begun = begin(state, form, self._stagers[form], path, self._group)
            called = time.perf_counter()
            staged = begun.staged
            assert staged is not None
            waited = self._train(lambda: _waited(staged))
            step = time.perf_counter() - start
            begun.stored.result()
            phases = {"state": taken - start, "call": called - taken, "hook": waited}
            return self._done(Times(called - start + waited, time.perf_counter() - start, step, phases), path)

        return run

    def _train(self, wait: Callable[[], float]) -> float:
        """A step; `wait` comes before the state changes, and says how long it waited."""
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        waited = wait()
        self._optimizer.step()
        return waited

    def memcpy(self, number: int) -> Times:
        """As many warm bytes as this rank's share, from one buffer to another."""
        if self._target.numel() != self.nbytes:
            self._source, self._target = (torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(2))
        dist.barrier()
        begin = time.perf_counter()
        self._target.copy_(self._source)
        seconds = time.perf_counter() - begin
        return Times(seconds, seconds)

    def _dcp_state(self) -> dict[str, Any]:
        """As PyTorch's tutorials make it."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _change(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.to_local().fill_(number)
        dist.barrier()

    def _done(self, times: Times, old: Path) -> Times:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(old, ignore_errors=True)
        return times

    def close(self) -> None:
        """Ours is closed as a script would."""
        self._checkpointer.close()
        self._overlapped.close()


def _waited(staged: Future[Any]) -> float:
    before = time.perf_counter()
    staged.result()
    return time.perf_counter() - before


def main(argv: list[str]) -> int:
    """`RANK WORLD RENDEZVOUS FOLDER SIZE ROUNDS RESULT`"""
    rank, world, rendezvous, folder, size, rounds, result = argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    bench = Bench(Path(folder), size)
    cases: dict[str, Callable[[int], Times]] = {"memcpy": bench.memcpy, "ours": bench.ours, "dcp_sync": bench.dcp_sync}
    cases |= {f"dcp_{form}": bench.dcp_async(form) for form in FORMS}
    cases |= {"step": bench.step, "ours_overlapped": bench.ours_beside}
    cases |= {f"dcp_{form}": bench.dcp_beside(form) for form in BESIDE}
    times: dict[str, list[Times]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(-2, int(rounds)):  # the first two are warm-up: memory, processes, both of our slots
        for name in turns(names, number):
            measured = cases[name](number + 2)
            if number >= 0:
                times[name].append(measured)
    Path(result).write_bytes(msgspec.json.encode(Result(times, bench.nbytes)))
    bench.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
