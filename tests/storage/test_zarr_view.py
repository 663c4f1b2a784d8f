"""Anyone reads it: stock zarr through the reference file, on local files, values and checksums."""

import shutil
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from storage import checkpoint as checkpoint_module
from storage import zarr_view
from storage.box import Box
from storage.errors import CoverageError, FormatError
from storage.keys import pack_name, step_folder
from storage.manifest import PackInfo, PackManifest
from storage.merge import merge
from storage.objects import open_store
from storage.pack import ArraySpec, plan_pack
from storage.run import RunStore
from storage.zarr_view import array_metadata, open_zarr
from tests.storage.building import SPECS, random_values, save

zarr = pytest.importorskip("zarr")

VALUES = random_values(SPECS, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = RunStore(open_store(str(tmp_path / "run")))
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}), writers=3)
    return tmp_path / "run" / step_folder(10)


VIEW = "e0000-a0000.zarr.json"


def bits(array: object, name: str) -> bytes:
    return np.asarray(array[...]).tobytes()  # type: ignore[index]


def test_stock_zarr_reads_every_array(folder: Path) -> None:
    group = zarr.open_group(f"reference::{folder / VIEW}", mode="r")
    for name, spec in SPECS.items():
        assert bits(group[name], name) == VALUES[name].tobytes()
        assert group[name].shape == spec.shape
        assert group[name].chunks == spec.tile
    assert group["weights/layers.0.wq"].dtype == np.uint16
    assert dict(group["weights/layers.0.wq"].attrs) == {"dtype": "bfloat16"}
    assert dict(group["master/layers.0.wq"].attrs) == {"tied": ["head"]}
    assert dict(group.attrs) == {"format": "ftrain-checkpoint", "step": 10}


def test_stock_zarr_lists_groups_and_their_members(folder: Path) -> None:
    group = zarr.open_group(f"reference::{folder / VIEW}", mode="r")
    assert sorted(name for name, _ in group.groups()) == ["exp_avg", "master", "weights"]
    assert sorted(name for name, _ in group["master"].arrays()) == ["layers.0.wq", "norm", "odd"]


def test_stock_zarr_opens_groups_that_hold_arrays_and_groups_at_any_depth(tmp_path: Path) -> None:
    """A script's state is nested as its author likes."""
    names = [
        "rng/rank-0/numpy/keys",
        "rng/rank-0/torch",
        "rng/rank-1/numpy/keys",
        "rng/rank-1/torch",
        "rng/seed",
        "a",
        "rng-b/x",
    ]
    specs = {name: ArraySpec(name=name, shape=(4,), dtype="float32", tile=(4,)) for name in names}
    values = random_values(specs, 2)
    run = RunStore(open_store(str(tmp_path / "run")))
    save(run, values, step=10, epoch=run.take_epoch(owner={}), writers=1, specs=specs)
    group = zarr.open_group(f"reference::{tmp_path / 'run' / step_folder(10) / VIEW}", mode="r")
    for name in names:
        assert bits(group[name], name) == values[name].tobytes()
    assert sorted(name for name, _ in group["rng/rank-1"].members()) == ["numpy", "torch"]
    assert sorted(name for name, _ in group["rng"].members()) == ["rank-0", "rank-1", "seed"]


def test_our_view_shows_weights_as_the_numbers_they_are(folder: Path) -> None:
    group = open_zarr(str(folder / VIEW))
    shown = np.asarray(group["weights/layers.0.wq"][3:9, 1:])
    exact = (VALUES["weights/layers.0.wq"][3:9, 1:].astype(np.uint32) << 16).view(np.float32)
    assert shown.dtype == np.float32
    np.testing.assert_array_equal(shown.view(np.uint32), exact.view(np.uint32))
    assert [name for name, _ in group["weights"].arrays()] == ["layers.0.wq"]
    assert bits(group["master/norm"], "master/norm") == VALUES["master/norm"].tobytes()


