"""Whole runs on a real S3 server: commits, fencing, fall-back, collection, and stock zarr reading over the network."""

import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from seaweed import BUCKET, SeaweedServer

from storage.compress import Compressor
from storage.keys import step_folder
from storage.objects import ObjectStore, open_store
from storage.retention import KeepLast
from storage.run import RunStore
from storage.zarr_view import open_zarr
from tests.storage.building import SPECS, random_values, save
from tests.storage.test_commit import holds, states

pytestmark = pytest.mark.s3

OLD, NEW = random_values(SPECS, 1), random_values(SPECS, 2)


@pytest.fixture
def store(s3: SeaweedServer) -> Iterator[ObjectStore]:
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", options=s3.options)
    yield store
    store.close()


def test_a_run_saves_falls_back_rolls_back_and_collects(store: ObjectStore) -> None:
    run = RunStore(store)
    first = run.take_epoch(owner={"host": "a"})
    for step in (10, 20, 30):
        save(run, OLD if step < 30 else NEW, step=step, epoch=first)
    assert holds(run.open(), NEW)
    store.delete(run.pack_key(30, first, 0, 1))
    fallen_back = run.open()
    assert (fallen_back.step, [s for s, _ in fallen_back.passed_over]) == (20, [30])
    assert fallen_back.verify().ok
    heir = RunStore(store)
    epoch = heir.take_epoch(owner={"host": "b"}, starts_from=20)
    assert states(heir) == {10: "valid", 20: "valid", 30: "fenced"}
    save(heir, NEW, step=30, epoch=epoch)
    assert holds(heir.open(), NEW)
    now = max(info.modified_s for info in store.list()) + 100.0
    heir.collect([KeepLast(1)], now_s=now, grace_s=10.0)
    heir.collect([KeepLast(1)], now_s=now + 10.0, grace_s=10.0)
    assert states(heir) == {30: "valid"}
    assert heir.open().verify().ok


def test_coordinators_that_start_at_once_get_different_epochs(s3: SeaweedServer, store: ObjectStore) -> None:
    taken: list[int] = []
    starters = [threading.Thread(target=lambda: taken.append(RunStore(store).take_epoch(owner={}))) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert sorted(taken) == [0, 1, 2, 3]


def test_stock_zarr_reads_over_s3(s3: SeaweedServer, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr = pytest.importorskip("zarr")
    run = RunStore(store)
    epoch = run.take_epoch(owner={})
    save(run, NEW, step=10, epoch=epoch)
    save(run, NEW, step=20, epoch=epoch, compressor=Compressor())
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    options = {"remote_options": {"asynchronous": True}}
    widened = (NEW["weights/layers.0.wq"].astype(np.uint32) << 16).view(np.float32)
    for step in (10, 20):
        url = store.url_of(step_folder(step) + "e0000-a0000.zarr.json")
        group = zarr.open_group(f"reference::{url}", mode="r", storage_options=options)
        assert np.asarray(group["master/odd"][...]).tobytes() == NEW["master/odd"].tobytes()
        assert np.asarray(open_zarr(url)["weights/layers.0.wq"][...]).tobytes() == widened.tobytes()
