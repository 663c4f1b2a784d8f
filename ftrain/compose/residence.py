"""Whose a run's local folder is. The newest of a ledger is only there, so two runs may not share it: the segments of one would
count as the other's, and be stored with it.

No run has a number of its own. What tells a run that was moved from another run is its ledger, of which storage has a copy.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ftrain.compose.args import Launch
from ftrain.compose.errors import RefusedError
from ftrain.compose.ledgers import StoreSink
from ftrain.compose.paths import CONFIGURED, SUPERVISED, folder_of, local_dir, local_dir_of
from ftrain.config import Config
from ftrain.load import fingerprint
from ftrain.schemes import is_local
from recovery.agent_record import living_agent
from recovery.owner import Claim, claim
from storage.errors import ConfigurationError
from storage.objects import ObjectStore

__all__ = ["check_tenant", "claim_folder", "same_place"]


def check_tenant(config: Config, store: ObjectStore) -> None:
    """RefusedError if the local folder is another run's, or a supervised command's. Nothing is written; `store`: this run's."""
    folder, url = local_dir(config), config.run.url
    if (folder / SUPERVISED).exists():
        raise RefusedError([f"{folder} is the folder of a supervised command (`ftrain supervise`): give run.url another place"])
    before = _launched(folder)
    if before is None or same_place(was := before.config["run"]["url"], url):
        return
    if folder == local_dir_of(url) and not before.config["run"]["local_dir"]:
        return  # the run's own, inside it: they were moved together
    ledger = folder / "ledger"
    if not any(ledger.glob("e*.jsonl*")) or _holds(store, ledger):
        return
    raise RefusedError(
        [
            f"the local folder {folder} holds the run at {was}, and two runs may not share one: give run.local_dir another "
            "place, or leave it out"
        ]
    )


def _launched(folder: Path) -> Launch | None:
    """What the newest `ftrain run` wanted there; None if there was none, or one of another version."""
    try:
        return msgspec.json.decode((folder / CONFIGURED).read_bytes(), type=Launch)
    except (OSError, msgspec.MsgspecError):
        return None


def same_place(one: str, other: str) -> bool:
    """Whether two absolute URLs name the same run, by whatever links."""
    if is_local(one) and is_local(other):
        return os.path.realpath(folder_of(one)) == os.path.realpath(folder_of(other))
    return one == other


def _holds(store: ObjectStore, ledger: Path) -> bool:
    """Whether the store has this very ledger: then the run was moved. Segments of two runs may have the same names."""
    sink = StoreSink(store)
    both = {path.name for path in ledger.glob("e*.jsonl")} & set(sink.names())
    return bool(both) and sink.get(oldest := min(both)) == (ledger / oldest).read_bytes()


def claim_folder(config: Config, *, take_over: bool) -> Claim:
    """Hold the local folder, which can be written and is nobody else's: a live run reads what is there whenever its coordinator
    starts.
    """
    folder = local_dir(config)
    try:
        held = claim(folder, take_over=take_over)
        try:
            _check_agent(folder, fingerprint(config))
        except BaseException:
            held.release()
            raise
        return held
    except OSError as error:
        raise ConfigurationError(
            f"the run's local folder {folder} cannot be used: {error.strerror}; set run.local_dir to a folder on a local disk"
        ) from error


def _check_agent(folder: Path, wanted: str) -> None:
    """An agent that outlived its coordinator has workers that step on under the config they were started with."""
    agent = living_agent(folder)
    if agent is None or (had := _launched(folder)) is None:
        return
    if had.fingerprint != wanted:
        raise RefusedError(
            [
                f"workers of this run still step under another config (agent: process {agent.pid}): go on with that config, "
                f"or wait {had.config['recovery']['lease_s']:g} s (recovery.lease_s) until the agent ends them"
            ]
        )
