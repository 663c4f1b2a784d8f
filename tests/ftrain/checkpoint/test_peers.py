"""Keepers that keep each other's snapshots: over real sockets, in real memory areas."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ftrain.checkpoint.area_lock import unchanging
from ftrain.checkpoint.arena import ArenaSlot, SlotState, Upload, slot_name, slot_nbytes
from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import (
    Buddies,
    CopyFailed,
    KeeperMessage,
    KeepSnapshots,
    PackStored,
    PeerCopied,
    Settled,
    StoreSnapshot,
)
from ftrain.checkpoint.names import area_name, peer_name
from ftrain.checkpoint.peer_link import Describe, Link, PeerError, Read, Unchanged, dial_keeper, offer_of
from ftrain.checkpoint.peer_restore import PeerStore
from ftrain.checkpoint.peers import Peers
from ftrain.checkpoint.saver import free_slot
from ftrain.compose.copies import Copies
from recovery.events import StorageNotice, TierCommitted
from recovery.identity import make_identity
from recovery.memory import memfd
from storage.box import Box
from storage.compress import Compressor
from storage.errors import ObjectMissing
from storage.memory import MemoryStore
from storage.objects import ByteRange
from storage.pack import ArraySpec, check, plan_pack

SPEC = ArraySpec(name="master/w", shape=(64, 64), dtype="float32", tile=(16, 16))
COMPRESSOR = Compressor(clevel=1)
LAYOUT = plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box.whole(SPEC.shape))])


class Node:
    """One node's keeper, as far as copies go, with the areas that an agent would have given it."""

    def __init__(self, name: str, control: Path, rank: int, copies_of: int) -> None:
        self.said: queue.SimpleQueue[KeeperMessage] = queue.SimpleQueue()
        self.peers = Peers(node=name, control=control, host="127.0.0.1", send=self.said.put)
        names = [slot_name(rank, index, 0) for index in range(3)] + [peer_name(copies_of, index, 0) for index in range(2)]
        self.fds = {area: memfd(area, slot_nbytes(LAYOUT)) for area in names}
        self.slots = {area: ArenaSlot(fd) for area, fd in self.fds.items()}
        for area, fd in self.fds.items():
            given = os.dup(fd)
            self.peers.adopt(area, given)
            os.close(given)
        self.rank = rank

    def snapshot(self, index: int, step: int, *, upload: bool = False) -> np.ndarray[Any, Any]:
        """What a worker would leave in a slot; returns the payload."""
        slot = self.slots[slot_name(self.rank, index, 0)]
        payload = slot.prepare(LAYOUT)
        slot.begin(epoch=1, attempt=0, step=step, rank=self.rank, world=2)
        payload[:] = np.random.default_rng(step).integers(0, 256, len(payload))
        slot.complete(msgspec.json.encode({"step": step}), upload=upload)
        return payload

    def heard(self) -> KeeperMessage:
        return self.said.get(timeout=30.0)

    def held(self) -> list[int]:
        return [slot.header().step for slot in self.slots.values() if slot.header().held]

    def copies(self) -> dict[int, ArenaSlot]:
        areas = (slot for name, slot in self.slots.items() if area_name(name).peer)
        return {slot.header().step: slot for slot in areas if slot.header().state is SlotState.COMPLETE}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    make_identity(tmp_path)
    made = Node("a", tmp_path, 0, 1), Node("b", tmp_path, 1, 0)
    for node in made:
        node.peers.buddies(Buddies(ring=["a", "b"]))
    yield made
    for node in made:
        node.peers.close()
        for fd in node.fds.values():
            os.close(fd)