def test_a_flipped_byte_makes_stock_zarr_raise(folder: Path) -> None:
    pack = sorted(folder.glob("*.pack"))[0]
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    group = zarr.open_group(f"reference::{folder / VIEW}", mode="r")
    with pytest.raises(ValueError, match="checksum do not match"):
        [bits(group[name], name) for name in SPECS]


def test_a_copy_opens_with_the_template_override_although_the_original_is_damaged(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for pack in folder.glob("*.pack"):
        pack.write_bytes(b"damaged")
    options = {"template_overrides": {"u": str(copy)}}
    stock = zarr.open_group(f"reference::{copy / VIEW}", mode="r", storage_options=options)
    ours = open_zarr(str(copy / VIEW), storage_options=options)
    assert bits(stock["master/odd"], "master/odd") == VALUES["master/odd"].tobytes()
    assert bits(ours["master/odd"], "master/odd") == VALUES["master/odd"].tobytes()


def test_very_many_chunks_make_one_file_for_each_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_view, "MAX_GROUP_CHUNKS", 10)
    run = RunStore(open_store(str(tmp_path / "run")))
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}))
    folder = tmp_path / "run" / step_folder(10)
    assert not (folder / VIEW).exists()
    for name in SPECS:
        array = zarr.open_array(f"reference::{folder / 'e0000-a0000.zarr' / name}.json", mode="r")
        assert bits(array, name) == VALUES[name].tobytes()
    assert run.open().verify().ok


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A checkpoint with so many chunks that its commit writes no view."""
    monkeypatch.setattr(zarr_view, "MAX_GROUP_CHUNKS", 5)
    monkeypatch.setattr(zarr_view, "MAX_COMMIT_CHUNKS", 10)
    monkeypatch.setattr(checkpoint_module, "MAX_COMMIT_CHUNKS", 10)
    run = RunStore(open_store(str(tmp_path / "run")))
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}), writers=3)
    return run


def test_a_commit_with_millions_of_chunks_writes_no_view_and_verifies(many: RunStore) -> None:
    assert not any(".zarr" in info.key for info in many.store.list(step_folder(10)))
    assert many.open().verify().ok


def test_the_view_of_one_array_is_written_when_asked_for(many: RunStore) -> None:
    (path,) = many.open().write_view(["master/odd"])
    assert path.endswith("step-00000010/e0000-a0000.zarr/master/odd.json")
    assert bits(zarr.open_array(f"reference::{path}", mode="r"), "master/odd") == VALUES["master/odd"].tobytes()
    assert many.open().verify().ok
    Path(path).write_bytes(Path(path).read_bytes().replace(b"float32", b"uint32"))
    (problem,) = many.open().verify().problems
    assert "master/odd.json is not the Zarr view" in problem.reason


def test_a_view_of_all_arrays_in_another_place_shows_the_packs_where_they_are(many: RunStore, tmp_path: Path) -> None:
    paths = many.open().write_view(to=open_store(str(tmp_path / "views")))
    assert len(paths) == len(SPECS)
    for name in SPECS:
        path = tmp_path / "views" / "e0000-a0000.zarr" / f"{name}.json"
        assert bits(zarr.open_array(f"reference::{path}", mode="r"), name) == VALUES[name].tobytes()
    assert not any(".zarr" in info.key for info in many.store.list(step_folder(10)))
    with pytest.raises(CoverageError, match="no array master/none"):
        many.open().write_view(["master/none"])


def test_a_view_that_came_with_the_commit_can_be_written_anew(folder: Path) -> None:
    run, before = RunStore(open_store(str(folder.parent.parent))), (folder / VIEW).read_bytes()
    (folder / VIEW).unlink()
    assert run.open().write_view() == [str(folder / VIEW)]
    assert (folder / VIEW).read_bytes() == before


def test_the_view_of_a_copied_run_shows_the_old_packs_until_it_is_written_anew(folder: Path, tmp_path: Path) -> None:
    original, copy = folder.parent.parent, tmp_path / "elsewhere"
    shutil.copytree(original, copy)
    view = copy / folder.relative_to(original) / VIEW
    assert view.read_bytes() == (folder / VIEW).read_bytes()  # which names the original's place
    for pack in folder.glob("*.pack"):
        pack.write_bytes(b"damaged")
    assert RunStore(open_store(str(copy))).open().write_view() == [str(view)]
    group = zarr.open_group(f"reference::{view}", mode="r")
    assert bits(group["master/odd"], "master/odd") == VALUES["master/odd"].tobytes()


def test_a_chunk_costs_what_the_bounds_were_chosen_for() -> None:
    """94 bytes a chunk under long names: a commit writes less than 100 MB of view."""
    spec = ArraySpec(name="exp_avg_sq/layers.117.attention.wq", shape=(4096, 4096), dtype="float32", tile=(32, 512))
    layout = plan_pack({spec.name: spec}, [(spec.name, Box.whole(spec.shape))])
    held = PackManifest(
        pack=PackInfo(name=pack_name(4, 7, 5119), nbytes=layout.nbytes),
        arrays=[spec],
        parts=list(layout.parts),
        digests={spec.name: 1},
    )
    manifest = merge([held], step=1000, epoch=4, attempt=7, progress={}, created_s=0.0)
    size = len(zarr_view.reference_json(manifest, base_url="s3://bucket/run/checkpoints/step-00001000"))
    assert zarr_view.num_chunks(manifest) == 1024
    assert size / 1024 < 100


@pytest.mark.parametrize(
    ("dtype", "data_type", "fill"),
    [
        ("bfloat16", "uint16", 0x7FC0),
        ("float32", "float32", "NaN"),
        ("float64", "float64", "NaN"),
        ("int64", "int64", -(2**63)),
        ("uint8", "uint8", 255),
        ("bool", "bool", True),
    ],
)
def test_nothing_missing_passes_for_zeros(dtype: str, data_type: str, fill: object) -> None:
    metadata = array_metadata(ArraySpec(name="x", shape=(4,), dtype=dtype, tile=(2,)))
    assert (metadata["data_type"], metadata["fill_value"]) == (data_type, fill)


def test_a_missing_chunk_reads_as_nan(folder: Path) -> None:
    view = folder / VIEW
    text = view.read_text()
    assert '"master/norm/c/0"' in text
    view.write_text(text.replace('"master/norm/c/0"', '"master/norm/c/gone"'))
    group = zarr.open_group(f"reference::{view}", mode="r")
    assert np.isnan(np.asarray(group["master/norm"][...])).all()


def test_storage_itself_imports_neither_zarr_nor_fsspec_nor_torch() -> None:
    code = "import storage, sys; print([m for m in ('zarr', 'fsspec', 's3fs', 'torch', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def resealed(view: Path, old: bytes, new: bytes) -> None:
    """The reference file with something else in it, and a right checksum."""
    data = view.read_bytes()
    assert old in data
    body = data[: -len(zarr_view.CHECKSUM)].replace(old, new)
    view.write_bytes(b'%b,"crc32c":"%08x"}' % (body, google_crc32c.value(body)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{{u}}/e0000", b"{{u}}/../e0000"),
        (b"{{u}}/e0000", b"/etc/e0000"),
        (b"{{u}}/e0000", b"{{x}}/e0000"),
        (b'["{{u}}/', b'[0,"{{u}}/'),
        (b'"refs":{', b'"refs":{"zarr.json":7,'),
        (b'"templates":{"u":', b'"templates":{"u":7,"v":'),
        (b'"templates"', b'"template"'),
        (b'{\\"zarr_format', b'[\\"zarr_format'),
    ],
)
def test_a_hostile_reference_file_is_refused(folder: Path, old: bytes, new: bytes) -> None:
    resealed(folder / VIEW, old, new)
    with pytest.raises(FormatError):
        open_zarr(str(folder / VIEW))


def test_a_damaged_reference_file_is_refused(folder: Path) -> None:
    data = (folder / VIEW).read_bytes()
    (folder / VIEW).write_bytes(data.replace(b"float32", b"uint32", 1))
    with pytest.raises(FormatError, match="does not match its own checksum"):
        open_zarr(str(folder / VIEW))
