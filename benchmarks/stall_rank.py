"""One rank of benchmarks.checkpoint_stall: a real engine whose state is saved in each of the ways compared.

Every case is measured from a barrier, so that the ranks share the memory's bandwidth as they do in training, and each saves
the same number of bytes: this rank's share of the state, at 14 bytes per parameter.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.common import Elapsed, stopwatch
from benchmarks.peers import dcp
from benchmarks.stall_messages import ForKeeper, FromParent, Leave, Measured, RankArgs, Up
from ftrain.checkpoint.arena import ArenaSlot
from ftrain.checkpoint.layout import rank_layout
from ftrain.checkpoint.messages import SnapshotReady, encode
from ftrain.checkpoint.saver import Saver
from ftrain.config import Config
from ftrain.parallel.arrays import StatePiece, torch_dtype
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.step import Engine
from recovery.wire import Channel, channel
from storage.digest import digest_box

ATTEMPT = 0


@dataclass(frozen=True)
class Arrays:
    """A batch."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]
    documents: npt.NDArray[np.int64]


class RandomTokens:
    """Sequences that cost nothing to make: the state's values matter here, not what was learned."""

    def __init__(self, config: Config) -> None:
        self._vocab, self._length = config.model.vocab, config.data.seq_len

    def sequences(self, first: int, count: int) -> Arrays:
        """Training sequences [first, first + count)."""
        tokens = np.random.default_rng(first).integers(0, self._vocab, (count, self._length + 1))
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        return Arrays(inputs, targets, np.ones_like(inputs, dtype=np.bool_), np.zeros_like(inputs))

    heldout = sequences


class OurSave:
    """The production path: Saver into the agent's arena slots, the keeper told; the state changes before each save."""

    def __init__(self, engine: Engine, args: RankArgs, link: Channel[Any], *, overlap: bool = False) -> None:
        self._engine, self._batch = engine, engine.config.batch.global_batch
        slots = [(name, ArenaSlot(fd, populate=True)) for name, fd in args.slots.items()]
        self._link, self._held = link, list[str]()
        self._saver = Saver(
            slots,
            rank_layout(engine.config, engine.mesh.coordinate),
            identity=(args.epoch, ATTEMPT, args.rank, args.world),
            announce=self._held.append,
            overlap=overlap,
        )

    def _train(self) -> int:
        engine = self._engine
        return engine.train_step(step=engine.step + 1, first_sequence=engine.step * self._batch).step

    def tell_keeper(self) -> None:
        """What was saved may be stored now."""
        while self._held:
            self._link.send(ForKeeper(payload=encode(SnapshotReady(slot=self._held.pop()))))

    def __call__(self, number: int) -> Elapsed:
        """One step of training, then the save as the loop does it."""
        engine, step = self._engine, self._train()
        self._saver.wait_until_free(upload=True)
        dist.barrier()
        elapsed = stopwatch()
        pieces = [piece for piece in engine.pieces() if piece.owner]
        self._saver.save(pieces, step=step, upload=True, progress={"step": step})
        self.tell_keeper()
        return elapsed()

    def digests(self) -> dict[str, str]:
        """This rank's share of the digest of each array, computed from the live tensors; shares of 0 are left out."""
        shapes = {spec.name: spec.shape for spec in self._engine.array_specs()}
        total = dict.fromkeys(shapes, 0)
        for piece in self._engine.pieces():
            if piece.owner:
                total[piece.array] += digest_box(bits(piece), shapes[piece.array], piece.box)
        return {name: f"{value % 2**64:016x}" for name, value in total.items() if value % 2**64}


class OverlappedSave(OurSave):
    """A step of training with the copy of the state beside it, as with checkpoint.overlap; and a step without, to compare.

    The keeper is told after the step, so that the figure is the copy's alone: how fast a keeper stores, and what that takes
    from training on the same cores, is what checkpoint.upload_mib_s is for. `stored` tells it at once, as a run does.
    """

    def __init__(self, engine: Engine, args: RankArgs, link: Channel[Any]) -> None:
        super().__init__(engine, args, link, overlap=True)
        self.blocked_s = 0.0
        self.before: dict[str, str] = {}

    def step(self, number: int) -> Elapsed:
        """A step without a save."""
        dist.barrier()
        elapsed = stopwatch()
        self._train()
        return elapsed()

    def stored(self, number: int) -> Elapsed:
        """As a call, and the keeper works beside the step, too."""
        return self(number, told_at_once=True)

    def __call__(self, number: int, *, told_at_once: bool = False) -> Elapsed:
        """A save, and the next step; `before` are the digests of what was saved."""
        self._saver.wait_until_free(upload=True)
        self.before, step = self.digests(), self._engine.step
        pieces = [piece for piece in self._engine.pieces() if piece.owner]
        self._saver.take_waited()

        def finish() -> None:
            self._saver.finish()
            if told_at_once:
                self.tell_keeper()

        self._engine.before_update = finish
        dist.barrier()
        elapsed = stopwatch()
        self._saver.save(pieces, step=step, upload=True, progress={"step": step})
        started = elapsed().wall
        self._train()
        whole = elapsed()
        self.blocked_s = started + self._saver.take_waited()
        self.tell_keeper()
        return whole


