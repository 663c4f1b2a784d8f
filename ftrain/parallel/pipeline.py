"""Executes a program: one thread, one instruction after the other, exactly as the list says.

A stage keeps, per micro-batch, the leaf its input became and the root its output is; a backward is one `autograd.backward`
from that root. Between stages, only activations (in the compute dtype) and the gradients of activations travel, into buffers
whose shapes both ends know beforehand. No weights do: the embedding that both ends of a tied model share is the optimizer's.

A receive stands in the list at the moment when its sender is done, by the schedule's clock. By the machine's, its sender may be
done earlier, and a host's backend moves nothing until the receiver has asked: the message would wait for a rank that computes,
and that rank then for the message. So on hosts a rank asks for the next two messages beforehand. Within a stream of a GPU it
must not: what is issued there waits for what was issued before it.

Micro-batches add to each weight's gradient in their order, whatever the schedule: a pipeline is bit-identical to one process
with the same micro-batches. A backward that is split runs autograd for the gradients of inputs and keeps aside what those of
matrices are made of; BACKWARD_WEIGHT makes up for it, in the same order of operations.

Cutting a stage into segments (only to overlap reductions) detaches at their borders, which changes no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ftrain.parallel.clock import COMPUTE, Timer
from ftrain.parallel.expert import Routing
from ftrain.parallel.mesh import Mesh, Pending
from ftrain.parallel.program import Batch, Instruction, Part, Program, Reduce, Transfer
from ftrain.parallel.schedule import AHEAD, Action, Kind
from ftrain.parallel.timeline import Span, Timeline
from ftrain.parallel.weight import Outer, make_up, put_off

_GONE = torch.empty(0)


class Module(Protocol):
    """The part of the model that a virtual stage computes."""

    def __call__(
        self, x: torch.Tensor, part: Sequence[str], documents: torch.Tensor | None, routing: Routing | None
    ) -> torch.Tensor: ...

    def stream_shape(self, sequences: int, length: int) -> tuple[int, ...]:
        """The shape of the activations between two stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a run of a program is about."""

    tokens: Callable[[int], torch.Tensor]  # [B, T] of a micro-batch, asked for by the first stage only
    shape: Callable[[int], tuple[int, int]]  # its B and T, asked for by all stages
    finish: Callable[[int, torch.Tensor], torch.Tensor | None]  # of the last stage's output: the loss to differentiate, if any
    documents: Callable[[int], torch.Tensor | None] = lambda microbatch: (
        None
    )  # which its whole sequences are made of, if it matters
    routing: Callable[[int], Routing | None] = lambda microbatch: None  # what its routers need to know
    reduce: Callable[[int], None] = lambda bucket: None  # start to sum a bucket's gradients over the replicas
    ready: Callable[[int], None] = lambda bucket: None  # until a bucket's weights may be read


@dataclass(frozen=True, slots=True)
class Timed:
    """An instruction and when it was carried out: seconds of a monotonic clock, waiting for its input not included."""

    instruction: Instruction
    begin: float
    end: float


@dataclass(slots=True)
class _Segment:
    """One micro-batch in one segment of a stage: where autograd starts and what it leads to.

    The root is a place in autograd's graph, not a tensor: nobody needs the values of the output for its backward.
    """

    leaf: torch.Tensor
    root: torch.Tensor | GradientEdge | None
    queue: list[Outer] = field(default_factory=list)


class Stage:
    """A virtual stage and the micro-batches in it."""

    def __init__(self, module: Module, parts: Sequence[Sequence[str]], buckets: Sequence[frozenset[int]]) -> None:
        """`parts`: its blocks in forward order, in segments; `buckets`: those that each segment's weights lie in."""
        self.module, self.parts, self.buckets = module, parts, buckets
        self._held: dict[int, list[_Segment]] = {}
        self._flow: dict[int, torch.Tensor | None] = {}  # the gradient on its way through the segments

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._held)

    def forward(self, microbatch: int, x: torch.Tensor, job: Job, *, ends: bool) -> torch.Tensor:
        """The output; with `ends`, that of the whole model, which the job finishes."""
        held = []
        for part, buckets in zip(self.parts, self.buckets, strict=True):
            for bucket in buckets:
                job.ready(bucket)
            if torch.is_grad_enabled() and x.is_floating_point():
                x = x.detach().requires_grad_()
            leaf, x = x, self.module(x, part, job.documents(microbatch), job.routing(microbatch))
            held.append(_Segment(leaf, get_gradient_edge(x) if x.requires_grad else None))
        if ends:
            loss = job.finish(microbatch, x)
            if loss is not None:
                held[-1].root = loss
        if torch.is_grad_enabled():
            self._held[microbatch] = held
        return x

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """All gradients, from that of the output (None: from the loss) to that of the input (None: there is none)."""
        self._flow[microbatch] = gradient
        for index in reversed(range(len(self.parts))):
            self.backward_part(microbatch, index)
        return self.leave(microbatch)

    def start(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Begin a backward that `backward_part` does from the last segment to the first."""
        self._flow[microbatch] = gradient

    def backward_part(self, microbatch: int, index: int) -> None:
        """One segment's gradients."""
        segment = self._held[microbatch][index]
        assert segment.root is not None, "forward ran without gradients"
        torch.autograd.backward(segment.root, self._flow[microbatch])
        self._flow[microbatch] = segment.leaf.grad
        segment.leaf, segment.root = _GONE, None  # let go of the activations

    def leave(self, microbatch: int) -> torch.Tensor | None:
        """The gradient of the input; the micro-batch is done."""
        del self._held[microbatch]
        return self._flow.pop(microbatch)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Gradients of the input and of small weights; those of matrices are put off."""
        self._flow[microbatch] = gradient
        for index in reversed(range(len(self.parts))):
            with put_off(self._held[microbatch][index].queue):
                self.backward_part(microbatch, index)
        return self._flow.pop(microbatch)

    def backward_weight(self, microbatch: int, index: int | None = None) -> None:
        """The gradients that were put off, of one segment or of all."""
        for part in reversed(range(len(self.parts))) if index is None else (index,):
            make_up(self._held[microbatch][part].queue)
        if not index:
            del self._held[microbatch]


class Pipeline:
    """A rank's stages, and the links to the ranks that hold their neighbours."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        *,
        num_stages: int,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str, int], None],
    ) -> None:
        """`dtype`: of the activations; `progress` is told the phase and micro-batch."""
        self.stages, self.num_stages, self.mesh = stages, num_stages, mesh
        self.dtype, self.device, self.progress = dtype, device, progress
        self._marked: list[tuple[Instruction, Any, Any]] = []  # of the last run: begin and end
        self._ahead = AHEAD if device.type == "cpu" else 0
        self._due: dict[Action, Transfer] = {}  # receives of the run that were not started, in their order
        self._arriving: dict[Action, Pending] = {}
        self._made: dict[Action, torch.Tensor] = {}
        self._leaving: list[Pending] = []
        mesh.all_reduce(torch.zeros(1, device=device), ("pp",))  # NCCL: a group's first call must be one of all its ranks

    def run(self, instructions: Sequence[Instruction], job: Job) -> None:
        """Carry out a whole list. On return everything that was sent has left."""
        self._marked = []
        batches = (instruction for instruction in instructions if isinstance(instruction, Batch))
        self._due = {transfer.of: transfer for batch in batches for transfer in batch.transfers if not transfer.sends}
        for instruction in instructions:
            if isinstance(instruction, Batch):
                self._exchange(instruction, job)
            elif isinstance(instruction, Reduce):
                self._clocked(instruction, partial(job.reduce, instruction.bucket), "dp")
            elif isinstance(instruction, Part):
                self._part(instruction)
            elif isinstance(instruction, Action):
                self._act(instruction, job)
        for pending in self._leaving:
            pending.wait()
        self._leaving.clear()
        left = [*self._due, *self._arriving, *self._made]
        assert not left, f"nobody took {left}"

    @property
    def timed(self) -> list[Timed]:
        """The instructions of the last run, as they were carried out."""
        timer = self.mesh.clock.timer
        return [
            Timed(instruction, timer.seconds(timer.origin, begin), timer.seconds(timer.origin, end))
            for instruction, begin, end in self._marked
        ]

    @property
    def marked(self) -> Sequence[tuple[Instruction, Any, Any]]:
        """The same as the clock marked them, to be read once the step is over."""
        return self._marked

    def _clocked(self, instruction: Instruction, work: Callable[[], None], activity: str = COMPUTE) -> None:
        clock = self.mesh.clock
        begin, before = clock.timer.now(), clock.enter(activity)
        work()
        clock.enter(before)
        self._marked.append((instruction, begin, clock.timer.now()))

    def _exchange(self, batch: Batch, job: Job) -> None:
        self._leaving = [pending for pending in self._leaving if not pending.is_done]

        def start() -> None:
            while len(self._leaving) > self.mesh.shape.pp:
                self._leaving.pop(0).wait()  # some backends say that a message has left only to whoever waits for it
            self._start(batch.transfers, job)

        self._clocked(batch, start, "pp")

    def _start(self, listed: Sequence[Transfer], job: Job) -> None:
        wanted = self._wanted(listed)
        if not wanted:
            return
        tensors = [
            self._made.pop(transfer.of).contiguous() if transfer.sends else self._buffer(transfer.of, job)
            for transfer in wanted
        ]
        pendings = self.mesh.start_transfers(
            [(tensor, transfer.peer, transfer.sends) for tensor, transfer in zip(tensors, wanted, strict=True)]
        )
        for transfer, pending in zip(wanted, pendings, strict=True):
            if transfer.sends:
                self._leaving.append(pending)
            else:
                self._arriving[transfer.of] = pending

    def _wanted(self, listed: Sequence[Transfer]) -> list[Transfer]:
        """What the list says, unless it is under way already, and what is asked for beforehand."""
        wanted = [transfer for transfer in listed if transfer.sends or transfer.of in self._due]
        receives = sum(not transfer.sends for transfer in wanted)  # the first of those that are due
        started = list(islice(self._due.values(), max(receives, self._ahead - len(self._arriving))))
        for transfer in started:
            del self._due[transfer.of]
        return wanted + started[receives:]

    def _buffer(self, action: Action, job: Job) -> torch.Tensor:
        module = next(iter(self.stages.values())).module
        shape = module.stream_shape(*job.shape(action.microbatch))
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _take(self, action: Action) -> torch.Tensor:
        """What a neighbouring stage made: from the link, or from this very rank."""
        pending = self._arriving.pop(action, None)
        return self._made.pop(action) if pending is None else pending.wait()

    def _act(self, action: Action, job: Job) -> None:
        stage, number, microbatch = self.stages[action.stage], action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            x = self._take(Action(Kind.FORWARD, number - 1, microbatch)) if number else job.tokens(microbatch)
            self.progress("forward", microbatch)
            self._clocked(action, lambda: self._made_by(action, stage.forward(microbatch, x, job, ends=self._is_last(number))))
            return
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._clocked(action, lambda: stage.backward_weight(microbatch))
            return
        backward = stage.backward if action.kind is Kind.BACKWARD else stage.backward_input
        gradient = self._gradient(action)
        self.progress("backward", microbatch)
        self._clocked(action, lambda: self._made_by(action, backward(microbatch, gradient)))

    def _part(self, part: Part) -> None:
        """A piece of a backward, or of one half of it."""
        action, stage = part.of, self.stages[part.of.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._clocked(part, lambda: stage.backward_weight(action.microbatch, part.index))
            return
        if part.index == len(stage.parts) - 1:
            stage.start(action.microbatch, self._gradient(action))
            self.progress("backward", action.microbatch)
        self._clocked(part, lambda: stage.backward_part(action.microbatch, part.index))
        if part.index == 0:
            self._made_by(action, stage.leave(action.microbatch))

    def _gradient(self, action: Action) -> torch.Tensor | None:
        """Of the stage's output; None on the last stage, where the loss is the root."""
        return None if self._is_last(action.stage) else self._take(Action(action.kind, action.stage + 1, action.microbatch))

    def _made_by(self, action: Action, result: torch.Tensor | None) -> None:
        """Keep what another stage waits for."""
        forward = action.kind is Kind.FORWARD
        if result is not None and (action.stage < self.num_stages - 1 if forward else action.stage > 0):
            self._made[action] = result.detach()

    def _is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1


def durations(marked: Sequence[tuple[Instruction, Any, Any]], timer: Timer) -> dict[Action, float]:
    """Seconds of each action that a rank carried out, its pieces added up."""
    found: dict[Action, float] = {}
    for instruction, begin, end in marked:
        action = instruction.of if isinstance(instruction, Part) else instruction
        if isinstance(action, Action):
            found[action] = found.get(action, 0.0) + timer.seconds(begin, end)
    return found


def measured(program: Program, timed: Sequence[Sequence[Timed]]) -> Timeline:
    """What the ranks measured, as a timeline that is laid over the simulated one: seconds from the first begin.

    `timed`: of each pipeline rank, on one machine's clock. Transfers and reductions are not spans; they are gaps.
    """
    zero = min(entry.begin for rank in timed for entry in rank)
    spans: list[Span] = []
    for rank, entries in enumerate(timed):
        parts: dict[Action, Span] = {}
        for entry in entries:
            action = entry.instruction.of if isinstance(entry.instruction, Part) else entry.instruction
            if isinstance(action, Action):
                begin = parts[action].begin if action in parts else entry.begin - zero
                parts[action] = Span(rank, action, begin, entry.end - zero)
        spans += parts.values()
    return Timeline(program.schedule, tuple(sorted(spans, key=lambda span: (span.rank, span.begin))))
