"""What the executor really does: the listed order, what it holds and sends, its clock, and seeded defects."""

from dataclasses import dataclass
from itertools import chain, pairwise

import pytest
import torch
from engines import engine_of, train
from pipelines import SCHEDULES, errors, one_of, piped, run_mesh
from world import run_world

from ftrain.parallel import pipeline as pipeline_module
from ftrain.parallel.clock import Clock
from ftrain.parallel.pipeline import Job, Pipeline, Stage, measured
from ftrain.parallel.program import Batch, lower
from ftrain.parallel.schedule import AHEAD, Action, Kind, peak_in_flight
from ftrain.parallel.shape import MeshShape
from ftrain.parallel.stages import stage_plan, training_schedule
from ftrain.train import step as step_module


def _watched(rank, config):
    """The instructions as carried out, the most micro-batches held, and the program."""
    engine = engine_of(config, rank)
    pipeline, peak = engine.passes.pipeline, [0]

    def progress(phase, microbatch):
        held = sum(stage.in_flight for stage in pipeline.stages.values())
        peak[0] = max(peak[0], held + (phase == "forward"))  # before each action

    engine.progress = progress
    train(engine, 1)
    assert not any(stage.in_flight for stage in pipeline.stages.values())
    program = engine.passes.program(config.batch.global_batch // config.batch.micro_batch)
    assert [entry.instruction for entry in pipeline.timed] == list(program.ranks[engine.mesh.coordinate.pp])
    return pipeline.timed, peak[0], program


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_carried_out_is_what_is_listed(schedule):
    """Same order, and as many micro-batches in flight as the schedule says; the measured line has all its actions."""
    worlds = run_world(_watched, 2, piped(schedule))
    program = worlds[0][2]
    assert all(world[2] == program for world in worlds)
    assert tuple(world[1] for world in worlds) == peak_in_flight(program.schedule)
    line = measured(program, [world[0] for world in worlds])
    for rank, actions in enumerate(program.schedule.actions):
        spans = [span for span in line.spans if span.rank == rank]
        assert tuple(span.action for span in spans) == actions
        assert all(a.end <= b.begin for a, b in pairwise(spans))
        assert all(span.begin < span.end for span in spans)
    end = {span.action: span for span in line.spans}
    for stage in range(1, program.schedule.num_stages):
        for microbatch in range(program.schedule.num_microbatches):
            before, after = (end[Action(Kind.FORWARD, s, microbatch)] for s in (stage - 1, stage))
            assert before.end <= after.begin  # one machine, one clock


class Thirds(Stage):
    """A stage that computes nothing."""

    def __init__(self, device):
        super().__init__(self, [["all"]], [frozenset()])
        self.made = torch.zeros(1, 8, device=device)

    def stream_shape(self, sequences, length):
        return sequences, 8

    def forward(self, microbatch, x, job, *, ends):
        return self.made

    def backward_input(self, microbatch, gradient):
        return self.made

    def backward_weight(self, microbatch, index=None):
        """Nothing."""


class Links:
    """Another rank that is never late: what was asked of it, and how many messages were asked for and not yet taken."""

    shape, rank = MeshShape(pp=2), 1

    def __init__(self):
        self.clock, self.asked, self.open, self.most = Clock(), [], 0, 0

    def all_reduce(self, tensor, axes):
        return tensor

    def start_transfers(self, transfers):
        self.asked.append([(peer, sends) for _, peer, sends in transfers])
        self.open += sum(not sends for _, _, sends in transfers)
        self.most = max(self.most, self.open)
        return [Taken(self, tensor, sends) for tensor, _, sends in transfers]


@dataclass
class Taken:
    links: Links
    tensor: torch.Tensor
    sends: bool
    is_done: bool = True

    def wait(self):
        self.links.open -= not self.sends
        return self.tensor


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize(("device", "ahead"), [("cpu", AHEAD), ("meta", 0)])
def test_hosts_ask_for_messages_beforehand_and_streams_do_not(schedule, device, ahead):
    """Within a stream whatever is issued behind a receive waits for it. On either, each message once, and in its order."""
    plan, links = stage_plan(piped(schedule)), Links()
    program = lower(training_schedule(piped(schedule), 4), [{}] * 2, [0] * 2, overlap=False)
    stages = {stage: Thirds(device) for stage in plan.stages_of(1)}
    pipeline = Pipeline(
        stages,
        num_stages=plan.num_stages,
        mesh=links,
        dtype=torch.float32,
        device=torch.device(device),
        progress=lambda phase, microbatch: None,
    )
    awaited, buffer = [], pipeline._buffer
    pipeline._buffer = lambda action, job: awaited.append(action) or buffer(action, job)
    pipeline.run(program.ranks[1], Job(tokens=None, shape=lambda number: (1, 1), finish=None))
    batches = [item.transfers for item in program.ranks[1] if isinstance(item, Batch)]
    assert awaited == [transfer.of for transfer in chain(*batches) if not transfer.sends], "in the order in which they are sent"
    listed = [[(transfer.peer, transfer.sends) for transfer in batch] for batch in batches]
    assert sorted(chain(*links.asked)) == sorted(chain(*listed))
    assert links.open == 0
    if ahead:
        assert links.most == ahead
        received = [sum(not sends for _, sends in batch) for batch in links.asked]
        assert received[0] == ahead > sum(not sends for _, sends in listed[0])
    else:
        assert links.asked == listed


def _on_the_links(rank, config):
    engine = engine_of(config, rank)
    sent, plain = [], engine.mesh.start_transfers

    def counted(transfers):
        sent.extend((peer, tuple(tensor.shape), tensor.dtype) for tensor, peer, sends in transfers if sends)
        return plain(transfers)

    engine.mesh.start_transfers = counted
    train(engine, 1)
    return sent


@pytest.mark.dist
def test_only_activations_and_their_gradients_travel():
    """bf16 activations: two bytes an element, each way, once a micro-batch and border; tied ends add two regions a step."""
    config = piped("1f1b", pp=3, dtype="bfloat16", batch={"global_batch": 8, "micro_batch": 2})
    stream = ((2, 12, 32), torch.bfloat16)
    sent = run_world(_on_the_links, 3, config)
    assert sent[0] == [(1, *stream)] * 4
    assert sorted(sent[1], key=lambda entry: entry[0]) == [(0, *stream)] * 4 + [(2, *stream)] * 4
    assert sent[2] == [(1, *stream)] * 4
    tied = run_world(_on_the_links, 3, piped("1f1b", pp=3, dtype="bfloat16", model={"tied": True}))
    assert [entry for entry in tied[2] if entry[0] == 0] == [(0, (61 * 32,), torch.float32)]  # summed gradients
    assert [entry for entry in tied[0] if entry[0] == 2] == [(2, (61 * 32,), torch.bfloat16)]  # updated weights


# --- seeded defects ---------------------------------------------------------------------------------------------------


def dropped_layer(engine):
    """30 layers built as 28: one is never applied."""
    stage = engine.passes.pipeline.stages[engine.mesh.coordinate.pp]
    stage.parts = [[name for name in part if name != "layers.1"] for part in stage.parts]


def doubled_tied_gradient(engine):
    """Both ends add the other's share, as a sum over an embedding group would that is done twice."""
    plain = engine.optimizer.reduce_twins

    def twice():
        plain()
        for region in engine.optimizer.regions:
            if region.twin is not None:
                region.main_grad.mul_(2)

    engine.optimizer.reduce_twins = twice


def dropped_tied_gradient(engine):
    """The head's share of a tied embedding stays on the last stage."""
    engine.optimizer.reduce_twins = engine.optimizer.finish


def missing_loss_scale(engine):
    """Gradients of summed losses, not divided by the global number of tokens (torchtitan 2972)."""
    plain = engine.passes.accumulate
    engine.passes.accumulate = lambda parts, scale: plain(parts, 1.0) * scale


def stage_local_norm(engine):
    """Each stage clips by its own norm (torchtitan 596)."""
    plain = step_module.vote

    def local(mesh, *, squares, loss, flags, exact):
        outcome = plain(mesh, squares=squares, loss=loss, flags=flags, exact=exact)
        object.__setattr__(outcome, "norm", float(squares.sqrt()))
        return outcome

    step_module.vote = local


def stale_twin(engine):
    """The last stage computes with the embedding of the step before."""
    plain = engine.optimizer.start_gather

    def stale(index, **options):
        region = engine.optimizer.regions[index]
        kept = region.weights.clone()
        plain(index, **options)
        if region.is_copy(engine.mesh.coordinate.pp):
            region.weights.copy_(kept)

    engine.optimizer.start_gather = stale


def lost_weight_gradient(engine):
    """The put-off gradients of one micro-batch never arrive."""
    plain = pipeline_module.make_up
    calls = [0]

    def forgetful(queue):
        calls[0] += 1
        if calls[0] == 2:
            queue.clear()
        plain(queue)

    pipeline_module.make_up = forgetful


def swapped_micro_batches(engine):
    """The targets of another micro-batch."""
    plain = engine.passes.accumulate

    def turned(parts, scale):
        object.__setattr__(parts[0], "targets", parts[1].targets)
        object.__setattr__(parts[0], "valid", parts[1].valid)
        return plain(parts, scale)

    engine.passes.accumulate = turned


DEFECTS = [
    pytest.param(dropped_layer, "layers.1.mlp.w1", id="dropped layer"),
    pytest.param(doubled_tied_gradient, "embedding", id="doubled tied gradient"),
    pytest.param(dropped_tied_gradient, "embedding", id="dropped tied gradient"),
    pytest.param(missing_loss_scale, "norm", id="missing loss scale"),
    pytest.param(stage_local_norm, "layers.0.mlp.w1", id="stage-local norm"),
    pytest.param(stale_twin, "norm", id="stale twin"),
    pytest.param(lost_weight_gradient, "layers.2.mlp.w1", id="lost weight gradient"),
    pytest.param(swapped_micro_batches, "norm", id="swapped micro-batches"),
]


def _defective(rank, config, defect):
    engine = engine_of(config, rank)
    if defect is not None:
        defect(engine)
    results = train(engine, 2)
    pieces = {p.array: p.tensor.clone() for p in engine.pieces() if p.owner and p.array.startswith("exp_avg/")}
    return pieces, [result.grad_norm for result in results]


@pytest.mark.dist
@pytest.mark.parametrize(("defect", "parameter"), [pytest.param(None, "", id="none"), *DEFECTS])
def test_a_seeded_defect_is_found_and_names_the_parameter(defect, parameter):
    config = piped("zb_h1", model={"tied": True, "layers": 4}, dtype="float64", optimizer={"clip_norm": 0.1})
    worlds = run_world(_defective, 2, config, defect)
    ours = {name.removeprefix("exp_avg/"): tensor for pieces, _ in worlds for name, tensor in pieces.items()}
    one = run_mesh(one_of(config), 2)
    theirs = {name.removeprefix("exp_avg/"): a for name, a in one.arrays.items() if name.startswith("exp_avg/")}
    found = {name for name, error in errors(ours, theirs).items() if not error < 1e-12}
    assert (parameter in found) if parameter else not found


def test_a_weight_that_no_stage_uses_stops_the_engine():
    engine = engine_of(piped("1f1b", pp=1))
    views = {**engine.optimizer.views(), "layers.9.mlp.w1": engine.optimizer.views()["layers.0.mlp.w1"]}
    engine.optimizer.views = lambda: views
    with pytest.raises(ValueError, match=r"no stage has layers\.9\.mlp\.w1"):
        engine.optimizer.place(engine.passes.modules)
