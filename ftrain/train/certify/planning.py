"""Every pair of layouts, without a byte: what one writes tiles every array, and what the other wants is all in it.

The ring of real saves and loads touches each layout twice; this touches each pair.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftrain.checkpoint.layout import rank_layouts
from ftrain.train.certify.layouts import Layout
from ftrain.train.certify.verdict import Failure
from storage.box import Box
from storage.errors import CoverageError
from storage.manifest import Manifest, PackInfo, PackManifest
from storage.merge import merge
from storage.reader import LIMITS
from storage.reshard import plan_reads

Wants = list[tuple[str, Box]]


def check_pairs(layouts: Sequence[Layout]) -> tuple[int, list[Failure]]:
    """The number of pairs of layouts of one model, and what is wrong with any of them."""
    failures: list[Failure] = []
    written: dict[str, Manifest] = {}
    wanted: dict[str, list[Wants]] = {}
    for layout in layouts:
        parts = list(rank_layouts(layout.config))
        wanted[layout.name] = [[(part.array, part.box) for part in rank.parts] for rank in parts]
        deliveries = [
            PackManifest(
                pack=PackInfo(name=f"e0000-a0000-r{rank:05d}.pack", nbytes=pack.nbytes),
                arrays=list(pack.specs.values()),
                parts=list(pack.parts),
                digests={},
            )
            for rank, pack in enumerate(parts)
        ]
        try:
            written[layout.name] = merge(deliveries, step=0, epoch=0, attempt=0, progress={}, created_s=0.0)
        except CoverageError as error:
            failures += [_failure(layout.name, problem) for problem in error.problems]
    pairs = [(writer, reader) for writer in written for reader in wanted]
    for writer, reader in pairs:
        failures += _unreadable(written[writer], wanted[reader], f"{writer} -> {reader}")
    return len(pairs), failures


def _unreadable(manifest: Manifest, ranks: list[Wants], pair: str) -> list[Failure]:
    found = []
    for wants in ranks:
        try:
            plan_reads(manifest, wants, limits=LIMITS)
        except CoverageError as error:
            found += [_failure(pair, problem) for problem in error.problems]
    return found


def _failure(layout: str, problem: str) -> Failure:
    name = next((word.rstrip(":") for word in problem.split() if "/" in word), "")
    return Failure(layout=layout, mode="", step=0, what="planning", parameter=name.partition("/")[2], reason=problem)
