"""From a config to a running coordinator: everything that can be checked before the first process is started, is.

The coordinator is a process of its own that reads what is written here, so that it can be started again by anybody,
at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose import resume
from ftrain.compose.args import KeeperArgs, Launch
from ftrain.compose.corpora import check_data, check_tokenizer
from ftrain.compose.errors import RefusedError
from ftrain.compose.holder import check_holder
from ftrain.compose.mirrors import check_mirror
from ftrain.compose.nodes import arena_nbytes, check_port, fleet_spec, shared_dir
from ftrain.compose.origin import Origin, check_other, resolve
from ftrain.compose.paths import CONFIGURED, absolute_url, local_dir
from ftrain.compose.residence import check_tenant, claim_folder
from ftrain.compose.standing import really_changed
from ftrain.compose.stores import limit_traffic, local_tier_url, open_configured
from ftrain.config import Config
from ftrain.load import fingerprint
from recovery.files import replace_file
from recovery.launch import python
from recovery.memory import check_fits, room
from recovery.network import NoInterfaceError, names_of
from recovery.owner import Claim
from recovery.rendezvous import control_folder
from storage.objects import check_store
from storage.run import RunStore


def checked(
    config: Config,
    *,
    accept_change: bool,
    origin: Origin | None,
    take_over: bool,
    command: str = "",
) -> tuple[Launch, Claim]:
    """What the coordinator is to read, once everything that can be checked is; nothing of an earlier start is overwritten.
    And the run itself, to be handed to the coordinator: until then nobody else may write what that will read.

    Raises ConfigProblems, RefusedError, HeldError, or a StorageError: in words, before anything has been started.
    """
    config = with_absolute_url(config)
    if origin is not None:
        check_other(origin, config)
    check_data(config, prepare=True, tokenizer=False)
    check_memory(config)
    limit_traffic(config)
    store = open_configured(config.storage, config.run.url)
    try:
        check_tenant(config, store)
        check_store(store)
        check_holder(store, take_over=take_over)
        found = resume.look(RunStore(store), config)
    finally:
        store.close()
    reasons = found.refused(accept=accept_change)
    if reasons:
        raise RefusedError([f"this run was started with another config (checkpoint of step {found.step}):", *reasons])
    if found.step is None:
        check_tokenizer(config)
    check_network(config)
    source = resolve(origin, config) if origin is not None and found.step is None else None
    check_mirror(config, begun=found.step is not None, origin=source[0] if source else "")
    held = claim_folder(config, take_over=take_over)
    launch = Launch(
        config=msgspec.to_builtins(config),
        fingerprint=fingerprint(config),
        changes=[dict(change) for change in really_changed(config, found.recorded())],
        origin_url=source[0] if source else "",
        origin_step=source[1] if source else 0,
        take_over=take_over,
        command=command,
    )
    return launch, held


def write(launch: Launch, config: Config) -> Path:
    """Leave it where the coordinator reads it; returns the run's local folder."""
    config = with_absolute_url(config)
    folder = local_dir(config)
    _write(folder / CONFIGURED, launch)
    _write(folder / "config.json", launch.config)
    _write(folder / "keeper.json", keeper_args(config, folder))
    return folder


def relaunch(folder: Path, launch: Launch, config: Config) -> None:
    """The config that a live run goes on with: what its next coordinator reads, should this one die."""
    wanted = msgspec.structs.replace(launch, config=msgspec.to_builtins(config), fingerprint=fingerprint(config), changes=[])
    _write(folder / "config.json", wanted.config)
    _write(folder / CONFIGURED, wanted)


def keeper_args(config: Config, folder: Path) -> KeeperArgs:
    """What the keeper reads at each of its starts."""
    return KeeperArgs(
        url=config.run.url,
        local_dir=str(folder),
        upload_mib_s=config.checkpoint.upload_mib_s,
        faults=msgspec.to_builtins(config.faults),
        storage=msgspec.to_builtins(config.storage),
        local_url=local_tier_url(config),
        local_every_steps=config.checkpoint.local_every_steps,
        several_nodes=bool(config.machine.ranks_per_node),
        control=str(control_folder(shared_dir(config, folder))) if config.checkpoint.peer_copy else "",
        interfaces=names_of(config.machine.interface),
    )


def check_network(config: Config) -> None:
    """The nodes of a run on several machines will look for this one on its interface, at its port."""
    try:
        check_port(fleet_spec(config, local_dir(config)), "machine.port")
    except NoInterfaceError as error:
        raise RefusedError([str(error)]) from error


def coordinator_argv(folder: Path) -> list[str]:
    """The command that runs (or takes up again) the coordinator of the run in `folder`."""
    return python("ftrain.compose.coordinator", str(folder))


def keeper_argv(folder: Path) -> list[str]:
    """The command that runs the keeper; the agent adds the socket's descriptor."""
    return python("ftrain.compose.keeper", str(folder / "keeper.json"))


def with_absolute_url(config: Config) -> Config:
    """The config with URLs that mean the same in every process."""
    replace, checkpoint = msgspec.structs.replace, config.checkpoint
    others = {name: absolute_url(url) for name in ("local_url", "mirror_url") if (url := getattr(checkpoint, name))}
    return replace(
        config,
        run=replace(config.run, url=absolute_url(config.run.url)),
        checkpoint=replace(checkpoint, **others),
    )


def check_memory(config: Config) -> None:
    """Arenas past the memory limit would be killed, not refused, by the kernel: refuse them first (MemoryLimitError)."""
    check_fits(arena_nbytes(config), room())


def _write(path: Path, record: Any) -> None:
    """Whole or not at all: a coordinator may be started at any moment."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(record)))
