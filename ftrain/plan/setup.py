"""One plan's facts, resolved once: the config, the mesh it implies, the model's sizes, the hardware, and what the planner is
asked to assume beyond the config (schedule, recompute, what is sharded).

Everything else in this package is a pure function of a `Setup`, so a question is asked again under another layout by
replacing one field; the search does that some hundred times in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, cast

from msgspec import structs

from ftrain.combinations import combinations, head_dim, kv_heads, num_chunks
from ftrain.config import Config, Sharding
from ftrain.load import active_parameters, num_parameters
from ftrain.parallel.partition import partition_layers
from ftrain.parallel.schedule import NAMES, IllegalScheduleError, Placement, rank_of, require_groups
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.plan.placement import ProfileKey, key
from ftrain.plan.profile import Profile

Recompute = Literal["none", "selective", "full"]

Quantity = Fraction | float
"""Exact in an answer; a float where hundreds of layouts are compared, for fractions cost ten times as much."""

# What the figures' sources are called in full, in one place.
DOC_A = "founding document A (500B plan)"
DOC_B = "founding document B (Llama 3 405B)"
MEGATRON_MEMORY = "Megatron-LM docs/distributed optimizer: bf16 with fp32 gradients, 18 | 6 + 12/d bytes"
ZERO = "ZeRO, arXiv 1910.02054"
SELECTIVE = "Reducing activation recomputation, arXiv 2205.05198"
PIPELINES = "Megatron-LM on GPU clusters, arXiv 2104.04473; checked by the simulator in ftrain.parallel.timeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a plan assumes beyond the config."""

    schedule: str = "1f1b"
    chunks: int = 1
    """Virtual stages of a rank."""
    recompute: Recompute = "none"
    sharding: Sharding = "zero1"
    inner: int = 1
    """HSDP, HFSDP: members of the inner group, which shares weights and gradients."""
    overlap: bool = False
    """Gradient reduction and parameter gathering hidden behind compute; off by default, as in Megatron Core 0.19.2."""
    params: int = 0
    """A round number of parameters for the ideal rows; 0: the config's own."""

    def __post_init__(self) -> None:
        if self.schedule not in NAMES:
            raise IllegalScheduleError(f"no schedule is called {self.schedule!r}; there are {', '.join(NAMES)}")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise IllegalScheduleError(f"--chunks {self.chunks} has no effect on {self.schedule}: use --schedule interleaved")
        if self.schedule == "interleaved" and self.chunks < 2:
            raise IllegalScheduleError("interleaved needs at least 2 virtual stages a rank: give --chunks 2")


