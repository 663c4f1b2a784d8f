"""Nobody makes progress: who is to blame, and for what. Pure, over lines that an incident keeps.

When one rank of a collective stands still, all others wait for it, so "no progress" is true of everybody and says nothing. What
tells them apart is what each was doing: a waiting rank sleeps *inside* a collective. So whoever is not in one is to blame, by
what the kernel says of it (stopped, in an uninterruptible wait, running, asleep) and by its innermost line. If everybody waits
in a collective and not at the same line, the program let them part ways; if at the same line, nobody here is to blame.

The kernel's view arrives as lines (`process_line`), so that evidence stays what it is everywhere: text that can be recorded and
replayed. The stacks are those that faulthandler writes into each rank's log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Kind = Literal["stopped", "disk", "loop", "lock", "asleep", "parted", "network", "unknown"]

BUSY = 0.5  # of a core while it was looked at: a loop; healthy waiting is far below, except for spinning collectives
COLLECTIVES = ("torch/distributed/", "parallel/mesh.py", "parallel/ops.py", "/nccl", "/gloo")
LOCKS = ("/threading.py", "/queue.py", "/multiprocessing/synchronize.py", "/multiprocessing/connection.py", "/selectors.py")
_PROCESS = re.compile(r"^host state: rank (\d+) \(pid \d+\): process state (\w), ([\d.]+) s of CPU in ([\d.]+) s$")
_RANK = re.compile(r"^\[rank(\d+)\]: ")
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in (\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")


class Process(Struct, frozen=True, kw_only=True):
    """What the kernel says of a rank: its state's letter, and its share of a core while it was looked at."""

    state: str
    busy: float


class Frame(Struct, frozen=True, kw_only=True):
    """A line of Python on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As people read it."""
        return f"{'/'.join(self.file.rsplit('/', 2)[-2:])}:{self.line} in {self.function}"


class Culprit(Struct, frozen=True, kw_only=True):
    """The finding. `rank` None: nobody in particular."""

    kind: Kind
    reason: str
    rank: int | None = None

    def line(self) -> str:
        """As evidence. The wording is that of `supervisor.hang` in the table of signatures."""
        who = f"no progress of rank {self.rank}" if self.rank is not None else "no progress of any rank"
        return f"supervisor: {who}: {self.reason}"


def process_line(rank: int, pid: int, state: str, cpu_s: float, over_s: float) -> str:
    """The kernel's view of a rank as a line of evidence."""
    return f"host state: rank {rank} (pid {pid}): process state {state}, {cpu_s:.2f} s of CPU in {over_s:.2f} s"


def culprit(stalled: Sequence[int], log: Iterable[str], host: Iterable[str]) -> Culprit:
    """Who is to blame among `stalled` (the least advanced first), from the ranks' logs and the kernel's view of them."""
    processes, stacks = read_processes(host), read_stacks(log)
    for find in (_stopped, _in_kernel, _outside_collectives, _parted):
        found = find(stalled, processes, stacks)
        if found is not None:
            return found
    if stalled and all(rank in stacks and _collective(stacks[rank]) for rank in stalled):
        where = _own(stacks[stalled[0]])
        return Culprit(kind="network", reason=f"all {len(stalled)} ranks wait in the same collective ({where})")
    first = stalled[0] if stalled else None
    return Culprit(kind="unknown", rank=first, reason="the least advanced; what it does is not known")


def with_collectives(found: Culprit, issued: Mapping[int, int]) -> Culprit:
    """The same, with what the ranks counted (rank -> collectives issued): who never joined has issued fewer than the others."""
    mine = issued.get(found.rank) if found.rank is not None else None
    others = [number for rank, number in issued.items() if rank != found.rank and number]
    if not mine or not others or mine == max(others):
        return found
    return replace(found, reason=f"{found.reason}; it has issued {mine} collectives, others up to {max(others)}")


Stacks = Mapping[int, Sequence[Frame]]
Processes = Mapping[int, Process]


