"""The time of a step on real ranks: a delay that is put somewhere is found there.

The delays are slept, so they are a lower bound whatever else the machine does. The buckets of a step add up to it, so what the
right one holds no other has.
"""

import statistics
import time

import pytest
import torch
from engines import engine_of
from pipelines import piped
from tiny import tiny
from world import run_world

from ftrain.parallel.mesh import Pending
from ftrain.plan import profile
from ftrain.plan.setup import Setup, options_of
from ftrain.plan.volume import volumes
from ftrain.ramp import position
from ftrain.train import times as module
from ftrain.train.times import BUCKETS, Times

DELAY, LONG, STEPS = 0.05, 0.15, 6
SHORT = {"global_batch": 2}  # few messages, so that a busy machine cannot delay many of them
FP32 = {"compute_dtype": "float32"}


def small(**parallel):
    """Two ranks with one layer between them."""
    return tiny(ranks=2, parallel=parallel, model={"layers": 1}, batch=SHORT, machine=FP32)


def nothing(engine):
    """No delay."""


def data_delay(engine):
    """Reading takes longer, everywhere."""
    read = engine.dataset.sequences

    def slow(first, count):
        time.sleep(DELAY)
        return read(first, count)

    engine.dataset.sequences = slow


def stage_delay(engine):
    """The first forward of a step takes longer on the last rank."""
    if engine.mesh.rank == engine.mesh.shape.world - 1:
        asked = engine.passes.pipeline.stages
        stage = next(iter(asked.values()))
        forward = stage.forward

        def slow(microbatch, *args, **options):
            time.sleep(DELAY * (microbatch == 0))
            return forward(microbatch, *args, **options)

        stage.forward = slow


def weight_delay(engine):
    """The gradients of the weights, put off, take longer for the first micro-batch on the last rank."""
    if engine.mesh.rank == engine.mesh.shape.world - 1:
        stage = next(iter(engine.passes.pipeline.stages.values()))
        make_up = stage.backward_weight

        def slow(microbatch, *args):
            time.sleep(DELAY * (microbatch == 0))
            make_up(microbatch, *args)

        stage.backward_weight = slow


class SlowWork:
    """A message that is longer on its way."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        self.work.wait()
        time.sleep(DELAY)

    def is_completed(self):
        return False


def transfer_delay(engine):
    """Each first activation of a step is longer on its way from stage to stage."""
    start, seen = engine.mesh.start_transfers, []

    def slow(transfers, *args):
        started = start(transfers, *args)
        seen.append(started)
        receives = [index for index, (_, _, sends) in enumerate(transfers) if not sends]
        if receives and engine.mesh.coordinate.pp == 1 and not engine.arrived:
            engine.arrived = True
            started[receives[0]] = Pending(started[receives[0]].tensor, SlowWork(started[receives[0]].work), engine.mesh.clock)
        return started

    engine.mesh.start_transfers = slow


def reduce_delay(engine):
    """The sum of gradients over the replicas takes longer on all of them."""
    start = engine.mesh.start_reduce_scatter

    def slow(flat, sharers):
        pending = start(flat, sharers)
        if engine.arrived:
            return pending
        engine.arrived = True
        return Pending(pending.tensor, SlowWork(pending.work), pending.clock, pending.activity)

    engine.mesh.start_reduce_scatter = slow


def measured(rank, config, disturb):
    engine = engine_of(config, rank)
    reports = []
    times = Times(engine.passes, engine.device, report=reports.append)
    engine.after_vote = times.voted
    disturb(engine)
    took = []
    for step in range(STEPS):
        engine.arrived = False
        outer = time.perf_counter()
        times.begin()
        inner = time.perf_counter()
        engine.train_step(step=step + 1, first_sequence=position(config, step))
        least = time.perf_counter() - inner
        times.end(step + 1)
        took.append((least, time.perf_counter() - outer))
    times.finish()
    return reports, took


def run(config, disturb):
    """Reports of all steps but the first, which builds programs, and of each rank what its steps took at least and at most."""
    world = config.parallel.ranks
    results = run_world(measured, world, config, disturb) if world > 1 else [measured(0, config, disturb)]
    reports = results[0][0]
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert all(not others for others, _ in results[1:])
    return reports[1:], [took[1:] for _, took in results]


def middle(reports, bucket, *, worst=True):
    """Its seconds in the median step: of the rank with most, or the mean over the ranks."""
    return statistics.median(report.worst[bucket][1] if worst else report.mean[bucket] for report in reports)


def least(reports, bucket):
    """The same of the step with the least."""
    return min(report.worst[bucket][1] for report in reports)


def test_one_process_accounts_for_its_whole_step():
    reports, (took,) = run(tiny(machine=FP32, model={"hidden": 128, "ffn": 256}, batch={"global_batch": 16}), data_delay)
    for report, (shortest, longest) in zip(reports, took, strict=True):
        assert set(report.mean) == set(BUCKETS)
        assert shortest - 1e-6 <= sum(report.mean.values()) <= longest + 1e-6
        assert report.mean["data"] >= DELAY
    assert statistics.median(report.mean["other"] / sum(report.mean.values()) for report in reports) <= 0.05
    assert reports[0].dtype == "float32"
    assert reports[0].memory[0].peak >= reports[0].memory[0].used > 10 * 2**20


def test_measuring_changes_no_bit():
    config = tiny(machine=FP32)
    plain, watched = engine_of(config), engine_of(config)
    times = Times(watched.passes, watched.device, report=lambda report: None)
    watched.after_vote = times.voted
    for step in range(3):
        times.begin()
        result = watched.train_step(step=step + 1, first_sequence=position(config, step))
        times.end(step + 1)
        assert result == plain.train_step(step=step + 1, first_sequence=position(config, step))
    for ours, theirs in zip(watched.pieces(), plain.pieces(), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)


@pytest.mark.dist
def test_slow_data_on_all_replicas_is_data():
    reports, _ = run(small(), data_delay)
    assert middle(reports, "data", worst=False) >= DELAY


@pytest.mark.dist
def test_a_slow_replica_is_imbalance_for_the_other():
    """The slow one computes for longer; the other waits for it in a collective, which is not the collective's fault."""
    reports, _ = run(small(), stage_delay)
    assert middle(reports, "imbalance") >= 0.8 * DELAY
    assert middle(reports, "compute") >= DELAY
    assert statistics.mode(report.worst["compute"][0] for report in reports) == 1


