"""A worker's life: meet the others, build the engine, bring the state back, train, leave.

The zygote imports this module before any fork, so torch and the engine are loaded once per node and a restart costs a fork.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader, Upload
from ftrain.checkpoint.layout import rank_layout
from ftrain.checkpoint.messages import Ready, SnapshotReady, SnapshotTaken, StepDone, Traced, encode
from ftrain.checkpoint.peer_restore import Neighbours, from_peer_memory
from ftrain.checkpoint.restore import Restored, restore
from ftrain.checkpoint.saver import Saver
from ftrain.checkpoint.spread import from_spread_memory
from ftrain.compose.args import WorkerArgs
from ftrain.compose.stores import limit_traffic, local_tier_url, open_configured
from ftrain.compose.way import Way, whole_config
from ftrain.config import Config
from ftrain.data.dataset import Dataset
from ftrain.data.stdlib import cache_root
from ftrain.device import backend, choose, pin
from ftrain.faults import Faults
from ftrain.load import fingerprint
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.environment import mismatches, numeric_environment
from ftrain.train.loop import Loop, Progress
from ftrain.train.profile import NoWindow, Profiler, Window
from ftrain.train.step import Engine
from ftrain.train.times import Times
from recovery.worker import WorkerContext
from storage.compress import compressor_named
from storage.objects import open_store
from storage.run import RunStore


class Asked:
    """Requests to this worker: the control page, and a signal to itself."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    @property
    def stop(self) -> bool:
        """Whether to leave after this step."""
        control = self._context.control
        return self._context.terminated or control.stop or control.leave >= self._context.attempt

    @property
    def save(self) -> int:
        """How many saves have been asked for."""
        return self._context.control.save


def main(context: WorkerContext) -> None:
    """Entry function of a rank."""
    args = msgspec.convert(context.args, WorkerArgs)
    config = msgspec.convert(args.config, Config)
    torch.set_num_threads(config.machine.threads)
    context.heartbeat.beat("rendezvous")
    device = choose(config.machine, args.slot, args.slots)
    _join(context, (args.host, args.port), config.parallel.ranks, config.recovery.collective_s, backend(device))
    context.heartbeat.beat("build")
    slots = {name: ArenaSlot(fd, populate=name in args.own_slots) for name, fd in context.fds.items()}
    for name in args.own_slots:
        pin(slots[name].bytes, device)
    engine = Engine(
        config,
        mesh=Mesh(mesh_shape(config), context.rank),
        device=device,
        dataset=Dataset(config, root=cache_root()),
        progress=lambda phase, microbatch: progress(phase, microbatch),
    )

    context.heartbeat.beat("compile")
    engine.prepare()
    pace = Pace()

    def progress(phase: str, microbatch: int) -> None:
        context.heartbeat.busy_s += pace.enter(phase)
        context.heartbeat.beat(phase, microbatch=microbatch, collective=engine.mesh.clock.issued)
        if phase == "forward" and faults.delay_s:
            time.sleep(faults.delay_s)
        if phase == "reduce":
            faults.reached("gradients", engine.step + 1)

    folder = Path(args.local_dir) / "faults"
    faults = Faults(config.faults, folder, rank=context.rank, corrupt=lambda kind: spoil(engine, kind))
    context.heartbeat.beat("restore")
    restored = _restore(engine, args, slots, context)
    way = Way(args, restored)
    constant = _constant(config, args, engine)
    _warn(restored, constant)
    loop = _loop(context, args, config, engine, slots, faults)
    loop.saver.forget_after(restored.step)
    _let_go(context, slots, args.own_slots)
    context.send(encode(_ready(context.rank, restored, way.begun)))
    loop.reached("restore", restored.step)
    final = way.train(engine, loop, Progress.from_record(restored.progress, constant))
    if context.rank == 0:
        context.send(encode(final))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _let_go(context: WorkerContext, slots: dict[str, ArenaSlot], own: list[str]) -> None:
    """The areas of others have been read: what the agent gives back must not live on in our mappings."""
    for name in slots.keys() - set(own):
        slots.pop(name).close()
        os.close(context.fds.pop(name))


class Pace:
    """How long this rank computes by itself: from its first forward to its last backward, after which it waits for others."""

    def __init__(self) -> None:
        self._began = self._last = 0.0

    def enter(self, phase: str) -> float:
        """A phase begins; the seconds that are complete now: those of the micro-batches of a step that ends in `reduce`."""
        now = time.monotonic()
        if phase == "reduce":
            done = max(0.0, self._last - self._began) if self._began else 0.0  # a replica may have no micro-batch
            self._began = 0.0
            return done
        if phase == "forward" and not self._began:
            self._began = now
        self._last = now if phase == "backward" else self._last
        return 0.0


def spoil(engine: Engine, kind: str) -> None:
    """An injected fault: a gradient that this rank will apply is no number, or has the highest bit of its exponent flipped; or
    a collective that the other ranks do not take part in.

    The first gradient that is not zero: of a zero the flip makes 2.0, no more than a usual norm; docs/recovery.md says which
    flips are noticed.
    """
    if kind == "part":
        engine.mesh.all_reduce(torch.zeros(1))
        return
    optimizer = engine.optimizer
    pieces = (piece.tensor.view(-1) for piece in optimizer.grad_pieces())
    first = next(piece.narrow(0, int(found[0]), 1) for piece in pieces if len(found := piece.nonzero()))
    if kind == "nan":
        first.fill_(float("nan"))
    else:
        first.view(torch.int32).bitwise_xor_(1 << 30)


