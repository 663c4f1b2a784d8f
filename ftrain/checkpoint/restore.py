"""Bring live state back: from the memory tier if it is as new, else from storage, and prove that it is the state
that was saved.

All ranks go through the same candidates together. A candidate counts only if it loads on every rank: one rank's
damaged chunk sends all of them to the next older one, with a message that says what was wrong. The proof: every
chunk's crc32c, and where the manifest has digests, the layout-free digest of what is now live, summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ftrain.checkpoint.arena import ArenaSlot
from ftrain.checkpoint.copy import TORCH_DTYPES
from ftrain.checkpoint.memory import ArenaStore, MemorySnapshot, newest_snapshot, snapshot_manifest
from ftrain.checkpoint.names import is_peer
from ftrain.parallel.arrays import WEIGHTS, StatePiece
from storage.catalog import CheckpointState
from storage.checkpoint import Checkpoint
from storage.digest import digest_box, digest_part
from storage.errors import CoverageError, Damaged, FormatError, NoCheckpoint, ObjectMissing, StorageError
from storage.manifest import Manifest
from storage.pack import ArraySpec
from storage.reader import Want
from storage.run import RunStore

T = TypeVar("T")

STAGED_NBYTES = 256 * 2**20  # of state on a GPU that is loaded into host memory before it is moved


MAX_WORDS_NBYTES = 2048  # of what is wrong with a candidate, as told to the other ranks


class Restorable(Protocol):
    """What a restore needs of an engine."""

    def pieces(self) -> Sequence[StatePiece]: ...

    def array_specs(self) -> Sequence[ArraySpec]: ...

    def after_load(self) -> None: ...

    @property
    def layout(self) -> str: ...

    @property
    def phase(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did. `source` is memory, peer, local, storage or init (nothing was there to load)."""

    source: str
    step: int
    progress: dict[str, Any] = field(default_factory=dict)
    proof: str = ""
    passed_over: tuple[tuple[int, str], ...] = ()


def agreed(problem: str | None) -> str | None:
    """What is wrong in the words of the first rank that has a problem, the same on all ranks; None if no rank has one.

    A collective, if there is more than one rank: the damage may lie where only one of them reads.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    rank, world = dist.get_rank(), dist.get_world_size()
    first = torch.tensor([world if problem is None else rank], dtype=torch.int64)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if int(first.item()) == world:
        return None
    words = torch.zeros(MAX_WORDS_NBYTES, dtype=torch.uint8)
    said = (problem or "").encode()[:MAX_WORDS_NBYTES]
    words[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    dist.broadcast(words, src=int(first.item()))
    return bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")


def restore(
    engine: Restorable,
    *,
    slots: Mapping[str, ArenaSlot],
    run: RunStore | None,
    storage_step: int | None,
    rank: int,
    world: int,
    local: tuple[RunStore, int] | None = None,
) -> Restored:
    """Load the newest state there is. Called by all ranks together, with the same arguments but `rank`.

    `storage_step`: the newest committed step, as the coordinator saw it; `local`: the local tier and its newest step. Of equal
    steps memory comes first, then the local tier. A snapshot of another layout, or of another phase, proves itself
    by digests. Returns source "init" if there is nothing to load. Raises NoCheckpoint if there are checkpoints and none of them
    loads.
    """
    passed_over: list[tuple[int, str]] = []
    snapshot = newest_snapshot(slots)
    nearer = [(snapshot.step, 1)] if snapshot is not None else []
    nearer += [(local[1], 0)] if local is not None else []
    for step, in_memory in sorted(nearer, reverse=True):
        if storage_step is not None and step < storage_step:
            continue
        if in_memory:
            assert snapshot is not None
            found = _from_memory(engine, snapshot, slots, rank=rank, world=world)
        else:
            assert local is not None
            found = _from_local(engine, *local)
        if isinstance(found, Restored):
            return replace(found, passed_over=tuple(passed_over))
        passed_over.append((step, found))
    if run is None or storage_step is None:
        return Restored(source="init", step=0, passed_over=tuple(passed_over))
    return _from_storage(engine, run, storage_step, passed_over)


def _from_memory(
    engine: Restorable, snapshot: MemorySnapshot, slots: Mapping[str, ArenaSlot], *, rank: int, world: int
) -> Restored | str:
    """The newest snapshot, or what is wrong with it."""
    for name in snapshot.slots[rank::world]:
        slots[name].seal()
    agreed(None)  # nobody reads before all slots are sealed
    tier = ArenaStore(slots)
    problem = agreed(attempt(lambda: load_pieces(engine, Checkpoint(tier, snapshot_manifest(snapshot, slots), prefix=""))))
    progress, proof = slots[snapshot.slots[0]].progress(), "crc32c of every chunk"
    layout, phase = progress.get("layout", engine.layout), progress.get("phase", engine.phase)
    if problem is None and (layout != engine.layout or phase != engine.phase):
        saved = digests_of([slots[name] for name in snapshot.slots[rank::world]], engine)
        problem = differ(saved, live_digests(engine))
        seam = f", from phase {phase} to {engine.phase}" if phase != engine.phase else ""
        proof = f"digests of {len(saved)} arrays, across {layout} and {engine.layout}{seam}"
    if problem is not None:
        return f"memory tier: {problem}"
    source = "peer" if any(is_peer(name) for name in snapshot.slots) else "memory"
    return Restored(source=source, step=snapshot.step, progress=progress, proof=proof)


def digests_of(mine: Sequence[ArenaSlot], engine: Restorable) -> dict[str, int]:
    """The digests of a snapshot's arrays, of which this rank looks at `mine`; a collective."""
    totals = {spec.name: 0 for spec in engine.array_specs()}
    for slot in mine:
        table, payload = slot.table(), slot.payload()
        specs = {spec.name: spec for spec in table.specs}
        for part in table.parts:
            totals[part.array] = (totals[part.array] + digest_part(payload, specs[part.array], part)) % 2**64
    return {name: total for name, total in _summed(totals).items() if total or not is_weights(name)}  # they may be left out


