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
from ftrain.compose.paths import CONFIGURED, SUPERVISED, absolute_url, local_dir
from ftrain.compose.stores import limit_traffic, local_tier_url, open_configured, opened_run
from ftrain.config import Config
from ftrain.load import fingerprint
from recovery.agent_record import living_agent
from recovery.files import replace_file
from recovery.launch import python
from recovery.memory import check_fits, room
from recovery.network import NoInterfaceError, names_of
from recovery.owner import Claim, claim
from recovery.rendezvous import control_folder
from storage.errors import ConfigurationError
from storage.objects import check_store
from storage.run import RunStore


def checked(
    config: Config,
    *,
    accept_change: bool,
    origin: tuple[str, int | None] | None,
    take_over: bool,
    command: str = "",
) -> tuple[Launch, Claim]:
    """What the coordinator is to read, once everything that can be checked is; nothing of an earlier start is overwritten.
    And the run itself, to be handed to the coordinator: until then nobody else may write what that will read.

    Raises ConfigProblems, RefusedError, HeldError, or a StorageError: in words, before anything has been started.
    """
    config = with_absolute_url(config)
    check_data(config, prepare=True, tokenizer=False)
    check_memory(config)
    limit_traffic(config)
    store = open_configured(config.storage, config.run.url)
    try:
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
    source = resolve_origin(origin) if origin is not None and found.step is None else None
    check_mirror(config, begun=found.step is not None, origin=source[0] if source else "")
    held = _claim_local(local_dir(config), fingerprint(config), take_over=take_over)
    launch = Launch(
        config=msgspec.to_builtins(config),
        fingerprint=fingerprint(config),
        changes=list(found.recorded()),
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


def check_agent(folder: Path, wanted: str) -> None:
    """An agent that outlived its coordinator has workers that step on under the config they were started with."""
    agent = living_agent(folder)
    if agent is None or not (folder / CONFIGURED).exists():
        return
    had = msgspec.json.decode((folder / CONFIGURED).read_bytes(), type=Launch)
    if had.fingerprint != wanted:
        raise RefusedError(
            [
                f"workers of this run still step under another config (agent: process {agent.pid}): go on with that config, "
                f"or wait {had.config['recovery']['lease_s']:g} s (recovery.lease_s) until the agent ends them"
            ]
        )


def _claim_local(folder: Path, wanted: str, *, take_over: bool) -> Claim:
    """The local folder can be written, and is nobody else's: a live run reads what is there whenever its coordinator starts.

    `wanted`: the fingerprint of the config.
    """
    if (folder / SUPERVISED).exists():
        raise RefusedError([f"{folder} is the folder of a supervised command (`ftrain supervise`): give run.url another place"])
    try:
        held = claim(folder, take_over=take_over)
        try:
            check_agent(folder, wanted)
        except BaseException:
            held.release()
            raise
        return held
    except OSError as error:
        raise ConfigurationError(
            f"the run's local folder {folder} cannot be used: {error.strerror}; set run.local_dir to a folder on a local disk"
        ) from error


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


def resolve_origin(origin: tuple[str, int | None]) -> tuple[str, int]:
    """The checkpoint another run is to be continued from; raises NoCheckpoint if it is not there."""
    url, step = absolute_url(origin[0]), origin[1]
    with opened_run(url) as run:
        return url, run.open(step).step


def check_memory(config: Config) -> None:
    """Arenas past the memory limit would be killed, not refused, by the kernel: refuse them first (MemoryLimitError)."""
    check_fits(arena_nbytes(config), room())


def _write(path: Path, record: Any) -> None:
    """Whole or not at all: a coordinator may be started at any moment."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(record)))
