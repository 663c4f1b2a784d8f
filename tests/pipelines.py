"""Running engines over any mesh in tests, and what their ranks saw."""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from engines import assemble, engine_of, train
from tiny import tiny
from world import run_world

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


def piped(schedule="1f1b", *, pp=2, ranks=None, model=None, parallel=None, dtype="float32", **sections):
    """A config with enough layers for any schedule; fp32, where a pipeline is bit-identical to one process."""
    layers = pp * (2 if schedule in ("interleaved", "zb_v") else 1) + 1
    chosen = {"pp": pp, "schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1, "bucket_mib": 0.01}
    return tiny(
        model={"layers": layers, **(model or {})},
        parallel={**chosen, "ranks": ranks or pp, **(parallel or {})},
        machine={"compute_dtype": dtype},
        **sections,
    )


@dataclass
class Ran:
    results: list[Any]
    arrays: dict[str, torch.Tensor]  # assembled from what each rank owns, by full name
    loss: float  # of the evaluation
    ranks: list[Any]  # what `look` returned on each rank


def _ran(rank, config, steps, look):
    engine = engine_of(config, rank)
    results = train(engine, steps)
    pieces = [(p.array, p.box, p.tensor.clone()) for p in engine.pieces() if p.owner]
    return results, pieces, engine.evaluate(), look(engine) if look else None


def run_mesh(config, steps, look=None):
    """Train on a world; `look` (a module-level function of the engine) is called at the end on each rank."""
    if config.parallel.ranks == 1:
        worlds = [_ran(0, config, steps, look)]
    else:
        worlds = run_world(_ran, config.parallel.ranks, config, steps, look)
    assert all((other[0], other[2]) == (worlds[0][0], worlds[0][2]) for other in worlds)
    arrays = {}
    for _, pieces, _, _ in worlds:
        for name, box, tensor in pieces:
            arrays.setdefault(name, []).append((box, tensor))
    whole = {name: assemble(parts) for name, parts in arrays.items() if not name.startswith("weights/")}
    return Ran(worlds[0][0], whole, worlds[0][2], [world[3] for world in worlds])


def one_of(config):
    """The same run on one process, in plain order."""
    plain = {"ranks": 1, "pp": 1, "tp": 1, "schedule": "1f1b", "virtual_stages": 1, "layer_counts": ()}
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, **plain))


def same_bits(ours, theirs):
    """Names of the arrays that differ in any bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def errors(ours, theirs):
    """Largest difference of each array over the array's largest value."""
    assert ours.keys() == theirs.keys()
    return {name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs}
