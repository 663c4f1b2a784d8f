"""Where a run is in its data at each update, over all its phases: a pure function of the config and the tokens read.

A phase has windows and batches of its own, so "how many sequences" no longer says where a run is. The `Cursor` does: for every
phase that has begun, the update before its first one and the sequences read in it. It is all that a checkpoint remembers, and
it follows from the config alone (`course`): a run that is resumed at any step, under any layout, reads what it would have read.

Tokens are those of whole sequences, masked ones included. An update belongs to the phase in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from ftrain.config import Config
from ftrain.phases import effective, num_phases
from ftrain.ramp import global_batch_at
from ftrain.schema import Problem

UNBOUNDED = 2**62


class Begun(NamedTuple):
    """A phase that has begun."""

    first_step: int
    """Updates behind the state it began with."""
    sequences: int
    """Read in it so far."""
    passed: int = 0
    """Passed over in it (`data.skip`): they lie behind the run as well, and nobody has read them."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run is."""

    step: int = 0
    begun: tuple[Begun, ...] = (Begun(0, 0),)

    @property
    def phase(self) -> int:
        """The newest phase that has begun."""
        return len(self.begun) - 1

    @property
    def sequences(self) -> int:
        """Read in this phase."""
        return self.begun[-1].sequences

    @property
    def total(self) -> int:
        """Sequences read in the whole run."""
        return sum(part.sequences for part in self.begun)

    def after(self, sequences: int) -> Cursor:
        """After one more update, of so many sequences."""
        last = self.begun[-1]
        return Cursor(self.step + 1, (*self.begun[:-1], last._replace(sequences=last.sequences + sequences)))

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> Cursor:
        """As a checkpoint remembers it; one that knows nothing of phases has all its sequences in phase 0."""
        begun = [Begun(*part[:2]) for part in progress.get("begun") or [(0, progress.get("sequences", 0))]]
        for first, _, sequences in progress.get("skipped", ()):
            number = phase_after([part.first_step for part in begun], first - 1)
            begun[number] = begun[number]._replace(passed=begun[number].passed + sequences)
        return cls(int(progress.get("step", 0)), tuple(begun))


@dataclass(frozen=True, slots=True)
class Leg:
    """A phase as the run goes through it: updates [first_step, stop_step), counted from 0."""

    phase: int
    config: Config
    first_step: int
    stop_step: int
    first_token: int
    """Tokens of the run read before it."""
    stop_token: int

    @property
    def steps(self) -> int:
        """Updates in it; 0 if the run ends before."""
        return self.stop_step - self.first_step


class Curve(NamedTuple):
    """The updates (first_step, stop_step] over which one learning-rate schedule stretches."""

    first_step: int
    stop_step: int


def tokens_read(config: Config, cursor: Cursor) -> int:
    """Tokens of the run up to here."""
    return sum(part.sequences * effective(config, number).data.seq_len for number, part in enumerate(cursor.begun))


def entered(config: Config, cursor: Cursor) -> Cursor:
    """The cursor in the phase that the next update belongs to: phases begin exactly where the tokens of theirs are reached."""
    read = tokens_read(config, cursor)
    begun = cursor.begun
    for phase in config.phases[cursor.phase :]:
        if phase.from_tokens > read:
            break
        begun = (*begun, Begun(cursor.step, 0))
    return Cursor(cursor.step, begun)


def recalled(config: Config, progress: Mapping[str, Any]) -> Cursor:
    """Where a run with this config goes on from a checkpoint's state.

    What another run has trained (`--from`) may have gone through phases that this one does not: then it all counts as phase 0.
    """
    cursor = Cursor.of(progress)
    theirs = [phase["from_tokens"] for phase in progress.get("config", {}).get("phases", ())]
    ours = [phase.from_tokens for phase in config.phases]
    if theirs[: cursor.phase] != ours[: cursor.phase]:
        cursor = Cursor.of({**progress, "begun": ()})
    return entered(config, cursor)


def course(config: Config, cursor: Cursor = Cursor()) -> tuple[Leg, ...]:
    """All phases: those that are over as they were, the rest as they will be, from `cursor` on."""
    cursor = entered(config, cursor)
    legs, token = list[Leg](), 0
    step, sequences = cursor.step, cursor.sequences
    for number in range(num_phases(config)):
        own = effective(config, number)
        if number < cursor.phase:
            here, following = cursor.begun[number], cursor.begun[number + 1]
            first, stop, read = here.first_step, following.first_step, here.sequences
        else:
            first = cursor.begun[number].first_step if number == cursor.phase else step
            limit = _limit(config, number, token, own.data.seq_len)
            left, read = _updates(own, sequences if number == cursor.phase else 0, limit, config.run.steps - step)
            stop = step = step + left
        legs.append(Leg(number, own, first, max(first, stop), token, token + read * own.data.seq_len))
        token = legs[-1].stop_token
    return tuple(legs)


