"""PyTorch Distributed Checkpoint: `async_save`, in thread and in process mode, each with the defaults and tuned.

Tuned means what its documentation offers for speed on CPU: a stager that is kept, so that the staging memory is allocated
once (in shared memory for the process mode, so that nothing is copied a second time). The process group is one of its own.
Each rank's tensors have keys of their own: no rank plans, stages or writes what another one has, and nothing is exchanged but
the plan.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks.common import Elapsed, stopwatch

FORMS = ("thread", "thread_kept_stager", "process", "process_kept_stager")


class AsyncSave:
    """One rank's side of one form of `async_save`."""

    def __init__(self, form: str, state: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
        """`form` is one of FORMS."""
        in_process = form.startswith("process")
        self._type = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        self._stager = stager_of(form)
        self._state, self._folder, self._group = state, folder / form, group
        self._nbytes = sum(tensor.nbytes for tensor in state.values())

    def __call__(self, number: int) -> Elapsed:
        """Save, wait until it is stored, and return the time until the state might have been changed again."""
        path = self._folder / str(number)
        for tensor in self._state.values():
            tensor.view(-1)[0] = number
        dist.barrier()
        elapsed = stopwatch()
        future = async_save(
            self._state,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        blocked = elapsed()
        assert not isinstance(future, AsyncSaveResponse), "that is what a stager with a thread of its own returns"
        future.result()
        self._check(path, whole=number == 0)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        return blocked

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
    """The stager of one of FORMS; None: DCP makes one for each save."""
    return _stager(shared=form.startswith("process")) if form.endswith("kept_stager") else None


def _stager(*, shared: bool) -> DefaultStager:
    """Pinned memory, streams and staging in a thread need a GPU (`StagingOptions` refuses them without one)."""
    return DefaultStager(
        StagingOptions(use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False)
    )
