"""The memory tier of a run on several machines: each rank finds its own snapshot again, on its own node.

Nobody sees all slots, so the ranks agree on a step by telling each other what they hold: the newest that every one of them has.
A rank then reads from the slots of its node alone. That is enough where the layout is the one that wrote them: every piece of
state has one owner, which stored it, and what is replicated is so within tensor parallel groups, which do not leave a node.
Where it is not enough, the ranks say so to each other, and all of them turn to storage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ftrain.checkpoint.arena import ArenaSlot, SlotState
from ftrain.checkpoint.memory import ArenaStore, pack_manifest
from ftrain.checkpoint.restore import Restorable, Restored, agreed, attempt, load_pieces, needed
from storage.checkpoint import Checkpoint
from storage.errors import CoverageError
from storage.merge import join

KEPT = 8  # snapshots of one rank that are told to the others; it has two or three slots
Key = tuple[int, int, int]
"""(step, epoch, attempt) of a snapshot."""


def newest_everywhere(slots: Mapping[str, ArenaSlot], *, rank: int, world: int) -> Key | None:
    """The newest snapshot that is complete on every rank, wherever it lies. A collective: the same answer everywhere."""
    headers = (slot.header() for slot in slots.values())
    mine = {
        (header.step, header.epoch, header.attempt)
        for header in headers
        if header.state is SlotState.COMPLETE and (header.rank, header.world) == (rank, world)
    }
    told = torch.full((KEPT, 3), -1, dtype=torch.int64)
    for row, key in enumerate(sorted(mine, reverse=True)[:KEPT]):
        told[row] = torch.tensor(key)
    heard = [torch.empty_like(told) for _ in range(world)]
    dist.all_gather(heard, told)
    common = set.intersection(*({tuple(key) for key in part.tolist() if key[0] >= 0} for part in heard))
    return max(common, default=None)


def from_spread_memory(
    engine: Restorable, slots: Mapping[str, ArenaSlot], *, rank: int, world: int, least_step: int
) -> Restored | tuple[int, str] | None:
    """Load the newest snapshot of at least `least_step` from this node's `slots`. A collective.

    Returns what was done; (step, what is wrong with it) if it does not load; None if there is none.
    """
    key = newest_everywhere(slots, rank=rank, world=world)
    if key is None or key[0] < least_step:
        return None
    step, epoch, number = key
    here = {name: slot for name, slot in slots.items() if _holds(slot, key, world)}
    own = next(name for name, slot in here.items() if slot.header().rank == rank)
    here[own].seal()
    agreed(None)  # nobody reads before all slots are sealed

    def load() -> None:
        manifest, problems = join(
            [pack_manifest(slot, name, {}) for name, slot in here.items()],
            step=step,
            epoch=epoch,
            attempt=number,
            progress=here[own].progress(),
            created_s=0.0,
            expected=needed(engine.array_specs(), [spec.name for spec in here[own].table().specs]),
        )
        if problems:
            raise CoverageError("; ".join(problems), problems=problems)
        load_pieces(engine, Checkpoint(ArenaStore(here), manifest, prefix=""))

    problem = agreed(attempt(load))
    if problem is not None:
        return step, f"memory tier: {problem}"
    return Restored(source="memory", step=step, progress=here[own].progress(), proof="crc32c of every chunk")


def _holds(slot: ArenaSlot, key: Key, world: int) -> bool:
    header = slot.header()
    return header.state is SlotState.COMPLETE and (header.step, header.epoch, header.attempt, header.world) == (*key, world)
