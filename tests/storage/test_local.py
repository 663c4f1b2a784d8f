"""What only a disk does: fill up, turn read-only, lack links, lose power, and see its writer killed."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.errors import AccessDenied, ConfigurationError, Damaged, NoSpace, ObjectMissing, StorageError, Unavailable
from storage.local import LocalStore
from storage.local_errors import translated
from storage.objects import check_store

MIB = 2**20


def all_files(folder: Path) -> list[str]:
    """Every file, the hidden ones too: an independent look that no listing of ours takes part in."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["unnamed", "named"])
def make_store(request: pytest.FixtureRequest) -> Callable[[Path], LocalStore]:
    """A store with either kind of unfinished file."""

    def make(root: Path) -> LocalStore:
        store = LocalStore(root)
        store._unnamed_files = request.param == "unnamed"
        return store

    return make


@pytest.mark.chaos
def test_a_full_disk(small_disk: Callable[[int], Path], make_store: Callable[[Path], LocalStore]) -> None:
    disk = small_disk(4)
    store = make_store(disk)
    store.put("old/pack", b"o" * MIB)

    def blocks() -> Iterator[bytes]:
        for _ in range(20):
            yield b"n" * MIB

    writes: list[Callable[[], object]] = [
        lambda: store.put_stream("new/pack", blocks()),
        lambda: store.put_stream("old/pack", blocks()),
        lambda: store.put("new/manifest", bytes(8 * MIB)),
        lambda: store.create("new/commit", bytes(8 * MIB)),
    ]
    for write in writes:
        with pytest.raises(NoSpace, match="no space left on the device") as caught:
            write()
        assert str(disk) in str(caught.value)
        assert "nothing partial was left behind" in str(caught.value)
        assert caught.value.needed_bytes is not None
        assert caught.value.needed_bytes > 3 * MIB
        assert caught.value.free_bytes is not None
        assert caught.value.free_bytes < MIB
        assert all_files(disk) == ["old/pack"]
    assert store.get("old/pack") == b"o" * MIB
    store.put("new/pack", bytes(2 * MIB))  # what the failed ones took is free again


@pytest.mark.chaos
def test_a_read_only_disk(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1)
    store = LocalStore(disk / "run")
    store.put("k", b"v")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for write in (
        lambda: check_store(store),
        lambda: store.put("k", b"w"),
        lambda: store.create("c", b""),
        lambda: store.delete("k"),
    ):
        with pytest.raises(AccessDenied, match="mounted read-only"):
            write()
    with pytest.raises(AccessDenied, match="mounted read-only"):
        check_store(LocalStore(disk / "other" / "run"))
    assert store.get("k") == b"v"


def test_a_disk_that_finds_out_at_the_sync_that_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "new").mkdir()
    with pytest.raises(NoSpace, match=r"0\.0 MiB were written"):
        LocalStore(tmp_path).put("new/pack", b"x")
    assert all_files(tmp_path) == []


