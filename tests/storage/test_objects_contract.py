"""Every backend keeps the promises of the seam: one suite, inherited."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from storage.contract import ObjectStoreContract
from storage.errors import ConfigurationError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.objects import ByteRange, ObjectStore, open_store
from storage.remote import FsspecStore
from storage.retry import QUICK, RetryingStore


class TestMemoryStore(ObjectStoreContract):
    def make_store(self, tmp_path: Path) -> ObjectStore:
        return MemoryStore()


class TestLocalStore(ObjectStoreContract):
    def make_store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "not" / "yet" / "there")


class TestLocalStoreWithNamedTemporaries(ObjectStoreContract):
    """As on NFS, where a file cannot be without a name."""

    def make_store(self, tmp_path: Path) -> ObjectStore:
        store = LocalStore(tmp_path / "run")
        store._unnamed_files = False
        return store


class TestFsspecMemory(ObjectStoreContract):
    """The generic store, on the simplest file system of fsspec."""

    def make_store(self, tmp_path: Path) -> ObjectStore:
        return FsspecStore(f"memory://{uuid.uuid4().hex}/run")


class TestFsspecLocal(ObjectStoreContract):
    def make_store(self, tmp_path: Path) -> ObjectStore:
        return FsspecStore(f"local://{tmp_path}/run")


class TestRetryingStore(ObjectStoreContract):
    """A wrapper keeps the promises of what is inside."""

    def make_store(self, tmp_path: Path) -> ObjectStore:
        return RetryingStore(LocalStore(tmp_path / "run"), QUICK, piece_bytes=1000)


def test_open_store_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("runs/one", f"{tmp_path}/runs/one", f"file://{tmp_path}/runs/one"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == f"{tmp_path}/runs/one"
    assert not (tmp_path / "runs").exists(), "opening writes nothing"


def test_memory_stores_of_one_name_are_one() -> None:
    name = f"memory://{uuid.uuid4().hex}"
    open_store(name).put("k", b"v")
    assert open_store(name).get("k") == b"v"
    assert not open_store(name + "x").exists("k")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        pytest.param("", {}, "names no place", id="empty"),
        pytest.param("s3://", {}, "names no place", id="no bucket"),
        pytest.param("s4://bucket/x", {}, "s4", id="unknown protocol"),
        pytest.param("runs/one", {"key": "K"}, "takes no options, got key", id="option without effect"),
    ],
)
def test_bad_urls(url: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_store(url, options=options)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_byte_range_refuses_nonsense(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="start <= stop"):
        ByteRange(start, stop)


def test_opening_a_local_store_imports_nothing_heavy() -> None:
    heavy = ("fsspec", "zarr", "torch", "tenacity")
    code = f"import sys, storage.objects as o; o.open_store('x'); print([m for m in {heavy} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.strip() == "[]"
    )
