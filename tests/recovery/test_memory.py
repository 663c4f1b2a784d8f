"""Limits are looked up before a page is touched, in either version of cgroups; areas survive by name and size."""

from __future__ import annotations

import os

import pytest

from recovery.memory import Areas, MemoryLimitError, Room, check_fits, memfd, room

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\nHugePages_Total: 0\n")
    (folder / "self" / "cgroup").write_text("")
    return folder


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_cgroups_the_machine_is_the_limit(tmp_path, proc):
    free = room(tmp_path / "cgroup", proc)
    assert (free.free_bytes, free.limit_bytes, free.source) == (32 * GIB, 64 * GIB, "the machine's memory")


def test_version_2_takes_the_tightest_ancestor_and_counts_page_cache_as_free(tmp_path, proc):
    (proc / "self" / "cgroup").write_text("0::/slice/job/step\n")
    root = tmp_path / "cgroup"
    write(root / "slice", memory__max=f"{10 * GIB}\n", memory__current=f"{6 * GIB}\n", memory__stat=f"inactive_file {GIB}\n")
    write(root / "slice/job", memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 0\n")
    write(root / "slice/job/step", memory__max=f"{9 * GIB}\n", memory__current=f"{GIB}\n", memory__stat="inactive_file 0\n")
    free = room(root, proc)
    assert (free.free_bytes, free.limit_bytes) == (5 * GIB, 10 * GIB)
    assert free.source.endswith("cgroup/slice")


def test_version_1(tmp_path, proc):
    (proc / "self" / "cgroup").write_text("4:memory:/job\n0::/\n")
    job = tmp_path / "cgroup" / "memory" / "job"
    write(job, memory__limit_in_bytes=f"{2 * GIB}\n", memory__usage_in_bytes=f"{GIB}\n", memory__stat="total_inactive_file 0\n")
    assert room(tmp_path / "cgroup", proc).free_bytes == GIB


def test_in_a_container_the_mount_may_show_only_the_root(tmp_path, proc):
    (proc / "self" / "cgroup").write_text("0::/docker/abc\n")
    write(tmp_path / "cgroup", memory__max=f"{GIB}\n", memory__current="0\n", memory__stat="inactive_file 0\n")
    assert room(tmp_path / "cgroup", proc).free_bytes == GIB


def test_this_machine_has_room():
    assert room().free_bytes > 0


def test_too_much_is_refused_with_the_numbers():
    with pytest.raises(MemoryLimitError, match=r"2\.00 GiB are needed, 1\.00 GiB of 4\.00 GiB are free under the job"):
        check_fits(2 * GIB, Room(free_bytes=GIB, limit_bytes=4 * GIB, source="the job"))
    check_fits(0, Room(free_bytes=0, limit_bytes=0, source="the job"))


def test_an_area_cannot_be_resized():
    fd = memfd("x", 8192)
    assert os.fstat(fd).st_size == 8192
    assert os.fstat(fd).st_blocks * 512 >= 8192  # every page is there
    for size in (0, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_same_size_keeps_its_content_another_size_does_not():
    areas = Areas()
    assert areas.prepare({"a": 4096, "b": 4096}) == ([], ["a", "b"])
    os.pwrite(areas.fd("a"), b"kept", 0)
    os.pwrite(areas.fd("b"), b"gone", 0)
    assert areas.prepare({"a": 4096, "b": 8192, "c": 1}) == (["a"], ["b", "c"])
    assert os.pread(areas.fd("a"), 4, 0) == b"kept"
    assert os.pread(areas.fd("b"), 4, 0) == bytes(4)
    assert areas.sizes() == {"a": 4096, "b": 8192, "c": 1}
    areas.release(["a", "unknown"])
    assert "a" not in areas.sizes()
    areas.close()


def test_areas_that_do_not_fit_leave_the_others_alone():
    areas = Areas()
    areas.prepare({"a": 4096})
    with pytest.raises(MemoryLimitError, match="arenas larger than the memory limit"):
        areas.prepare({"a": 4096, "b": 1 << 60})
    assert areas.sizes() == {"a": 4096}
    areas.close()
