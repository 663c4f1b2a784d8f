"""Restore from the memory of several nodes: what a rank needs lies on its own node, on the node that wrote it, or on a buddy's.

Each node tells all ranks what it holds. The newest step of which every rank's share is somewhere is loaded, by the planner and
reader that read object storage: a slot of this node is read where it lies, one of another node by ranges through that node's
keeper. Under the layout that wrote it a rank needs the shares of its own node's ranks alone (what is replicated is so within
tensor parallel groups, which do not leave a node); under another layout any share, and the digests of all arrays prove it.
What cannot be fetched makes the step one that does not load, and storage is next. From before its node tells until all ranks
have read, each rank holds the areas for copies on its node as they are: a late copy from another node cannot change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ftrain.checkpoint.area_lock import unchanging
from ftrain.checkpoint.arena import ArenaSlot, SlotState, SlotTable
from ftrain.checkpoint.memory import ArenaStore, table_manifest
from ftrain.checkpoint.names import AreaName, area_name
from ftrain.checkpoint.peer_link import Describe, Described, Fine, Link, PeerError, Read, dial_keeper
from ftrain.checkpoint.restore import (
    Restorable,
    Restored,
    agreed,
    attempt,
    differ,
    digests_of,
    live_digests,
    load_pieces,
    needed,
)
from recovery.identity import IdentityError
from storage.checkpoint import Checkpoint
from storage.errors import CoverageError, ObjectMissing
from storage.merge import join
from storage.objects import ByteRange
from storage.traffic import traffic

Snapshot = tuple[int, int, int, int]
"""(step, epoch, attempt, world) of a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The nodes of the attempt, by rank, and the folder in which their keepers say how they are reached."""

    control: Path
    nodes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Share:
    """Where one rank's share of a snapshot lies."""

    node: str
    area: str
    teller: int
    """The first rank of that node."""

    @property
    def peer(self) -> bool:
        """Whether it is a copy."""
        return area_name(self.area).peer


class PeerStore(ArenaStore):
    """Areas of this node and of others as objects, all named NODE/AREA. Read-only; used by one thread."""

    url = "peer-tier"

    def __init__(self, here: str, slots: Mapping[str, ArenaSlot], control: Path, *, dial: Callable[[Path, str], Link]) -> None:
        """`slots`: of the node `here`."""
        super().__init__({f"{here}/{name}": slot for name, slot in slots.items()})
        self._control, self._dial = control, dial
        self._links: dict[str, Link] = {}
        self.nbytes = 0
        """Bytes that came from other nodes."""

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        """A copy of a range of the payload."""
        out = bytearray(len(rng))
        self.get_into(key, rng.start, memoryview(out))
        return bytes(out)

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        """One copy, from the arena or the network to where it is wanted."""
        if key in self._slots:
            super().get_into(key, start, out)
            return
        node, _, area = key.partition("/")
        with traffic.hold(len(out)):
            self._with(node, lambda link: self._read(link, Read(area=area, start=start, nbytes=len(out)), out))
        self.nbytes += len(out)

    @staticmethod
    def _read(link: Link, request: Read, out: memoryview) -> None:
        if not isinstance(link.ask(request), Fine):
            raise PeerError("not an answer to a request for bytes")
        link.receive_into(out.cast("B"))

    def describe(self, key: str) -> Described:
        """What lies in an area of another node."""
        node, _, area = key.partition("/")
        found: list[Described] = []

        def ask(link: Link) -> None:
            answer = link.ask(Describe(area=area))
            if not isinstance(answer, Described):
                raise PeerError("not an answer to a request for a description")
            found.append(answer)

        self._with(node, ask)
        return found[0]

    def _with(self, node: str, use: Callable[[Link], None]) -> None:
        """ObjectMissing if the node does not give what it is said to have, whatever the reason.

        While other nodes were read, the other end may have given up a connection that nothing came from: it is made again.
        """
        known = node in self._links
        try:
            if not known:
                self._links[node] = self._dial(self._control, node)
            use(self._links[node])
        except (OSError, PeerError, IdentityError, msgspec.DecodeError) as error:
            broken = self._links.pop(node, None)
            if broken is not None:
                broken.close()
            if not known:
                raise ObjectMissing(f"node {node} does not give what is in its memory: {error}", node) from error
            self._with(node, use)

    def close(self) -> None:
        """Hang up."""
        for link in self._links.values():
            link.close()
        self._links.clear()


