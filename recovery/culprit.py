"""Which rank failed first: told by the deciding line, by exit statuses, or by who did *not* time out.

The rank that complains first is rarely the one that failed: in a hung collective the healthy ranks time out and the guilty one
says nothing. So a time-out is read the other way round (who never arrived, who is behind), and for everything else the speaker
of the deciding line comes first, then the one rank whose end was nobody else's doing. None is an answer: when all ranks end
alike in the same second, nobody was first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from recovery.evidence import Evidence
from recovery.reading import Line, Reader

# What was struck: a rank, a collective, a job from outside, a machine with its ranks, a process, who waits in the kernel,
# who is behind the others.
How = Literal["speaker", "timeout", "outside", "vanished", "killed", "stuck", "slow"]
# Ends that come from outside, most telling first: interrupted, hung up, asked to stop, never heard of again, killed.
_ASKED = (-15, 143)
_OUTSIDE = ((-2, 130), (-1, 129), _ASKED, (None,), (-9, 137))
_MEMBER = re.compile(
    r"(?:worker|rank|node|task|pod|member|replica|trainer|container)s?\b[-_ :/\w.]{0,24}?[-_ ](\d{1,5})\b", re.IGNORECASE
)
_KILLED = (-9, 137)
_EVICTED = re.compile(r"\b[Ee]victed\b")
_FAULT = (-11, 139, -7, 135, -4, 132, -8, 136)  # signals that only the process's own doing brings
_TEARDOWN = frozenset({-15, 143, -9, 137})
_ACCUSED = re.compile(
    r"[Cc]heck rank (\d+) logs|received errors while waiting for send/recv from rank (\d+)|"
    r"\b[Rr]ank (\d+) (?:failed to pass|never (?:joined|reported|arrived)|did not (?:join|reach|arrive|respond)|"
    r"is (?:missing|dead|stuck|absent))|"
    r"/task:(\d+) (?:heartbeat timeout|has been set to ERROR|unexpectedly tried)|"
    r"timed out task names: \S*/task:(\d+)(?![\d,])|\[missing ranks: (\d+)\]"
)
_STRAGGLER = re.compile(r"(?i)straggl\w*\b.{0,60}\brank ?[:=#]? ?(\d+)\b")
_MISSING = re.compile(r"^(?:Missing|Stalled) ranks:\s*$")  # Horovod's heading of the ranks whose tensors are waited for
_WAITED_FOR = re.compile(r"^(\d{1,5}): \[")
_IN_TEXT = (
    _ACCUSED,
    re.compile(r"\b(?:global|GLOBAL)[_ ](?:rank|RANK)[ :=]+(\d+)"),
    re.compile(r"\[Rank (\d+)\]|\bRank (\d+)[\]:, ]|\brank[ :=]+(\d+)\b|\bRANK (\d+)\b"),
    re.compile(r"\brank(\d+)\["),
    re.compile(r"\bTP(\d+)\b"),
    re.compile(r"-- Process (\d+) terminated with the following error"),
)
_NCCL_DEVICE = re.compile(r"^\S+:\d+:\d+ \[(\d+)\] ")
_GPU = re.compile(r"\bGPU(?: ID)? (\d+)\b|\bcuda:(\d+)\b|\blocalRank (\d+)\b")
_ELASTIC = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (\d+) \(pid: (\d+)\)")
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)")
_SUMMED_UP = re.compile(r"^\s*exitcode\s*: -?\d+ \(pid: (\d+)\)")
_PID = re.compile(
    r"\bpid[=: ]+'?(\d+)|process (\d+) \(|Sending SIGBUS to [^:]+:(\d+)|"
    r"[\w.-]+\[(\d+)\]:? (?:trap|segfault|general protection)"
)
_SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(\d+)|last completed(?: NCCL)? work: (\d+)|work sequence id: (\d+)")
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|detected by watchdog|Timeout at NCCL work|Timed out waiting"
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
            return _number(match)
    return None


def device(line: Line) -> int | None:
    """The GPU of the node that a line names: a rank only where there is one node."""
    for pattern in (_NCCL_DEVICE, _GPU):
        if match := pattern.search(line.text):
            return _number(match)
    return None


def odd_one_out(case: Evidence) -> int | None:
    """The one rank whose end was its own doing: an error among ranks that were stopped, a signal among errors."""
    own = {int(r): s for r, s in case.exit.items() if r.isdecimal() and s not in (0, None) and r not in case.ours}
    faulted = [rank for rank, status in own.items() if status in _FAULT]
    if len(faulted) == 1:
        return faulted[0]
    failed = [rank for rank, status in own.items() if status not in _TEARDOWN]
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


def first_failing(case: Evidence, reader: Reader, deciding: Line, related: Sequence[Line], *, how: How) -> int | None:
    """The rank that failed first, None if that cannot be told."""
    if how == "timeout":
        return absent_or_behind(case, reader)
    if how == "vanished" and (lost := _on_lost_node(case, deciding)) is not None:
        return lost
    if how == "vanished" and (silent := _only(case, (None,))) is not None:
        return silent
    if how == "vanished" and (named := _named_by_kernel(case, reader, [deciding, *related])) is not None:
        return named
    if how in {"outside", "vanished"}:
        return taken_away(case, [deciding, *related])
    known = ranks_of(case)
    for candidate in _candidates(case, reader, deciding, related, how):
        if candidate is not None and (not known or candidate in known):
            return candidate
    return None


def _candidates(case: Evidence, reader: Reader, deciding: Line, related: Sequence[Line], how: How) -> Iterable[int | None]:
    if deciding.where != "log" and (how == "stuck" or _vanished_from(deciding, case)):
        yield _only(case, (None,))
    if deciding.where == "exit":
        yield _struck(case, deciding)
    elif deciding.where != "kernel":
        yield speaker(deciding)
    yield _by_pid(deciding, reader)
    if how == "killed" or (deciding.where == "scheduler" and _EVICTED.search(deciding.text)):
        yield _only(case, _KILLED)
    yield from (speaker(line) for line in related if line.where == "log")
    yield odd_one_out(case)
    yield device(deciding)
    yield from (device(line) for line in related)
    yield root_cause(reader)
    if how == "slow":
        yield _straggler(reader)
    yield _lowest_of_some(case)


def _named_by_kernel(case: Evidence, reader: Reader, lines: Sequence[Line]) -> int | None:
    """The rank of the process that was in the way of a machine's fault, where it ended by that."""
    ranks = (_by_pid(line, reader) for line in lines if line.where == "kernel")
    return next((rank for rank in ranks if case.exit.get(str(rank)) in _FAULT), None)


