"""Faults that users of other checkpoint libraries met, by the number of the report (shared/cases/checkpoint-reports.md).

Each is tried with the right value in hand. What a report is about belongs to no single module here, so they stand together;
those about data order (28) are in tests/ftrain/data, those about whole runs (7, 11, 26) in tests/chaos and tests/ftrain/train.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ftrain.checkpoint.arena import ArenaSlot, slot_name, slot_nbytes
from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import KeeperMessage, PackFailed, PackStored, Settled
from ftrain.checkpoint.saver import Saver
from ftrain.parallel.arrays import StatePiece
from storage.box import Box
from storage.digest import digest_box
from storage.errors import CoverageError, NoCheckpoint, NoSpace
from storage.grid import tile_shape
from storage.keys import pack_name
from storage.local import LocalStore
from storage.manifest import PackManifest
from storage.memory import MemoryStore
from storage.merge import merge
from storage.objects import ObjectStore
from storage.pack import ArraySpec, PackLayout, plan_pack
from storage.reader import Want
from storage.run import RunStore
from tests.storage.building import SPECS, Values, build_pack, even_cut, random_values, save, write_packs

ROOT = Path(__file__).parent.parent.parent


def test_008_a_newest_checkpoint_without_its_metadata_is_passed_over_by_name(tmp_path: Path) -> None:
    run = RunStore(LocalStore(tmp_path))
    epoch = run.take_epoch(owner={}, starts_from=None)
    for step in (1, 2, 3):
        save(run, random_values(SPECS, step), step=step, epoch=epoch)
    next((tmp_path / "checkpoints" / "step-00000003").glob("*.manifest")).unlink()
    found = run.open()
    assert found.step == 2
    ((step, reason),) = found.passed_over
    assert step == 3
    assert ".manifest" in reason
    next((tmp_path / "checkpoints" / "step-00000002").glob("commit-*")).unlink()
    assert run.open().step == 1


@pytest.mark.chaos
def test_001_killed_at_any_moment_the_newest_visible_checkpoint_is_a_saved_one(tmp_path: Path) -> None:
    rng, last = random.Random(0), 0
    for _ in range(6):
        command = [sys.executable, "-m", "tests.storage.report_writer", str(tmp_path), str(last + 1)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randint(1, 4)):
            last = int(process.stdout.readline())
        timer = rng.random() * 0.02  # somewhere inside the next save: the point is that nobody knows where
        try:
            process.wait(timer)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        checkpoint = RunStore(LocalStore(tmp_path)).open()
        assert checkpoint.step >= last
        last = checkpoint.step
        assert checkpoint.verify().ok
        for name, values in random_values(SPECS, checkpoint.step).items():
            assert np.array_equal(checkpoint.read(name).view(values.dtype), values)


@pytest.mark.chaos
def test_010_a_disk_that_fills_up_leaves_the_first_checkpoint_and_no_rubbish(small_disk: Callable[[int], Path]) -> None:
    store = LocalStore(small_disk(10) / "run")
    run = RunStore(store)
    epoch = run.take_epoch(owner={}, starts_from=None)
    spec = ArraySpec(name="master/w", shape=(1536, 1024), dtype="float32", tile=(256, 1024))
    values: Values = {spec.name: np.arange(1536 * 1024, dtype=np.uint32).reshape(1536, 1024)}
    data, delivery = build_pack({spec.name: spec}, values, [(spec.name, Box.whole(spec.shape))], pack_name(epoch, 0, 0))
    store.put_stream(run.pack_key(1, epoch, 0, 0), [data])
    run.commit(merge([delivery], step=1, epoch=epoch, attempt=0, progress={}, created_s=0.0))
    before = {info.key for info in store.list()}
    with pytest.raises(NoSpace):
        store.put_stream(run.pack_key(2, epoch, 0, 0), (data[at : at + 2**20] for at in range(0, len(data), 2**20)))
    assert {info.key for info in store.list()} == before
    assert not list(Path(store.url).glob("**/.ftrain-tmp-*"))
    assert run.open().verify().ok


W = ArraySpec(name="master/w", shape=(8, 4), dtype="float32", tile=(2, 4))
LAYOUT = plan_pack({W.name: W}, [(W.name, Box.whole(W.shape))])


class Memory:
    """A saver, its arena, a keeper, and what the keeper says."""

    def __init__(self, store: ObjectStore, layout: PackLayout = LAYOUT, slots: int = 3) -> None:
        self.heard: queue.SimpleQueue[KeeperMessage] = queue.SimpleQueue()
        self.keeper = Keeper(lambda: store, self.heard.put)
        named = []
        for index in range(slots):
            fd = os.memfd_create("slot")
            os.posix_fallocate(fd, 0, slot_nbytes(layout))
            named.append((slot_name(0, index, 0), ArenaSlot(fd)))
            self.keeper.adopt(named[-1][0], fd)
        self.saver = Saver(named, layout, identity=(0, 0, 0, 1), announce=self.keeper.snapshot_ready, overlap=True)

    def save(self, tensor: torch.Tensor, step: int) -> None:
        piece = StatePiece("master/w", Box.whole(tuple(tensor.shape)), tensor, "float32")
        self.saver.save([piece], step=step, upload=True, progress={"step": step})


def committed(run: RunStore, message: KeeperMessage) -> None:
    assert isinstance(message, PackStored), message
    manifest = merge([message.manifest], step=message.step, epoch=0, attempt=0, progress={}, created_s=0.0)
    run.commit(manifest)


def test_003_a_change_after_the_save_does_not_reach_the_file(tmp_path: Path) -> None:
    run = RunStore(LocalStore(tmp_path))
    run.take_epoch(owner={}, starts_from=None)
    memory, parameter = Memory(run.store), torch.ones(8, 4)
    memory.save(parameter, 1)
    memory.saver.finish()  # what the optimizer step waits for
    parameter.mul_(7)
    memory.keeper.close()
    committed(run, memory.heard.get(timeout=30))
    assert np.array_equal(run.open().read("master/w"), np.ones((8, 4), "<f4"))


def test_005_five_saves_in_a_row_and_a_failure_that_says_what_it_was(tmp_path: Path) -> None:
    run = RunStore(LocalStore(tmp_path / "run"))
    run.take_epoch(owner={}, starts_from=None)
    memory, live = Memory(run.store, slots=3), torch.zeros(8, 4)
    for step in range(1, 6):
        live.fill_(step)
        memory.saver.wait_until_free(upload=True)
        memory.save(live, step)
        memory.saver.finish()
        committed(run, memory.heard.get(timeout=30))
        memory.keeper.settled(Settled(attempt=0, step=step))
    memory.keeper.close()
    for step in range(1, 6):
        assert run.open(step).read("master/w").max() == step

    class Full(MemoryStore):
        def put_stream(self, key: str, blocks: object) -> int:
            raise NoSpace("the disk of node 7 is full", key)

    broken = Memory(Full("report-5"))
    broken.save(torch.zeros(8, 4), 6)
    broken.saver.finish()
    broken.keeper.close()
    failed = broken.heard.get(timeout=30)
    assert isinstance(failed, PackFailed)
    assert (failed.rank, failed.step) == (0, 6)
    assert "the disk of node 7 is full" in failed.reason


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 8])
def test_012_013_014_018_any_number_of_readers_gets_whole_weights_and_moments(readers: int) -> None:
    """12 rows and primes, 4 writers: nobody's share divides; moments are compared right after the load, not a step later."""
    run, values = RunStore(MemoryStore(f"report-12-{readers}")), random_values(SPECS, 12)
    save(run, values, step=1, epoch=run.take_epoch(owner={}, starts_from=None), writers=4)
    checkpoint = run.open()
    for name, spec in SPECS.items():
        out = np.zeros(spec.shape, values[name].dtype)
        for rank in range(readers):
            rows = _rows(spec, readers, rank)
            if rows is not None:
                checkpoint.load([Want(name, rows, out[rows.slices()] if spec.shape else out)])
        assert np.array_equal(out, values[name]), name


