"""One checkpoint, read as arrays and boxes.

It needs an object store that holds the packs and a manifest that says what lies where, and nothing else: so the memory tier of
a running job (arenas as packs, an index that was never written) is a checkpoint like one in a bucket, read by the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.commit import CommitRecord
from storage.errors import CoverageError
from storage.lengths import starts_reader
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.pack import ArraySpec
from storage.reader import LoadReport, Progress, Want, load
from storage.verify import VerifyReport, verify, view_problems
from storage.zarr_view import MAX_COMMIT_CHUNKS, array_files, num_chunks, reference_files

__all__ = ["Checkpoint", "native_dtype"]


def native_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy type an array comes as: its own, or uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")


class Checkpoint:
    """An open checkpoint. Reading does not change it; it may be used from several threads as far as its store may."""

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        prefix: str = "",
        *,
        commit: CommitRecord | None = None,
        passed_over: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.prefix = prefix
        """What the names of the packs have in front of them in the store."""
        self.commit = commit
        """None for a checkpoint that lives in memory only."""
        self.passed_over = list(passed_over)
        """Newer checkpoints that could not be opened: step and reason."""

    @property
    def step(self) -> int:
        """The step after which this state was taken."""
        return self.manifest.step

    @property
    def progress(self) -> dict[str, Any]:
        """The run's own record, as it was given to the save."""
        return self.manifest.progress

    @property
    def url(self) -> str:
        """Where its packs lie, as other programs find them."""
        return self.store.url_of(self.prefix + "x").removesuffix("/x")

    def write_view(self, arrays: Collection[str] | None = None, *, to: ObjectStore | None = None) -> list[str]:
        """Write the Zarr view where the commit did not (very many chunks), or of some arrays only; returns where the files are.

        `to`: another store than this checkpoint's own, for whoever may only read that. The files name the packs' place, so
        they can be opened wherever they are.
        """
        find = starts_reader(self.store, self.manifest, prefix=self.prefix)
        if arrays is None and num_chunks(self.manifest) <= MAX_COMMIT_CHUNKS:
            files = reference_files(self.manifest, base_url=self.url, find=find)
        else:
            names = [self.array(name).name for name in arrays or self.names]
            files = array_files(self.manifest, names, base_url=self.url, find=find)
        store, prefix, written = to or self.store, "" if to else self.prefix, list[str]()
        for name, content in files:
            store.put(prefix + name, content)
            written.append(store.url_of(prefix + name))
        return written

    @property
    def names(self) -> list[str]:
        """Names of all arrays, sorted."""
        return [spec.name for spec in self.manifest.arrays]

    def array(self, name: str) -> ArraySpec:
        """Shape, type and grid of an array; `CoverageError` if there is none of this name."""
        if name not in self.manifest.index:
            text = f"the checkpoint of step {self.step} has no array {name}"
            raise CoverageError(text, name, problems=[f"array {name} is missing"])
        return self.manifest.array(name)

    def read(self, name: str, box: Box | None = None) -> NDArray[np.generic]:
        """The values of an array, or of a box of it. bfloat16 comes as its uint16 bits."""
        spec = self.array(name)
        wanted = box or Box.whole(spec.shape)
        values = np.empty(wanted.shape, native_dtype(spec.dtype))
        self.load([Want(name, wanted, values)])
        return values

    def load(self, wants: Sequence[Want]) -> LoadReport:
        """Fill every destination from the chunks that hold it, each of which is read and checked once.

        `CoverageError` lists everything that is missing or of another shape, before anything is read. `Damaged` names array,
        pack and byte; destinations that were filled before it hold right values, the others are untouched.
        """
        return load(self.store, self.manifest, wants, prefix=self.prefix)

    def verify(self, *, sample: float = 1.0, seed: int = 0, progress: Progress | None = None) -> VerifyReport:
        """Read a share of the packs (1.0: all, and recompute the digests) and report everything that is wrong.

        Another `seed` takes another sample.
        """
        report = verify(self.store, self.manifest, prefix=self.prefix, sample=sample, seed=seed, progress=progress)
        if self.commit is None:
            return report
        return report.with_problems(view_problems(self.store, self.manifest, prefix=self.prefix))