def _limit(config: Config, number: int, token: int, seq_len: int) -> int:
    """Sequences of a phase at which the next one begins."""
    if number == len(config.phases):
        return UNBOUNDED
    return max(0, -(-(config.phases[number].from_tokens - token) // seq_len))


def _updates(config: Config, sequences: int, limit: int, most: int) -> tuple[int, int]:
    """Updates from the position `sequences` of a phase until `limit` of its sequences are read, at most `most`; and the
    position then."""
    steps = 0
    while sequences < limit and steps < most:
        size = global_batch_at(config, sequences)
        stop = min(_same_until(config, sequences), limit)
        count = min(-(-(stop - sequences) // size), most - steps)
        steps, sequences = steps + count, sequences + count * size
    return steps, sequences


def _same_until(config: Config, sequences: int) -> int:
    """The position at which an update may take another number of sequences than at this one."""
    seq_len = config.data.seq_len
    ends = (part.tokens for part in config.batch.ramp if sequences * seq_len < part.tokens)
    return -(-next(ends, UNBOUNDED * seq_len) // seq_len)


def cursor_at(config: Config, steps: int, start: Cursor = Cursor()) -> Cursor:
    """Where a run that goes on from `start` is after so many updates of the run; it never goes back."""
    if steps <= start.step:
        return entered(config, start)
    legs = course(replace(config, run=replace(config.run, steps=steps)), start)
    begun = list[Begun]()
    for leg in legs:
        known = leg.phase <= start.phase
        if known or leg.first_token >= config.phases[leg.phase - 1].from_tokens:
            sequences = (leg.stop_token - leg.first_token) // leg.config.data.seq_len
            begun.append(Begun(leg.first_step, sequences, start.begun[leg.phase].passed if known else 0))
    return Cursor(steps, tuple(begun))


def tokens_after(config: Config, steps: int) -> int:
    """Tokens read by the first `steps` updates of a run that began at 0."""
    return tokens_read(config, cursor_at(config, steps))


def updates_left(config: Config, cursor: Cursor, update_tokens: float) -> float:
    """Tokens from the cursor to the end of its run, in updates of so many."""
    return (course(config, cursor)[-1].stop_token - tokens_read(config, cursor)) / update_tokens


def phase_after(first_steps: Sequence[int], step: int) -> int:
    """The phase of the update that follows `step`, given where each phase that has begun did."""
    return max((number for number, first in enumerate(first_steps) if first <= step), default=0)


def curve(config: Config, legs: Sequence[Leg], phase: int) -> Curve:
    """The updates over which the schedule of a phase stretches: from the phase that gave it to the next that gives one."""
    first, stop = 0, config.run.steps
    for number, entry in enumerate(config.phases, start=1):
        if entry.schedule and number <= phase:
            first = legs[number].first_step
        elif entry.schedule and legs[number].steps:
            stop = min(stop, legs[number].first_step)
    return Curve(first, stop)


def problems(config: Config) -> Iterator[Problem]:
    """Phases in which nothing happens, and schedules that do not fit into the updates they have."""
    if not config.phases:
        return
    legs = course(config)
    for number, entry in enumerate(config.phases, start=1):
        leg, path = legs[number], f"phases.{number - 1}"
        if not leg.steps and number < len(config.phases) and legs[number + 1].first_token >= config.phases[number].from_tokens:
            given = f"given {entry.from_tokens}, and phases.{number}.from_tokens = {config.phases[number].from_tokens}"
            yield Problem(f"{path}.from_tokens", given, "at least one update of the run begins in a phase")
        if entry.schedule and leg.steps:
            yield from _curve_problems(config, legs, number, f"{path}.schedule")
    yield from _curve_problems(config, legs, 0, "schedule")


def _curve_problems(config: Config, legs: Sequence[Leg], phase: int, path: str) -> Iterator[Problem]:
    own, (first, stop) = legs[phase].config.schedule, curve(config, legs, phase)
    if own.warmup_steps + own.decay_steps > stop - first:
        given = f"given {own.warmup_steps}, with decay_steps = {own.decay_steps}"
        yield Problem(f"{path}.warmup_steps", given, f"warm-up and decay within its {stop - first} updates")