def _rows(spec: ArraySpec, world: int, rank: int) -> Box | None:
    if not spec.shape:
        return Box((), ()) if rank == 0 else None
    first, last = rank * spec.shape[0] // world, (rank + 1) * spec.shape[0] // world
    if first == last:
        return None
    return Box((first, *(0 for _ in spec.shape[1:])), (last - first, *spec.shape[1:]))


def test_017_a_tie_survives_and_is_one_array() -> None:
    run = RunStore(MemoryStore("report-17"))
    save(run, random_values(SPECS, 0), step=1, epoch=run.take_epoch(owner={}, starts_from=None))
    checkpoint = run.open()
    assert checkpoint.array("master/layers.0.wq").attributes["tied"] == ["head"]
    assert "head" not in checkpoint.names
    assert "master/odd" in checkpoint.names, "an array that belongs to no layer is as good as any other"


LAYERS, EXPERTS = 4, 8


def _expert_specs() -> dict[str, ArraySpec]:
    """Weights, masters and moments of the experts of four layers: arrays [expert, row, column] on the grid's own tiles."""
    specs = {}
    for kind, dtype in (("weights", "bfloat16"), ("master", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32")):
        for layer in range(LAYERS):
            for name, shape in (("w1", (EXPERTS, 22, 12)), ("w2", (EXPERTS, 12, 22)), ("router", (EXPERTS, 12))):
                tile = tile_shape(shape, 4, tp_dim=0, row_tile=None)
                full = f"{kind}/layers.{layer}.moe.{name}"
                specs[full] = ArraySpec(name=full, shape=shape, dtype=dtype, tile=tile)
    return specs


def _pipeline(stages: int) -> list[list[tuple[str, Box]]]:
    """Each stage has the whole experts of its layers."""
    specs = _expert_specs()
    return [
        [(name, Box.whole(spec.shape)) for name, spec in specs.items() if int(name.split(".")[1]) * stages // LAYERS == stage]
        for stage in range(stages)
    ]


def _experts(ep: int, tp: int = 1) -> list[list[tuple[str, Box]]]:
    """Each rank has some experts of every layer, whole or cut along the columns; the router is cut by experts only."""
    places = list(itertools.product(range(ep), range(tp)))
    held: list[list[tuple[str, Box]]] = [[] for _ in places]
    for (e, t), mine in zip(places, held, strict=True):
        for name, spec in _expert_specs().items():
            count, wide = EXPERTS // ep, spec.shape[-1] // tp
            if len(spec.shape) == 3:
                mine.append((name, Box((e * count, 0, t * wide), (count, spec.shape[1], wide))))
            elif t == 0:
                mine.append((name, Box((e * count, 0), (count, spec.shape[1]))))
    return held


EXPERT_LAYOUTS = {
    "pp4": _pipeline(4),
    "pp2": _pipeline(2),
    "ep4": _experts(4),
    "ep8": _experts(8),
    "ep2": _experts(2),
    "one": _experts(1),
}
READERS = {**EXPERT_LAYOUTS, "ep2 tp2": _experts(2, 2), "tp2": _experts(1, 2)}


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(("pp4", "ep4", "ep8"), READERS)))
def test_020_experts_saved_by_pipeline_stages_load_under_expert_parallelism(saved: str, loaded: str) -> None:
    """Every expert's weights and moments, under any of the layouts, are those of the one gathered array."""
    specs = _expert_specs()
    values = random_values(specs, 20)
    run = RunStore(MemoryStore(f"report-20-{saved}-{loaded}"))
    epoch = run.take_epoch(owner={}, starts_from=None)
    deliveries: list[PackManifest] = []
    for rank, boxes in enumerate(EXPERT_LAYOUTS[saved]):
        data, delivery = build_pack(specs, values, boxes, pack_name(epoch, 0, rank))
        run.store.put(run.pack_key(1, epoch, 0, rank), data)
        deliveries.append(delivery)
    run.commit(merge(deliveries, step=1, epoch=epoch, attempt=0, progress={}, created_s=0.0))
    checkpoint = run.open()
    for name, spec in specs.items():
        assert checkpoint.manifest.digests[name] == digest_box(values[name], spec.shape, Box.whole(spec.shape))
    for boxes in READERS[loaded]:
        outs = [np.zeros(box.shape, values[name].dtype) for name, box in boxes]
        report = checkpoint.load([Want(name, box, out) for (name, box), out in zip(boxes, outs, strict=True)])
        for (name, box), out in zip(boxes, outs, strict=True):
            assert np.array_equal(out, values[name][box.slices()]), (name, box)
        if "tp" not in loaded:  # an expert is a tile: nobody reads another one's
            assert report.read_bytes < 1.1 * sum(out.nbytes for out in outs)


@pytest.mark.parametrize("odd", list(itertools.permutations((5, 7, 11))))
def test_022_several_odd_buckets_never_shift_nor_turn_to_zeros(odd: tuple[int, ...]) -> None:
    """Moments count up from 1, so any shift shows, and no value may be 0."""
    specs = {
        f"exp_avg/w{i}": ArraySpec(name=f"exp_avg/w{i}", shape=(13 * n, n), dtype="float32", tile=(n, n))
        for i, n in enumerate(odd)
    }
    values: Values = {}
    start = 1
    for name, spec in specs.items():
        count = spec.shape[0] * spec.shape[1]
        values[name] = np.arange(start, start + count, dtype="<f4").reshape(spec.shape).view("<u4")
        start += count
    run = RunStore(MemoryStore(f"report-22-{odd}"))
    epoch = run.take_epoch(owner={}, starts_from=None)
    deliveries: list[PackManifest] = []
    for writer in range(3):
        boxes = [(name, cut[writer]) for name, spec in specs.items() if len(cut := even_cut(spec, 3)) > writer]
        data, delivery = build_pack(specs, values, boxes, pack_name(epoch, 0, writer))
        run.store.put(run.pack_key(1, epoch, 0, writer), data)
        deliveries.append(delivery)
    run.commit(merge(deliveries, step=1, epoch=epoch, attempt=0, progress={}, created_s=0.0))
    for name in specs:
        found = run.open().read(name)
        assert np.array_equal(found.view("<u4"), values[name])
        assert (found != 0).all()


def test_024_a_load_that_would_leave_moments_untouched_is_an_error() -> None:
    run = RunStore(MemoryStore("report-24"))
    save(run, random_values(SPECS, 0), step=1, epoch=run.take_epoch(owner={}, starts_from=None))
    checkpoint = run.open()
    names = ("exp_avg/layers.0.wq", "exp_avg_sq/layers.0.wq", "exp_avg_sq/norm")
    outs = [np.zeros((12, 10), "<f4") for _ in names]
    with pytest.raises(CoverageError) as caught:
        checkpoint.load([Want(name, Box.whole((12, 10)), out) for name, out in zip(names, outs, strict=True)])
    assert len(caught.value.problems) == 2, "both that are missing are named"
    assert not any(out.any() for out in outs), "nothing was filled in before the error"


def test_025_the_names_are_the_same_after_every_save_and_resume() -> None:
    run, seen = RunStore(MemoryStore("report-25")), set[tuple[str, ...]]()
    values = random_values(SPECS, 0)
    for step in range(1, 5):
        epoch = run.take_epoch(owner={}, starts_from="newest")
        save(run, values, step=step, epoch=epoch, writers=step)
        checkpoint = run.open()
        values = {name: checkpoint.read(name).view(bits.dtype) for name, bits in values.items()}
        seen.add(tuple(checkpoint.names))
    assert seen == {tuple(sorted(SPECS))}


def test_011_saved_by_one_writer_or_many_the_state_is_the_same() -> None:
    values, digests = random_values(SPECS, 3), []
    for number, writers in enumerate((1, 2, 5)):
        run = RunStore(MemoryStore(f"report-11-{number}"))
        manifest = write_packs(run.store, values, step=1, epoch=run.take_epoch(owner={}, starts_from=None), writers=writers)
        run.commit(manifest)
        digests.append(run.open().manifest.digests)
    assert digests[0] == digests[1] == digests[2]


def test_nothing_to_load_says_why() -> None:
    with pytest.raises(NoCheckpoint, match="nothing is there"):
        RunStore(MemoryStore("report-none")).open()
