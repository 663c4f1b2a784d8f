"""On which nodes a supervised command goes on, and after which step its ranks leave."""

from __future__ import annotations

import msgspec
import pytest

from ftrain.compose.command_launch import CommandLaunch, environment
from ftrain.compose.command_leave import AHEAD_S, AT_LEAST, Leave
from ftrain.compose.command_nodes import CommandNodes
from ftrain.compose.errors import RefusedError
from ftrain.compose.supervise import check_nodes, fleet_spec, node_args
from ftrain.supervised import LeaveAfter, Leaving, StepTold, decode_asked
from recovery.places import WHOLE_NODE, Place


def launch(**values: object) -> CommandLaunch:
    settings = {"nnodes": 3, "nproc": 2, **values}
    return msgspec.convert({"url": "/runs/x", "argv": ["python", "train.py"], "cwd": "/", **settings}, CommandLaunch)


def places(*nodes: str, slots: int = 2) -> list[Place]:
    return [Place(node=node, slot=slot) for node in nodes for slot in range(slots)]


def started(**values: object) -> CommandNodes:
    nodes = CommandNodes(launch(**values))
    assert nodes.settle(places("a", "b", "c")) == []
    return nodes


def test_a_spare_takes_the_ranks_of_a_lost_node_and_the_others_stay() -> None:
    nodes = started()
    nodes.settle(places("a", "c", "d"))
    assert nodes.chosen == ("a", "d", "c")
    assert (nodes.count, nodes.ranks) == (3, 6)
    assert nodes.place_of(3) == Place(node="d", slot=WHOLE_NODE)
    assert nodes.place_of(6) is None


def test_without_leave_to_shrink_all_nodes_are_needed() -> None:
    nodes = started()
    with pytest.raises(ValueError, match=r"2 nodes are left, and it takes 3 .*--min-nodes would allow fewer"):
        nodes.choose(places("a", "c"), "b is lost")
    assert (nodes.count, nodes.chosen) == (3, ("a", "b", "c"))


def test_with_leave_it_shrinks_down_to_the_least_and_grows_again() -> None:
    nodes = started(min_nodes=2)
    (shrunk,) = nodes.choose(places("a", "c"), "b is lost")
    assert (shrunk.ranks, shrunk.reason) == (4, "b is lost")
    assert (shrunk.layout, shrunk.was) == ("2 nodes x 2 x python train.py", "3 nodes x 2 x python train.py")
    assert nodes.settle(places("a", "c")) == []
    assert (nodes.count, nodes.chosen) == (2, ("a", "c"))
    with pytest.raises(ValueError, match="1 nodes are left, and it takes 2"):
        nodes.choose(places("a"), "c is lost too")
    assert nodes.moves(places("a", "c", "d"))
    (grown,) = nodes.settle(places("a", "c", "d"))
    assert (grown.ranks, nodes.chosen) == (6, ("a", "c", "d"))
    assert not nodes.moves(places("a", "c", "d", "e"))


def test_a_node_with_a_place_too_few_is_used_only_where_there_is_no_other() -> None:
    nodes = started()
    partly = [Place(node="b", slot=1)]
    nodes.settle([*places("a", "c", "d"), *partly])
    assert nodes.chosen == ("a", "d", "c")
    nodes.settle([*places("a", "c"), *partly])
    assert nodes.chosen == ("a", "b", "c")


def test_processes_of_an_earlier_coordinator_are_as_many_as_they_are() -> None:
    nodes = CommandNodes(launch(min_nodes=1))
    nodes.adopt(("a", "c"), running=False)
    assert (nodes.count, nodes.chosen) == (3, ("a", "c"))
    nodes.adopt(nodes.chosen, running=True)
    assert (nodes.count, nodes.ranks) == (2, 4)