def test_bytes_are_synced_before_they_have_a_name_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut cannot be tried here; that nothing is named before its bytes are on the disk can."""
    log: list[str] = []
    real_fsync, real_link, real_replace, real_mkdir = os.fsync, os.link, os.replace, Path.mkdir

    def fsync(fd: int) -> None:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}" if folder else "sync file")
        real_fsync(fd)

    def link(*args: object, **kwargs: object) -> None:
        log.append("name")
        real_link(*args, **kwargs)  # type: ignore[arg-type]

    def replace(*args: object) -> None:
        log.append("name")
        real_replace(*args)  # type: ignore[arg-type]

    def mkdir(path: Path, mode: int) -> None:
        log.append(f"mkdir {path.name}")
        real_mkdir(path, mode)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    store = LocalStore(tmp_path / "root")
    store._unnamed_files = False
    store.put("a/b", b"x")
    assert log == ["mkdir root", f"sync {tmp_path.name}", "mkdir a", "sync root", "sync file", "name", "sync a"]
    log.clear()
    assert store.create("a/c", b"x")
    assert log == ["sync file", "name", "sync a"]
    log.clear()
    store.delete("a/c")
    assert log == ["sync a"]
    store._unnamed_files = True
    log.clear()
    assert LocalStore(tmp_path / "root").create("a/d", b"x")
    assert log == ["sync file", "name", "sync a"]


def test_without_hard_links_create_still_has_one_winner_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    store = LocalStore(tmp_path)
    store._unnamed_files = False
    assert store.capabilities.atomic_create
    assert [store.create("commit", b"1"), store.create("commit", b"2")] == [True, False]
    assert not store.capabilities.atomic_create
    assert store.get("commit") == b"1"
    assert all_files(tmp_path) == ["commit"]


def test_without_unnamed_files_a_temporary_name_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_tmpfile(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", no_tmpfile)
    store = LocalStore(tmp_path)
    seen: list[str] = []

    def blocks() -> Iterator[bytes]:
        yield b"x"
        seen.extend(all_files(tmp_path))
        assert list(store.list()) == []

    store.put_stream("k", blocks())
    assert [name.startswith(".ftrain-tmp-") for name in seen] == [True]
    assert all_files(tmp_path) == ["k"]


WRITER = """
import os, sys
from storage.local import LocalStore
store = LocalStore(sys.argv[1])
store._unnamed_files = sys.argv[2] == "unnamed"
def blocks():
    yield bytes(2**20)
    print("half", flush=True)
    sys.stdin.read()
store.put_stream("step/pack", blocks())
"""


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["unnamed", "named"])
def test_a_killed_writer(tmp_path: Path, kind: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITER, str(tmp_path), kind]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
    store = LocalStore(tmp_path)
    assert list(store.list()) == []
    assert len(all_files(tmp_path)) == (0 if kind == "unnamed" else 1)
    assert store.sweep_unfinished(older_than_s=3600) == 0, "its writer may be alive"
    assert store.sweep_unfinished(older_than_s=-60) == (0 if kind == "unnamed" else 1)
    assert all_files(tmp_path) == []


def test_a_file_where_a_folder_is_wanted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    named = rf"^{tmp_path}/a is a file, where a folder is wanted\. Choose another run\.url"  # and not one of our own names
    with pytest.raises(ConfigurationError, match=named):
        store.put("a/b", b"y")
    for place in ("a", "a/deeper"):
        with pytest.raises(ConfigurationError, match=named):
            LocalStore(tmp_path / place).put("b", b"y")
    store.put("c/d", b"x")
    with pytest.raises(ConfigurationError, match="both a file and a folder"):
        store.put("c", b"y")
    assert store.create("c", b"y") is False
    assert all_files(tmp_path) == ["a", "c/d"]


def test_files_have_the_modes_of_the_users_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        LocalStore(tmp_path).put("folder/file", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "folder" / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("k", b"v")
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        store.put("k", b"v")
        store.create("k", b"v")
        list(store.list())
        for read in (store.get, store.size):
            with pytest.raises(ObjectMissing):
                read("nothing")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        (errno.EACCES, AccessDenied, "Choose a folder that this user may write to"),
        (errno.EROFS, AccessDenied, "read-only"),
        (errno.ENOSPC, NoSpace, "are free"),
        (errno.EDQUOT, NoSpace, "quota"),
        (errno.ENOENT, ObjectMissing, "there is no object"),
        (errno.EISDIR, ConfigurationError, "another run.url"),
        (errno.ENAMETOOLONG, ConfigurationError, "shorter"),
        (errno.EIO, Damaged, "kernel's log"),
        (errno.ESTALE, Unavailable, "does not answer"),
        (errno.EMFILE, StorageError, "Too many open files"),
    ],
    ids=lambda value: errno.errorcode.get(value) if isinstance(value, int) else "",
)
def test_each_errno_has_its_class_and_a_sentence(tmp_path: Path, code: int, expected: type[StorageError], words: str) -> None:
    error = translated(OSError(code, os.strerror(code)), tmp_path, "step/pack")
    assert type(error) is expected
    assert error.key == "step/pack"
    assert words in str(error)