def options_of(
    config: Config, *, schedule: str = "", chunks: int = 0, recompute: str | None = None, overlap: bool = False, **given: Any
) -> Options:
    """What the config says of schedule, virtual stages, recompute, sharding and overlap, where nothing else was asked for.

    Another schedule than the config's is asked for with its own number of virtual stages; the config's belongs to its own.
    """
    own = config.parallel.schedule.replace("_", "-")
    name = schedule or own
    if not chunks:
        chunks = num_chunks(config) if name == own == "interleaved" else 1
    both = config.parallel.overlap_reduce and config.parallel.overlap_gather
    policy = cast(Recompute, recompute or config.parallel.recompute)
    given["sharding"] = given.get("sharding") or config.parallel.sharding
    given["inner"] = given.get("inner") or config.parallel.fsdp_inner
    return Options(schedule=name, chunks=chunks, recompute=policy, overlap=overlap or both, **given)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A config under a hardware profile and options. What follows from them is worked out once (hence no slots)."""

    config: Config
    profile: Profile
    options: Options
    quick: bool = False
    """Quantities are floats: for comparing, not for printing."""
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What other modules work out once of the config alone, whatever the options."""
    staged: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The same of the stages that the schedule makes, whatever recompute is."""

    def __post_init__(self) -> None:
        if self.config.model.experts and self.options.sharding != "zero1":
            raise ValueError(f"--sharding {self.options.sharding}: experts are shared out with parallel.ep, beside zero1")

    def with_recompute(self, policy: Recompute) -> Setup:
        """The same under another policy. Nothing that has been worked out depends on it."""
        return self._with(recompute=policy)

    def with_schedule(self, schedule: str, chunks: int) -> Setup:
        """The same under another schedule. Only what depends on its stages is worked out again."""
        return self._with("staged", "stages", "_held", schedule=schedule, chunks=chunks)

    def _with(self, *anew: str, **changes: Any) -> Setup:
        other = object.__new__(Setup)  # a tenth of what `replace` takes, and a search does it a thousand times
        kept = {name: value for name, value in vars(self).items() if name not in anew}
        vars(other).update({"staged": {}, **kept, "options": replace(self.options, **changes)})
        return other

    def ratio(self, a: int, b: int) -> Quantity:
        """a / b, exact or quick."""
        return a / b if self.quick else Fraction(a, b)

    def ring(self, members: int) -> Quantity:
        """Share of the buffer that a member of a ring all-reduce sends: 2 (N-1)/N, the lower bound for any all-reduce."""
        return self.ratio(2 * (members - 1), members)

    def half_ring(self, members: int) -> Quantity:
        """The same for a reduce-scatter, or for an all-gather."""
        return self.ratio(members - 1, members)

    @cached_property
    def mesh(self) -> MeshShape:
        """The mesh; DP is what remains of the ranks."""
        return mesh_shape(self.config)

    @cached_property
    def alike(self) -> MeshShape:
        """The mesh if nobody shared out experts: which groups then talk is said apart."""
        return replace(self.mesh, ep=1)

    @cached_property
    def links(self) -> ProfileKey:
        """What of the hardware decides a group's links."""
        return key(self.profile)

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model, or the round number that was asked for."""
        return self.options.params or num_parameters(self.config)

    @cached_property
    def active_params(self) -> int:
        """Parameters that compute a token; of a round number the same share as of the config's."""
        own, active = num_parameters(self.config), active_parameters(self.config)
        return self.num_params * active // own

    @cached_property
    def expert_params(self) -> Fraction:
        """Parameters of all experts; of a round number the same share as of the config's."""
        model = self.config.model
        experts = 3 * model.layers * model.experts * model.hidden * model.ffn
        return Fraction(self.num_params * experts, num_parameters(self.config))

    @cached_property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.config.model.heads * head_dim(self.config)

    @cached_property
    def keys(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return kv_heads(self.config) * head_dim(self.config)

    @cached_property
    def local_keys(self) -> int:
        """Key width a TP rank holds: where tp exceeds the kv heads, they are replicated."""
        return max(1, kv_heads(self.config) // self.mesh.tp) * head_dim(self.config)

    @cached_property
    def expert_rows(self) -> Quantity:
        """Rows of a micro-batch that a rank sends to a layer's experts, and gets from others where all are used alike: each
        token as often as it has experts, less what exceeds their capacity."""
        model = self.config.model
        room = min(Fraction(1), Fraction(repr(model.capacity))) if model.capacity else 1
        return self.tokens * model.experts_per_token * room

    @cached_property
    def tokens(self) -> Quantity:
        """Positions of a micro-batch on one CP rank."""
        return self.ratio(self.config.data.seq_len * self.config.batch.micro_batch, self.mesh.cp)

    @property
    def tokens_per_update(self) -> int:
        """Sequences of an update times their length; each counted once, whatever the layout."""
        return self.config.batch.global_batch * self.config.data.seq_len

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches of the busiest replica in an update."""
        return -(-self.config.batch.global_batch // (self.config.batch.micro_batch * self.mesh.dp))

    @cached_property
    def width(self) -> int:
        """Bytes of an activation: the config's dtype; `auto` is bf16 where the hardware has a bf16 peak, else fp32."""
        bf16 = self.profile.peak_flops and self.profile.gpu.peak_dtype == "bfloat16"
        widths = {"float64": 8, "float32": 4, "bfloat16": 2, "auto": 2 if bf16 else 4}
        return widths[self.config.machine.compute_dtype]

    @property
    def exact(self) -> int:
        """Bytes of what is never narrower than fp32: norms, softmax, router, loss, gradients of keys and values."""
        return max(4, self.width)

    @property
    def sums(self) -> int:
        """Bytes of activations while TP ranks sum them: on a CPU fp32 at least, as its backend would round each sum."""
        device = self.config.machine.device
        on_cpu = device == "cpu" or (device == "auto" and self.profile.device == "cpu")
        return self.exact if on_cpu else self.width

    @property
    def sp(self) -> int:
        """By how much norms and residuals are cut: tp under sequence parallelism, else 1."""
        return self.mesh.tp if self.config.parallel.sp else 1

    def require_schedule(self) -> None:
        """Raises IllegalScheduleError if the schedule cannot run this many micro-batches on these stages."""
        if self.options.schedule == "interleaved":
            require_groups(self.mesh.pp, self.microbatches)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each virtual stage: the config's counts where they are of this many stages, else even ones."""
        number, counts = self.mesh.pp * self.chunks, self.config.parallel.layer_counts
        return partition_layers(self.config.model.layers, number, counts if len(counts) == number else ())

    @property
    def chunks(self) -> int:
        """Virtual stages of a rank; the V shape always has two."""
        return 2 if self.options.schedule == "zb-v" else self.options.chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank."""
        return self._held[rank]

    @property
    def placement(self) -> Placement:
        """How the schedule lays virtual stages onto ranks."""
        return "vee" if self.options.schedule == "zb-v" else "loop"

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        owners = [
            rank_of(stage, num_ranks=self.mesh.pp, placement=self.placement) for stage in range(self.mesh.pp * self.chunks)
        ]
        held: list[list[int]] = [[] for _ in range(self.mesh.pp)]
        for stage, owner in enumerate(owners):
            held[owner].append(stage)
        return tuple(tuple(stages) for stages in held)


def wrong_inner(setup: Setup) -> str:
    """Why replicas cannot be grouped as asked; empty if they can, or are not."""
    mesh, inner, sharding = setup.mesh, setup.options.inner, setup.options.sharding
    if sharding not in ("hsdp", "hfsdp"):
        return f"--inner {inner} has no effect on {sharding}: use --sharding hsdp or hfsdp" if inner > 1 else ""
    if mesh.shards % inner or inner < 2:
        return f"--inner {inner}: wanted a divisor of DP x CP = {mesh.dp} x {mesh.cp}, 2 or more"
    return ""


def wrong_sharding(config: Config, options: Options) -> str:
    """Why the engine would refuse this way of sharing with the rest of the config, by the loader's own rules; empty if not."""
    schedule = options.schedule.replace("-", "_") if config.parallel.pp > 1 else "1f1b"
    parallel = structs.replace(
        config.parallel, sharding=options.sharding, schedule=schedule, overlap_reduce=False, overlap_gather=False
    )
    asked = structs.replace(config, parallel=parallel)
    found = [problem for problem in combinations(asked) if problem.path == "parallel.sharding"]
    return f"--sharding {options.sharding}: {found[0].given}; allowed: {found[0].allowed}" if found else ""


def layout(mesh: MeshShape) -> str:
    """`TP8 x CP1 x PP16 x DP128 = 16,384`, in rank order, innermost first. EP is not a factor: it lives inside DP x CP."""
    factors = " x ".join(f"{axis.upper()}{mesh.size(axis)}" for axis in mesh.order)
    return f"{factors} = {mesh.world:,}" + (f" (EP{mesh.ep} inside DP x CP)" if mesh.ep > 1 else "")
