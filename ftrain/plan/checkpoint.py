"""`ftrain plan checkpoint`: how large, who writes it, what it costs, and how often it pays.

The state is stored once, whatever the layout: 14 bytes a parameter, not times the replicas and without gradients. What a
save costs the training is a copy to host memory; the upload runs beside it. So two intervals are reckoned: one for the
memory tier, which a restart of the same machines reads, and one for storage, which a lost machine needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ftrain.checkpoint.names import PEER_SLOTS
from ftrain.plan import failure_table, interval, state
from ftrain.plan.figure import Answer, Section, Table, Value, duration, nbytes, number, percent, seconds, why
from ftrain.plan.params import largest
from ftrain.plan.setup import DOC_A, DOC_B, Setup, layout
from ftrain.units import plural

STORED = state.WEIGHT + state.MASTER + state.MOMENTS
"""Bytes a parameter takes in storage: bf16 weight, fp32 master, two fp32 moments. No gradient."""

PART_BYTES = 16 * 2**20
"""Size of an upload request: the default of `storage.multipart`."""

PUT_PRICE, GB_MONTH_PRICE = 0.005 / 1000, 0.023
"""US dollars: S3 standard, us-east-1, list prices. Change them in thought; they are printed with the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What is assumed about saving and failing. Zeros are worked out from the hardware or left out."""

    stall_s: float = 0.0
    """Time a save blocks training; 0: the copy to host memory."""
    restart_s: float = 600.0
    """From the failure to the first step again: detection, restart, load."""
    rate: float = 0.0
    """Unplanned interruptions per 1,000 node-days; 0: from the failure table."""
    table: str = "llama3"
    store_gb_s: float = 0.0
    """Bandwidth of the whole store; 0: unknown, the network cards are the limit."""
    left_s: float = 0.0
    """Time left before the job is ended; 0: not asked."""


def stored(setup: Setup) -> int:
    """Bytes a parameter in a checkpoint: the weights may be left out (checkpoint.weights), the masters are rounded then."""
    return STORED if setup.config.checkpoint.weights else STORED - state.WEIGHT


def rank_bytes(setup: Setup) -> Fraction:
    """What the busiest rank writes: its ZeRO-1 share, weights rounded from its masters."""
    own = largest(setup)
    return stored(setup) * Fraction(own.common + own.experts * setup.mesh.ep, setup.mesh.shards)


def stall_s(setup: Setup, costs: Costs) -> float:
    """Seconds that a save blocks training."""
    return costs.stall_s or float(rank_bytes(setup)) / (setup.profile.server.host_gb_s * 1e9)


def nodes(setup: Setup) -> int:
    """Servers of the job."""
    return -(-setup.mesh.world // setup.profile.server.gpus)


def mtbf_s(setup: Setup, costs: Costs) -> float:
    """Mean time between unplanned interruptions of this job."""
    rate = costs.rate or failure_table.load(costs.table).per_1000_node_days
    return failure_table.mtbf_s(rate, nodes(setup))


def best(setup: Setup, costs: Costs) -> interval.Reach:
    """The estimate of effective time at Young's interval."""
    stall, mtbf = stall_s(setup, costs), mtbf_s(setup, costs)
    return interval.reach(interval.young(stall, mtbf), stall_s=stall, restart_s=costs.restart_s, mtbf_s=mtbf)


def answer(setup: Setup, costs: Costs) -> Answer:
    """The whole answer."""
    sections = [_size(setup), _writing(setup, costs), _memory_tier(setup, costs), _interval(setup, costs)]
    sections.append(failure_table.section(failure_table.load(costs.table)))
    return Answer(
        command="checkpoint",
        title=f"Checkpoints of {layout(setup.mesh)} on {setup.profile.title}",
        sections=tuple(sections),
        refusals=_refusals(setup, costs),
    )


