"""Whom the others wait for in a hung collective: who never arrived, who is behind, who is in another one.

The ranks that complain are the healthy ones, so what they report is read the other way round.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from recovery.evidence import Evidence
from recovery.naming import ACCUSED, TEARDOWN, failed_alone, number, odd_one_out, ranks_of, speaker
from recovery.reading import Line, Reader

LEAST_MEMBERS = 4  # of a group that must have reported before the one that has not is conspicuous
_MISSING = re.compile(r"^(?:Missing|Stalled) ranks:\s*$")  # Horovod's heading of the ranks whose tensors are waited for
_WAITED_FOR = re.compile(r"^(\d{1,5})!?: \[")
_SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(\d+)|last completed(?: NCCL)? work: (\d+)|work sequence id: (\d+)")
_ENQUEUED = re.compile(r"[Ll]ast enqueued(?: NCCL)? work: (\d+)")
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|detected by watchdog|Timeout at NCCL work|Timed out waiting"
)
_MEMBER = re.compile(r"\[PG ID \d+ PG GUID (\w+)(?:\([^)]*\))? Rank (\d+)\]")
_RUNS = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=\d+(?:, )?)?(OpType=\w+(?:, \w+=\[[^\]]*\])?)"
)


def absent_or_behind(case: Evidence, reader: Reader) -> int | None:
    """The one rank that the others name, else the one that has put in less than all others, that never reported, that did not
    run out of patience, or whose sequence number is lowest.
    """
    lines = reader.lines["log"]
    if (accused := only_accused(reader)) is not None:
        return accused
    if (behind := _behind(lines)) is not None:
        return behind
    seen = _seen(lines)
    absent = [rank for rank in ranks_of(case) if rank not in seen]
    if len(seen) > 1 and len(absent) == 1:
        return absent[0]
    if (silent := _silent_member(lines)) is not None:
        return silent
    lowest = Counter(seen.values())
    if len(seen) > 2 and not absent and lowest[min(seen.values())] == 1 and len(lowest) > 1:
        return min(seen, key=lambda rank: seen[rank])
    if (patient := _patient(case)) is not None and patient not in seen:
        return patient
    return odd_one_out(case) if len(seen) <= 1 else None


def in_another_collective(reader: Reader) -> int | None:
    """The one rank that PyTorch's fingerprints show in another collective than all the others; of two nobody can tell."""
    running: dict[int, str] = {}
    for line in reader.lines["log"]:
        running |= {int(rank): what for rank, what in _RUNS.findall(line.text)}
    alone = [what for what, count in Counter(running.values()).items() if count == 1]
    if len(running) < 3 or len(alone) != 1:
        return None
    return next(rank for rank, what in running.items() if what == alone[0])


def only_accused(reader: Reader) -> int | None:
    """The rank that others name, if all name the same."""
    return accused.pop() if len(accused := _accused(reader)) == 1 else None


def _accused(reader: Reader) -> set[int]:
    """The ranks that others name, in a sentence or in a list."""
    return _waited_for(reader) | {
        number(match) for line in reader.lines["log"] if (match := ACCUSED.search(line.text)) is not None
    }


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


def _seen(lines: Iterable[Line]) -> dict[int, int]:
    """Rank -> the lowest sequence number in its reports of a time-out."""
    seen: dict[int, int] = {}
    for line in lines:
        if (rank := speaker(line)) is not None and _TIMED_OUT.search(line.text):
            numbers = [int(n) for match in _SEQUENCE.finditer(line.text) for n in match.groups() if n]
            seen[rank] = min([*numbers, seen.get(rank, 1 << 62)])
    return seen


def _behind(lines: Iterable[Line]) -> int | None:
    """The one rank that has enqueued less than all others, who have enqueued alike: they wait for what it never began."""
    groups: dict[str, dict[int, int]] = defaultdict(dict)  # each process group counts for itself
    for line in lines:
        if (rank := speaker(line)) is not None and (match := _ENQUEUED.search(line.text)):
            enqueued = groups[member[1] if (member := _MEMBER.search(line.text)) else ""]
            enqueued[rank] = max(int(match[1]), enqueued.get(rank, 0))
    found = set[int]()
    for enqueued in groups.values():
        counts = Counter(enqueued.values())
        if len(enqueued) > 2 and len(counts) == 2 and counts[min(counts)] == 1:
            found.add(min(enqueued, key=enqueued.__getitem__))
    return found.pop() if len(found) == 1 else None


def _silent_member(lines: Iterable[Line]) -> int | None:
    """The one rank of a process group that says nothing while the rest of the group times out.

    A group numbers its members from 0. By what number and rank differ is the same for neighbours, as in a group of tensor
    parallelism; a last member that is missing cannot be told from a smaller group.
    """
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    for line in lines:
        if line.rank is not None and (match := _MEMBER.search(line.text)):
            groups[match[1]][int(match[2])] = line.rank
    found = set[int]()
    for members in groups.values():
        offsets = {rank - member for member, rank in members.items()}
        missing = set(range(max(members))) - members.keys()
        if len(members) >= LEAST_MEMBERS and len(offsets) == 1 and len(missing) == 1 and offsets != {0}:
            found.add(missing.pop() + offsets.pop())
    return found.pop() if len(found) == 1 else None


def _patient(case: Evidence) -> int | None:
    """The one rank that had to be ended, or was not heard of, where all the others ended by themselves."""
    known = ranks_of(case)
    ended = [rank for rank in known if not failed_alone(case, rank)]
    if len(ended) != 1 or len(known) < 3:
        return None
    return ended[0] if case.exit[str(ended[0])] in {*TEARDOWN, None} else None
