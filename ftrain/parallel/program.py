"""A schedule with its communication: everything a rank issues in one step, in order, still as plain data.

`lower` takes a schedule of computing actions and puts in, at fixed places of each rank's list,

    Batch    transfers between pipeline ranks: what an action produced, sent and received; issued together
    Part     a piece of the last backward of a stage, where the gradients of some buckets become final behind it
    Reduce   the sum of a bucket's gradients over the replicas (reduce-scatter)
    Gather   its new weights to everybody (all-gather); these close the step, after the update

The places come from the schedule's own clock (`timeline.simulate`): a transfer stands at the moment its producer ends, on both
ranks, before whatever begins then. All lists are therefore sorted by one and the same time, so no two ranks can wait for each
other, not even where a transfer blocks until its other end arrives, as it does within a CUDA stream. `stuck` proves it for a
given set of programs by running them on paper with exactly those semantics.

Collectives of a rank come in an order that depends on the stage alone, not on the number of micro-batches: replicas with
unequal shares meet in the same sequence of collectives. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftrain.parallel.buckets import Bucket
from ftrain.parallel.schedule import Action, Kind, Schedule, dependencies, is_split
from ftrain.parallel.stages import StagePlan
from ftrain.parallel.timeline import Time, even, simulate


@dataclass(frozen=True, slots=True)
class Transfer:
    """What `of` produced (activations, or the gradient of its input), sent to or received from a pipeline rank."""

    of: Action
    peer: int
    sends: bool

    def __str__(self) -> str:
        return f"{'send' if self.sends else 'receive'} {self.of} {'to' if self.sends else 'from'} {self.peer}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Transfers of one moment, issued together."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.transfers))


@dataclass(frozen=True, slots=True)
class Part:
    """One of the pieces into which the last backward of a stage is cut; piece 0 is nearest to the stage's input."""

    of: Action
    index: int

    def __str__(self) -> str:
        return f"{self.of}/{self.index}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start to sum a bucket's gradients over the replicas."""

    bucket: int

    def __str__(self) -> str:
        return f"reduce {self.bucket}"


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to gather a bucket's weights from the replicas."""

    bucket: int

    def __str__(self) -> str:
        return f"gather {self.bucket}"


Instruction = Action | Batch | Part | Reduce | Gather


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks of a stage whose weights lie in the same buckets."""

    blocks: tuple[str, ...]
    buckets: frozenset[int]


Segments = Mapping[int, tuple[Segment, ...]]
"""The segments of each of a rank's virtual stages, in forward order."""


@dataclass(frozen=True, slots=True)
class Program:
    """What the pipeline ranks of one replica issue in a step."""

    schedule: Schedule
    ranks: tuple[tuple[Instruction, ...], ...]


def segments(plan: StagePlan, rank: int, buckets: Sequence[Bucket]) -> dict[int, tuple[Segment, ...]]:
    """How a rank's stages fall apart by buckets. A tied embedding is used, and gets gradients, at both ends of the model."""
    home: dict[str, set[int]] = {}
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            home.setdefault(slot.spec.block, set()).add(index)
            if slot.spec.tied:
                home.setdefault("head", set()).add(index)
    return {
        stage: _merged((block, frozenset(home.get(block, ()))) for block in blocks(plan, stage))
        for stage in plan.stages_of(rank)
    }


def blocks(plan: StagePlan, stage: int) -> tuple[str, ...]:
    """What a stage applies, in order: blocks as the placement table names them."""
    layers = tuple(f"layers.{layer}" for layer in plan.layers[stage])
    first, last = stage == 0, stage == plan.num_stages - 1
    return (*(("embedding",) if first else ()), *layers, *(("head",) if last else ()))