@pytest.mark.parametrize("nproc", [0, 2])
def test_one_machine_has_no_nodes_to_choose_from(nproc: int) -> None:
    nodes = CommandNodes(launch(nnodes=0, nproc=nproc))
    nodes.adopt(("localhost",), running=True)
    assert nodes.settle([]) == []
    assert (nodes.count, nodes.ranks, nodes.place_of(0)) == (1, max(1, nproc), None)
    assert nodes.layout() == ("2 x python train.py" if nproc else "python train.py")
    assert fleet_spec(launch(nnodes=0), None) is None  # type: ignore[arg-type]


def test_every_rank_is_told_its_place_as_torchrun_tells_it() -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    told = [environment(launch(), rank, 3, 1) for rank in range(6)]
    assert [[int(env[name]) for name in names] for env in told] == [
        [0, 0, 0, 6, 2, 3],
        [1, 1, 0, 6, 2, 3],
        [2, 0, 1, 6, 2, 3],
        [3, 1, 1, 6, 2, 3],
        [4, 0, 2, 6, 2, 3],
        [5, 1, 2, 6, 2, 3],
    ]
    assert {env["TORCHELASTIC_RESTART_COUNT"] for env in told} == {"1"}
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(told[0])  # the first rank's agent knows them
    assert "RANK" not in environment(launch(nnodes=0, nproc=0), 0, 1, 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nproc": 0}, "--nproc how many processes on each: give both"),
        ({"min_nodes": 4}, "--min-nodes 4: at most --nnodes, which is 3"),
        ({"master_addr": "10.0.0.1"}, "--master-addr is for one machine"),
        ({"interface": "none0"}, "no IPv4 address on none0"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_words(values: dict[str, object], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        check_nodes(launch(**values))
    check_nodes(launch(nnodes=0, nproc=0))


def test_nodes_are_told_of_no_keeper_and_find_their_own_network(tmp_path) -> None:  # type: ignore[no-untyped-def]
    args = node_args(launch(lease_s=7.0, nodes_s=9.0), tmp_path)
    assert (args.keeper, args.interfaces, args.lease_s, args.patience_s) == (None, [], 7.0, 9.0)


# -- the step after which all leave --------------------------------------------------------------------------------------------


class Sent:
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.leave = Leave(lambda rank, payload: self.steps.append((rank, decode_asked(payload).step)))
        self.leave.begin(range(3))

    def step(self, step: int, seconds: float = 0.1) -> None:
        self.leave.on_step(StepTold(step=step, t_begin=100.0, t_end=100.0 + seconds))


def test_the_last_step_is_so_far_ahead_that_nobody_can_have_finished_it() -> None:
    """At the fastest pace of late, the word has AHEAD_S to reach everybody."""
    sent = Sent()
    sent.step(40, seconds=0.5)
    sent.step(41, seconds=0.25)
    sent.step(39, seconds=0.5)  # another rank, a little behind
    sent.leave.ask()
    sent.leave.tick(1000.0)
    assert sent.steps == [(rank, 41 + int(AHEAD_S / 0.25)) for rank in range(3)]
    sent.step(43, seconds=0.01)
    sent.leave.tick(1000.5)
    assert len(sent.steps) == 3
    sent.leave.tick(1001.0)
    assert sent.steps[3:] == sent.steps[:3]  # said again, never changed


def test_slow_steps_still_leave_two_to_hear_of_it() -> None:
    sent = Sent()
    sent.leave.ask()
    sent.leave.tick(1000.0)
    assert sent.steps == []  # nobody has finished a step yet: whoever is first tells how far they are
    sent.step(7, seconds=60.0)
    sent.leave.tick(1001.0)
    assert {step for _, step in sent.steps} == {7 + AT_LEAST}


def test_a_script_that_goes_on_regardless_has_not_left() -> None:
    sent = Sent()
    assert not sent.leave.left(10)
    sent.leave.on_leaving(0, Leaving(step=10))
    assert sent.leave.left(10)
    assert not sent.leave.left(11)
    sent.leave.begin(range(2))
    assert not sent.leave.left(10)
    assert msgspec.json.decode(msgspec.json.encode(LeaveAfter(step=3)))["step"] == 3
