"""Which pipeline stage holds which layers, and which replica computes which micro-batches.

Both deal a list of things in contiguous runs, and neither may insist on equal runs: 126 layers over 16 stages and 80
replicas after the loss of one are everyday cases. Layers keep their number on every stage: layer 7 is 7.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def partition_layers(num_layers: int, num_stages: int, counts: Sequence[int] = ()) -> tuple[range, ...]:
    """The layers of each stage, in order.

    Without explicit `counts` the stages differ by at most one layer, and the ends, which also hold the embedding and the
    head, are the last to get the extra one.
    """
    if not counts:
        if not 1 <= num_stages <= num_layers:
            raise ValueError(f"{num_layers} layers over {num_stages} stages: every stage needs a layer; nearest: {num_layers}")
        counts = _even_counts(num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 0:
        raise ValueError(f"layers per stage {tuple(counts)}: wanted {num_stages} numbers that add up to {num_layers}")
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    base, extra = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
    for stage in middle_first[:extra]:
        counts[stage] += 1
    return counts


def balanced_counts(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage is as fast as can be; of those, the one with the evenest stages.

    `costs`: measured seconds of each layer; `first` and `last`: what the ends do besides (the embedding; head and loss). The
    result goes into `parallel.layer_counts`.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers over {num_stages} stages: every stage needs a layer; nearest: {len(costs)}")
    sums = [0.0, *accumulate(costs)]

    def time(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    limit, _ = _best_cuts(len(costs), num_stages, time, max)
    _, cuts = _best_cuts(
        len(costs),
        num_stages,
        lambda stage, start, stop: t**2 if (t := time(stage, start, stop)) <= limit * (1 + 1e-9) else math.inf,
        operator.add,
    )
    return tuple(stop - start for start, stop in pairwise(cuts))


def _best_cuts(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cheapest way to cut layers into non-empty runs: its cost, and where the runs start and the last one stops."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(num_stages):
        stops = range(stage + 1, num_layers - (num_stages - 1 - stage) + 1)
        best = {
            stop: min(
                (join(before, cost(stage, start, stop)), (*cuts, stop))
                for start, (before, cuts) in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[num_layers]


def deal(num_items: int, num_hands: int, hand: int) -> range:
    """The contiguous run of items that goes to one hand; runs differ by at most one, earlier hands get the longer ones."""
    base, extra = divmod(num_items, num_hands)
    start = hand * base + min(hand, extra)
    return range(start, start + base + (hand < extra))


def microbatches(global_batch: int, micro_batch: int, num_replicas: int, replica: int) -> tuple[range, ...]:
    """The micro-batches of one replica, each a range of sequences counted from the start of the global batch.

    The list of micro-batches is global: it does not depend on the number of replicas, so that losing one of 80 replicas
    changes who computes what and not what is computed. Only the last micro-batch of the list may be short.
    """
    num_micro = -(-global_batch // micro_batch)
    return tuple(
        range(index * micro_batch, min((index + 1) * micro_batch, global_batch))
        for index in deal(num_micro, num_replicas, replica)
    )