@pytest.mark.dist
def test_a_slow_link_between_replicas_is_dp():
    reports, _ = run(small(), reduce_delay)
    assert middle(reports, "dp", worst=False) >= DELAY


@pytest.mark.dist
def test_a_slow_tensor_parallel_rank_is_imbalance_for_the_other():
    reports, _ = run(small(tp=2), stage_delay)
    assert middle(reports, "imbalance") >= 0.8 * DELAY


@pytest.mark.dist
def test_a_slow_context_parallel_rank_is_imbalance_for_the_other():
    reports, _ = run(small(cp=2), stage_delay)
    assert middle(reports, "imbalance") >= 0.8 * DELAY
    assert middle(reports, "cp") > 0


@pytest.mark.dist
def test_a_slow_stage_is_imbalance_and_not_bubble():
    """1F1B on two stages: the bubble is that of the same work spread evenly, a mean forward and a mean backward; what the first
    stage waits beyond it, it waits for the second."""
    reports, _ = run(piped(batch=SHORT), stage_delay)
    for report in reports:
        (f0, f1), (b0, b1) = report.actions["F"], report.actions["B"]
        assert f1 >= DELAY / 2  # of two micro-batches, one
        assert report.worst["bubble"][1] <= (f0 + f1 + b0 + b1) / 2 + 1e-6
    waited = [report.worst["imbalance"][1] + report.worst["bubble"][1] for report in reports]
    assert statistics.median(waited) >= 0.9 * DELAY
    assert middle(reports, "imbalance") >= 0.5 * DELAY


@pytest.mark.dist
def test_a_slow_link_between_stages_is_pp():
    reports, _ = run(piped(batch=SHORT), transfer_delay)
    assert middle(reports, "pp") >= 0.8 * DELAY


