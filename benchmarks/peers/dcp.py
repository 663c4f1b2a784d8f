"""PyTorch Distributed Checkpoint: `async_save`, in thread and in process mode, each with the defaults and tuned.

Tuned means what its documentation offers for speed on CPU: plans that are kept; a stager that is kept, so that the staging
memory is allocated once (in shared memory for the process mode, so that nothing is copied a second time); and one that copies
in a thread of its own, beside the next forward and backward, until its `staging_completion` is waited for before the state
changes. The process group is one of its own. Each rank's tensors have keys of their own: no rank plans, stages or writes what
another one has, and nothing is exchanged but the plan.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks.common import Elapsed, stopwatch

FORMS = ("thread", "thread_kept_stager", "process", "process_kept_stager")
"""Those that return when the state may be changed."""
BESIDE = ("thread_async_stager", "process_async_stager")
"""Those that return before: what PyTorch 2.13 allows of it without a GPU (no pinned memory, no non-blocking copies)."""


class Begun(NamedTuple):
    """A save that was begun: until when the state may not change (None: it may), and until when it is not stored."""

    staged: Future[Any] | None
    stored: Future[Any]


def begin(state: dict[str, Any], form: str, stager: DefaultStager | None, path: Path, group: dist.ProcessGroup) -> Begun:
    """One `async_save`, in one of FORMS or BESIDE, with the stager of that form."""
    kind = AsyncCheckpointerType.PROCESS if form.startswith("process") else AsyncCheckpointerType.THREAD
    planner = planner_of() if stager is not None else None
    answer = async_save(
        state, checkpoint_id=path, process_group=group, async_checkpointer_type=kind, async_stager=stager, planner=planner
    )
    if isinstance(answer, AsyncSaveResponse):
        return Begun(answer.staging_completion, answer.upload_completion)
    return Begun(None, answer)


def planner_of() -> DefaultSavePlanner:
    """A planner that plans once: what it found is kept for the next save of the same state."""
    return DefaultSavePlanner(enable_plan_caching=True)


class AsyncSave:
    """One rank's side of one form of `async_save`."""

    def __init__(self, form: str, state: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
        """`form` is one of FORMS or BESIDE."""
        self._form, self._stager = form, stager_of(form)
        self._state, self._folder, self._group = state, folder / form, group
        self._nbytes = sum(tensor.nbytes for tensor in state.values())

    def __call__(self, number: int) -> Elapsed:
        """Save, wait until it is stored, and return the time until the state might have been changed again."""
        self.prepare(number)
        elapsed = stopwatch()
        begun = self.begin(number)
        blocked = elapsed()
        assert begun.staged is None, "that is what a stager with a thread of its own returns"
        self.end(begun, number)
        return blocked

    def prepare(self, number: int) -> None:
        """Change the state, and meet the other ranks."""
        for tensor in self._state.values():
            tensor.view(-1)[0] = number
        dist.barrier()

    def begin(self, number: int) -> Begun:
        """The save alone."""
        return begin(self._state, self._form, self._stager, self._folder / str(number), self._group)

    def end(self, begun: Begun, number: int) -> None:
        """Wait until it is stored, check it, and remove it."""
        begun.stored.result()
        path = self._folder / str(number)
        self._check(path, whole=number == 0)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)

    def _check(self, path: Path, *, whole: bool) -> None:
        """That it has written what it was given: all bytes, and if `whole` the right ones."""
        written = sum(file.stat().st_size for file in path.glob(f"__{dist.get_rank()}_*.distcp"))
        if written < self._nbytes:
            raise RuntimeError(f"DCP stored {written} bytes of {self._nbytes} in {path}")
        if whole:
            found = {key: torch.empty_like(tensor) for key, tensor in self._state.items()}
            load(found, checkpoint_id=path, process_group=self._group)
            wrong = [key for key, tensor in self._state.items() if not torch.equal(tensor, found[key])]
            if wrong:
                raise RuntimeError(f"DCP stored other values than it was given: {wrong[:5]}")


def stager_of(form: str) -> DefaultStager | None:
    """The stager of a form; None: DCP makes one for each save.

    Pinned memory and non-blocking copies need a GPU (`StagingOptions` refuses them without one).
    """
    if not form.endswith("_stager"):
        return None
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=form.startswith("process"),
        use_async_staging=form in BESIDE,
        use_non_blocking_copy=False,
    )
    return DefaultStager(options)
