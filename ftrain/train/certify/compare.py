"""Whole arrays of a layout against those of one process, and the bounds they must keep.

error      the largest difference over the array's largest value; of one that is all zeros in truth (with sequences of one token
           attention has nothing to choose, and no gradient in queries and keys), over the largest value of its kind
fp64       error against one process at most 1e-12: only the order of sums may differ
fp32 bf16  error against the fp64 oracle at most 4 x that of one process in the same dtype, or 4 x the dtype's epsilon; that of
           one process is its worst array of the kind (all gradients of the step, all first moments, ...)

The oracle starts from the same state and computes with the same bf16-rounded weights, so the second bound is about arithmetic
alone. Why the worst array: the error of a single one is the rounding of one or two elements, its largest. Two such numbers of
equal distribution are often four times apart (measured: the median ratio of layout and process is 1, single ratios reach 10),
and a certificate compares tens of thousands. How many arrays are beyond 4 x their *own* error in one process is counted, as
information. Everything is read from checkpoints, whole; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ftrain.train.certify.messages import Held, StepDone
from ftrain.train.certify.verdict import Failure, Worst, finite
from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.digest import digest_box

Array = NDArray[np.generic]

KINDS = ("grad", "master", "exp_avg", "exp_avg_sq")
EXACT_BOUND = 1e-12
FACTOR = 4.0
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7}


@dataclass(slots=True)
class Result:
    """One update of one layout in one mode, as it was written and said."""

    done: StepDone  # of rank 0
    checkpoint: Checkpoint
    arrays: dict[str, Array] = field(default_factory=dict)

    def read(self, name: str) -> Array:
        """A whole array, read once."""
        if name not in self.arrays:
            self.arrays[name] = self.checkpoint.read(name)
        return self.arrays[name]

    def names(self) -> list[str]:
        """All arrays that are compared."""
        return [name for name in self.checkpoint.names if name.partition("/")[0] in KINDS]

    def largest_of(self, kind: str) -> float:
        """The largest value of all arrays of a kind."""
        return max((_largest(self.read(name)) for name in self.names() if name.partition("/")[0] == kind), default=0.0)

    def value(self, name: str) -> Array:
        """What is called `name`: an array, or one of the scalars."""
        if name in ("loss", "norm"):
            return np.array([self.done.loss if name == "loss" else self.done.grad_norm])
        return self.read(name)


@dataclass(slots=True)
class Truth:
    """What one update should give, and how far from it a layout may be."""

    exact: Result
    bound: Callable[[str], float]
    own_bound: Callable[[str], float]  # by the array's own error in one process

    def differences(self, found: Result) -> Iterator[Worst]:
        """The error of everything that is compared, with its bound."""
        for name in ("loss", "norm", *self.exact.names()):
            kind, _, parameter = name.partition("/")
            error = error_of(name, found, self.exact)
            yield Worst(
                what=kind,
                parameter=parameter,
                step=found.done.step,
                error=finite(error),
                bound=self.bound(name),
                beyond_own=error > self.own_bound(name),
            )


def exact_truth(one: Result) -> Truth:
    """fp64: one process itself."""
    return Truth(one, lambda name: EXACT_BOUND, lambda name: EXACT_BOUND)


def rounded_truth(oracle: Result, one: Result, mode: str) -> Truth:
    """The oracle, and what one process in the same dtype is away from it."""
    errors = {name: error_of(name, one, oracle) for name in ("loss", "norm", *oracle.names())}
    worst: dict[str, float] = {}
    for name, error in errors.items():
        kind = name.partition("/")[0]
        worst[kind] = max(worst.get(kind, EPSILON[mode]), error)
    return Truth(
        oracle,
        lambda name: FACTOR * worst[name.partition("/")[0]],
        lambda name: FACTOR * max(errors[name], EPSILON[mode]),
    )


def error_of(name: str, found: Result, truth: Result) -> float:
    """How far what is called `name` is from the truth."""
    ours, theirs = found.value(name), truth.value(name)
    return distance(ours, theirs, _largest(theirs) or truth.largest_of(name.partition("/")[0]))


def distance(found: Array, truth: Array, scale: float) -> float:
    """The largest difference over `scale`; infinite if it is not finite, or there is one and no scale."""
    if found.shape != truth.shape:
        return math.inf
    difference = _largest(found.astype(np.float64) - truth.astype(np.float64))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf


def _largest(array: Array) -> float:
    return float(np.abs(array.astype(np.float64)).max(initial=0.0))


def failures_of(found: Iterator[Worst] | list[Worst], layout: str, mode: str) -> list[Failure]:
    """Those beyond their bounds."""
    return [
        Failure(layout=layout, mode=mode, step=w.step, what=w.what, parameter=w.parameter, error=w.error, bound=w.bound)
        for w in found
        if w.error is None or w.error > w.bound
    ]


def held_failures(found: Result, ranks: list[StepDone], layout: str, mode: str) -> Iterator[Failure]:
    """Copies and live weights that are not what was written."""
    for rank, done in enumerate(ranks):
        for held in done.held:
            if held.digest != _stored_digest(found, held):
                kind, _, parameter = held.array.partition("/")
                what = "weights" if kind == "weights" else f"copies of {kind}"
                reason = f"rank {rank} holds other values than were written"
                yield Failure(layout=layout, mode=mode, step=done.step, what=what, parameter=parameter, reason=reason)


def _stored_digest(found: Result, held: Held) -> int:
    box = Box(held.offset, held.shape)
    values = np.ascontiguousarray(found.read(held.array)[box.slices()])
    return digest_box(values, found.checkpoint.array(held.array).shape, box)