def _size(setup: Setup) -> Section:
    n, each = setup.num_params, stored(setup)
    parts, formula = ("weight 2, master 4, moments 8", "2 + 4 + 8") if each == STORED else ("master 4, moments 8", "4 + 8")
    return Section(
        title="Size",
        figures=(
            number("stored_bytes_per_param", f"bytes a parameter ({parts}; no gradient)", value=each, unit="B",
                   why=why(formula, DOC_A)),
            nbytes("size", "one checkpoint", value=each * n,
                   why=why(f"N x {each} B, once, whatever the layout", DOC_A, N=n)),
            nbytes("size_limit", "with padding and checksums, at most", value=Fraction(each * n * 101, 100), digits=2,
                   why=why("+ 1 %", "architecture 1.1")),
        ),
        notes=(f"not times the {plural(setup.mesh.dp, 'replica')}: sharding changes who writes, not how much",),
    )  # fmt: skip


def _writing(setup: Setup, costs: Costs) -> Section:
    largest, world, whole = rank_bytes(setup), setup.mesh.world, stored(setup) * setup.num_params
    requests = world * -(-int(largest) // PART_BYTES) + 3
    upload = _upload_s(setup, costs)
    limit = "the store's bandwidth" if costs.store_gb_s else "one network card"
    return Section(
        title="Writing",
        figures=(
            number("writers", "writers, one pack each", value=world, why=why("every rank writes its optimizer shard", DOC_B)),
            nbytes("rank_bytes", "written by the busiest rank (Llama 3 reports 1 MB to 4 GB)", value=largest, digits=2,
                   why=why(f"{stored(setup)} B x parameters of its stage / (DP x CP), those of experts / (DP x CP / EP)", DOC_B,
                           shards=setup.mesh.shards, ep=setup.mesh.ep)),
            number("objects", "objects: packs, manifest, view, commit", value=world + 3,
                   why=why("ranks + 3", "architecture 1.2")),
            number("requests", "write requests", value=requests,
                   why=why("ranks x ceil(bytes / 16 MiB) + 3", "ftrain.plan.checkpoint")),
            number("request_cost", "their price", value=requests * PUT_PRICE, unit="USD", digits=2,
                   why=why("requests x 0.005 / 1000 USD", "S3 standard list price")),
            number("storage_cost", "price of keeping one for a month", value=whole / 1e9 * GB_MONTH_PRICE, unit="USD", digits=0,
                   why=why("GB x 0.023 USD", "S3 standard list price")),
            duration("upload_s", f"upload, bound by {limit}", value=upload,
                     why=why("bytes / bandwidth", setup.profile.sources["server"])),
        ),
    )  # fmt: skip


def _upload_s(setup: Setup, costs: Costs) -> float:
    alone = float(rank_bytes(setup)) / (setup.profile.nic_gb_s * 1e9)
    shared = stored(setup) * setup.num_params / (costs.store_gb_s * 1e9) if costs.store_gb_s else 0.0
    return max(alone, shared)


def _slots(setup: Setup) -> int:
    """Memory areas for each rank of a server: its own, and those for the copies of another server's ranks."""
    checkpoint = setup.config.checkpoint
    return checkpoint.slots + (PEER_SLOTS if checkpoint.peer_copy else 0)


def _arena(setup: Setup) -> Fraction:
    """Bytes of all memory areas of a server."""
    return rank_bytes(setup) * _slots(setup) * setup.profile.server.gpus


def _memory_tier(setup: Setup, costs: Costs) -> Section:
    server, checkpoint = setup.profile.server, setup.config.checkpoint
    arena = _arena(setup)
    copies = f", {PEER_SLOTS} of them for copies of another node's snapshots" if checkpoint.peer_copy else ""
    figures = [
        duration("stall_s", "stall of a save", value=stall_s(setup, costs),
                 why=why("--stall" if costs.stall_s else "bytes of the busiest rank / bandwidth to host memory",
                         setup.profile.sources["server"], gb_s=server.host_gb_s)),
        nbytes("arena_per_server", f"host memory of a server for {_slots(setup)} arena slots{copies}", value=arena,
               digits=2, why=why("bytes of a rank x slots x cards of a server", "architecture 1.3")),
    ]  # fmt: skip
    if server.host_memory_gb:
        share = arena / Fraction(server.host_memory_gb * 10**9)
        figures.append(
            percent("arena_share", "of its memory", value=share,
                    why=why("arenas / host memory", setup.profile.sources["server"], host_memory_gb=server.host_memory_gb))
        )  # fmt: skip
    return Section(title="Memory tier", figures=tuple(figures))


def _interval(setup: Setup, costs: Costs) -> Section:
    mtbf, stall = mtbf_s(setup, costs), stall_s(setup, costs)
    young, reach = interval.young(stall, mtbf), best(setup, costs)
    slower = max(young, _upload_s(setup, costs))
    needed = stored(setup) * setup.num_params / young / 1e9
    return Section(
        title="Interval",
        figures=(
            duration("mtbf_s", "time between unplanned interruptions of this job", value=mtbf,
                     why=why("1000 x 86400 / (nodes x rate)", "per 1,000 node-days", nodes=nodes(setup),
                             rate=costs.rate or failure_table.load(costs.table).per_1000_node_days)),
            duration("young_s", "interval by Young", value=young, why=why("sqrt(2 w M)", interval.YOUNG, w=stall, M=mtbf)),
            duration("daly_s", "interval by Daly", value=interval.daly(stall, mtbf),
                     why=why(interval.DALY, "Daly 2006", w=stall, M=mtbf)),
            percent("effective", f"effective time, {seconds(costs.restart_s)} to restart", value=reach.effective,
                    why=why(interval.ESTIMATOR, interval.ESTIMATOR, u0=costs.restart_s, w=stall, M=mtbf, dt=young)),
            number("store_gb_s_needed", "bandwidth the store needs to keep up with that interval", value=needed, unit="GB/s",
                   digits=1, why=why("size / interval", "ftrain.plan.checkpoint")),
            duration("storage_interval_s", "best interval that uploads allow, one at a time", value=slower,
                     why=why("max(Young, upload)", "architecture 1.3")),
        ),
        tables=(_interval_table(costs, stall, mtbf),),
        notes=(f"what limits it: {reach.largest()}",),
    )  # fmt: skip


def _interval_table(costs: Costs, stall: float, mtbf: float) -> Table:
    """The estimate around the optimum, so that one sees how flat it is."""
    best = interval.young(stall, mtbf)
    rows: list[tuple[Value, ...]] = []
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        part = interval.reach(best * factor, stall_s=stall, restart_s=costs.restart_s, mtbf_s=mtbf)
        shares = (part.effective, part.saving, part.restarting, part.repeating)
        rows.append((seconds(best * factor), *(f"{100 * share:.2f} %" for share in shares)))
    return Table(
        key="intervals",
        title="Around the optimum",
        columns=("interval", "effective", "saving", "restarting", "repeating"),
        rows=tuple(rows),
        formulas={"effective": interval.ESTIMATOR},
        source="arXiv 2410.21680",
    )


def _refusals(setup: Setup, costs: Costs) -> tuple[str, ...]:
    found = []
    server = setup.profile.server
    if server.host_memory_gb and _arena(setup) > server.host_memory_gb * 10**9:
        found.append("arenas are larger than the host's memory: lower checkpoint.slots, or use more replicas")
    upload = _upload_s(setup, costs)
    if costs.left_s and stall_s(setup, costs) + upload > costs.left_s:
        needs = seconds(stall_s(setup, costs) + upload)
        found.append(
            f"a save started now needs {needs}, {seconds(costs.left_s)} are left: it would not be committed; save earlier"
        )
    return tuple(found)
