"""Copies of snapshots on another node: a whole node is lost, and nothing is read from storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.client import ask
from recovery.events import AttemptStarted, Event, LayoutChosen, Ready, StorageNotice, TierCommitted
from tests.nodes_run import NodesRun, nodes_run
from tests.runs import TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.slow]

MACHINE = "[machine]\nranks_per_node = 1\n"
INTERVAL = 3  # of snapshots, see the run's config
COPIED = "--set=checkpoint.peer_copy=true"


def standstill(step: int, rank: int = 1) -> str:
    """A rank is stopped after this step: what is copied by then is known."""
    return f'[[faults]]\nkind = "stop"\nat = "step"\nstep = {step}\nrank = {rank}\n'


def ready(run: TinyRun) -> list[tuple[str, int]]:
    return [(event.source, event.step) for event in run.events() if isinstance(event, Ready)]


def planned(run: TinyRun) -> list[str]:
    return [event.source for event in run.events() if isinstance(event, AttemptStarted)]


def copied(step: int) -> object:
    def seen(events: list[Event]) -> bool:
        return any(isinstance(it, TierCommitted) and it.tier == "peer" and it.step == step for it in events)

    return seen


def hide_packs(run: TinyRun) -> list[Path]:
    """Storage cannot be read any more: whoever tries finds nothing."""
    packs = list(Path(run.url).rglob("*.pack"))
    for pack in packs:
        pack.rename(pack.with_suffix(".hidden"))
    return packs


def lose(nodes: NodesRun, *names: str) -> None:
    for name in names:
        nodes.kill(name)


def test_a_lost_node_is_restored_from_its_buddys_memory_bit_for_bit_and_storage_is_not_read(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f"{MACHINE}{standstill(14)}")
    with no_process_left(run), nodes_run(run, "n1", "n2") as nodes:
        parent = run.start(COPIED)
        run.wait_for(copied(12))  # type: ignore[arg-type]
        nodes.join("n3")
        nodes.wait_for_nodes("n1", "n2", "n3")
        assert hide_packs(run)
        lose(nodes, "n2")
        code, output = finish(parent)
        assert code == 0, output
    assert ready(run) == [("init", 0), ("peer", 12)]
    assert planned(run) == ["init", "peer"]
    assert 14 - ready(run)[1][1] <= INTERVAL
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_stop_in_the_verdict_of_a_lost_node_stores_the_copies(corpus: str, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f"{MACHINE}{standstill(14)}")
    options = COPIED, "--set=checkpoint.every_steps=0"
    with no_process_left(run), nodes_run(run, "n1", "n2") as nodes:
        parent = run.start(*options)
        run.wait_for(copied(12))  # type: ignore[arg-type]
        run.halted()
        lose(nodes, "n2")
        ask(run.local, "stop")
        code, output = finish(parent)
        assert code == 75, output
        assert "2 steps since step 12 will be done again" in output
    with no_process_left(run), nodes_run(run, "n1", "n2"):
        assert run.run(*options)[0] == 0
    assert ready(run) == [("init", 0), ("storage", 12)]
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_both_the_node_and_its_buddy_are_lost_and_storage_has_the_state(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f"{MACHINE}{standstill(14)}")
    with no_process_left(run), nodes_run(run, "n1", "n2") as nodes:
        parent = run.start(COPIED)
        run.wait_for(copied(12))  # type: ignore[arg-type]
        nodes.join("n3", "n4")
        nodes.wait_for_nodes("n1", "n2", "n3", "n4")
        lose(nodes, "n2", "n1")
        code, output = finish(parent)
        assert code == 0, output
    assert ready(run) == [("init", 0), ("storage", 9)]
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_node_is_lost_for_good_and_the_others_go_on_under_another_layout_from_their_memory(
    corpus: str, tmp_path: Path
) -> None:
    """Two losses, one after the other: the copies are made anew after the first."""
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=3, steps=100_000, global_batch=6, extra=MACHINE)
    with no_process_left(run), nodes_run(run, "n1", "n2", "n3") as nodes:
        parent = run.start(COPIED, "--set", "recovery.nodes_s=5", "--set", "checkpoint.every_steps=0")
        for number, name in enumerate(("n2", "n3"), start=1):
            seen = len([event for event in run.events() if isinstance(event, TierCommitted)])
            run.wait_for(lambda events, seen=seen: sum(isinstance(it, TierCommitted) for it in events) > seen + 2)  # type: ignore[misc]
            lose(nodes, name)
            run.wait_for(lambda events, number=number: sum(isinstance(it, Ready) for it in events) == number + 1)  # type: ignore[misc]
        ask(run.local, "stop")
        assert finish(parent)[0] == 75
    assert [source for source, _ in ready(run)] == ["init", "peer", "peer"]
    assert [event.ranks for event in run.events() if isinstance(event, LayoutChosen)] == [2, 1]
    proofs = [event.proof for event in run.events() if isinstance(event, Ready)]
    assert all("digests of" in proof and "across" in proof for proof in proofs[1:])
    said = [event.text for event in run.events() if isinstance(event, StorageNotice) and event.topic == "peer"]
    assert len(said) <= 2, "each loss may break off the copy that was on its way to the lost node, and nothing else goes wrong"
