"""Whether a checkpoint is of the model that a run is to go on with: told from its list of arrays alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.errors import RefusedError
from ftrain.compose.origin import differences, resolve
from ftrain.config import Model
from ftrain.parallel.arrays import SLOTS, WEIGHTS, StateTypes, array_specs
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape
from storage.objects import open_store
from storage.pack import ArraySpec
from storage.run import RunStore
from tests.ledgers import config
from tests.storage.building import random_values, save

MODEL = Model(layers=2, hidden=8, heads=2, ffn=12, vocab=10)


def arrays_of(model: Model, slots: Sequence[str] = SLOTS) -> list[ArraySpec]:
    found = array_specs(parameters(model, MeshShape()), MeshShape(), bucket_bytes=2**20, types=StateTypes())
    return [spec for spec in found if spec.name.partition("/")[0] in slots]


def other(**sizes: object) -> Model:
    return msgspec.structs.replace(MODEL, **sizes)


def test_the_state_of_the_same_model_has_no_differences_with_or_without_its_weights() -> None:
    assert differences(MODEL, arrays_of(MODEL)) == []
    assert differences(MODEL, arrays_of(MODEL, SLOTS[1:])) == []


def test_another_width_is_told_once_for_each_parameter() -> None:
    w1, w2, w3 = "(12, 8) there, (14, 8) here", "(8, 12) there, (8, 14) here", "(12, 8) there, (14, 8) here"
    wanted = [f"layers.{n}.mlp.{name} is {said}" for n in (0, 1) for name, said in (("w1", w1), ("w2", w2), ("w3", w3))]
    assert sorted(differences(other(ffn=14), arrays_of(MODEL))) == wanted


def test_so_are_parameters_that_only_one_of_the_two_has() -> None:
    assert differences(other(tied=True), arrays_of(MODEL)) == ["head is there, and not here"]
    assert differences(MODEL, arrays_of(other(tied=True))) == ["head is (10, 8) here, and not there"]


def test_and_a_slot_that_is_not_there() -> None:
    names = [spec.name.partition("/")[2] for spec in arrays_of(MODEL, [WEIGHTS])]
    found = differences(MODEL, arrays_of(MODEL, [slot for slot in SLOTS if slot != "exp_avg"]))
    assert found == [f"exp_avg/{name} is not there" for name in names]


def test_the_checkpoint_of_a_script_is_called_that(tmp_path: Path) -> None:
    run = RunStore(open_store(str(tmp_path / "theirs")))
    specs = {name: ArraySpec(name=name, shape=(3,), dtype="float32", tile=(3,)) for name in ("model/a", "model/b", "optim/c")}
    save(run, random_values(specs, 1), step=7, epoch=run.take_epoch(owner={}), specs=specs)
    with pytest.raises(RefusedError, match=r"theirs@7 is not of a model .* a script's own names \(model/a, model/b, \.\.\.\)"):
        resolve((str(tmp_path / "theirs"), None), config())
