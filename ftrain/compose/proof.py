"""Digests recomputed from what lies in storage: the proof that two runs ended in the same state."""

from __future__ import annotations

from storage.run import RunStore

from ftrain.compose.paths import absolute_url
from storage.box import Box
from storage.digest import digest_box
from storage.objects import open_store


def stored_digests(url: str, step: int | None = None) -> tuple[int, dict[str, str]]:
    """(step, digest of every array as 16 hex digits) of a run's checkpoint, from the bytes in storage, not from the
    manifest.
    """
    store = open_store(absolute_url(url))
    try:
        checkpoint = RunStore(store).open(step)
        digests = {}
        for spec in checkpoint.manifest.arrays:
            values = checkpoint.read(spec.name)
            digests[spec.name] = f"{digest_box(values, spec.shape, Box.whole(spec.shape)):016x}"
        return checkpoint.step, digests
    finally:
        store.close()