class PeerBeside:
    """The same step with a save of the peer's before it that stages in a thread, and is waited for before the update."""

    def __init__(self, engine: Engine, save: dcp.AsyncSave) -> None:
        self._engine, self._save = engine, save
        self.blocked_s = 0.0

    def __call__(self, number: int) -> Elapsed:
        """A save, and the next step."""
        engine = self._engine
        self._save.prepare(number)
        elapsed = stopwatch()
        begun = self._save.begin(number)
        self.blocked_s = elapsed().wall

        def finish() -> None:
            waiting = stopwatch()
            assert begun.staged is not None
            begun.staged.result()
            self.blocked_s += waiting().wall

        engine.before_update = finish
        engine.train_step(step=engine.step + 1, first_sequence=engine.step * engine.config.batch.global_batch)
        whole = elapsed()
        engine.before_update = nothing
        self._save.end(begun, number)
        return whole


def nothing() -> None:
    """Nobody waits before the update."""


class Memcpy:
    """Private warm buffers copied to others of the same sizes, one after the other: what the C library does at best."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._pairs = [(np.zeros(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)) for size in sizes]
        self(0)

    def __call__(self, number: int) -> Elapsed:
        """One copy of each."""
        dist.barrier()
        elapsed = stopwatch()
        for to, source in self._pairs:
            np.copyto(to, source)
        return elapsed()


def stored(piece: StatePiece) -> torch.Tensor:
    """The tensor as it is stored: masters are rounded to make the weights."""
    return piece.tensor.detach().to(torch_dtype(piece.dtype))


def bits(piece: StatePiece) -> npt.NDArray[np.generic]:
    """The bits of the tensor as it is stored."""
    tensor = stored(piece)
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


def build(args: RankArgs) -> Engine:
    """The process group and the engine, with real moments after one step."""
    config = msgspec.convert(args.config, Config)
    torch.set_num_threads(1)
    where = f"file://{args.rendezvous}"
    dist.init_process_group("gloo", init_method=where, rank=args.rank, world_size=args.world)
    engine = Engine(config, mesh=Mesh(mesh_shape(config), args.rank), device="cpu", dataset=RandomTokens(config))
    engine.init_state()
    engine.train_step(step=1, first_sequence=0)
    return engine


def main(argv: list[str]) -> int:
    """`python -m benchmarks.stall_rank ARGS.json SOCKET_FD`."""
    args = msgspec.json.decode(Path(argv[0]).read_bytes(), type=RankArgs)
    link = channel(socket.socket(fileno=int(argv[1])), FromParent)
    engine = build(args)
    ours, overlapped = OurSave(engine, args, link), OverlappedSave(engine, args, link)
    state = {
        f"rank{args.rank}/{piece.array}@{piece.box.offset}": stored(piece).clone() for piece in engine.pieces() if piece.owner
    }
    nbytes = sum(tensor.nbytes for tensor in state.values())
    group = dist.new_group(list(range(args.world)))
    assert isinstance(group, dist.ProcessGroup)
    cases: dict[str, Callable[[int], Elapsed]] = {
        "ours": ours,
        "memcpy": Memcpy([tensor.nbytes for tensor in state.values()]),
        "memcpy_one_call": Memcpy([nbytes]),
        "step": overlapped.step,
        "overlapped": overlapped,
        "overlapped_stored": overlapped.stored,
    }
    saves = {f"dcp_{form}": dcp.AsyncSave(form, state, Path(args.folder), group) for form in (*dcp.FORMS, *dcp.BESIDE)}
    peers = {f"dcp_{form}": PeerBeside(engine, saves[f"dcp_{form}"]) for form in dcp.BESIDE}
    cases |= saves
    cases |= peers
    link.send(Up(logical_nbytes=nbytes, parameters=nbytes // 14))
    while (frame := link.receive()) is not None and not isinstance(frame.message, Leave):
        case = frame.message.case
        wall, cpu = cases[case](frame.message.number)
        aside = peers.get(case, overlapped)
        digests = ours.digests() if case == "ours" else overlapped.before if case.startswith("overlapped") else {}
        blocked_s = aside.blocked_s if case.startswith("overlapped") or case in peers else 0.0
        link.send(Measured(seconds=wall, cpu_seconds=cpu, digests=digests, blocked_s=blocked_s))
    link.drain(10)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
