"""Programs as data: what was put between the actions, that no set of replicas can block itself, and that a wrong one does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import SCHEDULES
from tiny import tiny

from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.partition import microbatches
from ftrain.parallel.program import Batch, Part, Program, Reduce, Segment, blocks, closing, lower, reduce_order, segments, stuck
from ftrain.parallel.schedule import Action, Kind, problems
from ftrain.parallel.shape import Coordinate, mesh_shape
from ftrain.parallel.stages import config_parameters, forward_schedule, stage_plan, training_schedule
from ftrain.parallel.timeline import averages, simulate


@st.composite
def runs(draw):
    """A config over any schedule, and how many micro-batches each replica has."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2 if schedule == "interleaved" else 1, 5))
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    dp = draw(st.integers(1, 3))
    stages = pp * (2 if schedule == "zb_v" else chunks)
    config = tiny(
        model={"layers": stages + draw(st.integers(0, 3)), "tied": draw(st.booleans())},
        parallel={
            "pp": pp,
            "ranks": pp * dp,
            "schedule": schedule,
            "virtual_stages": chunks,
            "bucket_mib": draw(st.sampled_from([0.005, 0.02, 64.0])),
        },
    )
    unit = pp if schedule == "interleaved" else 1
    return config, [unit * draw(st.integers(0, 6 // unit)) for _ in range(dp)]


def programs_of(config, counts, *, overlap):
    plan, mesh = stage_plan(config), mesh_shape(config)
    specs = config_parameters(config, mesh)
    size = config.parallel.bucket_mib * 2**20
    buckets = [plan_buckets(specs, mesh, Coordinate(pp=pp), bucket_bytes=size) for pp in range(mesh.pp)]
    held = [segments(plan, pp, buckets[pp]) for pp in range(mesh.pp)]
    numbers = [len(of_rank) for of_rank in buckets]
    return held, numbers, [lower(training_schedule(config, count), held, numbers, overlap=overlap) for count in counts]


@settings(max_examples=80, deadline=None)
@given(runs(), st.booleans())
def test_no_set_of_replicas_blocks_itself(run, overlap):
    """Also where a batch of transfers waits for every other end, and whatever the replicas' shares are."""
    _, _, programs = programs_of(*run, overlap=overlap)
    assert stuck(programs) == []


@settings(max_examples=60, deadline=None)
@given(runs(), st.booleans())
def test_a_program_is_its_schedule_with_communication_between(run, overlap):
    config, counts = run
    held, numbers, programs = programs_of(config, counts, overlap=overlap)
    for program in programs:
        sent, received = [], []
        for rank, instructions in enumerate(program.ranks):
            whole = [i for i in instructions if isinstance(i, Action) or (isinstance(i, Part) and i.index == 0)]
            assert [i if isinstance(i, Action) else i.of for i in whole] == list(program.schedule.actions[rank])
            reduced = [i.bucket for i in instructions if isinstance(i, Reduce)]
            assert reduced == list(reduce_order(held[rank], numbers[rank]))
            assert sorted(reduced) == list(range(numbers[rank]))
            for batch in (i for i in instructions if isinstance(i, Batch)):
                for transfer in batch.transfers:
                    pair = (rank, transfer.peer) if transfer.sends else (transfer.peer, rank)
                    (sent if transfer.sends else received).append((pair, transfer.of))
        for pair in {pair for pair, _ in sent + received}:  # links know no names: what is sent first is received first
            assert [of for it, of in sent if it == pair] == [of for it, of in received if it == pair]
        edges = program.schedule.num_stages - 1
        local = sum(program.schedule.rank_of(stage) == program.schedule.rank_of(stage + 1) for stage in range(edges))
        assert len(sent) == 2 * program.schedule.num_microbatches * (edges - local)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_gradients_are_final_when_their_bucket_is_reduced(run):
    """With overlap: no later instruction of the rank adds to the bucket."""
    config, counts = run
    held, _, programs = programs_of(config, counts, overlap=True)
    for program in programs:
        for rank, instructions in enumerate(program.ranks):
            for position, reduce in ((p, i) for p, i in enumerate(instructions) if isinstance(i, Reduce)):
                for later in instructions[position:]:
                    assert reduce.bucket not in touched(later, held[rank])


def touched(instruction, held):
    if isinstance(instruction, Part):
        return held[instruction.of.stage][instruction.index].buckets
    if isinstance(instruction, Action) and instruction.kind is not Kind.FORWARD:
        return frozenset().union(*(segment.buckets for segment in held[instruction.stage]))
    return frozenset()


@settings(max_examples=40, deadline=None)
@given(runs())
def test_segments_hold_every_block_once_and_their_buckets(run):
    config, _ = run
    plan = stage_plan(config)
    held, numbers, _ = programs_of(*run, overlap=True)
    for rank, of_rank in enumerate(held):
        assert tuple(of_rank) == plan.stages_of(rank)
        for stage, parts in of_rank.items():
            assert sum((segment.blocks for segment in parts), ()) == blocks(plan, stage)
            assert all(segment.buckets for segment in parts)
        gathers = [gather.bucket for gather in closing(of_rank, numbers[rank])]
        assert gathers == list(reduce_order(of_rank, numbers[rank]))[::-1]


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(0, 9))
def test_an_evaluation_is_forwards_in_an_order_that_ends(run, count):
    config, _ = run
    schedule = forward_schedule(stage_plan(config), count)
    program = lower(schedule, [{}] * schedule.num_ranks, [0] * schedule.num_ranks, overlap=False)
    assert stuck([program]) == []
    assert sum(len(rank) for rank in schedule.actions) == count * schedule.num_stages


def test_a_swapped_pair_of_batches_is_found():
    _, _, (program,) = programs_of(tiny(model={"layers": 4}, parallel={"pp": 2, "ranks": 2}), [4], overlap=False)
    first, second = program.ranks[1], list(program.ranks[1])
    places = [p for p, i in enumerate(first) if isinstance(i, Batch)]
    a, b = places[0], places[2]
    second[a], second[b] = second[b], second[a]
    found = stuck([Program(program.schedule, (program.ranks[0], tuple(second)))])
    assert any("pipeline rank 1 waits at" in line for line in found)


def test_a_missing_receive_is_found():
    _, _, (program,) = programs_of(tiny(model={"layers": 4}, parallel={"pp": 2, "ranks": 2}), [3], overlap=False)
    without = tuple(i for i in program.ranks[1] if not (isinstance(i, Batch) and not any(t.sends for t in i.transfers)))
    assert stuck([Program(program.schedule, (program.ranks[0], without))]) != []


def test_replicas_that_reduce_in_different_orders_are_found():
    _, _, (one, two) = programs_of(tiny(model={"layers": 4}, parallel={"pp": 2, "ranks": 4}), [3, 2], overlap=True)
    assert stuck([one, two]) == []
    turned = [i for i in two.ranks[0] if isinstance(i, Reduce)][::-1]
    rest = [i for i in two.ranks[0] if not isinstance(i, Reduce)]
    found = stuck([one, replace(two, ranks=((*rest, *turned), two.ranks[1]))])
    assert found == ["pipeline rank 0: replicas reduce in different orders"]


def test_the_last_backward_falls_apart_where_buckets_end():
    """Two layers a stage, a bucket each: the second layer's gradients travel while the first one's are computed."""
    config = tiny(model={"layers": 4}, parallel={"pp": 2, "ranks": 2, "bucket_mib": 0.01})
    held, _, (program,) = programs_of(config, [2], overlap=True)
    assert held[0] == {0: (Segment(("embedding", "layers.0"), frozenset({0})), Segment(("layers.1",), frozenset({1})))}
    last = Action(Kind.BACKWARD, 0, 1)
    assert program.ranks[0][-4:] == (Part(last, 1), Reduce(1), Part(last, 0), Reduce(0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_a_config_are_legal(schedule):
    config = tiny(
        model={"layers": 8},
        parallel={"pp": 4, "ranks": 4, "schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1},
    )
    assert problems(training_schedule(config, 8)) == []


def test_the_program_knows_replicas_with_nothing_to_do():
    config = tiny(ranks=3, batch={"global_batch": 2})
    counts = [len(microbatches(2, 1, 3, replica)) for replica in range(3)]
    _, numbers, programs = programs_of(config, counts, overlap=True)
    assert counts == [1, 1, 0]
    assert [type(i) for i in programs[2].ranks[0]] == [Reduce] * numbers[0]


def test_a_prediction_from_measured_times_is_the_measured_line():
    """The means of an uneven line, put back into the schedule, give that line again."""
    schedule = training_schedule(tiny(model={"layers": 4}, parallel={"pp": 4, "ranks": 4}), 6)
    line = simulate(schedule, lambda action: (1 + action.stage) * (2 if action.kind is Kind.BACKWARD else 1))
    assert simulate(schedule, averages(line)) == line