def told_by_all(slots: Mapping[str, ArenaSlot], nodes: Sequence[str], *, rank: int) -> dict[Snapshot, dict[int, list[Share]]]:
    """Which snapshots are complete, whose share of each lies where, nearest to its writer first. A collective: the same answer
    everywhere. The first rank of each node tells what its node holds.
    """
    mine: list[tuple[int, ...]] = []
    if nodes.index(nodes[rank]) == rank:
        for name, slot in sorted(slots.items()):
            header, area = slot.header(), area_name(name)
            if header.state is SlotState.COMPLETE:
                snapshot = (header.step, header.epoch, header.attempt, header.world)
                mine.append((*snapshot, header.rank, int(area.peer), area.generation, area.rank, area.number))
    most = torch.tensor([len(mine)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    told = torch.full((max(1, int(most.item())), 9), -1, dtype=torch.int64)
    for row, entry in enumerate(mine):
        told[row] = torch.tensor(entry)
    heard = [torch.empty_like(told) for _ in nodes]
    dist.all_gather(heard, told)
    found: dict[Snapshot, dict[int, list[Share]]] = {}
    for teller, part in enumerate(heard):
        for step, epoch, number, world, of, *name in part.tolist():
            if step >= 0:
                named = str(AreaName(bool(name[0]), *name[1:]))
                shares = found.setdefault((step, epoch, number, world), {}).setdefault(of, [])
                shares.append(Share(nodes[teller], named, teller))
    for by_rank in found.values():
        for shares in by_rank.values():
            shares.sort(key=lambda share: (share.peer, share.teller))
    return found


def from_peer_memory(
    engine: Restorable,
    slots: Mapping[str, ArenaSlot],
    neighbours: Neighbours,
    *,
    fds: Mapping[str, int],
    rank: int,
    least_step: int,
    dial: Callable[[Path, str], Link] = dial_keeper,
) -> Restored | tuple[int, str] | None:
    """Load the newest snapshot of at least `least_step` that the nodes hold together. A collective.

    `slots`: all areas of this rank's node, `fds` their files. Returns what was done; (step, what is wrong with it) if it does
    not load; None if there is none.
    """
    with unchanging({name: fds[name] for name in slots}) as still:
        found = told_by_all({name: slots[name] for name in slots if name in still}, neighbours.nodes, rank=rank)
        whole = [key for key, shares in found.items() if sorted(shares) == list(range(key[3])) and key[0] >= least_step]
        if not whole:
            return None
        key = max(whole)
        store = PeerStore(neighbours.nodes[rank], slots, neighbours.control, dial=dial)
        load = _Load(engine, store, key, found[key], neighbours, rank=rank)
        try:
            return load.restore(slots)
        finally:
            store.close()


class _Load:
    """One snapshot, on its way into one rank."""

    def __init__(
        self,
        engine: Restorable,
        store: PeerStore,
        key: Snapshot,
        shares: Mapping[int, Sequence[Share]],
        neighbours: Neighbours,
        *,
        rank: int,
    ) -> None:
        self._engine, self._store, self._key = engine, store, key
        self._shares, self._nodes, self._rank = shares, neighbours.nodes, rank
        self.progress: dict[str, Any] = {}
        self.other_layout = False
        self._tables: dict[str, SlotTable] = {}

    def restore(self, slots: Mapping[str, ArenaSlot]) -> Restored | tuple[int, str]:
        """The whole of it; what came of it. A collective."""
        engine, step = self._engine, self._key[0]
        problem = agreed(attempt(self.prepare))
        if problem is None:
            problem = agreed(attempt(self.load))
        proof = "crc32c of every chunk"
        if problem is None and self.other_layout:
            saved = digests_of(self.told_by_me(slots), engine)
            problem = differ(saved, live_digests(engine))
            proof = f"digests of {len(saved)} arrays, across {self.progress['layout']} and {engine.layout}"
        if problem is not None:
            return step, f"memory of the nodes: {problem}"
        copies = any(shares[0].peer for shares in self._shares.values())
        return Restored(source="peer" if copies else "memory", step=step, progress=self.progress, proof=proof)

    def _nearest(self, of: int) -> Share:
        """Of equal copies the one of this node."""
        here = self._nodes[self._rank]
        return next((share for share in self._shares[of] if share.node == here), self._shares[of][0])

    def _look(self, of: int) -> SlotTable:
        """The table of a rank's share; its progress record is noted."""
        share = self._nearest(of)
        name = f"{share.node}/{share.area}"
        if name not in self._tables:
            slot = self._store.slot(name)
            if slot is not None:
                slot.seal()
                self.progress, self._tables[name] = slot.progress(), slot.table()
            else:
                told = self._store.describe(name)
                if (told.step, told.epoch, told.attempt, told.world, told.rank) != (*self._key, of):
                    raise ObjectMissing(f"{name} holds another snapshot by now", name)
                self.progress = msgspec.json.decode(told.progress)
                self._tables[name] = msgspec.msgpack.decode(told.table, type=SlotTable)
        return self._tables[name]

    def prepare(self) -> None:
        """Look at one share, seal what lies here, and see whose shares are needed."""
        world = self._key[3]
        mine = [of for of in range(world) if self._nodes[self._rank] == (self._nodes[of] if of < len(self._nodes) else "")]
        self._look(mine[0] if mine else 0)
        self.other_layout = world != len(self._nodes) or self.progress.get("layout", self._engine.layout) != self._engine.layout
        for of in range(world) if self.other_layout else mine:
            self._look(of)

    def load(self) -> None:
        """Read everything that this rank's pieces need."""
        step, epoch, number, _ = self._key
        first = next(iter(self._tables.values()))
        manifest, problems = join(
            [table_manifest(table, name, {}) for name, table in self._tables.items()],
            step=step,
            epoch=epoch,
            attempt=number,
            progress=self.progress,
            created_s=0.0,
            expected=needed(self._engine.array_specs(), [spec.name for spec in first.specs]),
        )
        if problems:
            raise CoverageError("; ".join(problems), problems=problems)
        load_pieces(self._engine, Checkpoint(self._store, manifest, prefix=""))

    def told_by_me(self, slots: Mapping[str, ArenaSlot]) -> list[ArenaSlot]:
        """The shares that this rank's node was the one to be asked for, so that each is digested once."""
        return [slots[shares[0].area] for shares in self._shares.values() if shares[0].teller == self._rank]
