"""Formats live long: golden checkpoints are read for ever, by `storage` and by a reader that shares no code with it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from storage.errors import StorageError
from storage.objects import open_store
from storage.run import RunStore
from storage.zarr_view import open_zarr
from tests.storage.independent import read_run
from tests.storage.make_golden import (
    ATTEMPT,
    COMPRESSORS,
    EPOCH,
    PROGRESS,
    SPECS,
    STEP,
    compressed_store,
    compressed_values,
    golden_store,
    golden_values,
)

GOLDEN = Path(__file__).parent / "golden" / "v1"


def test_storage_reads_it() -> None:
    run = RunStore(open_store(str(GOLDEN)))
    assert {info.step: info.state.value for info in run.checkpoints()} == {990: "valid", 1000: "valid", 1010: "fenced"}
    checkpoint = run.open()
    assert (checkpoint.step, checkpoint.manifest.epoch, checkpoint.manifest.attempt) == (STEP, EPOCH, ATTEMPT)
    assert checkpoint.progress == PROGRESS
    assert [checkpoint.array(name) for name in checkpoint.names] == list(SPECS.values())
    for name, values in golden_values().items():
        assert checkpoint.read(name).tobytes() == values.tobytes()
    assert checkpoint.verify().ok


def test_an_independent_reader_reads_it() -> None:
    header, arrays = read_run(GOLDEN)
    assert (header["step"], header["format_version"], header["min_reader"]) == (STEP, 1, 1)
    assert header["progress"] == PROGRESS
    for name, values in golden_values().items():
        np.testing.assert_array_equal(arrays[name], values)


def test_the_independent_reader_notices_damage(tmp_path: Path) -> None:
    """It is worth something as an oracle only if it checks."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    names = [path for path in (tmp_path / "run" / "checkpoints" / "step-00001000").iterdir() if "zarr" not in path.name]
    assert len(names) == 5
    for path in names:
        good = path.read_bytes()
        path.write_bytes(good[:1] + bytes([good[1] ^ 1]) + good[2:])
        with pytest.raises(AssertionError):
            read_run(tmp_path / "run")
        path.write_bytes(good)
    read_run(tmp_path / "run")


def test_stock_zarr_reads_it() -> None:
    zarr = pytest.importorskip("zarr")
    folder = GOLDEN / "checkpoints" / "step-00001000"
    options = {"template_overrides": {"u": str(folder)}}
    stock = zarr.open_group(f"reference::{folder / 'e0001-a0007.zarr.json'}", mode="r", storage_options=options)
    ours = open_zarr(str(folder / "e0001-a0007.zarr.json"), storage_options=options)
    for name, values in golden_values().items():
        assert np.asarray(stock[name][...]).tobytes() == values.tobytes()
    widened = (golden_values()["weights/layers.0.wq"].astype(np.uint32) << 16).view(np.float32)
    assert np.asarray(ours["weights/layers.0.wq"][...]).tobytes() == widened.tobytes()


def test_today_s_writer_still_writes_version_1() -> None:
    """The same packs and views, byte for byte; the manifest's columns may be compressed by another zlib."""
    store = golden_store()
    files = {str(path.relative_to(GOLDEN)): path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    assert {info.key for info in store.list()} == set(files)
    for key, data in files.items():
        if key.endswith((".pack", ".zarr.json")):
            assert store.get(key) == data, key


# -- version 2: compressed -----------------------------------------------------------------------------------------------------

COMPRESSED_GOLDEN = GOLDEN.parent / "v2"


def test_storage_reads_compressed_ones_and_their_history() -> None:
    run = RunStore(open_store(str(COMPRESSED_GOLDEN)))
    opened = [run.open(step) for step in COMPRESSORS]
    assert [checkpoint.manifest.compressor for checkpoint in opened] == list(COMPRESSORS.values())
    for checkpoint in opened:
        assert checkpoint.manifest.digests == opened[0].manifest.digests
        for name, values in compressed_values().items():
            assert checkpoint.read(name).tobytes() == values.tobytes()
        assert checkpoint.verify().ok
    assert opened[2].manifest.nbytes < 0.8 * opened[0].manifest.nbytes


@pytest.mark.parametrize("step", list(COMPRESSORS))
def test_an_independent_reader_reads_compressed_ones(step: int, tmp_path: Path) -> None:
    shutil.copytree(COMPRESSED_GOLDEN, tmp_path / "run")
    for later in (later for later in COMPRESSORS if later > step):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:08d}")
    header, arrays = read_run(tmp_path / "run")
    version = 1 if COMPRESSORS[step] is None else 2
    assert (header["step"], header["format_version"], header["min_reader"]) == (step, version, version)
    for name, values in compressed_values().items():
        np.testing.assert_array_equal(arrays[name], values)


@pytest.mark.parametrize("step", list(COMPRESSORS))
def test_stock_zarr_reads_compressed_ones(step: int) -> None:
    zarr = pytest.importorskip("zarr")
    folder = COMPRESSED_GOLDEN / "checkpoints" / f"step-{step:08d}"
    options = {"template_overrides": {"u": str(folder)}}
    stock = zarr.open_group(f"reference::{folder / 'e0000-a0007.zarr.json'}", mode="r", storage_options=options)
    ours = open_zarr(str(folder / "e0000-a0007.zarr.json"), storage_options=options)
    for name, values in compressed_values().items():
        assert np.asarray(stock[name][...]).tobytes() == values.tobytes()
    widened = (compressed_values()["weights/layers.0.wq"].astype(np.uint32) << 16).view(np.float32)
    assert np.asarray(ours["weights/layers.0.wq"][...]).tobytes() == widened.tobytes()


def test_today_s_writer_still_writes_version_2() -> None:
    """All but the packs, whose compressor may be another one: what they inflate to is compared above."""
    store = compressed_store()
    files = {str(path.relative_to(COMPRESSED_GOLDEN)) for path in COMPRESSED_GOLDEN.rglob("*") if path.is_file()}
    assert {info.key for info in store.list()} == files
    opened = [RunStore(each).open(1000).manifest for each in (store, open_store(str(COMPRESSED_GOLDEN)))]
    assert opened[0].arrays == opened[1].arrays
    assert opened[0].digests == opened[1].digests


def test_a_golden_checkpoint_that_needs_a_newer_reader_says_so(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    for path in (tmp_path / "run").rglob("*.manifest"):
        path.write_bytes(b"ftrainM2" + path.read_bytes()[8:])
    with pytest.raises(StorageError, match="is not the manifest that was committed"):
        RunStore(open_store(str(tmp_path / "run"))).open(STEP)
