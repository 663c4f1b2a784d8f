"""The coordinator's process: `python -P -m ftrain.compose.coordinator LOCAL_DIR`. Composes the run and hands it to recovery.

Reads everything from the run's local folder, so that it can be started again at any time by anybody. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from ftrain.compose.args import Launch
from ftrain.compose.delegate import RunDelegate
from ftrain.compose.endwatch import EndWatch, planned_end
from ftrain.compose.exporter import Exporter
from ftrain.compose.launch import keeper_args, keeper_argv
from ftrain.compose.ledgers import StoreSink
from ftrain.compose.nodes import fleet_spec, node_args, shared_dir, tell_nodes, this_node
from ftrain.compose.packets import Packets
from ftrain.compose.paths import CONFIGURED
from ftrain.compose.places import notice
from ftrain.compose.skips import ranges
from ftrain.compose.slurm import ask_for_requeue
from ftrain.compose.stores import limit_traffic, open_configured
from ftrain.compose.webhook import tell
from ftrain.config import Config, KeepBest, KeepEvery, KeepLast, KeepPinned, KeepYoung
from ftrain.faults import CommitPoints, Faults
from ftrain.phases import most_ranks
from recovery.codes import ExitCode
from recovery.coordinator import Coordinator
from recovery.events import Event
from recovery.ledger import Ledger, read_past
from recovery.notice import Lookout, sources
from recovery.policy import Limits
from recovery.spec import CoordinatorSpec
from recovery.state import RunState, fold
from storage import retention
from storage.errors import NoCheckpoint, StorageError
from storage.objects import ObjectStore
from storage.run import RunStore

TICK_S = 1.0  # limits of ours are several seconds, and whoever has a result wakes the coordinator
WORKER_MODULE = "ftrain.compose.worker"


def main(argv: list[str]) -> int:
    """Run the coordinator of the run in `argv[0]`; returns the exit code of the whole run."""
    folder = Path(argv[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    launch = msgspec.json.decode((folder / CONFIGURED).read_bytes(), type=Launch)
    config = msgspec.convert(launch.config, Config)
    try:
        limit_traffic(config)
        store = open_configured(config.storage, config.run.url)
    except StorageError as error:
        logging.error("%s", error)
        return ExitCode.STORAGE
    exporter = Exporter(folder, port=config.recovery.metrics_port)
    try:
        coordinator = compose(folder, launch, config, store, unserved=exporter.unserved)
        ending = coordinator.run()
    except StorageError as error:  # at the start or a roll-back: afterwards a save fails, not the run
        logging.error("storage cannot be used: %s", error)
        return ExitCode.DAMAGED if isinstance(error, NoCheckpoint) else ExitCode.STORAGE
    finally:
        exporter.close()
    logging.info("%s: %s", ending.outcome, ending.reason)
    asked = config.recovery
    tell(asked.webhook, folder, coordinator.state, run_url=config.run.url, limit_s=asked.webhook_s)
    if ending.code == ExitCode.STOPPED and config.slurm.requeue and (why := planned_end(coordinator.state)):
        ask_for_requeue(folder, why)
    return ending.code


def compose(folder: Path, launch: Launch, config: Config, store: ObjectStore, *, unserved: str = "") -> Coordinator:
    """Everything a run is made of, put together. `unserved`: why its metrics are on no port, if that is so."""
    faults = Faults(config.faults, folder / "faults")
    recovery = config.recovery
    lookout = Lookout(sources(os.environ, recovery.notice), poll_s=recovery.notice_poll_s, clock=time.time)
    scheduler = f"Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    endwatch = EndWatch(lookout, margin_s=recovery.end_margin_s, scheduler=scheduler)
    run = RunStore(CommitPoints(store, faults) if config.faults else store)
    delegate = RunDelegate(launch, config, run, folder=folder, policies=policies(config), endwatch=endwatch)
    if unserved:
        delegate.tell(notice("metrics", unserved))
    env = {"OPENBLAS_NUM_THREADS": "1"}
    fleet = fleet_spec(config, folder)
    if fleet is not None:
        told = node_args(config, folder, preload=WORKER_MODULE, keeper=keeper_args(config, folder), env=env)
        tell_nodes(shared_dir(config, folder), told)
    spec = CoordinatorSpec(
        local_dir=folder,
        node=this_node() if fleet is not None else "localhost",
        fleet=fleet,
        places=config.machine.ranks_per_node or most_ranks(config) + recovery.spares,
        zygote_preload=WORKER_MODULE,
        keeper_argv=tuple(keeper_argv(folder)),
        env=env,
        lease_s=recovery.lease_s,
        hang_s=recovery.hang_s,
        hang_floor_s=recovery.hang_floor_s,
        start_s=recovery.start_s,
        stop_s=recovery.stop_s,
        tick_s=TICK_S,
        take_over=launch.take_over,
    )
    limits = Limits(**{name: getattr(recovery, name) for name in Limits.__struct_fields__})

    def open_ledger(epoch: int) -> tuple[Ledger, RunState]:
        sink = StoreSink(store)
        past, newest = read_past(folder / "ledger", sink)
        return Ledger(folder / "ledger", sink, epoch, after=newest), fold(past)

    def on_event(event: Event) -> None:
        packets.on_event(event)
        endwatch.on_event(event)

    packets = Packets(
        folder, launch.command, lambda: coordinator.desk.journal.state, skips=ranges(config, ()), stored=delegate.will_store
    )
    coordinator = Coordinator(delegate, spec, open_ledger, limits, on_event=on_event)
    return coordinator


def policies(config: Config) -> list[retention.RetentionPolicy]:
    """The retention policies of a config."""
    made: list[retention.RetentionPolicy] = []
    for policy in config.checkpoint.retention:
        match policy:
            case KeepLast():
                made.append(retention.KeepLast(policy.n))
            case KeepEvery():
                made.append(retention.KeepEvery(policy.steps))
            case KeepBest():
                made.append(retention.KeepBest(policy.n))
            case KeepPinned():
                made.append(retention.KeepPinned(frozenset(policy.steps)))
            case KeepYoung():
                made.append(retention.KeepYoung(policy.hours * 3600.0))
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
