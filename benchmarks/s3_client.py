"""One client of benchmarks.s3: saves a state to S3 and loads it again, as one library does, and says what it cost this process.

A process for each, so that processor time and memory are its own; imports and the making of the state do not count. Memory is
growth beyond the arena (ours), the tensors (DCP) and the destination, which are there before.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.reshard_cases import Array, arrays, bits
from storage.box import Box
from storage.keys import pack_name
from storage.manifest import PackInfo, PackManifest
from storage.merge import merge
from storage.objects import open_store
from storage.pack import plan_pack, seal, write_part
from storage.reader import Want
from storage.run import RunStore

BLOCK = 4 * 2**20


class Ours:
    """Seal the arena, stream it, commit; open, plan, read, check every checksum."""

    def __init__(self, held: list[Array], url: str, backend: str) -> None:
        self._held = {array.name: array for array in held}
        self._specs = {name: array.spec() for name, array in self._held.items()}
        self._layout = plan_pack(self._specs, [(name, Box.whole(array.shape)) for name, array in self._held.items()])
        self._arena = np.zeros(self._layout.nbytes, np.uint8)
        for part in self._layout.parts:
            write_part(self._arena, self._specs[part.array], part, bits(self._held[part.array], part.box))
        self._run = RunStore(open_store(url, options={"backend": backend}))
        self._epoch = self._run.take_epoch(owner={"benchmark": "s3"}, starts_from=None)
        self._out = {array.name: np.ones(array.shape, np.int32) for array in held}

    def save(self) -> None:
        """One checkpoint."""
        seal(self._arena, self._layout)
        data = self._arena.data
        blocks = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
        self._run.store.put_stream(self._run.pack_key(1, self._epoch, 0, 0), blocks)
        delivery = PackManifest(
            pack=PackInfo(name=pack_name(self._epoch, 0, 0), nbytes=self._layout.nbytes),
            arrays=list(self._specs.values()),
            parts=list(self._layout.parts),
            digests={},
        )
        self._run.commit(merge([delivery], step=1, epoch=self._epoch, attempt=0, progress={}, created_s=0.0))

    def load(self) -> None:
        """All of it."""
        self._run.open().load([Want(name, Box.whole(out.shape), out) for name, out in self._out.items()])

    def right(self) -> bool:
        """Whether what was loaded is what was saved."""
        return all(np.array_equal(self._out[name], bits(a, Box.whole(a.shape))) for name, a in self._held.items())


class Dcp:
    """torch's own fsspec writer and reader, with s3fs."""

    def __init__(self, held: list[Array], url: str) -> None:
        import torch

        from benchmarks.peers import dcp_sync

        torch.set_num_threads(1)
        self._peer, self._url, self._equal = dcp_sync, url, torch.equal
        self._state = {a.name: torch.from_numpy(bits(a, Box.whole(a.shape))).view(torch.float32) for a in held}
        self._out = {name: torch.ones_like(value) for name, value in self._state.items()}
        self._bits = torch.int32

    def save(self) -> None:
        """One checkpoint."""
        self._peer.save_url(self._state, self._url, {})

    def load(self) -> None:
        """All of it."""
        self._peer.load_url(self._out, self._url, {})

    def right(self) -> bool:
        """Whether what was loaded is what was saved."""
        pairs = ((self._out[name].view(self._bits), value.view(self._bits)) for name, value in self._state.items())
        return all(self._equal(a, b) for a, b in pairs)


def measured(action: Callable[[], None]) -> dict[str, float]:
    """What an action costs this process."""
    Path("/proc/self/clear_refs").write_text("5")
    memory, begin, cpu = _status("VmRSS"), time.perf_counter(), time.process_time()
    action()
    wall, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu_s, "peak": float(_status("VmHWM") - memory)}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(argv: list[str]) -> int:
    """`python -m benchmarks.s3_client CASE URL tiny|full`; CASE is obstore, s3fs or dcp."""
    warnings.simplefilter("ignore")
    case, url, size = argv
    held = arrays(tiny=size == "tiny")
    client: Any = Dcp(held, url) if case == "dcp" else Ours(held, url, case)
    found = {"save": measured(client.save), "load": measured(client.load)}
    if not client.right():
        raise RuntimeError(f"{case} loaded other values than it saved")
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
