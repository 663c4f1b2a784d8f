"""Real engines with real arenas, keeper and store, without a supervisor: for tests of changing layouts.

Every rank's slots are files, so that worlds of other sizes, which live in other processes, can read them as the memory tier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from engines import engine_of, train
from world import run_world

from ftrain.checkpoint.arena import ArenaSlot, slot_name, slot_nbytes
from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.layout import rank_layout
from ftrain.checkpoint.messages import KeeperMessage, PackStored
from ftrain.checkpoint.restore import live_digests, restore
from ftrain.checkpoint.saver import Saver
from ftrain.config import Config
from ftrain.train.step import Engine
from storage.manifest import Manifest
from storage.merge import merge
from storage.objects import open_store
from storage.run import RunStore

Digests = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Where a state is: the run's folder in storage, and the folder of slot files."""

    url: str
    slots: str


def resized(config: Config, ranks: int) -> Config:
    """The same training on another number of replicas."""
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, ranks=ranks))


def open_slots(folder: str) -> dict[str, ArenaSlot]:
    """All slot files of a folder."""
    slots = {}
    for path in sorted(Path(folder).glob("arena-*")):
        fd = os.open(path, os.O_RDWR)
        slots[path.name] = ArenaSlot(fd)
        os.close(fd)
    return slots


def save(engine: Engine, tiers: Tiers, *, rank: int, world: int, attempt: int) -> list[KeeperMessage]:
    """One rank's save of the state as it is: copy, seal, upload. Returns what the keeper says of it."""
    layout = rank_layout(engine.config, engine.mesh.coordinate)
    name = slot_name(rank, 0, 0)
    Path(tiers.slots).mkdir(exist_ok=True)
    fd = os.open(Path(tiers.slots) / name, os.O_RDWR | os.O_CREAT)
    os.truncate(fd, slot_nbytes(layout))
    said: list[KeeperMessage] = []
    keeper = Keeper(lambda: open_store(tiers.url), said.append)
    keeper.adopt(name, fd)
    saver = Saver([(name, ArenaSlot(fd))], layout, identity=(0, attempt, rank, world), announce=keeper.snapshot_ready)
    progress = {"step": engine.step, "sequences": engine.step * engine.config.batch.global_batch}
    saver.save([piece for piece in engine.pieces() if piece.owner], step=engine.step, upload=True, progress=progress)
    keeper.close()
    os.close(fd)
    return said


def commit(tiers: Tiers, said: list[list[KeeperMessage]]) -> Manifest:
    """What the coordinator does with the packs of all ranks."""
    parts = [message for rank in said for message in rank]
    assert all(isinstance(part, PackStored) for part in parts), parts
    first = parts[0]
    run = RunStore(open_store(tiers.url))
    epoch = run.take_epoch(owner={}, starts_from=None)
    manifest = merge(
        [part.manifest for part in parts if isinstance(part, PackStored)],
        epoch=epoch,
        attempt=first.attempt,
        step=first.step,
        progress=getattr(first, "progress", {}),
        created_s=time.time(),
    )
    run.commit(manifest)
    return manifest


def bring_back(engine: Engine, tiers: Tiers, source: str, *, rank: int, world: int) -> Any:
    """Restore from one tier only; the engine then stands at the saved step."""
    slots: Mapping[str, ArenaSlot] = open_slots(tiers.slots) if source == "memory" else {}
    run = RunStore(open_store(tiers.url)) if source == "storage" else None
    step = run.open().step if run else None
    restored = restore(engine, slots=slots, run=run, storage_step=step, rank=rank, world=world)
    assert restored.source == source
    engine.after_load()
    engine.set_step(restored.step)
    return restored


def spoil(engine: Engine) -> None:
    """Nothing of what the engine held before may survive a restore."""
    for piece in engine.pieces():
        piece.tensor.fill_(float("nan"))


def from_storage(tiers: Tiers, engine: Engine) -> None:
    """A spoilt engine of any layout, with the state that lies in storage."""
    spoil(engine)
    bring_back(engine, tiers, "storage", rank=engine.mesh.rank, world=engine.mesh.shape.world)


def _train_and_save(rank: int, config: Config, steps: int, tiers: Tiers | None) -> Any:
    engine = engine_of(config, rank)
    results = train(engine, steps)
    said = save(engine, tiers, rank=rank, world=config.parallel.ranks, attempt=0) if tiers else []
    return said, live_digests(engine), results, engine.evaluate()


def trained(config: Config, steps: int, tiers: Tiers | None = None) -> tuple[Digests, float, Manifest | None]:
    """Train from the initial values on all ranks, save, commit: digests, held-out loss, manifest."""
    worlds = run_world(_train_and_save, config.parallel.ranks, config, steps, tiers)
    manifest = commit(tiers, [said for said, *_ in worlds]) if tiers else None
    return worlds[0][1], worlds[0][3], manifest


def _load_and_go_on(rank: int, config: Config, source: str, tiers: Tiers, steps: int, onward: Tiers | None) -> Any:
    engine = engine_of(config, rank)
    spoil(engine)
    world = config.parallel.ranks
    restored = bring_back(engine, tiers, source, rank=rank, world=world)
    loaded, loss = live_digests(engine), engine.evaluate()
    said = save(engine, onward, rank=rank, world=world, attempt=1) if onward else []
    train(engine, steps)
    return said, loaded, loss, restored.progress, live_digests(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a world held after a restore, and after the steps that followed."""

    at_load: Digests
    eval_loss: float
    progress: dict[str, Any]
    at_end: Digests
    manifest: Manifest | None


def loaded(config: Config, source: str, tiers: Tiers, *, steps: int = 0, onward: Tiers | None = None) -> Loaded:
    """Restore on all ranks of `config`, save what was restored to `onward`, train some steps."""
    worlds = run_world(_load_and_go_on, config.parallel.ranks, config, source, tiers, steps, onward)
    _, at_load, loss, progress, at_end = worlds[0]
    assert all(other[1:] == worlds[0][1:] for other in worlds)
    manifest = commit(onward, [said for said, *_ in worlds]) if onward else None
    return Loaded(at_load=at_load, eval_loss=loss, progress=progress, at_end=at_end, manifest=manifest)


def tiers_in(folder: Path, name: str) -> Tiers:
    """Fresh tiers below `folder`."""
    return Tiers(url=str(folder / name), slots=str(folder / f"{name}-slots"))
