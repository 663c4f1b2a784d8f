"""What the ranks of a script tell each other about checkpoints: a few bytes, never a pickle, on a group of their own.

Always Gloo: the script's own group may be NCCL's, which carries nothing that is not on a GPU, and its order of collectives is
the script's business.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=30)


class Ranks:
    """All ranks of the script. Every method is a collective (free of charge if there is one rank)."""

    def __init__(self) -> None:
        """Called by all ranks together."""
        self.alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank = 0 if self.alone else dist.get_rank()
        self.world = 1 if self.alone else dist.get_world_size()
        self._group = None if self.alone else dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank says, by rank."""
        if self.alone:
            return [mine]
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes, group=self._group)
        longest = max(1, int(sizes.max()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
        told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(told, padded, group=self._group)
        return [bytes(each[: int(size)].numpy()) for each, size in zip(told, sizes, strict=True)]

    def first_says(self, mine: bytes) -> bytes:
        """What rank 0 says."""
        return self.gather(mine if self.rank == 0 else b"")[0]

    def agreed(self, problem: str | None) -> str | None:
        """What is wrong, in the words of the first rank that has a problem; None if no rank has one."""
        told = self.gather(msgspec.msgpack.encode(problem))
        problems = [(rank, said) for rank, each in enumerate(told) if (said := msgspec.msgpack.decode(each)) is not None]
        if not problems:
            return None
        rank, said = problems[0]
        return str(said) if self.alone else f"rank {rank}: {said}"

    def largest(self, mine: Sequence[int]) -> Callable[[], list[int]]:
        """The largest that any rank says, of each of some numbers; what is returned waits for it."""
        if self.alone:
            return lambda: list(mine)
        numbers = torch.tensor(mine, dtype=torch.int64)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[int]:
            assert work is not None
            work.wait()
            return cast("list[int]", numbers.tolist())

        return wait

    def close(self) -> None:
        """Give the group back, if the script's own is still there."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group, self.alone = None, True