def _from_local(engine: Restorable, run: RunStore, step: int) -> Restored | str:
    """A checkpoint of the local tier, or what is wrong with it. Trouble with that disk is a reason, too: there is storage."""
    opened: list[Checkpoint] = []

    def load() -> None:
        opened.append(run.open(step))
        load_pieces(engine, opened[0])

    try:
        problem = attempt(load)
    except StorageError as error:
        problem = str(error)
    problem = agreed(problem) or _prove(engine, opened[0].manifest)
    if problem is not None:
        return f"local tier: {problem}"
    proof = f"digests of {len(opened[0].manifest.digests)} arrays"
    return Restored(source="local", step=step, progress=opened[0].progress, proof=proof)


def _from_storage(engine: Restorable, run: RunStore, newest: int, passed_over: list[tuple[int, str]]) -> Restored:
    """The newest checkpoint of at most step `newest` that loads and proves itself on every rank.

    A tainted one only if it is `newest` itself: then a person named it (`--from URL@STEP`).
    """
    infos = run.checkpoints()
    without = {info.step: "newer than what this attempt was started from" for info in infos if info.step > newest}
    tainted = any(info.step == newest and info.state is CheckpointState.TAINTED for info in infos)
    while True:
        checkpoint = _agree(run, without, exactly=newest if tainted and newest not in without else None)
        problem = agreed(attempt(lambda checkpoint=checkpoint: load_pieces(engine, checkpoint)))  # type: ignore[misc]
        if problem is None:
            problem = _prove(engine, checkpoint.manifest)
            if problem is None:
                seen = [*passed_over, *((step, why) for step, why in checkpoint.passed_over if step <= newest)]
                return Restored(
                    source="storage",
                    step=checkpoint.step,
                    progress=checkpoint.progress,
                    proof=f"digests of {len(checkpoint.manifest.digests)} arrays",
                    passed_over=tuple(seen),
                )
        without[checkpoint.step] = problem


