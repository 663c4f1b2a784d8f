"""Which rank a line of evidence names, and how the ranks ended: what is told of one line or one status at a time.

A launcher numbers its processes by node, the kernel by pid: each needs another line that says which rank that was.
"""

from __future__ import annotations

import re
from collections import Counter

from recovery.evidence import Evidence
from recovery.reading import Line, Reader

FAULT = (-11, 139, -7, 135, -4, 132, -8, 136)  # signals that only the process's own doing brings
TEARDOWN = frozenset({-15, 143, -9, 137})
ACCUSED = re.compile(
    r"[Cc]heck rank (\d+) logs|received errors while waiting for send/recv from rank (\d+)|"
    r"\b[Rr]ank (\d+) (?:failed to pass|never (?:joined|reported|arrived)|did not (?:join|reach|arrive|respond)|"
    r"is (?:missing|dead|stuck|absent))|"
    r"/task:(\d+) (?:heartbeat timeout|has been set to ERROR|unexpectedly tried)|"
    r"timed out task names: \S*/task:(\d+)(?![\d,])|\[missing ranks: (\d+)\]|"
    r"The missing rank: (\d+)|missing ranks: \{(\d+)\}|^\s*Rank (\d+) -- GPU \d+ managed by process|"
    r"Rank (\d+)\] ProcessGroupNCCL's watchdog got stuck"
)
"""Words by which the others, or a tool that asked them, name one rank."""
_IN_TEXT = (
    ACCUSED,
    re.compile(r"\b(?:global|GLOBAL)[_ ](?:rank|RANK)[ :=]+(\d+)"),
    re.compile(r"\[Rank (\d+)\]|\bRank (\d+)[\]:, ]|\brank[ :=]+(\d+)\b|\bRANK (\d+)\b"),
    re.compile(r"\brank(\d+)\["),
    re.compile(r"\bTP(\d+)\b"),
    re.compile(r"-- Process (\d+) terminated with the following error"),
)
_NCCL_DEVICE = re.compile(r"^\S+:\d+:\d+ \[(\d+)\] ")
_GPU = re.compile(
    r"\bGPU(?: ID)? (\d+)\b|\bgpu(\d+): |\bGPU-\w+ \(index (\d+)\)|\bgpu index (\d+)\b(?![-,])|"
    r"\bcuda:(\d+)\b|\blocalRank (\d+)\b"
)
_ASKED_GPU = re.compile(r"\bnvidia-smi\b.*\s(?:-i|--id)[ =](\d+)\b(?!,)|^GPU (\d+): ")
SHOWN_LINES = 20  # of what a command shows about one GPU
_ELASTIC = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (\d+) \(pid: (\d+)\)")
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)")
_CHILD = re.compile(r"^\[rank: (\d+)\] Child process with PID \d+ terminated with code")
_TASK = re.compile(r"srun: error: (\S+): task (\d+): (?!Terminated)")
_SUMMED_UP = re.compile(r"^\s*exitcode\s*: -?\d+ \(pid: (\d+)\)")
_BUS = re.compile(r"(?i)\b((?:[0-9a-f]{4})?[0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\b(?:\.([0-7]))?")
_BUS_OF_RANK = re.compile(r"\brank (\d+) nranks \d+ .{0,80}?\bbusId ([0-9a-f]+)\b")
_HOST = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?([\w.-]+):\d+:\d+ \[")
_PID = re.compile(
    r"\bpid[=: ]+'?(\d+)|process (\d+) \(|Sending SIGBUS to [^:]+:(\d+)|"
    r"[\w.-]+\[(\d+)\]:? (?:trap|segfault|general protection)"
)


def ranks_of(case: Evidence) -> list[int]:
    """The ranks that have an exit status, in order."""
    return sorted(int(rank) for rank in case.exit if rank.isdecimal())


def speaker(line: Line) -> int | None:
    """The rank a line names, in its prefix or in its text."""
    if line.rank is not None:
        return line.rank
    for pattern in _IN_TEXT:
        if match := pattern.search(line.text):
            return number(match)
    return None


def device(line: Line) -> int | None:
    """The GPU of the node that a line names: a rank only where there is one node."""
    for pattern in (_NCCL_DEVICE, _GPU):
        if match := pattern.search(line.text):
            return number(match)
    return None


def asked_about(line: Line, reader: Reader) -> int | None:
    """The GPU that was asked for what the line shows (`nvidia-smi -q -i 5`), or that stands over it (`GPU 3: ...`)."""
    if line.where != "log":
        return None
    for above in reversed(reader.lines["log"][max(0, line.index - SHOWN_LINES) : line.index]):
        if match := _ASKED_GPU.search(above.raw):
            return number(match)
    return None


def odd_one_out(case: Evidence) -> int | None:
    """The one rank whose end was its own doing: an error among ranks that were stopped, a signal among errors."""
    own = {int(r): s for r, s in case.exit.items() if r.isdecimal() and s not in (0, None) and r not in case.ours}
    faulted = [rank for rank, status in own.items() if status in FAULT]
    if len(faulted) == 1:
        return faulted[0]
    failed = [rank for rank, status in own.items() if status not in TEARDOWN]
    if len(failed) == 1:
        return failed[0]
    errors = [rank for rank in failed if own[rank] not in (-6, 134)]
    if len(errors) == 1:  # the others aborted: that is what a watchdog does to the healthy
        return errors[0]
    statuses = Counter(own.values())
    if not failed and len(own) > 1 and len(statuses) == 2:
        rare, count = statuses.most_common()[-1]
        return next(rank for rank, status in own.items() if status == rare) if count == 1 else None
    return next(iter(own)) if len(own) == 1 and len(ranks_of(case)) == 1 else None


def failed_alone(case: Evidence, rank: int) -> bool:
    """Whether a rank ended with an error of its own, so that nobody had to end it."""
    status = case.exit[str(rank)]
    return status not in (0, None) and status not in TEARDOWN and str(rank) not in case.ours


def root_cause(reader: Reader) -> int | None:
    """The rank that the launcher saw fail first (torch's elastic agent, Lightning's): a hint, by its own clock."""
    for line in reader.lines["log"]:
        if match := _CHILD.search(line.raw):
            return int(match[1])
    inside = False
    for line in reader.lines["log"]:
        inside = inside or bool(_ROOT.search(line.text))
        if inside and (match := _ROOT_RANK.match(line.text)):
            return int(match[1])
    return next(iter(elastic_ranks(reader).values()), None)


def elastic_ranks(reader: Reader) -> dict[int, int]:
    """Pid -> rank of the processes that torch's elastic agent saw fail, in its order.

    It numbers them by node; only its summary tells the ranks, and by how much they are off is the same for all of a node.
    """
    local: dict[int, int] = {}
    summed: dict[int, int] = {}
    offsets: set[int] = set()
    entry: re.Match[str] | None = None
    for line in reader.lines["log"]:
        if match := _ELASTIC.search(line.text):
            local[int(match[2])] = int(match[1])
        elif match := _ROOT_RANK.match(line.text):
            entry = match
            offsets.add(int(match[1]) - int(match[2]))
        elif entry is not None and (match := _SUMMED_UP.match(line.text)):
            summed[int(match[1])] = int(entry[1])
    offset = offsets.pop() if len(offsets) == 1 else 0
    return {pid: rank + offset for pid, rank in local.items()} | summed


def by_pid(deciding: Line, reader: Reader) -> int | None:
    """The rank of the process that the kernel names."""
    match = _PID.search(deciding.text)
    if match is None:
        return None
    pid = number(match)
    if (rank := elastic_ranks(reader).get(pid)) is not None:
        return rank
    for line in reader.lines["log"]:
        if deciding is not line and _told_with_rank(line.text, pid) and (rank := speaker(line)) is not None:
            return rank
    return None


def _told_with_rank(text: str, pid: int) -> bool:
    return f"PID {pid}" in text or re.search(rf"\brank \d+ \(pid[ =:]{{1,2}}{pid}\)", text) is not None


def by_bus(deciding: Line, reader: Reader) -> int | None:
    """The one rank whose GPU sits where the line says (`PCI:0000:9a:00`), as NCCL told it when a communicator began; where
    several nodes have one there, that of the host which the line names.
    """
    match = _BUS.search(deciding.text)
    if match is None:
        return None
    bus = int("".join(match.groups(default="0")), 16)  # NCCL's busId: the same digits in a row, the function last
    hosts = dict[int, str]()
    for line in reader.lines["log"]:
        if (found := _BUS_OF_RANK.search(line.text)) and int(found[2], 16) == bus:
            host = _HOST.match(line.raw)
            hosts[int(found[1])] = host[1] if host else ""
    there = [rank for rank, host in hosts.items() if host and _names(deciding.text, host)]
    return next(iter(there or hosts)) if len(there or hosts) == 1 else None


def _names(text: str, host: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", text) is not None


def task_of_host(deciding: Line, reader: Reader) -> int | None:
    """The one task that Slurm saw end on the host which the line names."""
    tasks = set[int]()
    for line in reader.lines["log"]:
        if (match := _TASK.search(line.text)) and _names(deciding.text, match[1]):
            tasks.add(int(match[2]))
    return tasks.pop() if len(tasks) == 1 else None


def number(match: re.Match[str]) -> int:
    """What the one group that took part in a match holds."""
    return int(next(group for group in match.groups() if group is not None))
