"""Training under several layouts, everything brought home whole: results, gradients, state, evaluation.

All layouts of one number of ranks share a world, one after the other: starting processes costs more than training this size.
"""

from dataclasses import dataclass

import msgspec
import torch
from engines import engine_of, error, train
from world import run_world

SLOTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class Run:
    """What training under one layout gave."""

    results: list
    grads: dict  # by parameter, of the last update, before clipping
    state: dict  # by slot, then parameter
    loss: float  # held out


def laid_out(config, **parallel):
    """The same training under another layout."""
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, **parallel))


def one_process(config):
    return laid_out(config, ranks=1, tp=1, cp=1, pp=1)


def own_grads(engine):
    """Reduced gradients of what this rank keeps, as boxes; every box, also those that others own."""
    return [(p.array.removeprefix("grad/"), p.box, p.tensor.clone()) for p in engine.optimizer.grad_pieces()]


def train_here(rank, config, steps, prepare=None):
    """One rank's training; boxes of gradients and state."""
    engine = engine_of(config, rank)
    if prepare is not None:
        prepare(engine)
    seen = {}
    engine.before_update = lambda: seen.update(grads=own_grads(engine))
    results = train(engine, steps)
    pieces = [(piece.array, piece.box, piece.tensor.clone()) for piece in engine.pieces()]
    return results, seen["grads"], pieces, engine.evaluate()


def _all(rank, configs, steps, prepare):
    return [train_here(rank, config, steps, prepare) for config in configs]


def run_layouts(configs, steps, prepare=None):
    """One Run for each config; all of the same number of ranks."""
    ranks = configs[0].parallel.ranks
    worlds = [_all(0, configs, steps, prepare)] if ranks == 1 else run_world(_all, ranks, configs, steps, prepare)
    return [_merged([world[index] for world in worlds]) for index in range(len(configs))]


def _merged(ranks):
    results, _, _, loss = ranks[0]
    assert all(other[0] == results and other[3] == loss for other in ranks)
    state = assembled(box for rank in ranks for box in rank[2])
    return Run(
        results=results,
        grads=assembled(box for rank in ranks for box in rank[1]),
        state={
            slot: {name.removeprefix(f"{slot}/"): value for name, value in state.items() if name.startswith(f"{slot}/")}
            for slot in SLOTS
        },
        loss=loss,
    )


def assembled(boxes):
    """Whole arrays from (name, box, tensor); a box that several ranks hold must have the same bits on all."""
    parts = {}
    for name, box, tensor in boxes:
        parts.setdefault(name, {}).setdefault(box, []).append(tensor)
    whole = {}
    for name, by_box in parts.items():
        stop = [max(box.stop[dim] for box in by_box) for dim in range(next(iter(by_box)).ndim)]
        out = torch.full(stop, float("nan"), dtype=next(iter(by_box.values()))[0].dtype)
        for box, copies in by_box.items():
            assert all(torch.equal(copy, copies[0]) for copy in copies), f"copies of {name} differ"
            assert out[box.slices()].isnan().all(), f"boxes of {name} overlap"
            out[box.slices()] = copies[0]
        assert not out.isnan().any(), f"boxes of {name} leave gaps"
        whole[name] = out
    return whole


def deviations(run, reference):
    """Max-abs over the array's max-abs, the worst array of each kind; norms and losses relative."""
    both = list(zip(run.results, reference.results, strict=True))
    return {
        "grads": error(run.grads, reference.grads),
        **{slot: error(run.state[slot], reference.state[slot]) for slot in SLOTS},
        "norm": max(abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in both),
        "loss": max(abs(a.loss - b.loss) / b.loss for a, b in both),
        "held out": abs(run.loss - reference.loss) / reference.loss,
    }
