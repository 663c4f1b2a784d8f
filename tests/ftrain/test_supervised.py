"""What a supervised script says, and what it is told: over the same shared memory and sockets as in a run."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.patterns import LogTail, PatternError, Seen, compiled, seen_in
from ftrain.supervised import LeaveAfter, Leaving, Reporter, StateLoaded, StepTold, decode_told
from recovery.command import LINK, Link, inherited
from recovery.heartbeat import CONTROL_SIZE, RECORD_SIZE, ControlWriter, HeartbeatReader
from recovery.memory import memfd
from recovery.messages import FromWorkerProcess, Payload
from recovery.wire import channel


class Agent:
    """The other end of a few supervised ranks."""

    def __init__(self, folder: Path, ranks: int, *, several_nodes: bool = False) -> None:
        page, control = memfd("heartbeat", ranks * RECORD_SIZE), memfd("control", CONTROL_SIZE)
        self.beats, self.control = HeartbeatReader(page), ControlWriter(control)
        self.reporters, self.links = [], []
        for rank in range(ranks):
            ours, theirs = socket.socketpair()
            fds = (os.dup(page), os.dup(control), theirs.detach())
            inodes = tuple(os.fstat(fd).st_ino for fd in fds)
            link = Link(
                heartbeat=fds[0],
                control=fds[1],
                channel=fds[2],
                inodes=inodes,  # type: ignore[arg-type]
                index=rank,
                rank=rank,
                attempt=0,
                folder=str(folder),
                several_nodes=several_nodes,
            )
            self.links.append(channel(ours, FromWorkerProcess))
            self.reporters.append(Reporter(link))
        os.close(page)
        os.close(control)

    def close(self) -> None:
        for link in (*self.links, *(reporter._channel for reporter in self.reporters)):
            link.close()

    def heard(self, rank: int) -> list[object]:
        return [decode_told(frame.message.payload) for frame in self.links[rank].read()]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, 2)
    yield agent
    agent.close()


def test_steps_reach_the_page_and_the_ledgers_way(two: Agent) -> None:
    two.reporters[1].loaded(4, ((4, 2, 99),))
    two.reporters[1].saved(0.25)
    before = time.time()
    assert two.reporters[1].progress(5, 0.5, 100) is False
    loaded, step = two.heard(1)
    assert isinstance(loaded, StateLoaded)
    assert isinstance(step, StepTold)
    assert loaded.stored == ((4, 2, 99),)
    assert (loaded.step, step.step, step.loss, step.tokens, step.saving_s) == (4, 5, 0.5, 100, 0.25)
    assert loaded.t <= step.t_begin <= before <= step.t_end
    (beat,) = two.beats.beats()
    assert (beat.rank, beat.step, beat.phase) == (1, 5, "step")


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_a_step_apart_stop_after_the_same_step(two: Agent, first: int) -> None:
    """One has finished step 10 when it sees the request, the other step 11; whoever sees it first."""
    done = {0: 10, 1: 11}
    two.control.set(stop=True, save=0)
    stopped: dict[int, int] = {}
    for rank in (first, 1 - first) * 9:
        if rank not in stopped and two.reporters[rank].progress(done[rank], None, 0):
            stopped[rank] = done[rank]
        done[rank] += 1
    assert stopped[0] == stopped[1] >= 12


def test_ranks_of_several_nodes_leave_after_the_step_that_the_supervisor_names(tmp_path: Path) -> None:
    """The control pages of two nodes do not change at the same time, so none of them is asked."""
    nodes = Agent(tmp_path, 2, several_nodes=True)
    nodes.control.set(stop=True, save=0)
    zero, one = nodes.reporters
    assert not zero.progress(10, None, 0)
    nodes.links[0].send(Payload(payload=msgspec.json.encode(LeaveAfter(step=12))))
    nodes.links[0].send(Payload(payload=msgspec.json.encode(LeaveAfter(step=99))))  # of another coordinator: the first holds
    assert [zero.progress(step, None, 0) for step in (11, 12, 13)] == [False, True, True]
    nodes.links[1].send(Payload(payload=msgspec.json.encode(LeaveAfter(step=12))))
    assert one.progress(14, None, 0)  # too late, so at once
    leaving = [[told.step for told in nodes.heard(rank) if isinstance(told, Leaving)] for rank in (0, 1)]
    assert leaving == [[12], [14]]
    nodes.close()


def test_a_single_process_stops_at_once(tmp_path: Path) -> None:
    alone = Agent(tmp_path, 1)
    alone.control.set(stop=True, save=0)
    assert alone.reporters[0].progress(3, None, 0) is True
    alone.close()


def test_the_supervisor_that_does_not_read_never_makes_the_loop_wait(two: Agent) -> None:
    for step in range(20_000):  # several times what a socket holds
        two.reporters[0].progress(step, 1.0, 1)
    assert two.beats.beats()[0].step == 19_999


def test_a_variable_without_its_files_is_no_link(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    link = {"heartbeat": here, "control": here, "channel": here, "inodes": [1, 2, 3], "index": 0, "rank": 0, "attempt": 0}
    os.close(here)
    assert inherited({}) is None
    assert inherited({LINK: "nonsense"}) is None
    assert inherited({LINK: str({**link, "folder": ""}).replace("'", '"')}) is None


@pytest.mark.parametrize(
    ("pattern", "line", "expected"),
    [
        (r"step (\d+)", "step 12 loss 3", Seen(12)),
        (r"iter (?P<step>[\d,]+): loss (?P<loss>\S+)", "iter 1,200: loss 2.5e-1", Seen(1200, 0.25)),
        (r"it=(?P<step>\d+) tok=(?P<tokens>\d+) l=(?P<loss>\S+)", "it=3 tok=512 l=nan", Seen(3, None, 512)),
        (r"loss (?P<loss>\S+) at (\d+)", "loss 2.5 at 12", Seen(12, 2.5)),
        (r"step (\d+)", "nothing of it", None),
    ],
)
def test_lines(pattern: str, line: str, expected: Seen | None) -> None:
    assert seen_in(line, compiled([pattern])) == expected


def test_patterns_that_cannot_work() -> None:
    allowed = "allowed: step, loss, tokens"
    told = {
        r"step (\d+": "is no regular expression",
        r"step\d": "has no group for the step",
        r"loss (?P<loss>[\d.]+)": "has no group for the step",
        r"step (?P<stp>\d+)": f"names a group stp; {allowed}",
        r"step (?P<step>\d+) lr (?P<lr>\S+)": f"names a group lr; {allowed}",
    }
    for pattern, why in told.items():
        with pytest.raises(PatternError, match=re.escape(f"--progress-pattern '{pattern}' {why}")):
            compiled([pattern])


def test_a_log_is_read_on_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n\xffthree\n")
    assert tail.lines() == ["two", "\N{REPLACEMENT CHARACTER}three"]