def _constant(config: Config, args: WorkerArgs, engine: Engine) -> dict[str, Any]:
    """What every checkpoint of this attempt remembers of its circumstances."""
    assert isinstance(engine.dataset, Dataset)
    return {
        "config": args.whole or args.config,
        "phase": args.phase,
        "fingerprint": fingerprint(whole_config(args)),
        "layout": args.layout,
        "numeric_environment": numeric_environment(engine.device, engine.compute_dtype, compiled=config.machine.compile),
        "data": engine.dataset.identity,
    }


def _loop(
    context: WorkerContext, args: WorkerArgs, config: Config, engine: Engine, slots: dict[str, ArenaSlot], faults: Faults
) -> Loop:
    def urgent(header: SlotHeader) -> bool:
        """Whether somebody wants to have a snapshot before the slot is filled again: not only to seal it."""
        return header.upload is Upload.WANTED or bool(config.checkpoint.local_every_steps or args.nodes)

    saver = Saver(
        [(name, slots[name]) for name in args.own_slots],
        rank_layout(config, engine.mesh.coordinate),
        identity=(context.epoch, context.attempt, context.rank, config.parallel.ranks),
        announce=lambda name: context.send_keeper(encode(SnapshotReady(slot=name)), soon=not urgent(slots[name].header())),
        taken=lambda step, upload: context.send_later(encode(SnapshotTaken(rank=context.rank, step=step, upload=upload))),
        reached=faults.reached,
        overlap=config.checkpoint.overlap,
    )
    saver.early = len(os.sched_getaffinity(0)) >= args.slots * (config.machine.threads + 1)  # each rank's keeper has a core
    saver.compressor = compressor_named(config.checkpoint.compression, config.checkpoint.compression_level)
    times = Times(engine.passes, engine.device, report=lambda message: context.send_later(encode(message)))
    engine.before_update, engine.after_vote = saver.finish, times.voted
    return Loop(
        config=config,
        engine=engine,
        saver=saver,
        asked=Asked(context),
        report=lambda message: (context.send_soon if isinstance(message, StepDone) else context.send)(encode(message)),
        beat=lambda phase, step: context.heartbeat.beat(phase, step=step),
        reached=faults.reached,
        rank=context.rank,
        times=times,
        window=_window(context, args, config, engine),
        saves_handled=context.control.save,
        stored_step=args.stored_step,
        skips=args.skips,
    )


def _window(context: WorkerContext, args: WorkerArgs, config: Config, engine: Engine) -> Window:
    """What traces the steps that `machine.profile_steps` names."""
    if not config.machine.profile_steps:
        return NoWindow()
    first, last = config.machine.profile_steps
    name = f"attempt-{context.attempt}-steps-{{}}-{{}}-rank-{context.rank}.json"

    def written(first: int, last: int, path: Path) -> None:
        if context.rank == 0:
            context.send(encode(Traced(first=first, last=last, folder=str(path.parent))))

    path = Path(args.local_dir) / "profiles" / name
    return Profiler((first, last), path, engine.mesh.clock, engine.device, written=written)


def _ready(rank: int, restored: Restored, begun: list[tuple[int, int]]) -> Ready:
    return Ready(
        rank=rank,
        step=restored.step,
        source=restored.source,
        passed_over=list(restored.passed_over),
        proof=restored.proof,
        begun=begun,
    )


def _join(context: WorkerContext, address: tuple[str, int], world: int, timeout_s: float, backend: str) -> None:
    """Form the process group. The listener was bound by the agent, so no port can be lost in between."""
    if world == 1:
        return
    timeout = timedelta(seconds=timeout_s)
    listener = context.listener_fd
    server = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch's stubs do not list it
        *address,
        world,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    store = dist.PrefixStore(f"attempt-{context.attempt}", server)  # type: ignore[attr-defined]  # as above
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=world, timeout=timeout)


def _restore(engine: Engine, args: WorkerArgs, slots: dict[str, ArenaSlot], context: WorkerContext) -> Restored:
    config, engine.phase = engine.config, args.phase
    rank, world = context.rank, config.parallel.ranks
    limit_traffic(config)
    run = RunStore(open_configured(config.storage, args.restore_url)) if args.storage_step is not None else None
    sources = {name: slots[name] for name in args.source_slots if args.nearer}
    passed: tuple[tuple[int, str], ...] = ()
    if args.spread and args.nearer:
        least = max(args.storage_step or 0, args.local_step or 0)
        if args.nodes:
            neighbours = Neighbours(control=Path(args.control), nodes=args.nodes)
            found = from_peer_memory(engine, sources, neighbours, fds=context.fds, rank=rank, least_step=least)
        else:
            found = from_spread_memory(engine, sources, rank=rank, world=world, least_step=least)
        if isinstance(found, Restored):
            return _at(engine, found)
        passed, sources = (found,) if found is not None else (), {}
    restored = restore(
        engine,
        slots=sources,
        run=run,
        local=(RunStore(open_store(local_tier_url(config))), args.local_step) if args.local_step is not None else None,
        storage_step=args.storage_step,
        rank=rank,
        world=world,
    )
    return _at(engine, replace(restored, passed_over=(*passed, *restored.passed_over)))


def _at(engine: Engine, restored: Restored) -> Restored:
    """The engine stands at the step whose state it has."""
    if restored.source == "init":
        engine.init_state()
    else:
        engine.after_load()
    engine.set_step(restored.step)
    return restored


def _warn(restored: Restored, constant: dict[str, Any]) -> None:
    """What a reader of the log should know about the state this attempt begins with."""
    for step, reason in restored.passed_over:
        sys.stderr.write(f"checkpoint of step {step} passed over: {reason}\n")
    saved = restored.progress.get("numeric_environment", {})
    for sentence in mismatches(saved, constant["numeric_environment"]):
        sys.stderr.write(f"not bitwise from here on: {sentence}\n")
