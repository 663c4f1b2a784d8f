"""The agent's memory areas: anonymous files that survive every worker, checked against the machine before they are touched.

A memfd lives as long as somebody holds a descriptor, and the agent does: so a snapshot in it survives the worker that wrote
it. Past a memory limit the kernel kills instead of refusing, so the limit is looked up *first* (every cgroup above us,
version 1 and 2, and the machine), and then every page is allocated at once: it is charged to the agent's cgroup, and no later
write can fail. The size is sealed: a worker that truncated an area would kill whoever reads it with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
HEADROOM = 64 << 20
CGROUP_ROOT = Path("/sys/fs/cgroup")


class MemoryLimitError(Exception):
    """The areas do not fit into the memory limit; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that can still be allocated, and who says so."""

    free_bytes: int
    limit_bytes: int
    source: str


def room(root: Path = CGROUP_ROOT, proc: Path = Path("/proc")) -> Room:
    """The tightest limit of the machine and of every cgroup above this process. Reclaimable page cache counts as free."""
    return min([_machine(proc), *_cgroups(root, proc)], key=lambda it: it.free_bytes)


def cgroup_limits(root: Path = CGROUP_ROOT, proc: Path = Path("/proc")) -> list[int]:
    """The memory limits of the cgroups above this process, in bytes; version 1 shows a huge number for none."""
    return [group.limit_bytes for group in _cgroups(root, proc)]


def _machine(proc: Path) -> Room:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return Room(free_bytes=kib["MemAvailable"] << 10, limit_bytes=kib["MemTotal"] << 10, source="the machine's memory")


def _cgroups(root: Path, proc: Path) -> Iterable[Room]:
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, names = [root, root / "unified"], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts, names = [root / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for mount in mounts:
            yield from _upwards(mount, path, names)


def _upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterable[Room]:
    """The group and all above it. In a container the mount may show only our own group: what is not there sets no limit."""
    folder = mount / path.lstrip("/")
    while folder.is_relative_to(mount):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / names[0]).read_text())  # "max" is no number: no limit
            used = int((folder / names[1]).read_text()) - _stat(folder / "memory.stat", names[2])
            yield Room(free_bytes=max(0, limit - used), limit_bytes=limit, source=f"the limit of cgroup {folder}")
        if folder == mount:
            return
        folder = folder.parent


def _stat(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def memfd(name: str, nbytes: int) -> int:
    """A close-on-exec anonymous file, every page allocated, its size sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass(slots=True)
class Area:
    """One named memory area."""

    fd: int
    nbytes: int


class Areas:
    """All named areas of an agent. Not thread-safe."""

    def __init__(self) -> None:
        """None yet."""
        self._areas: dict[str, Area] = {}

    def sizes(self) -> dict[str, int]:
        """Bytes of each area."""
        return {name: area.nbytes for name, area in self._areas.items()}

    def fd(self, name: str) -> int:
        """Descriptor of an area; KeyError if there is none."""
        return self._areas[name].fd

    def prepare(self, wanted: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Have all of `wanted`; returns the names whose content was kept and those newly allocated (zeroed).

        All or nothing for the new ones: MemoryLimitError, before a page is touched, if they do not fit.
        """
        kept = [name for name, nbytes in wanted.items() if self._has(name, nbytes)]
        missing = {name: nbytes for name, nbytes in wanted.items() if not self._has(name, nbytes)}
        self.release([name for name in missing if name in self._areas])
        check_fits(sum(missing.values()), room())
        for name, nbytes in missing.items():
            self._areas[name] = Area(_allocate(name, nbytes), nbytes)
        return kept, list(missing)

    def _has(self, name: str, nbytes: int) -> bool:
        return name in self._areas and self._areas[name].nbytes == nbytes

    def release(self, names: Iterable[str]) -> None:
        """Give areas back; the memory is free once workers and keeper have unmapped theirs. Unknown names are fine."""
        for name in names:
            area = self._areas.pop(name, None)
            if area is not None:
                os.close(area.fd)

    def close(self) -> None:
        """Give all back."""
        self.release(list(self._areas))


def check_fits(nbytes: int, free: Room) -> None:
    """Refuse, with the numbers, what would have the kernel kill us."""
    if nbytes and nbytes + HEADROOM > free.free_bytes:
        raise MemoryLimitError(
            f"arenas larger than the memory limit: {show(nbytes)} are needed, {show(free.free_bytes)} of "
            f"{show(free.limit_bytes)} are free under {free.source}; use fewer checkpoint.slots, more nodes, or raise the limit"
        )


def _allocate(name: str, nbytes: int) -> int:
    try:
        return memfd(name, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise MemoryLimitError(f"arenas larger than the memory limit: the kernel refused {show(nbytes)} for {name}") from error


def show(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.1f} MiB"