def _straggler(reader: Reader) -> int | None:
    """The one rank that a watch for stragglers has named."""
    ranks = {int(match[1]) for line in reader.lines["log"] if (match := _STRAGGLER.search(line.text))}
    return ranks.pop() if len(ranks) == 1 else None


def _vanished_from(deciding: Line, case: Evidence) -> bool:
    """Whether the scheduler reports a fault of a machine whose ranks nobody killed: then the silent one was on it."""
    return deciding.where == "scheduler" and not any(status in _TEARDOWN for status in case.exit.values())


def taken_away(case: Evidence, lines: Sequence[Line]) -> int | None:
    """The one rank that ended from outside, else the one that the scheduler's words number (`worker-3`, `task 5`)."""
    for statuses in _OUTSIDE:
        if (rank := _only(case, statuses)) is not None:
            return rank
    known = ranks_of(case)
    asked = [rank for rank in known if case.exit[str(rank)] in _ASKED]
    if asked and all(rank in asked or _failed_alone(case, rank) for rank in known) and len(asked) < len(known):
        return asked[0]  # a node's ranks were asked to end, and the others failed for want of them
    named = {int(match[1]) for line in lines for match in _MEMBER.finditer(line.text)}
    named = {rank for rank in named if rank in known}
    return named.pop() if len(named) == 1 and len(known) > 1 else None


def _failed_alone(case: Evidence, rank: int) -> bool:
    """Whether a rank ended with an error of its own, so that nobody had to end it."""
    status = case.exit[str(rank)]
    return status not in (0, None) and status not in _TEARDOWN and str(rank) not in case.ours


