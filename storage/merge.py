"""From what the writers deliver to one manifest, and the check that nothing is missing and nothing stored twice.

This is the last gate before a commit: a forgotten rank, a bucket cut at the wrong row, two writers that own the same rows. All
problems are listed at once, by array and box, because the person who reads them has one job in front of them, not twenty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.box import Box, coverage_problems
from storage.compress import Compressor
from storage.digest import MASK
from storage.errors import CoverageError, FormatError
from storage.manifest import COMPRESSED_VERSION, PLAIN_VERSION, Manifest, PackInfo, PackManifest
from storage.pack import ArraySpec
from storage.parts import PartTable

__all__ = ["join", "merge", "tiling"]


def merge(
    deliveries: Iterable[PackManifest],
    *,
    step: int,
    epoch: int,
    attempt: int,
    progress: dict[str, Any],
    created_s: float,
    expected: Sequence[ArraySpec] | None = None,
) -> Manifest:
    """One manifest of all writers' packs; `CoverageError` with every problem if the boxes do not tile every array exactly once.

    `deliveries` may be a generator: each one is turned into columns at once. `expected` are the arrays that must be there;
    without it an array that no writer knows of cannot be missed. A pack without parts is left out.
    """
    manifest, problems = join(
        deliveries, step=step, epoch=epoch, attempt=attempt, progress=progress, created_s=created_s, expected=expected
    )
    problems += tiling(manifest)
    if problems:
        text = f"the boxes of step {step} do not make up the state: {'; '.join(problems[:8])}"
        raise CoverageError(text, problems=problems)
    broken = manifest.problems()
    if broken:
        raise FormatError(f"what the writers delivered for step {step} breaks the format: {'; '.join(broken[:8])}")
    return manifest


def join(
    deliveries: Iterable[PackManifest],
    *,
    step: int,
    epoch: int,
    attempt: int,
    progress: dict[str, Any],
    created_s: float,
    expected: Sequence[ArraySpec] | None = None,
) -> tuple[Manifest, list[str]]:
    """The same of some of the writers, and what is wrong with their packs. What they leave open is not looked at: such a
    manifest is for reading what is there, never for a commit.
    """
    gathered = _Gathered(expected)
    for delivery in deliveries:
        gathered.add(delivery)
    names = sorted(gathered.specs)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        attempt=attempt,
        created_s=created_s,
        arrays=tuple(gathered.specs[name] for name in names),
        packs=tuple(gathered.packs),
        table=gathered.table(names),
        digests={name: gathered.digests.get(name, 0) for name in names},
        progress=progress,
        compressor=gathered.compressor,
        stored=gathered.all_stored(),
        format_version=gathered.version,
        min_reader=gathered.version,
    )
    return manifest, list(gathered.problems)


class _Gathered:
    """What has been delivered so far."""

    def __init__(self, expected: Sequence[ArraySpec] | None) -> None:
        self.specs: dict[str, ArraySpec] = {spec.name: spec for spec in expected or ()}
        self.known = frozenset(self.specs) if expected is not None else None
        self.number = {name: i for i, name in enumerate(self.specs)}
        self.digests: dict[str, int] = {}
        self.tables: list[PartTable] = []
        self.packs: list[PackInfo] = []
        self.compressor: Compressor | None = None
        self.stored: list[int] = []
        self.problems: list[str] = []

    def add(self, delivery: PackManifest) -> None:
        """Take in one writer's pack."""
        self.problems += [f"{delivery.pack.name}: {text}" for text in self._spec_problems(delivery)]
        for name, value in delivery.digests.items():
            self.digests[name] = (self.digests.get(name, 0) + value) & MASK
        described = {spec.name: len(spec.shape) for spec in delivery.arrays}
        odd = {p.array for p in delivery.parts if not described.get(p.array) == len(p.offset) == len(p.shape)}
        odd |= {name for name in delivery.digests if name not in described}
        if odd:
            self.problems.append(f"{delivery.pack.name}: parts or digests that do not fit its arrays: {', '.join(sorted(odd))}")
        elif delivery.parts:
            self._add_sizes(delivery)
            self.tables.append(PartTable.of(delivery.parts, self.number, len(self.packs)))
            self.packs.append(delivery.pack)

    def _add_sizes(self, delivery: PackManifest) -> None:
        """The sizes of its parts: all packs are compressed alike, or none is (an array has one codec in the Zarr view)."""
        if not self.packs:
            self.compressor = delivery.compressor
        elif self.compressor != delivery.compressor:
            said = f"{delivery.compressor or 'not at all'}, and {self.packs[0].name}: {self.compressor or 'not at all'}"
            self.problems.append(f"{delivery.pack.name} is compressed: {said}")
        if delivery.compressor is not None and len(delivery.stored) != len(delivery.parts):
            self.problems.append(f"{delivery.pack.name}: sizes of {len(delivery.stored)} parts for {len(delivery.parts)}")
        self.stored += delivery.stored

    @property
    def version(self) -> int:
        """Of the format."""
        return PLAIN_VERSION if self.compressor is None else COMPRESSED_VERSION

    def all_stored(self) -> NDArray[np.int64] | None:
        """The sizes of the parts of all packs, if they are compressed."""
        return None if self.compressor is None else np.array(self.stored, np.int64)

    def table(self, names: list[str]) -> PartTable:
        """All rows, with array indices that count in the order of `names` instead of that of arrival."""
        ndim = max((len(spec.shape) for spec in self.specs.values()), default=0)
        table = PartTable.concatenate(self.tables or [PartTable.of([], {}, 0)], ndim)
        return table.renumbered({self.number[name]: new for new, name in enumerate(names)})

    def _spec_problems(self, delivery: PackManifest) -> list[str]:
        problems = []
        for spec in delivery.arrays:
            if self.known is not None and spec.name not in self.known:
                problems.append(f"array {spec.name} is not part of the state")
            if self.specs.setdefault(spec.name, spec) != spec:
                problems.append(f"array {spec.name} is described in another way than elsewhere")
            self.number.setdefault(spec.name, len(self.number))
        return problems


def tiling(manifest: Manifest) -> list[str]:
    """Where the boxes of a manifest do not tile its arrays exactly once."""
    problems, table = [], manifest.table
    for number, spec in enumerate(manifest.arrays):
        rows, ndim = table.rows_of(number), len(spec.shape)
        found = coverage_problems(Box.whole(spec.shape), table.offset[rows, :ndim], table.stop[rows, :ndim])
        problems += [f"{spec.name}: {text}" for text in found]
    return problems
