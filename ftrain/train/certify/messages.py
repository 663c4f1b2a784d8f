"""What the parent of a certificate and its workers say to each other: closed types in frames, as everywhere; no pickle."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ftrain.config import Config
from storage.manifest import PackManifest

Role = Literal["reference", "oracle", "layout"]


class Steps(Struct, frozen=True, kw_only=True, tag=True):
    """Updates 1 to `steps`, the results of each written to `results`.

    reference   one process: from the initial values on; the state before and after each update goes to `states`
    oracle      one process in fp64, from each state in `states`, computing with weights rounded to bf16
    layout      from each state in `states`
    """

    config: Config
    role: Role
    states: str  # URL of a run
    results: str
    steps: int
    routes: str = ""  # URL where the reference writes which experts it chose, and the others read it; empty: not at all


class Ring(Struct, frozen=True, kw_only=True, tag=True):
    """Load a state under one layout and save it again: what the next layout of the ring loads."""

    config: Config
    source: str
    target: str
    step: int


Job = Steps | Ring


class Task(Struct, frozen=True, kw_only=True, tag=True):
    """What one worker is asked to do, as rank `rank` of a new process group."""

    rank: int
    world: int
    rendezvous: str  # a file that does not exist yet
    cache: str  # where the built-in corpus lies
    timeout_s: float
    defect: str = ""  # tests only: `module:function`, a context manager around the whole task
    jobs: list[Job]


class Held(Struct, frozen=True, kw_only=True):
    """Values a rank holds besides those it writes: copies, and the weights it computes with. They must be what was written."""

    array: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int


class StepDone(Struct, frozen=True, kw_only=True):
    """One update on one rank."""

    step: int
    loss: float
    grad_norm: float
    applied: bool
    pack: PackManifest | None  # of the results; None: this rank writes nothing
    held: list[Held]
    data: list[tuple[int, str]]  # every training sequence that was read: global index, digest
    flips: int = 0  # positions, counted in each layer, that would have gone to other experts than in one process
    routed: int = 0  # of so many


class JobDone(Struct, frozen=True, kw_only=True):
    """A job on one rank."""

    digests: dict[str, int]  # of the initial state, or of the state as loaded; summed over ranks
    steps: list[StepDone] = []
    states: list[PackManifest] = []  # reference: of step 0, 1, ...; ring: the one it saved (if this rank writes anything)


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """All jobs of a task."""

    jobs: list[JobDone]


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """A task that raised."""

    reason: str  # type and message
    traceback: str


Reply = Done | Failed
