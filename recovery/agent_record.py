"""Which agent serves this node: a lock that says whether one lives, and a record that says which process it is.

The kernel drops the lock with the process, whatever ends it, so the lock cannot lie; the pid in the record is needed to watch
an agent that an earlier coordinator started.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from recovery import paths
from recovery.files import replace_file
from recovery.launch import boot_id, is_alive, start_time
from recovery.spec import AgentSpec

RECORD_LIMIT_S = 5.0
LOCK_LIMIT_S = 1.0


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who the living agent is."""

    node: str
    pid: int
    start_time: int
    boot_id: str


def lock(folder: Path) -> int | None:
    """The agent's lock, held until the process ends; None if another agent has it."""
    fd = os.open(paths.agent_lock(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def lock_soon(folder: Path) -> int | None:
    """The lock, waiting a moment for a predecessor that is just being torn down."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    while (held := lock(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def write_record(spec: AgentSpec) -> None:
    """Say who we are, whole or not at all."""
    pid = os.getpid()
    record = AgentRecord(node=spec.node, pid=pid, start_time=start_time(pid) or 0, boot_id=boot_id())
    path = paths.agent_record(Path(spec.local_dir))
    replace_file(path, msgspec.json.encode(record))


def living_agent(folder: Path) -> AgentRecord | None:
    """The agent that serves `folder`, None if there is none. Waits a moment for one that is just being born."""
    deadline = time.monotonic() + RECORD_LIMIT_S
    while time.monotonic() < deadline:
        held = lock(folder)
        if held is not None:
            os.close(held)
            return None
        record = _record(folder)
        if record is not None and is_alive(record.pid, record.start_time):
            return record
        time.sleep(0.01)
    return None


def _record(folder: Path) -> AgentRecord | None:
    try:
        return msgspec.json.decode(paths.agent_record(folder).read_bytes(), type=AgentRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