def _agree(run: RunStore, without: dict[int, str], *, exactly: int | None) -> Checkpoint:
    """The checkpoint all ranks try next, of step `exactly` if that is given.

    Rank 0 chooses: a commit may land while others look. Raises NoCheckpoint on all.
    """
    mine: Checkpoint | None = None
    refusal: str | None = None
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        try:
            mine = run.open(exactly, without=without)
        except NoCheckpoint as error:
            refusal = str(error)
    chosen = torch.tensor([mine.step if mine else -1], dtype=torch.int64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(chosen, src=0)
    step = int(chosen.item())
    if step < 0:
        raise NoCheckpoint(agreed(refusal) or "no checkpoint of this run can be loaded")
    return mine or run.open(step)


def attempt(action: Callable[[], None]) -> str | None:
    """Run `action`; what is wrong with the candidate, or None. Trouble with the store itself is not the candidate's
    fault: raised.
    """
    try:
        action()
    except (Damaged, FormatError, CoverageError, ObjectMissing, NoCheckpoint) as error:
        return str(error)
    return None


def load_pieces(engine: Restorable, checkpoint: Checkpoint) -> None:
    """Fill the engine's pieces. Weights are not read: they are the rounded masters, by the format's invariant."""
    _check_shapes(engine.array_specs(), checkpoint.manifest)
    pieces = [piece for piece in engine.pieces() if not is_weights(piece.array)]
    for some in batches(pieces, lambda piece: piece.tensor):
        hosts = [piece.tensor.detach().cpu() for piece in some]  # the tensor itself on CPU
        checkpoint.load([Want(p.array, p.box, bits_of(host.reshape(p.box.shape))) for p, host in zip(some, hosts, strict=True)])
        for piece, host in zip(some, hosts, strict=True):
            if host.device != piece.tensor.device:
                piece.tensor.detach().copy_(host)


def batches(items: Sequence[T], tensor_of: Callable[[T], torch.Tensor]) -> Iterator[Sequence[T]]:
    """All at once on CPU, where values go straight to their place; bounded by host memory where they are staged."""
    if all(tensor_of(item).device.type == "cpu" for item in items):
        yield items
        return
    batch: list[T] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += tensor_of(item).nbytes
        if nbytes >= STAGED_NBYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def is_weights(array: str) -> bool:
    """Whether an array holds weights, which follow from the masters."""
    return array.startswith(f"{WEIGHTS}/")


def needed(specs: Sequence[ArraySpec], stored: Collection[str]) -> list[ArraySpec]:
    """What a checkpoint with the arrays `stored` must hold: weights are left out all together, or not at all."""
    without = not any(is_weights(name) for name in stored)
    return [spec for spec in specs if not (without and is_weights(spec.name))]


def _check_shapes(specs: Sequence[ArraySpec], manifest: Manifest) -> None:
    stored = {spec.name: spec for spec in manifest.arrays}
    problems = [f"{spec.name} is missing" for spec in needed(specs, stored) if spec.name not in stored]
    problems += [f"{name} is extra" for name in sorted(set(stored) - {spec.name for spec in specs})]
    problems += [
        f"{spec.name} is {stored[spec.name].dtype} {tuple(stored[spec.name].shape)}, wanted {spec.dtype} {tuple(spec.shape)}"
        for spec in specs
        if spec.name in stored and (tuple(stored[spec.name].shape), stored[spec.name].dtype) != (tuple(spec.shape), spec.dtype)
    ]
    if problems:
        raise CoverageError("the checkpoint is of another model: " + "; ".join(problems), problems=tuple(problems))


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's memory as NumPy; bfloat16 as its bits."""
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def live_digests(engine: Restorable) -> dict[str, int]:
    """The layout-free digest of every array as it is live now, summed over all ranks (a collective)."""
    specs = list(engine.array_specs())
    index = {spec.name: i for i, spec in enumerate(specs)}
    totals = [0] * len(specs)
    for piece in (piece for piece in engine.pieces() if piece.owner):
        spec = specs[index[piece.array]]
        stored = piece.tensor.detach().cpu().to(TORCH_DTYPES[piece.dtype]).reshape(piece.box.shape)
        bits = bits_of(stored)
        bits = bits.view(np.dtype(f"u{bits.dtype.itemsize}"))
        totals[index[piece.array]] = (totals[index[piece.array]] + digest_box(bits, tuple(spec.shape), piece.box)) % 2**64
    return _summed({spec.name: value for spec, value in zip(specs, totals, strict=True)})


def _summed(totals: Mapping[str, int]) -> dict[str, int]:
    """Each rank's share of the digests, added up over all ranks (a collective)."""
    summed = torch.from_numpy(np.array(list(totals.values()), dtype=np.uint64).view(np.int64))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(summed)
    return {name: int(value) for name, value in zip(totals, summed.numpy().view(np.uint64), strict=True)}


def _prove(engine: Restorable, manifest: Manifest) -> str | None:
    """What differs between the live state and the manifest's digests; the same answer on every rank."""
    return differ(manifest.digests, live_digests(engine))


def differ(saved: Mapping[str, int], live: Mapping[str, int]) -> str | None:
    """Which arrays are not as they were saved, in words; None if all are."""
    wrong = [name for name, digest in live.items() if name in saved and saved[name] != digest]
    return f"the loaded state is not the saved one: digests differ for {', '.join(sorted(wrong)[:5])}" if wrong else None
