"""Large aligned blocks go to the disk past the page cache, and every mixture of blocks makes the same file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import NoSpace
from storage.local import LocalStore
from storage.local_write import ALIGNMENT, DIRECT_BYTES

NBYTES = 4 * DIRECT_BYTES


@pytest.fixture
def aligned() -> memoryview:
    """Bytes that begin on a page, none like its neighbours."""
    memory = mmap.mmap(-1, NBYTES + ALIGNMENT)
    memory[:] = (bytes(range(251)) * (len(memory) // 251 + 1))[: len(memory)]
    return memoryview(memory)


def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(bytes, past the page cache) of each write from now on."""
    seen = list[tuple[int, bool]]()
    write = os.write

    def noting(fd: int, data: memoryview) -> int:
        done = write(fd, data)
        seen.append((done, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return done

    monkeypatch.setattr(os, "write", noting)
    return seen


def can_be_direct(folder: Path) -> bool:
    path = folder / "probe"
    path.touch()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_large_aligned_blocks_go_past_the_page_cache_and_the_rest_does_not(
    tmp_path: Path, aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_be_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    seen = written(monkeypatch)
    blocks = [aligned[: 2 * DIRECT_BYTES], aligned[2 * DIRECT_BYTES : NBYTES + 7]]
    assert LocalStore(tmp_path).put_stream("k", blocks) == NBYTES + 7
    assert seen == [(2 * DIRECT_BYTES, True), (2 * DIRECT_BYTES, True), (7, False)]
    assert (tmp_path / "k").read_bytes() == bytes(aligned[: NBYTES + 7])


CUTS: dict[str, Callable[[memoryview], list[memoryview]]] = {
    "small first": lambda view: [view[:3], view[3:NBYTES]],
    "not aligned in memory": lambda view: [view[1 : NBYTES + 1]],
    "not aligned in the middle": lambda view: [
        view[:DIRECT_BYTES],
        view[DIRECT_BYTES : DIRECT_BYTES + 5],
        view[ALIGNMENT:NBYTES],
    ],
    "aligned again": lambda view: [view[:ALIGNMENT], view[ALIGNMENT : ALIGNMENT + DIRECT_BYTES], view[:0], view[:NBYTES]],
    "many small": lambda view: [view[at : at + 100_000] for at in range(0, NBYTES, 100_000)],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_mixture_of_blocks_makes_the_same_file(
    cut: Callable[[memoryview], list[memoryview]], tmp_path: Path, aligned: memoryview
) -> None:
    blocks = cut(aligned)
    LocalStore(tmp_path).put_stream("k", blocks)
    assert (tmp_path / "k").read_bytes() == b"".join(blocks)


@pytest.mark.parametrize("refuses", ["the flag", "the write"])
def test_a_file_system_that_refuses_is_written_through_the_page_cache(
    refuses: str, tmp_path: Path, aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, write = fcntl.fcntl, os.write

    def no_flag(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(fd, command, flags)

    def no_write(fd: int, data: memoryview) -> int:
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(*((fcntl, "fcntl", no_flag) if refuses == "the flag" else (os, "write", no_write)))
    LocalStore(tmp_path).put_stream("k", [aligned[:DIRECT_BYTES], aligned[DIRECT_BYTES:NBYTES]])
    assert (tmp_path / "k").read_bytes() == bytes(aligned[:NBYTES])


def test_a_disk_that_fills_up_past_the_page_cache(tmp_path: Path, aligned: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        if os.lseek(fd, 0, os.SEEK_CUR) >= DIRECT_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:DIRECT_BYTES])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpace):
        LocalStore(tmp_path).put_stream("k", [aligned[:NBYTES]])
    assert list(tmp_path.iterdir()) == []