def _merged(pairs: Iterator[tuple[str, frozenset[int]]]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for block, buckets in pairs:
        if found and found[-1].buckets == buckets:
            found[-1] = Segment((*found[-1].blocks, block), buckets)
        else:
            found.append(Segment((block,), buckets))
    return tuple(found)


def reduce_order(held: Segments, num_buckets: int) -> tuple[int, ...]:
    """The order in which buckets become final on a rank that works through its stages from the last to the first."""
    visits = [segment.buckets for stage in sorted(held, reverse=True) for segment in reversed(held[stage])]
    last = {bucket: index for index, buckets in enumerate(visits) for bucket in buckets}
    return tuple(sorted(range(num_buckets), key=lambda bucket: (last.get(bucket, len(visits)), -bucket)))


def lower(schedule: Schedule, held: Sequence[Segments], num_buckets: Sequence[int], *, overlap: bool) -> Program:
    """The whole program of a replica. Without `overlap` every collective comes behind the last backward."""
    ranks = []
    for rank, instructions in enumerate(_with_transfers(schedule)):
        order = reduce_order(held[rank], num_buckets[rank])
        reducing = _Reducing(held[rank], order, overlap=overlap)
        ranks.append(tuple(reducing.spread(instructions)))
    return Program(schedule, tuple(ranks))


def closing(held: Segments, num_buckets: int) -> tuple[Gather, ...]:
    """What ends the step of a rank, once its state is updated: new weights in the order in which they are used next."""
    return tuple(Gather(bucket) for bucket in reversed(reduce_order(held, num_buckets)))


def _with_transfers(schedule: Schedule) -> list[list[Instruction]]:
    """Each rank's actions and transfers, sorted by the schedule's clock."""
    if not schedule.num_microbatches:
        return [[] for _ in range(schedule.num_ranks)]
    spans = simulate(schedule, even()).spans
    moments: list[dict[Time, list[Transfer]]] = [{} for _ in range(schedule.num_ranks)]
    for span in sorted(spans, key=lambda span: (span.end, span.action.stage, span.action.microbatch)):
        peer = _consumer(schedule, span.action)
        if peer is not None and peer != span.rank:
            moments[span.rank].setdefault(span.end, []).append(Transfer(span.action, peer, sends=True))
            moments[peer].setdefault(span.end, []).append(Transfer(span.action, span.rank, sends=False))
    timed: list[list[tuple[Time, int, Instruction]]] = [
        [(time, 0, Batch(tuple(transfers))) for time, transfers in batches.items()] for batches in moments
    ]
    for span in spans:
        timed[span.rank].append((span.begin, 1, span.action))
    return [[instruction for _, _, instruction in sorted(rank, key=lambda item: item[:2])] for rank in timed]


def _consumer(schedule: Schedule, action: Action) -> int | None:
    """The rank that waits for what an action produces, if any does."""
    if action.kind is Kind.FORWARD:
        return schedule.rank_of(action.stage + 1) if action.stage + 1 < schedule.num_stages else None
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return schedule.rank_of(action.stage - 1) if action.stage else None


class _Reducing:
    """Puts one rank's reductions behind the backward that makes their gradients final, always in the same order."""

    def __init__(self, held: Segments, order: tuple[int, ...], *, overlap: bool) -> None:
        self._held, self._order, self._overlap = held, order, overlap
        self._open = dict.fromkeys(order, 0)
        for parts in held.values():
            for segment in parts:
                for bucket in segment.buckets:
                    self._open[bucket] += 1
        self._next = 0

    def spread(self, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        """The same instructions with the reductions between them."""
        last = {i.stage: i for i in instructions if isinstance(i, Action) and i.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        for instruction in instructions:
            if self._overlap and isinstance(instruction, Action) and last.get(instruction.stage) == instruction:
                yield from self._last(instruction)
            else:
                yield instruction
        yield from (Reduce(bucket) for bucket in self._order[self._next :])

    def _last(self, action: Action) -> Iterator[Instruction]:
        parts = self._held[action.stage]
        for index in reversed(range(len(parts))):
            yield Part(action, index) if len(parts) > 1 else action
            for bucket in parts[index].buckets:
                self._open[bucket] -= 1
            while self._next < len(self._order) and not self._open[self._order[self._next]]:
                yield Reduce(self._order[self._next])
                self._next += 1


# --- proof ------------------------------------------------------------------------------------------------------------


def stuck(programs: Sequence[Program]) -> list[str]:
    """Where the ranks of a set of replicas stop, if they do; empty: the step ends.

    A batch of transfers blocks its rank until every other end is there; computing waits for what it needs; the same collectives
    in the same order on all replicas are awaited at the end of the step.
    """
    found = [line for index, program in enumerate(programs) for line in _stuck(index, program)]
    for rank in range(programs[0].schedule.num_ranks):
        orders = {tuple(i for i in program.ranks[rank] if isinstance(i, Reduce)) for program in programs}
        if len(orders) > 1:
            found.append(f"pipeline rank {rank}: replicas reduce in different orders")
    return found


def _stuck(replica: int, program: Program) -> Iterator[str]:
    position = [0] * len(program.ranks)
    happened: set[Need] = set()
    split, moved = is_split(program.schedule), True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.ranks):
            while position[rank] < len(instructions):
                instruction = instructions[position[rank]]
                if isinstance(instruction, Batch):
                    happened |= {(rank, transfer) for transfer in instruction.transfers}
                if not all(need in happened for need in _needs(rank, instruction, program.schedule, split)):
                    break
                if isinstance(instruction, Action | Part):
                    happened.add(instruction if isinstance(instruction, Action) else instruction.of)
                position[rank] += 1
                moved = True
    for rank, instructions in enumerate(program.ranks):
        if position[rank] < len(instructions):
            yield f"replica {replica}, pipeline rank {rank} waits at {instructions[position[rank]]}"


Need = Action | tuple[int, Transfer]


def _needs(rank: int, instruction: Instruction, schedule: Schedule, split: bool) -> Iterator[Need]:
    """What has to have happened before an instruction ends: actions done, transfers posted."""
    if isinstance(instruction, Batch):
        yield from ((t.peer, Transfer(t.of, rank, not t.sends)) for t in instruction.transfers)
    action = instruction.of if isinstance(instruction, Part) else instruction
    if isinstance(action, Action):
        for need in dependencies(action, num_stages=schedule.num_stages, split=split):
            yield need
            if (source := schedule.rank_of(need.stage)) != rank:
                yield rank, Transfer(need, source, sends=False)
