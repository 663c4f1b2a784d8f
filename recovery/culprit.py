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
from recovery.naming import (
    FAULT,
    TEARDOWN,
    asked_about,
    by_bus,
    by_pid,
    device,
    failed_alone,
    odd_one_out,
    ranks_of,
    root_cause,
    speaker,
    task_of_host,
)
from recovery.reading import Line, Reader
from recovery.waiting import absent_or_behind, in_another_collective, only_accused

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
MOST_ON_A_NODE = 16
_EVICTED = re.compile(r"\b[Ee]victed\b")
_STRAGGLER = re.compile(r"(?i)(?:straggl\w*|slowest)\b.{0,60}\brank ?[:=#]? ?(\d+)\b")


def first_failing(case: Evidence, reader: Reader, deciding: Line, related: Sequence[Line], *, how: How) -> int | None:
    """The rank that failed first, None if that cannot be told."""
    if how == "timeout":
        return absent_or_behind(case, reader)
    if how == "vanished" and (lost := _on_lost_node(case, deciding)) is not None:
        return lost
    if how == "vanished" and (silent := _only(case, (None,))) is not None:
        return silent
    if how == "vanished" and (given_up := only_accused(reader)) is not None:
        return given_up
    if how == "vanished" and (named := _named_by_kernel(case, reader, [deciding, *related])) is not None:
        return named
    if how in {"outside", "vanished"}:
        away = taken_away(case, [deciding, *related])
        return _straggler(reader) if away is None and how == "vanished" else away
    known = ranks_of(case)
    for candidate in _candidates(case, reader, deciding, related, how):
        if candidate is not None and (not known or candidate in known):
            return candidate
    return None


def _candidates(case: Evidence, reader: Reader, deciding: Line, related: Sequence[Line], how: How) -> Iterable[int | None]:
    if deciding.where != "log" and (how == "stuck" or _vanished_from(deciding, case)):
        yield _only(case, (None,))
    yield in_another_collective(reader)
    if deciding.where == "exit":
        yield _struck(case, deciding)
    elif deciding.where != "kernel":
        yield _crashed_instead_of(speaker(deciding), case)
        yield speaker(deciding)
    yield by_pid(deciding, reader)
    yield by_bus(deciding, reader)
    yield from (by_pid(line, reader) for line in related if line.where == "kernel")
    if deciding.where == "kernel":
        yield task_of_host(deciding, reader)
    if how == "killed" or (deciding.where == "scheduler" and _EVICTED.search(deciding.text)):
        yield _only(case, _KILLED)
    yield from (speaker(line) for line in related if line.where == "log")
    yield odd_one_out(case)
    yield _on_one_node(device(deciding), case)
    yield from (_on_one_node(device(line), case) for line in related)
    if how == "slow":
        yield _straggler(reader)
    yield _on_one_node(asked_about(deciding, reader), case)
    yield root_cause(reader)
    yield _lowest_of_some(case)


def _on_one_node(gpu: int | None, case: Evidence) -> int | None:
    """The rank of a node's GPU: its number, or where the ranks of one later node are told alone, that far from the first.
    Of more ranks than a node holds nobody knows on which it is.
    """
    known = ranks_of(case)
    if gpu is None or len(known) > MOST_ON_A_NODE:
        return None
    if not known or known[0] == 0:
        return gpu
    one_node = len(known) > 1 and known == list(range(known[0], known[-1] + 1)) and known[0] % len(known) == 0
    return known[0] + gpu if one_node and gpu < len(known) else gpu


def _crashed_instead_of(named: int | None, case: Evidence) -> int | None:
    """The one rank that crashed, where the line's number belongs to one that is not known to have ended: a pod's, say."""
    if named is None or case.exit.get(str(named), 0) is not None:
        return None
    return _only(case, FAULT)


def _named_by_kernel(case: Evidence, reader: Reader, lines: Sequence[Line]) -> int | None:
    """The rank of the process that was in the way of a machine's fault, where it ended by that."""
    ranks = (by_pid(line, reader) for line in lines if line.where == "kernel")
    return next((rank for rank in ranks if case.exit.get(str(rank)) in FAULT), None)


def _straggler(reader: Reader) -> int | None:
    """The one rank that a watch for stragglers has named, or that it named in more than half of its lines."""
    named = Counter(int(match[1]) for line in reader.lines["log"] if (match := _STRAGGLER.search(line.text)))
    return next((rank for rank, times in named.most_common(1) if 2 * times > named.total()), None)


def _vanished_from(deciding: Line, case: Evidence) -> bool:
    """Whether the scheduler reports a fault of a machine whose ranks nobody killed: then the silent one was on it."""
    return deciding.where == "scheduler" and not any(status in TEARDOWN for status in case.exit.values())


def taken_away(case: Evidence, lines: Sequence[Line]) -> int | None:
    """The one rank that ended from outside, else the one that the scheduler's words number (`worker-3`, `task 5`)."""
    for statuses in _OUTSIDE:
        if (rank := _only(case, statuses)) is not None:
            return rank
    known = ranks_of(case)
    asked = [rank for rank in known if case.exit[str(rank)] in _ASKED]
    if asked and all(rank in asked or failed_alone(case, rank) for rank in known) and len(asked) < len(known):
        return asked[0]  # a node's ranks were asked to end, and the others failed for want of them
    named = {int(match[1]) for line in lines for match in _MEMBER.finditer(line.text)}
    named = {rank for rank in named if rank in known}
    return named.pop() if len(named) == 1 and len(known) > 1 else None


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
