"""Weights that were left out are the rounded masters, bit for bit as torch rounds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ftrain.checkpoint.layout import rank_layout
from ftrain.checkpoint.restore import needed
from ftrain.compose.exchange import export
from ftrain.compose.sampling import SMALL, fitting_threads, stored_weights
from ftrain.compose.weights import weights_of
from ftrain.load import parse
from ftrain.parallel.shape import Coordinate
from storage.keys import pack_name
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.merge import merge
from storage.run import RunStore
from tests.storage.building import build_pack

CONFIG = """
run = {{ url = "run", steps = 1, seed = 1 }}
model = {{ layers = 1, hidden = 16, heads = 2, kv_heads = 2, ffn = 24, vocab = 257 }}
data = {{ sources = [{{ path = "stdlib" }}], seq_len = 8 }}
batch = {{ global_batch = 1 }}
checkpoint = {{ weights = {weights} }}
optimizer = {{ lr = 1e-3 }}
"""


def saved(*, weights: bool) -> RunStore:
    """A checkpoint as one rank writes it, with awkward values: ties, denormals, infinities."""
    layout = rank_layout(parse(CONFIG.format(weights=str(weights).lower())), Coordinate())
    rng, values = np.random.default_rng(5), {}
    for name, spec in sorted(layout.specs.items()):  # master/ before weights/
        slot, _, parameter = name.partition("/")
        if slot == "weights":
            master = torch.from_numpy(values[f"master/{parameter}"].view("<f4"))
            values[name] = master.bfloat16().view(torch.int16).numpy().view("<u2")
            continue
        drawn = rng.integers(0, 2**32, spec.shape, dtype=np.uint32)
        special = np.array([0x3F808000, 0x3F818000, 0x00000001, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32)
        drawn.reshape(-1)[: len(special)] = special
        drawn[np.isnan(drawn.view(np.float32))] = 0
        values[name] = drawn
    run = RunStore(MemoryStore(f"weights-{weights}"))
    epoch = run.take_epoch(owner={}, starts_from=None)
    data, delivery = build_pack(layout.specs, values, [(p.array, p.box) for p in layout.parts], pack_name(epoch, 0, 0))
    run.store.put(run.pack_key(1, epoch, 0, 0), data)
    run.commit(merge([delivery], step=1, epoch=epoch, attempt=0, progress={"step": 1}, created_s=0.0))
    return run


@pytest.fixture(scope="module")
def both() -> tuple[RunStore, RunStore]:
    """The same state with and without its weights."""
    return saved(weights=True), saved(weights=False)


def test_they_are_the_same_bits_as_stored_ones(both: tuple[RunStore, RunStore]) -> None:
    with_weights, without = (stored_weights(run.open()) for run in both)
    assert list(with_weights) == list(without)
    assert len(without) > 8
    for name, tensor in with_weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), without[name].view(torch.int16)), name


def test_a_checkpoint_without_them_is_two_fourteenths_smaller(both: tuple[RunStore, RunStore]) -> None:
    sizes = [sum(spec.nbytes for spec in run.open().manifest.arrays) for run in both]
    assert sizes[1] * 14 == sizes[0] * 12
    assert not any(name.startswith("weights/") for name in both[1].open().names)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exports_of_both_are_the_same_files(both: tuple[RunStore, RunStore], dtype: str, tmp_path: Path) -> None:
    for number, run in enumerate(both):
        export(run.open(), "safetensors", LocalStore(tmp_path / str(number)), dtype=dtype, state=False)
    files = [{path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()} for number in range(2)]
    assert files[0] == files[1]
    assert files[0]


def test_a_load_needs_all_weights_or_none(both: tuple[RunStore, RunStore]) -> None:
    specs = both[0].open().manifest.arrays
    names = [spec.name for spec in specs]
    assert needed(specs, names) == list(specs)
    assert {spec.name.partition("/")[0] for spec in needed(specs, [n for n in names if not n.startswith("weights/")])} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert needed(specs, names[:-1]) == list(specs), "one that is missing is a fault, not a choice"
    assert len(list(weights_of(both[1].open()))) == len(names) // 4


@pytest.mark.parametrize(("parameters", "threads"), [(1000, 1), (SMALL, 2)])
def test_a_small_model_is_sampled_by_one_thread(parameters: int, threads: int) -> None:
    """Its operations are too short to be shared; torch's own number is back afterwards."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with fitting_threads({"matrix": torch.empty(parameters, device="meta")}):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