SPLIT = ("zb_h1", "zb_v")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", *SPLIT])
def test_delays_are_found_under_every_schedule(schedule):
    """A slow stage computes for longer, and what the other rank waits for it is not the schedule's idle time; a slow link is no
    stage's. The bubble is that of the same work spread evenly, of which the delay is a part."""
    config = piped(schedule, batch=SHORT)
    for delay in (stage_delay, *([weight_delay] if schedule in SPLIT else [])):
        reports, _ = run(config, delay)
        assert middle(reports, "compute") >= DELAY
        assert statistics.mode(report.worst["compute"][0] for report in reports) == 1
        waited = [report.worst["imbalance"][1] + report.worst["bubble"][1] for report in reports]
        assert statistics.median(waited) >= 0.9 * DELAY
        assert middle(reports, "imbalance") >= 0.5 * DELAY
    reports, _ = run(config, transfer_delay)
    assert middle(reports, "pp") >= 0.8 * DELAY


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_axis_at_once_adds_up(tp):
    """Pipeline and replicas, reductions and gathers beside the computation, an unequal number of micro-batches."""
    parallel = {"tp": tp, "overlap_reduce": True, "overlap_gather": True}
    config = piped("1f1b", ranks=4 * tp, parallel=parallel, batch={"global_batch": 9})
    reports, took = run(config, nothing)
    for index, report in enumerate(reports):
        shortest, longest = (statistics.mean(rank[index][end] for rank in took) for end in (0, 1))
        assert shortest - 1e-6 <= sum(report.mean.values()) <= longest + 1e-6
        assert min(report.mean.values()) >= 0
        assert {of_rank.stage for of_rank in report.memory} == {0, 1}
    axes = ["pp", "dp", *(["tp"] if tp > 1 else [])]
    assert all(reports[-1].mean[bucket] > 0 for bucket in ("compute", "data", *axes))
    for report in reports:
        stages_are_told_apart(report)
        bytes_are_those_of_the_plan(report, config)


def stages_are_told_apart(report):
    """The mean over the stages' means is that over the ranks: there are as many on each stage."""
    assert len(report.stages) == 2
    for bucket, mean in report.mean.items():
        assert statistics.mean(stage[bucket] for stage in report.stages) == pytest.approx(mean, abs=2e-6)
    assert set(report.actions) == {"F", "B"}
    assert all(len(stages) == 2 and min(stages) > 0 for stages in report.actions.values())


def bytes_are_those_of_the_plan(report, config):
    """Within 1 %; votes on the update come on top."""
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    said = {volume.name: float(volume.nbytes) for volume in volumes(setup, aligned=True)}
    assert report.sent["pp"] == pytest.approx(said["PP"], rel=0.01)
    assert report.sent["dp"] == pytest.approx(said["DP x CP"], rel=0.01)
    assert report.sent.get("tp", 0.0) == pytest.approx(said.get("TP", 0.0), rel=0.01)


class TimelyWork(SlowWork):
    """A message that is there a while after it was sent, whoever waits for it."""

    def __init__(self, work):
        super().__init__(work)
        self.due = time.perf_counter() + LONG

    def wait(self):
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


def busy_end(engine):
    """The first sum over the replicas takes a while, and so does the last piece of the last backward, behind it."""
    start = engine.mesh.start_reduce_scatter
    (stage,) = engine.passes.pipeline.stages.values()
    backward_part = stage.backward_part

    def slow(flat, sharers):
        pending = start(flat, sharers)
        if engine.arrived:
            return pending
        engine.arrived = True
        return Pending(pending.tensor, TimelyWork(pending.work), pending.clock, pending.activity)

    def slow_part(microbatch, index):
        time.sleep(1.5 * LONG * (index == 0))
        backward_part(microbatch, index)

    engine.mesh.start_reduce_scatter, stage.backward_part = slow, slow_part


@pytest.mark.dist
def test_row_24_communication_beside_computation_is_not_exposed():
    exposed, _ = run(small(bucket_mib=0.004), busy_end)
    hidden, _ = run(small(bucket_mib=0.004, overlap_reduce=True), busy_end)
    assert middle(exposed, "dp", worst=False) >= 0.9 * LONG
    assert least(hidden, "dp") < 0.8 * LONG
    assert all(report.mean["compute"] >= 1.5 * LONG for report in hidden)


def batches(rank, config, every_s, kept):
    """Steps of each report, by the number of the step after which it came (0: at the end)."""
    module.EVERY_S = every_s
    engine = engine_of(config, rank)
    came, now = {}, 0
    times = Times(engine.passes, engine.device, report=lambda report: came.setdefault(now, []).append(report.step))
    engine.after_vote = times.voted
    for step in range(1, 13):
        now = step
        times.begin()
        engine.train_step(step=step, first_sequence=position(config, step - 1))
        times.end(step, kept=step in kept)
    now = 0
    times.finish()
    return came


@pytest.mark.dist
def test_short_steps_are_put_together_at_once_and_behind_a_snapshot_all_are():
    """The first by itself, since nobody knows yet how long a step takes; the rest wait for enough others or a snapshot."""
    (came, others) = run_world(batches, 2, small(), 1e6, (7,))
    assert came == {2: [1], 8: [2, 3, 4, 5, 6, 7], 0: [8, 9, 10, 11, 12]}
    assert not others


@pytest.mark.dist
def test_long_steps_are_put_together_one_by_one():
    (came, _) = run_world(batches, 2, small(), 1e-6, ())
    assert came == {**{step: [step - 1] for step in range(2, 13)}, 0: [12]}
