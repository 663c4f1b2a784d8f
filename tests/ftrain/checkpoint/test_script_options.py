"""What a Checkpointer does not let itself be told: every argument, by its name, before anything is opened."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftrain
from storage.objects import open_store
from storage.run import RunStore


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"when_busy": "drop"}, """when_busy='drop': "wait" or "skip\""""),
        ({"on_error": "rais"}, """on_error='rais': "log" or "raise\""""),
        ({"on_error": True}, """on_error=True: "log" or "raise\""""),
        ({"keep_last": -3}, "keep_last=-3: a whole number, 1 or more; 0 is no such rule"),
        ({"keep_last": "3"}, "keep_last='3': a whole number, 1 or more; 0 is no such rule"),
        ({"keep_last": True}, "keep_last=True: a whole number, 1 or more; 0 is no such rule"),
        ({"keep_last": None}, "keep_last=None: a whole number, 1 or more; 0 is no such rule"),
        ({"keep_every": 2.0}, "keep_every=2.0: a whole number, 1 or more; 0 is no such rule"),
        ({"keep_every": np.int64(-1)}, "keep_every=np.int64(-1): a whole number, 1 or more; 0 is no such rule"),
        ({"compression": "gzip"}, """compression='gzip': "none", "lz4" or "zstd\""""),
        ({"compression": None}, """compression=None: "none", "lz4" or "zstd\""""),
        ({"upload_mib_s": math.nan}, "upload_mib_s=nan: a number of MiB per second; 0 is no limit"),
        ({"upload_mib_s": -1}, "upload_mib_s=-1: a number of MiB per second; 0 is no limit"),
        ({"upload_mib_s": "9"}, "upload_mib_s='9': a number of MiB per second; 0 is no limit"),
        ({"overlap": "always"}, """overlap='always': True, False, or "manual\""""),
        ({"overlap": 0}, """overlap=0: True, False, or "manual\""""),  # it overlapped
        ({"url": 7}, "url=7: a folder, or an object store's URL, as text"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused_by_its_name(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        ftrain.Checkpointer(**{"url": str(tmp_path / "run"), **given})
    assert str(caught.value) == said
    assert not (tmp_path / "run").exists()


def test_a_number_of_numpys_and_a_path_will_do(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    given: dict[str, Any] = {"keep_last": np.int64(1), "keep_every": np.int32(4), "upload_mib_s": np.float32(900)}
    checkpointer = ftrain.Checkpointer(tmp_path / "run", **given)
    checkpointer.load(state)
    for step in range(4, 7):
        checkpointer.save(step, state)
        checkpointer.wait()
    checkpointer.close()
    found = RunStore(open_store(str(tmp_path / "run"))).checkpoints()
    assert [info.step for info in found if str(info.state) == "valid"] == [4, 6]
