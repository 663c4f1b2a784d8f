"""Counts what a running rank really sends: below our own code, at torch's collectives, whoever calls them (FSDP's too).

Every collective passes torch's dispatcher as a `c10d` operation with its tensors and its group. A member of a ring sends of an
all-reduce 2 (N-1)/N of the tensor, of an all-gather or a reduce-scatter (N-1)/N of the whole; of an all-to-all what is not for
itself; of a message all. Nothing here knows the planner or the engine's own count.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Counted(TorchDispatchMode):
    """Bytes that this rank sent, by the ranks of the group."""

    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            ranks = tuple(dist.get_process_group_ranks(_group(args)))
            self.sent[ranks] += _sent(func._opname, args, len(ranks), ranks.index(dist.get_rank()))
        return func(*args, **(kwargs or {}))


def _group(args):
    """The process group among the arguments."""
    objects = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    return dist.ProcessGroup.unbox(objects[0])


def _sent(name, args, n, place):
    tensors = []
    tree_map_only(torch.Tensor, tensors.append, args)
    if tensors[0].dtype == torch.float64:  # votes
        return 0
    if name == "allreduce_":
        return 2 * (n - 1) / n * tensors[0].nbytes
    if name in ("_allgather_base_", "_reduce_scatter_base_"):  # the whole is the larger of both
        return (n - 1) / n * max(tensor.nbytes for tensor in tensors[:2])
    if name == "alltoall_base_":
        whole, splits = tensors[1], args[4]
        rows = whole.shape[0]
        kept = splits[place] if splits else rows / n
        return whole.nbytes * (1 - kept / rows) if rows else 0
    if name == "send":
        return tensors[0].nbytes
    if name in ("recv_", "gather_"):  # what is gathered are measurements
        return 0
    raise AssertionError(f"{name}: nobody said what this sends")