def test_a_snapshot_is_copied_with_its_crcs_and_held_and_the_one_that_is_whole_stays(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    whole: tuple[int, int] | None = None
    for index, step in enumerate((3, 6, 9)):
        payload = one.snapshot(index, step)
        one.peers.keep(KeepSnapshots(keep=whole, copy=(0, step)))
        answer = one.heard()
        assert isinstance(answer, PeerCopied), answer
        assert (answer.step, answer.rank, answer.world, answer.buddy) == (step, 0, 2, "b")
        found = two.copies()[step]
        assert found.payload().tobytes() == payload.tobytes()
        assert check(found.payload(), LAYOUT) == []
        assert found.progress() == {"step": step}
        assert whole is None or whole[1] in two.copies()
        assert set(one.held()) == {step, *([whole[1]] if whole else [])}
        whole = (0, step)
    assert set(two.copies()) == {6, 9}
    one.peers.keep(KeepSnapshots(keep=(0, 9)))
    assert one.held() == [9]
    two.peers.keep(KeepSnapshots(keep=None, forget_after=6))
    assert set(two.copies()) == {6}, "what is no part of the history any more"


def test_a_slot_that_storage_is_owed_stays_when_storage_has_it_and_what_is_owed_is_not_forgotten_by_a_hold(
    nodes: tuple[Node, Node],
) -> None:
    one, _ = nodes
    one.snapshot(0, 3, upload=True)
    one.snapshot(1, 6)
    slot = one.slots[slot_name(0, 0, 0)]
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    assert isinstance(one.heard(), PeerCopied)
    assert one.held() == [3]
    assert slot.header().upload is Upload.WANTED
    slot.upload_ended()
    assert free_slot([slot.header(), one.slots[slot_name(0, 1, 0)].header()]) is None
    one.peers.keep(KeepSnapshots(keep=(0, 6)))
    assert free_slot([slot.header(), one.slots[slot_name(0, 1, 0)].header()]) == 0
    slot.want_upload()
    for held in (True, False):  # a keeper that was interrupted between its look and its word
        slot.hold(held)
        assert slot.header().upload is Upload.WANTED


def test_a_snapshot_that_was_overwritten_is_said_to_be(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.snapshot(0, 6)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    answer = one.heard()
    assert isinstance(answer, CopyFailed)
    assert (answer.step, answer.rank) == (3, 0)


def test_what_arrives_damaged_is_refused_and_the_copy_before_stays(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    one, two = nodes
    one.snapshot(0, 3)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    assert isinstance(one.heard(), PeerCopied)
    slot = one.slots[slot_name(0, 0, 0)]
    payload = slot.payload().copy()
    payload[100] ^= 1
    link = dial_keeper(tmp_path, "b")
    link.ask(offer_of("g0000-r00000", slot, slot.header(), (0, 3)))
    link.send_bytes(payload.data)
    with pytest.raises(PeerError, match="arrived damaged: master/w"):
        link.ask(Unchanged())
    with pytest.raises(PeerError, match="nothing was offered"):
        link.ask(Unchanged())
    link.close()
    assert set(two.copies()) == {3}


def test_what_is_overwritten_while_it_is_sent_is_no_copy_although_every_chunk_of_it_is_sound(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker was faster than the hold: what arrives belongs to another step than the offer says."""
    one, two = nodes
    one.snapshot(0, 3)
    send_bytes = Link.send_bytes

    def overwritten(link: Link, view: memoryview) -> None:
        one.snapshot(0, 9)
        one.slots[slot_name(0, 0, 0)].seal()
        send_bytes(link, view)

    monkeypatch.setattr(Link, "send_bytes", overwritten)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    answer = one.heard()
    assert isinstance(answer, CopyFailed), answer
    assert answer.reason == "its snapshot was overwritten meanwhile"
    monkeypatch.setattr(Link, "send_bytes", send_bytes)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 9)))
    assert isinstance(one.heard(), PeerCopied)  # the area is free again
    assert set(two.copies()) == {9}


def test_a_late_copy_does_not_overwrite_what_is_read(nodes: tuple[Node, Node]) -> None:
    """An attempt begins with step 6, which memory has; a late offer, which knows of 3 alone, must not take its area."""
    one, two = nodes
    for index, step in enumerate((3, 6)):
        one.snapshot(index, step)
        one.peers.keep(KeepSnapshots(keep=None if step == 3 else (0, 3), copy=(0, step)))
        assert isinstance(one.heard(), PeerCopied)
    before = two.copies()[6].payload().tobytes()
    one.snapshot(2, 9)
    with unchanging(two.fds) as still:
        assert still == two.fds.keys()
        one.peers.keep(KeepSnapshots(keep=(0, 3), copy=(0, 9)))
        answer = one.heard()
        assert isinstance(answer, CopyFailed)
        assert "no memory area is free" in answer.reason
        assert two.copies()[6].payload().tobytes() == before
    one.peers.keep(KeepSnapshots(keep=(0, 3), copy=(0, 9)))
    assert isinstance(one.heard(), PeerCopied)
    assert set(two.copies()) == {3, 9}


def test_the_copy_of_a_lost_nodes_share_goes_to_storage_as_that_node_would_have_stored_it(nodes: tuple[Node, Node]) -> None:
    """And stays as it is until storage has it, whatever the other node knows of."""
    one, two = nodes
    wanted = StoreSnapshot(attempt=0, step=3, copies_of=[0])
    one.slots[slot_name(0, 0, 0)].compress_with(COMPRESSOR)
    one.snapshot(0, 3)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    assert isinstance(one.heard(), PeerCopied)
    stores = MemoryStore(), MemoryStore()
    stored = []
    for store, (name, slot) in zip(stores, [(slot_name(0, 0, 0), None), *two.peers.lend(wanted).items()], strict=True):
        said: queue.SimpleQueue[KeeperMessage] = queue.SimpleQueue()
        keeper = Keeper(lambda store=store: store, said.put)  # type: ignore[misc]
        if slot is None:
            keeper.adopt(name, one.fds[name])
        keeper.store(wanted, {name: slot} if slot is not None else {})
        keeper.close()
        answer = said.get(timeout=30.0)
        assert isinstance(answer, PackStored), answer
        stored.append((answer.rank, answer.manifest, store.get(next(info.key for info in store.list()))))
    keeper.drop(name)  # which leaves it to the peers
    assert stored[0] == stored[1]
    assert two.peers.lend(StoreSnapshot(attempt=0, step=3, copies_of=[1])) == {}, "its own share is no copy"
    for index, (step, fine) in enumerate(((6, PeerCopied), (9, CopyFailed)), start=1):
        one.snapshot(index, step)
        one.peers.keep(KeepSnapshots(keep=(0, 6) if step == 9 else None, copy=(0, step)))
        assert isinstance(one.heard(), fine)
    assert set(two.copies()) == {3, 6}
    two.peers.settled(Settled(attempt=0, step=3))
    one.peers.keep(KeepSnapshots(keep=(0, 6), copy=(0, 9)))
    assert isinstance(one.heard(), PeerCopied)
    assert set(two.copies()) == {6, 9}


def test_an_area_that_is_being_filled_is_nothing_to_begin_with(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    one.snapshot(0, 3)
    seen: list[frozenset[str]] = []
    send_bytes = Link.send_bytes

    def look(link: Link, view: memoryview) -> None:
        with unchanging(two.fds) as still:
            seen.append(still)
        send_bytes(link, view)

    monkeypatch.setattr(Link, "send_bytes", look)
    one.peers.keep(KeepSnapshots(keep=None, copy=(0, 3)))
    assert isinstance(one.heard(), PeerCopied)
    filled = next(name for name, slot in two.slots.items() if slot is two.copies()[3])
    assert seen == [two.fds.keys() - {filled}]
    with unchanging(two.fds) as still:
        assert filled in still


def test_a_connection_that_the_other_node_gave_up_is_made_again(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """While gigabytes come from one node, nothing is asked of another, which hangs up after its patience."""
    one, _ = nodes
    payload = one.snapshot(0, 3)
    links: list[Link] = []

    def dial(control: Path, node: str) -> Link:
        links.append(dial_keeper(control, node))
        return links[-1]

    store = PeerStore("b", {}, tmp_path, dial=dial)
    key = f"a/{slot_name(0, 0, 0)}"
    store.describe(key)
    links[0].close()
    assert store.get_range(key, ByteRange(10, 1000)) == payload[10:1000].tobytes()
    with pytest.raises(ObjectMissing, match="node a does not give"):
        store.get_range("a/arena-g0009-r00000-s0", ByteRange(0, 1))
    assert len(links) == 3, "a refusal is asked once more, and then believed"
    store.close()


def test_another_nodes_memory_is_read_by_ranges_and_what_it_does_not_give_is_missing(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    one, _ = nodes
    payload = one.snapshot(0, 3)
    store = PeerStore("b", {}, tmp_path, dial=dial_keeper)
    key = f"a/{slot_name(0, 0, 0)}"
    told = store.describe(key)
    assert (told.step, told.rank, told.world) == (3, 0, 2)
    assert store.get_range(key, ByteRange(10, 1000)) == payload[10:1000].tobytes(), "sealed before it was described"
    with pytest.raises(ObjectMissing, match="node a does not give"):
        store.get_range("a/arena-g0009-r00000-s0", ByteRange(0, 1))
    with pytest.raises(ObjectMissing, match="node c does not give"):
        store.describe("c/arena-g0000-r00000-s0")
    store.close()


def test_nobody_without_the_key_of_the_run_is_answered(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Another run's key, the same address."""
    other = tmp_path / "other"
    make_identity(other)
    (other / "keepers").symlink_to(tmp_path / "keepers")
    with pytest.raises((OSError, PeerError)):
        dial_keeper(other, "a").ask(Describe(area=slot_name(0, 0, 0)))
    link = dial_keeper(tmp_path, "a")
    with pytest.raises(PeerError, match="no complete snapshot"):
        link.ask(Describe(area=slot_name(0, 0, 0)))
    with pytest.raises(PeerError, match="asked for up to"):
        link.ask(Read(area=slot_name(0, 0, 0), start=0, nbytes=2**30))
    link.close()


# the coordinator's half


def answer(step: int, rank: int) -> PeerCopied:
    return PeerCopied(epoch=1, attempt=0, step=step, rank=rank, world=2, nbytes=5, seconds=0.1, buddy="b")


def copies() -> tuple[Copies, Callable[[], KeepSnapshots]]:
    sent: list[bytes] = []
    made = Copies(sent.append)
    made.started(["a", "b"])
    return made, lambda: msgspec.msgpack.decode(sent[-1], type=KeepSnapshots)


def test_one_step_at_a_time_and_whole_once_all_ranks_have_said_so() -> None:
    made, last = copies()
    made.taken(0, 3)
    assert (last().keep, last().copy) == (None, (0, 3))
    made.taken(0, 6)
    made.taken(0, 9)
    assert last().copy == (0, 3)
    assert made.on_keeper(answer(3, 0)) == []
    assert made.step is None
    (told,) = made.on_keeper(answer(3, 1))
    assert isinstance(told, TierCommitted)
    assert (told.tier, told.step, told.nbytes) == ("peer", 3, 10)
    assert (last().keep, last().copy) == ((0, 3), (0, 9)), "the newest there is; 6 is left out"
    assert [made.reachable(nodes) for nodes in (("a", "b"), ("a",), ("b", "c"), ("c",))] == [3, 3, 3, None]
    made.started(["a", "c"])  # another attempt, of which nothing is whole
    wanted = [made.wanted(nodes, newer_than=0) for nodes in (("a", "b"), ("a", "c"), ("b",), ("c",))]
    assert [it and it.copies_of for it in wanted] == [[], [1], [0], None]
    assert made.wanted(("a",), newer_than=3) is None, "storage has it"


def test_a_copy_that_fails_is_a_notice_once_and_the_next_is_tried() -> None:
    made, last = copies()
    for step in (3, 6):
        made.taken(0, step)
        assert made.on_keeper(CopyFailed(attempt=0, step=step, rank=1, node="c", reason="it was here once")) == []
        assert last().copy == (0, step)
        told = made.on_keeper(CopyFailed(attempt=0, step=step, rank=1, node="b", reason="no route"))
        assert [isinstance(event, StorageNotice) for event in told] == ([True] if step == 3 else [])
        assert last().copy is None


def test_a_copy_of_a_later_step_than_the_run_goes_on_from_does_not_count() -> None:
    made, last = copies()
    made.recall((0, 9))
    made.began_at(6)
    assert (made.step, last().forget_after) == (None, 6)
