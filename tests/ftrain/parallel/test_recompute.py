"""Recompute: the same bits, and less that is kept."""

import pytest
import torch
from engines import engine_of
from pipelines import one_of, piped, run_mesh, same_bits
from tiny import data_of, tiny
from torch.autograd.graph import saved_tensors_hooks

from ftrain.train.batch import Sequences


@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "changes", "ranks"),
    [("1f1b", {}, 1), ("zb_v", {}, 2), ("zb_h1", {}, 2), ("1f1b", {"tp": 2}, 4), ("1f1b", {"overlap_reduce": True}, 2)],
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_row_41_recompute_changes_no_bit(schedule, changes, ranks, recompute):
    pp = min(ranks, 2)
    plain, again = (
        piped(schedule, pp=pp, ranks=ranks, parallel={**changes, "recompute": kind}) for kind in ("none", recompute)
    )
    ours, theirs = run_mesh(again, 2), run_mesh(plain if "tp" in changes else one_of(plain), 2)
    assert ours.results == theirs.results
    assert same_bits(ours.arrays, theirs.arrays) == []


def kept_bytes(recompute):
    """Bytes of distinct storages that a micro-batch keeps for backward."""
    config = tiny(model={"layers": 3}, parallel={"recompute": recompute}, machine={"compute_dtype": "float32"})
    engine, storages = engine_of(config), {}
    weights = {region.weights.untyped_storage().data_ptr() for region in engine.optimizer.regions}
    batch = Sequences.of(data_of(config).sequences(0, 2), torch.device("cpu"))

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = engine.model(batch.tokens)
    del y
    return sum(storages.values()), batch.tokens.nbytes, y_bytes(config)


def y_bytes(config):
    return 2 * config.data.seq_len * config.model.hidden * 4


def test_full_keeps_the_input_of_each_layer_and_no_more():
    kept, tokens, stream = kept_bytes("full")
    norm_statistics = 2 * 12 * 4
    # the input of each of three layers, that of the final norm, and what the embedding and the norm keep
    assert kept == 4 * stream + tokens + norm_statistics


def test_selective_keeps_less_than_a_run_that_recomputes_nothing():
    assert kept_bytes("full")[0] < kept_bytes("selective")[0] < kept_bytes("none")[0]