def _on_lost_node(case: Evidence, deciding: Line) -> int | None:
    """The one rank on the node that a supervisor has lost; those on other nodes may still run when the verdict is wanted."""
    there = [int(rank) for rank, node in case.nodes.items() if f"supervisor: node {node} was lost" in deciding.text]
    return there[0] if len(there) == 1 and len(case.nodes) > 1 else None


def _only(case: Evidence, statuses: Sequence[int | None]) -> int | None:
    """The one rank that ended like this, if there is one."""
    struck = [int(rank) for rank, status in case.exit.items() if rank.isdecimal() and status in statuses]
    return struck[0] if len(struck) == 1 and len(case.exit) > 1 else None


def _struck(case: Evidence, deciding: Line) -> int | None:
    """The rank whose exit status decided, unless several ended alike and nobody knows their order."""
    if deciding.rank is None or case.order:
        return deciding.rank
    alike = [
        rank for rank, status in case.exit.items() if status == case.exit.get(str(deciding.rank)) and rank not in case.ours
    ]
    return deciding.rank if len(alike) == 1 else None


def _lowest_of_some(case: Evidence) -> int | None:
    """Where some ranks failed and others did not: the first of those by number. Where all did, nobody was first."""
    known = ranks_of(case)
    failed = [rank for rank in known if case.exit[str(rank)] not in (0, None) and str(rank) not in case.ours]
    return failed[0] if failed and (len(failed) < len(known) or len(known) == 1) else None


def absent_or_behind(case: Evidence, reader: Reader) -> int | None:
    """In a hung collective: the one rank that never reported, else the one whose sequence number is lowest."""
    seen: dict[int, int] = {}
    accused = _waited_for(reader)
    for line in reader.lines["log"]:
        if match := _ACCUSED.search(line.text):
            accused.add(_number(match))
        rank = speaker(line)
        if rank is None or not _TIMED_OUT.search(line.text):
            continue
        numbers = [int(n) for match in _SEQUENCE.finditer(line.text) for n in match.groups() if n]
        seen[rank] = min([*numbers, seen.get(rank, 1 << 62)])
    if len(accused) == 1:
        return accused.pop()
    absent = [rank for rank in ranks_of(case) if rank not in seen]
    if len(seen) > 1 and len(absent) == 1:
        return absent[0]
    lowest = Counter(seen.values())
    if len(seen) > 2 and not absent and lowest[min(seen.values())] == 1 and len(lowest) > 1:
        return min(seen, key=lambda rank: seen[rank])
    if len(seen) > 1:
        return None
    patient = [rank for rank in ranks_of(case) if case.exit[str(rank)] in _TEARDOWN]
    if len(patient) == 1 and sum(_failed_alone(case, rank) for rank in ranks_of(case)) == len(ranks_of(case)) - 1 > 1:
        return patient[0]  # all the others ran out of patience, with it
    return odd_one_out(case)


def _waited_for(reader: Reader) -> set[int]:
    """The ranks under the last heading of those that the others wait for, one a line."""
    ranks: set[int] = set()
    listed = False
    for line in reader.lines["log"]:
        if _MISSING.match(line.text):
            ranks, listed = set(), True
        elif listed and (match := _WAITED_FOR.match(line.text)):
            ranks.add(int(match[1]))
        else:
            listed = False
    return ranks


def root_cause(reader: Reader) -> int | None:
    """The rank that torch's elastic agent saw fail first: a hint, by its own clock."""
    inside = False
    for line in reader.lines["log"]:
        inside = inside or bool(_ROOT.search(line.text))
        if inside and (match := _ROOT_RANK.match(line.text)):
            return int(match[1])
    return next(iter(_elastic_ranks(reader).values()), None)


def _elastic_ranks(reader: Reader) -> dict[int, int]:
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


def _by_pid(deciding: Line, reader: Reader) -> int | None:
    """The rank of the process that the kernel names."""
    match = _PID.search(deciding.text)
    if match is None:
        return None
    pid = _number(match)
    if (rank := _elastic_ranks(reader).get(pid)) is not None:
        return rank
    for line in reader.lines["log"]:
        if deciding is not line and f"PID {pid}" in line.text and (rank := speaker(line)) is not None:
            return rank
    return None


def _number(match: re.Match[str]) -> int:
    return int(next(group for group in match.groups() if group is not None))