def _stopped(stalled: Sequence[int], processes: Processes, stacks: Stacks) -> Culprit | None:
    for rank in stalled:
        if rank in processes and processes[rank].state in "Tt":
            return Culprit(kind="stopped", rank=rank, reason="stopped by a signal (SIGSTOP) or a debugger")
    return None


def _in_kernel(stalled: Sequence[int], processes: Processes, stacks: Stacks) -> Culprit | None:
    for rank in stalled:
        if rank in processes and processes[rank].state == "D" and not _collective(stacks.get(rank, ())):
            where = f" at {_own(stacks[rank])}" if stacks.get(rank) else ""
            return Culprit(kind="disk", rank=rank, reason=f"in an uninterruptible wait of the kernel (disk or driver){where}")
    return None


def _outside_collectives(stalled: Sequence[int], processes: Processes, stacks: Stacks) -> Culprit | None:
    """A rank that is not waiting for its peers: what it does instead."""
    for rank in stalled:
        stack = stacks.get(rank, ())
        if not stack or _collective(stack):
            continue
        process, where = processes.get(rank), _own(stack)
        if process is not None and (process.busy >= BUSY or process.state == "R"):
            return Culprit(kind="loop", rank=rank, reason=f"runs without end at {where} ({process.busy:.0%} of a core)")
        if any(mark in stack[0].file for mark in LOCKS):
            return Culprit(kind="lock", rank=rank, reason=f"waits for a lock or a message at {where}, in {stack[0]}")
        return Culprit(kind="asleep", rank=rank, reason=f"sleeps at {where}")
    return None


def _parted(stalled: Sequence[int], processes: Processes, stacks: Stacks) -> Culprit | None:
    """Everybody waits in a collective, but not in the same: the few have left the path of the many."""
    places = {rank: str(_own(stacks[rank])) for rank in stalled if rank in stacks and _collective(stacks[rank])}
    if len(set(places.values())) < 2 or len(places) < len(stalled):
        return None
    counts = Counter(places.values())
    usual = counts.most_common(1)[0][0]
    rank = next((rank for rank in places if counts[places[rank]] < counts[usual]), next(iter(places)))
    others = next(place for place in counts if place != places[rank])
    reason = f"mismatched collectives: waits at {places[rank]}, others at {others}"
    return Culprit(kind="parted", rank=rank, reason=reason)


def _collective(stack: Sequence[Frame]) -> bool:
    """Whether the innermost frames are those of a collective."""
    return any(mark in frame.file for frame in stack[:2] for mark in COLLECTIVES)


def _own(stack: Sequence[Frame]) -> Frame:
    """The innermost frame of the program itself: not of a library, not of the wrapper around a collective."""
    foreign = (*COLLECTIVES, *LOCKS, "/site-packages/", "/lib/python")
    return next((frame for frame in stack if not any(mark in frame.file for mark in foreign)), stack[0])


def read_processes(host: Iterable[str]) -> dict[int, Process]:
    """The kernel's view of each rank, from lines of evidence."""
    matches = (match for line in host if (match := _PROCESS.match(line)))
    return {int(match[1]): Process(state=match[2], busy=float(match[3]) / max(0.01, float(match[4]))) for match in matches}


def read_stacks(log: Iterable[str]) -> dict[int, list[Frame]]:
    """The newest stack of each rank's main thread, innermost frame first.

    faulthandler shows the thread that got the signal as "Current thread", which is the main one; it comes last of its dump.
    """
    stacks: dict[int, list[Frame]] = {}
    inside: dict[int, bool] = {}
    for line in log:
        match = _RANK.match(line)
        rank = int(match[1]) if match else -1
        text = line[match.end() :] if match else line
        if (thread := _THREAD.match(text)) is not None:
            inside[rank] = thread[1] == "Current thread"
            if inside[rank]:
                stacks[rank] = []
        elif inside.get(rank) and (frame := _FRAME.match(text)):
            stacks[rank].append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
        else:
            inside[rank] = False
    return {rank: stack for rank, stack in stacks.items() if stack}
