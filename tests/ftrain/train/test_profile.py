"""The profiler window: which steps are traced, and that nothing happens elsewhere."""

import json

import pytest
import torch
from engines import engine_of
from tiny import tiny

from ftrain.train.profile import Profiler
from ftrain.train.times import Times


@pytest.mark.parametrize(
    ("window", "steps", "traced"),
    [
        ((2, 3), range(1, 6), (2, 3)),
        ((2, 3), range(3, 6), (3, 3)),  # resumed inside it
        ((3, 9), range(1, 5), (3, 4)),  # the run ends inside it
        ((7, 9), range(1, 5), None),
    ],
)
def test_the_window_is_traced_and_nothing_else(tmp_path, window, steps, traced):
    engine = engine_of(tiny(machine={"compute_dtype": "float32"}))
    written = []
    times = Times(engine.passes, engine.device, report=lambda report: None)
    engine.after_vote = times.voted
    profiler = Profiler(
        window,
        tmp_path / "profiles" / "steps-{}-{}.json",
        engine.mesh.clock,
        torch.device("cpu"),
        written=lambda *told: written.append(told),
    )
    engine.set_step(steps[0] - 1)
    for step in steps:
        profiler.before(step)
        times.begin()
        engine.train_step(step=step, first_sequence=0)
        times.end(step)
        profiler.after(step)
    profiler.close()
    if traced is None:
        assert not written
        assert not (tmp_path / "profiles").exists()
        return
    ((first, last, path),) = written
    assert (first, last) == traced
    assert path.name == f"steps-{first}-{last}.json"
    events = json.loads(path.read_text())["traceEvents"]
    reads = [event for event in events if event.get("name") == "ftrain: data" and event.get("cat") == "user_annotation"]
    assert len(reads) == last - first + 1  # the data of each traced step is read once
    assert engine.mesh.clock.watcher is None
