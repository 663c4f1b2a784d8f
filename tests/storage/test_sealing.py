"""One pass over a pack gives what separate passes give, and never calls final what is not."""

from __future__ import annotations

import numpy as np
import pytest

from storage import sealing as module
from storage.box import Box
from storage.digest import digest_part
from storage.pack import ArraySpec, check, plan_pack, seal
from storage.sealing import sealing

SPECS = {
    "matrix": ArraySpec(name="matrix", shape=(40, 24), dtype="float32", tile=(4, 8)),
    "weights": ArraySpec(name="weights", shape=(10, 7), dtype="bfloat16", tile=(3, 7)),
    "cube": ArraySpec(name="cube", shape=(3, 5, 6), dtype="float32", tile=(1, 5, 4)),
    "norm": ArraySpec(name="norm", shape=(33,), dtype="float32", tile=(16,)),
    "count": ArraySpec(name="count", shape=(), dtype="int64", tile=()),
}
BOXES = [
    ("matrix", Box((0, 0), (12, 24))),
    ("weights", Box((0, 0), (10, 7))),
    ("cube", Box((0, 0, 0), (3, 5, 6))),
    ("norm", Box((0,), (33,))),
    ("matrix", Box((12, 8), (28, 16))),
    ("count", Box((), ())),
]


@pytest.mark.parametrize("piece_bytes", [1, 600, 1 << 20])
def test_one_pass_gives_checksums_and_digests(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    layout = plan_pack(SPECS, BOXES)
    values = np.random.default_rng(3).integers(0, 255, layout.nbytes, dtype=np.uint8)
    whole, ours = values.copy(), values.copy()
    seal(whole, layout)
    digests = dict.fromkeys(layout.specs, 0)
    final = 0
    for stop in sealing(ours, layout, digests):
        assert stop > final
        np.testing.assert_array_equal(ours[:stop], whole[:stop])  # what was called final is
        final = stop
    assert final == layout.nbytes
    assert check(ours, layout) == []
    expected = dict.fromkeys(layout.specs, 0)
    for part in layout.parts:
        expected[part.array] = (expected[part.array] + digest_part(whole, SPECS[part.array], part)) % 2**64
    assert digests == expected


def test_without_digests_only_the_checksums_are_made() -> None:
    layout = plan_pack(SPECS, BOXES)
    buffer = np.ones(layout.nbytes, np.uint8)
    assert list(sealing(buffer, layout, None))[-1] == layout.nbytes
    assert list(sealing(buffer[:0], plan_pack({}, []), {})) == []
    assert check(buffer, layout) == []
