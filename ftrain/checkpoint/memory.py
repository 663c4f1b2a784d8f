"""The memory tier as a checkpoint: complete arena slots of all ranks, behind the seam that object storage has.

Nothing here needs torch, so the keeper and the tools use it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ftrain.checkpoint.arena import ArenaSlot, SlotState, SlotTable
from storage.errors import ObjectMissing
from storage.manifest import Manifest, PackInfo, PackManifest
from storage.merge import merge
from storage.objects import ByteRange, Bytes, Capabilities, ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """One step that is complete on every rank of the attempt that took it: slot names by rank."""

    epoch: int
    attempt: int
    step: int
    slots: tuple[str, ...]


def newest_snapshot(slots: Mapping[str, ArenaSlot]) -> MemorySnapshot | None:
    """The newest step complete on all ranks, or None. Pure in the headers, so every rank finds the same one."""
    found: dict[tuple[int, int, int, int], dict[int, str]] = defaultdict(dict)
    for name, slot in sorted(slots.items()):
        header = slot.header()
        if header.state is SlotState.COMPLETE:
            found[header.step, header.epoch, header.attempt, header.world][header.rank] = name
    whole = [key for key, ranks in found.items() if sorted(ranks) == list(range(key[3]))]
    if not whole:
        return None
    step, epoch, attempt, world = key = max(whole)
    return MemorySnapshot(epoch=epoch, attempt=attempt, step=step, slots=tuple(found[key][rank] for rank in range(world)))


class ArenaStore(ObjectStore):
    """Slots as objects: the key is the slot's name, the bytes are its payload. Read-only."""

    url = "memory-tier"
    capabilities = Capabilities(atomic_create=False, durable=False, local=True)

    def __init__(self, slots: Mapping[str, ArenaSlot]) -> None:
        self._slots = slots

    def _payload(self, key: str) -> memoryview:
        if key not in self._slots:
            raise ObjectMissing(f"no arena slot {key!r}", key)
        return self._slots[key].payload().data

    def get(self, key: str, *, max_bytes: int = 2**63) -> bytes:
        """The whole payload."""
        return bytes(self._payload(key)[:max_bytes])

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        """A copy of a range of the payload."""
        return bytes(self._payload(key)[rng.start : rng.stop])

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        """One copy, from the arena to where it is wanted."""
        out[:] = self._payload(key)[start : start + len(out)]

    def size(self, key: str) -> int:
        """Bytes of the payload."""
        return len(self._payload(key))

    def slot(self, key: str) -> ArenaSlot | None:
        """The slot itself, if it is here."""
        return self._slots.get(key)

    def exists(self, key: str) -> bool:
        """Whether there is such a slot."""
        return key in self._slots

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All slots whose name starts with `prefix`."""
        for name in sorted(self._slots):
            if name.startswith(prefix):
                yield ObjectInfo(key=name, size=self.size(name), modified_s=0.0)

    def url_of(self, key: str) -> str:
        """A name for messages; nobody can open it."""
        return f"{self.url}:{key}"

    def child(self, prefix: str) -> ObjectStore:
        """There are no folders in memory."""
        raise ObjectMissing(f"the memory tier has no folder {prefix!r}", prefix)

    def close(self) -> None:
        """Nothing to release: the slots belong to whoever opened them."""

    def put(self, key: str, data: Bytes) -> None:
        """Refused: workers fill slots, nobody else."""
        raise PermissionError("the memory tier is read-only")

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Refused, as put."""
        raise PermissionError("the memory tier is read-only")

    def create(self, key: str, data: bytes) -> bool:
        """Refused, as put."""
        raise PermissionError("the memory tier is read-only")

    def delete(self, key: str) -> None:
        """Refused, as put."""
        raise PermissionError("the memory tier is read-only")


def pack_manifest(slot: ArenaSlot, pack: str, digests: Mapping[str, int]) -> PackManifest:
    """What one slot contributes to a manifest."""
    return table_manifest(slot.table(), pack, digests, first=slot.header().rank == 0)


def table_manifest(table: SlotTable, pack: str, digests: Mapping[str, int], *, first: bool = False) -> PackManifest:
    """The same, of a table.

    It describes the arrays it has parts of; rank 0 describes all of them, so that an array that nobody writes is missed. If
    every rank did, 5,120 writers would send 3 GB of descriptions.
    """
    held = {part.array for part in table.parts}
    arrays = [spec for spec in table.specs if first or spec.name in held]
    return PackManifest(
        pack=PackInfo(name=pack, nbytes=table.nbytes),
        arrays=arrays,
        parts=table.parts,
        digests={name: value for name, value in digests.items() if name in held},
    )


def snapshot_manifest(snapshot: MemorySnapshot, slots: Mapping[str, ArenaSlot]) -> Manifest:
    """The manifest of a snapshot in memory, its tiling checked. It carries no digests: nobody has computed them yet."""
    return merge(
        [pack_manifest(slots[name], name, {}) for name in snapshot.slots],
        epoch=snapshot.epoch,
        attempt=snapshot.attempt,
        step=snapshot.step,
        progress=slots[snapshot.slots[0]].progress(),
        created_s=0.0,
    )
