"""Which pipeline stage holds which layers, and which replica computes which micro-batches.

Both deal a list of things in contiguous runs, and neither may insist on equal runs: 126 layers over 16 stages and 80
replicas after the loss of one are everyday cases. Layers keep their number on every stage: layer 7 is 7.
"""

from __future__ import annotations

from collections.abc import Sequence


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
