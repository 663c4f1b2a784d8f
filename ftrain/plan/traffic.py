"""`ftrain plan traffic`: what each group sends in an update, over which link, and how long that takes at best.

The order of the axes decides which group gets the fast links. So the answer ends with a check of that order: the group that
moves most belongs innermost, and a tensor parallel group that leaves its server is refused.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from ftrain.plan.figure import Answer, Figure, Section, Table, Value, decimal, nbytes, number, seconds, size, why
from ftrain.plan.params import largest
from ftrain.plan.placement import Path, path
from ftrain.plan.ring import Volume
from ftrain.plan.setup import DOC_A, DOC_B, Setup, layout
from ftrain.plan.state import GRADIENT
from ftrain.plan.volume import activation_bytes, volumes
from ftrain.units import plural

RING = "Patarasuk and Yuan 2009: no all-reduce can send less than 2(N-1)/N of the buffer from each member"


def group_path(setup: Setup, volume: Volume) -> Path:
    """The slowest link of a group."""
    # which groups there are is said by `run` and `step`; what is known is known for any ep
    return path(setup.alike, volume.axes, setup.links, run=volume.run, step=volume.step)


def group_gb_s(setup: Setup, volume: Volume) -> float:
    """What a member sends at: of a ring only neighbours cross a tier, where everyone sends to everyone all do."""
    way = group_path(setup, volume)
    return way.crowded_gb_s if volume.everyone else way.gb_s


def answer(setup: Setup, *, members: int = 0, buffer_bytes: int = 0) -> Answer:
    """The whole answer; `members` and `buffer_bytes` ask the ring section about another ring."""
    return Answer(
        command="traffic",
        title=f"Traffic of {layout(setup.mesh)} on {setup.profile.title}",
        sections=(
            _links(setup),
            _groups(setup, volumes(setup, aligned=True)),
            _ring(setup, members, buffer_bytes),
            _power(setup),
        ),
        refusals=refusals(setup),
        warnings=_order_warnings(setup) + expert_warnings(setup),
    )


def refusals(setup: Setup) -> tuple[str, ...]:
    """A TP group that crosses servers: it talks in every layer, and would do so over a network card."""
    mesh, profile = setup.mesh, setup.profile
    if mesh.tp == 1 or not path(setup.alike, ("tp",), setup.links).crosses_servers:
        return ()
    ratio = profile.link_gb_s / profile.nic_gb_s
    gpus = profile.server.gpus
    return (
        f"tensor parallel groups of {mesh.tp} in rank order {', '.join(mesh.order)} cross servers of {plural(gpus, 'card')}: "
        f"every layer would exchange over a link {ratio:.3g} times slower than {profile.server.link_name}. Keep tp first in "
        f"parallel.order, and parallel.tp a divisor of {gpus}",
    )


def _links(setup: Setup) -> Section:
    profile = setup.profile
    server, link, nic = profile.server, Fraction(profile.link_gb_s), Fraction(profile.nic_gb_s)
    source = profile.sources["server"]
    rows: list[tuple[Value, ...]] = [(server.link_name, server.gpus, "-", f"{decimal(link)} GB/s", f"{decimal(link)} GB/s")]
    for tier in profile.tiers:
        crowded = f"{profile.tier_gb_s(tier):.4g} GB/s"
        rows.append((tier.name, f"{tier.gpus:,}", f"1:{tier.oversubscription:g}", f"{decimal(nic)} GB/s", crowded))
    return Section(
        title="Links, per direction",
        figures=(
            number("link_gb_s", f"{server.link_name}, one direction", value=link, unit="GB/s",
                   why=why("lanes x GB/s a lane", source, lanes=server.link_lanes, per_lane=server.link_gb_s_per_lane)),
            number("link_both_gb_s", "both directions added, as vendors print it", value=2 * link, unit="GB/s",
                   why=why("2 x one direction", source)),
            number("nic_gb_s", "network card of a GPU, one direction", value=nic, unit="GB/s",
                   why=why("Gb/s / 8", source, gbit_s=server.nic_gbit_s)),
            Figure(key="nic_over_link", label="card over " + server.link_name, value=nic / link, text=str(nic / link),
                   why=why("nic / link", source, nic=nic, link=link)),
        ),
        tables=(Table(key="tiers", title="Tiers", columns=("tier", "GPUs", "oversubscription", "alone", "all at once"),
                      rows=tuple(rows), source=profile.sources["network"]), _server(setup)),
    )  # fmt: skip


def _server(setup: Setup) -> Table:
    """What the profile knows of a server."""
    server, gpu = setup.profile.server, setup.profile.gpu
    facts: dict[str, Value] = {
        "GPUs": server.gpus,
        "memory of a GPU": f"{gpu.memory_gb:g} GB",
        "dense bf16": f"{gpu.dense_bf16_tflops:,g} TFLOP/s",
        "sparse bf16": f"{gpu.sparse_bf16_tflops:,g} TFLOP/s",
        "power of a GPU": f"{gpu.power_w:g} W",
        "network cards": f"{server.gpus} x {server.nic_gbit_s:g}G, one for each GPU",
        "CPUs": server.cpus,
        "switches": server.switches,
        "fans": server.fans,
        "size": " x ".join(str(side) for side in server.size_mm) + " mm" if server.size_mm else "",
        "weight": f"{server.weight_kg:g} kg" if server.weight_kg else "",
        "cooling": server.cooling,
    }
    rows = tuple((name, value) for name, value in facts.items() if value)
    return Table(key="server", title="Server", columns=("what", "value"), rows=rows, source=setup.profile.sources["server"])


def _groups(setup: Setup, found: tuple[Volume, ...]) -> Section:
    rows: list[tuple[Value, ...]] = []
    for volume in found:
        way = group_path(setup, volume)
        rate = group_gb_s(setup, volume)
        best = float(volume.nbytes) / (rate * 1e9)
        crowded = float(volume.nbytes) / (way.crowded_gb_s * 1e9)
        sent = (size(volume.ideal, digits=2), size(volume.nbytes, digits=2))
        rows.append((volume.name, volume.members, *sent, way.link, f"{rate:.4g} GB/s", seconds(best), seconds(crowded)))
    table = Table(
        key="groups",
        title="Sent by the busiest rank in one update",
        columns=("group", "members", "ideal", "sent", "slowest link", "rate", "time", "if all cross at once"),
        rows=tuple(rows),
        formulas={volume.name: volume.formula for volume in found}
        | {"sent": "the ideal, which the founding documents count, and what this engine sends beyond it: the table below"},
        source="ring collectives; bandwidth only, no latency",
    )
    hop = activation_bytes(setup) / setup.sp
    return Section(
        title="Groups",
        figures=(
            number("tp_all_reduces", "TP all-reduces of a layer (2 forward, 2 backward)", value=4 if setup.mesh.tp > 1 else 0,
                   why=why("column then row: one exchange in attention, one in the MLP, each way",
                           "Megatron-LM, arXiv 1909.08053")),
            nbytes("hop", "one hand-off between stages", value=hop,
                   why=why("w sbh / (c r): an activation; weights stay where they are", DOC_A, r=setup.sp, c=setup.mesh.cp)),
        ),
        tables=(table, _lines(found)),
    )  # fmt: skip


def _lines(found: tuple[Volume, ...]) -> Table:
    """What the bytes of each group are made of."""
    rows: list[tuple[Value, ...]] = []
    formulas: dict[str, str] = {}
    for volume in found:
        for line in volume.lines:
            share = f"{100 * float(line.nbytes) / float(volume.nbytes):.1f} %"
            rows.append((volume.name, line.what, size(line.nbytes, digits=2), share))
            formulas[f"{volume.name}: {line.what}"] = line.formula
    return Table(
        key="sent_lines",
        title="Line by line: the ideal first, then what this engine sends beyond it",
        columns=("group", "what", "sent", "of the group"),
        rows=tuple(rows),
        formulas=formulas,
        source="collectives of ftrain.parallel, counted on running ranks by tests/plan/test_volumes_counted.py",
    )


def _ring(setup: Setup, members: int, buffer_bytes: int) -> Section:
    profile = setup.profile
    n = members or setup.mesh.shards
    buffer = Fraction(buffer_bytes or (GRADIENT * largest(setup).common if n > 1 else 0))
    sent = setup.ring(n) * buffer
    return Section(
        title=f"A ring all-reduce over {n}",
        figures=(
            number("ring_factor", "sent by a member, per byte of the buffer", value=setup.ring(n),
                   why=why("2 (N-1)/N", RING, N=n)),
            number("ring_steps", "steps", value=2 * (n - 1),
                   why=why("N-1 to reduce, N-1 to spread", DOC_B, N=n)),
            nbytes("ring_buffer", "buffer", value=buffer, digits=None if buffer_bytes else 2,
                   why=why("fp32 gradients of a rank, or --size", DOC_B)),
            nbytes("ring_sent", "sent by each member", value=sent, digits=2,
                   why=why("2 (N-1)/N x buffer", RING, N=n, buffer=buffer)),
            number("ring_nic", f"at {profile.nic_gb_s:g} GB/s (network card)", value=float(sent) / (profile.nic_gb_s * 1e9),
                   unit="s", digits=3, why=why("sent / rate, bandwidth only; normally overlapped", DOC_B, sent=sent)),
            number("ring_link", f"at {profile.link_gb_s:g} GB/s ({profile.server.link_name})", unit="s", digits=4,
                   value=float(sent) / (profile.link_gb_s * 1e9), why=why("sent / rate, bandwidth only", DOC_B, sent=sent)),
        ),
    )  # fmt: skip


def _power(setup: Setup) -> Section:
    watts = setup.profile.gpu.power_w
    total = Fraction(watts) * setup.mesh.world / 10**6
    return Section(
        title="Power",
        figures=(
            number("gpu_power_mw", "GPUs of the job at full load", value=total, unit="MW", digits=2,
                   why=why("ranks x W", setup.profile.sources["gpu"], ranks=setup.mesh.world, watts=watts)),
        ),
        notes=("a synchronous stop (a collective, a checkpoint, a failure) swings the site by up to this much, plus servers "
               "and cooling: Llama 3 reports tens of MW",),
    )  # fmt: skip


def _order_warnings(setup: Setup) -> tuple[str, ...]:
    """Inner axes should move more than outer ones."""
    moved = {volume.axes[-1]: volume for volume in volumes(setup) if not volume.run and volume.step == 1}
    order = [axis for axis in setup.mesh.order if axis in moved]
    pairs = [(a, b) for a, b in pairwise(order) if moved[a].nbytes < moved[b].nbytes]
    return tuple(
        f"{b.upper()} moves {size(moved[b].nbytes, digits=1)} but lies outside {a.upper()}, which moves "
        f"{size(moved[a].nbytes, digits=1)}: the inner axis has the faster links"
        for a, b in pairs
        if group_path(setup, moved[b]).gb_s < group_path(setup, moved[a]).gb_s
    )


def expert_warnings(setup: Setup) -> tuple[str, ...]:
    """An EP group that leaves its server: it exchanges in every layer, as TP does."""
    found = [volume for volume in volumes(setup) if volume.name == "EP" and group_path(setup, volume).crosses_servers]
    mesh, gpus = setup.mesh, setup.profile.server.gpus
    far = plural(mesh.expert_group(0)[1], "rank") if found else ""
    return tuple(
        f"expert parallel groups of {mesh.ep} have members {far} apart and cross servers of {plural(gpus, 'card')}: "
        f"{size(volume.nbytes, digits=1)} of tokens an update go over network cards. Put dp before pp in parallel.order, or "
        "lower parallel.ep"
        for volume in found
    )
