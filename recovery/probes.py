"""What can be asked of a node without knowing what will run on it: memory, disk, shared memory, ports, descriptors.

Each function is a check of `recovery.preflight`: it returns what it found, raises Concern for a warning, and fails otherwise.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import uuid
from pathlib import Path

from recovery.memory import MemoryLimitError, check_fits, memfd, room
from recovery.network import first_present
from recovery.preflight import Concern

MIB = 1 << 20


class ProbeError(Exception):
    """What is wrong, with numbers."""


def disk(path: str, need_bytes: int) -> str:
    """A folder that will be written to: room, rights, and a rename that is whole or not at all."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if state.f_flag & os.ST_RDONLY:
        raise ProbeError(f"{path} is on a read-only file system")
    if state.f_files and state.f_favail == 0:
        raise ProbeError(f"{path}: no inode is free")
    if free < need_bytes:
        raise ProbeError(f"{path}: {free / MIB:.0f} MiB free, {need_bytes / MIB:.0f} MiB needed")
    _rename_probe(folder)
    return f"{path}: {free / MIB:.0f} MiB free, written, synced and renamed"


def _rename_probe(folder: Path) -> None:
    token = uuid.uuid4().hex
    old, new = folder / f".probe-{token}.tmp", folder / f".probe-{token}"
    try:
        with old.open("wb") as file:
            file.write(token.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(old, new)
        if new.read_bytes() != token.encode():
            raise ProbeError(f"{folder} gave back other bytes than were written")
    finally:
        old.unlink(missing_ok=True)
        new.unlink(missing_ok=True)


def program(names: list[str]) -> str:
    """One of these can be started."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise ProbeError(f"none of {', '.join(names)} was found")
    return found


def memory(need_bytes: int) -> str:
    """The memory tier fits under every limit above us."""
    free = room()
    try:
        check_fits(need_bytes, free)
    except MemoryLimitError as error:
        raise ProbeError(str(error)) from error
    needed = f"{need_bytes / MIB:.0f} MiB needed for the arenas of the memory tier alone"
    return f"{free.free_bytes / MIB:.0f} MiB free under {free.source}, {needed}"


def shared_memory(path: str = "/dev/shm", need_bytes: int = 64 * MIB) -> str:
    """Data loaders and collectives put things here; ftrain itself does not."""
    if not os.path.isdir(path):
        raise Concern(f"{path} is not there; data loaders of several processes will fail")
    state = os.statvfs(path)
    free = state.f_bavail * state.f_frsize
    if free < need_bytes:
        raise Concern(f"{path}: {free / MIB:.0f} MiB free, less than {need_bytes / MIB:.0f} MiB")
    return f"{path}: {free / MIB:.0f} MiB free"


def port(host: str) -> str:
    """The ranks can listen, and reach each other, on the address on which they will meet."""
    with socket.create_server((host, 0)) as listener:
        number = listener.getsockname()[1]
        with socket.create_connection((host, number), timeout=2.0) as near, listener.accept()[0] as far:
            near.sendall(b"x")
            if far.recv(1) != b"x":
                raise ProbeError(f"what is sent to {host}:{number} does not arrive")
    return f"listening and connecting on {host}"


def interface(name: str) -> str:
    """The network interface of the collectives is there; of several names, separated by commas, one."""
    known = [known for _, known in socket.if_nameindex()]
    found = first_present(name)
    if found not in known:
        raise ProbeError(f"no network interface {name!r}; there are {', '.join(known)}")
    return f"{found} is there"


def descriptors(need: int) -> str:
    """The agent holds several descriptors for each rank."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        raise ProbeError(f"{soft} open files are allowed, {need} are needed")
    return f"{soft} open files allowed"


def anonymous_memory(nbytes: int = MIB) -> str:
    """Memory areas can be made and allocated."""
    try:
        os.close(memfd("probe", nbytes))
    except OSError as error:
        raise ProbeError(f"memory areas cannot be allocated: {error}") from error
    return "memory areas can be allocated"
