"""Pictures of the plan: from a card to the cluster, with the line along which one shard is kept equal; and where ZeRO-1 moves
what. The topology also comes as a page in which the part under the pointer is lifted and named while the others dim.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise

from ftrain.config import Axis
from ftrain.parallel.shape import AXES
from ftrain.plan.placement import place
from ftrain.plan.setup import Setup, layout
from ftrain.plan.svg import COLOURS, Picture
from ftrain.units import plural

LIFT = (
    "text{pointer-events:none} .part{transition:transform .15s,opacity .15s} "
    "svg:has(.part:hover) .part:not(:hover){opacity:.35} .part:hover{transform:translateY(-5px)}"
)
MAX_REPLICAS = 160


def topology(setup: Setup, rank: int) -> str:
    """Card -> server -> replica -> replicas, as SVG. Marked: the rank, and the ranks that hold the same shard."""
    mesh, profile = setup.mesh, setup.profile
    inside = mesh.group(rank, tuple(axis for axis in AXES if axis != "dp"))
    servers = sorted({member // profile.server.gpus for member in inside})
    height = max(330, 120 + 26 * len(servers))
    picture = Picture(1120, height, title=f"{layout(mesh)}: rank {rank} and its shard")
    picture.text((16, 26), f"{layout(mesh)}; {_name(setup, rank)}", size=14)
    _card(picture, setup, rank)
    _server(picture, setup, rank)
    _replica(picture, setup, rank, servers)
    _replicas(picture, setup, rank)
    return picture.render(style=LIFT)


def _name(setup: Setup, rank: int) -> str:
    here = setup.mesh.coordinate(rank)
    seat = ", ".join(f"{name} {index}" for name, index in place(rank, setup.profile).items())
    return f"rank {rank}: stage {here.pp}, card {here.tp}, replica {here.dp} ({seat})"


def _card(picture: Picture, setup: Setup, rank: int) -> None:
    here = setup.mesh.coordinate(rank)
    picture.text((16, 66), "1 card", size=12)
    picture.rect((16, 76), (120, 84), fill=COLOURS["mark"], name=_name(setup, rank), css="part")
    picture.text((76, 112), f"stage {here.pp}", anchor="middle")
    picture.text((76, 130), f"TP {here.tp} of {setup.mesh.tp}", anchor="middle")


def _server(picture: Picture, setup: Setup, rank: int) -> None:
    gpus = setup.profile.server.gpus
    first = rank // gpus * gpus
    picture.text((180, 66), f"{plural(gpus, 'card')}: a server ({setup.profile.server.link_name})", size=12)
    picture.rect((176, 76), (220, 84), fill=COLOURS["soft"], name=f"server {rank // gpus}")
    for index in range(min(gpus, setup.mesh.world - first)):
        at = (182 + (index % 4) * 53, 82 + (index // 4) * 38)
        fill = COLOURS["mark"] if first + index == rank else COLOURS["F"]
        picture.rect(at, (48, 32), fill=fill, name=_name(setup, first + index), css="part")
        picture.text((at[0] + 24, at[1] + 20), str(first + index), size=10, anchor="middle")


def _replica(picture: Picture, setup: Setup, rank: int, servers: list[int]) -> None:
    gpus, dp = setup.profile.server.gpus, setup.mesh.coordinate(rank).dp
    picture.text((440, 66), f"{plural(len(servers), 'server')}: replica {dp}", size=12)
    for row, server in enumerate(servers):
        picture.rect((436, 76 + row * 26), (262, 24), fill=COLOURS["soft"], name=f"server {server}")
        for index in range(gpus):
            member = server * gpus + index
            if member < setup.mesh.world and setup.mesh.coordinate(member).dp == dp:
                fill = COLOURS["mark"] if member == rank else COLOURS["F"]
                picture.rect((440 + index * 32, 79 + row * 26), (28, 18), fill=fill, name=_name(setup, member), css="part")


def _replicas(picture: Picture, setup: Setup, rank: int) -> None:
    """All replicas as squares; the line joins the one card in each that holds the same shard."""
    axes: tuple[Axis, ...] = ("dp",)
    shard = setup.mesh.group(rank, axes)
    picture.text((740, 66), f"{plural(setup.mesh.dp, 'replica')}; the line: one shard, reduced over all of them", size=12)
    centres = []
    for replica, member in enumerate(shard[:MAX_REPLICAS]):
        at = (740 + (replica % 16) * 22, 80 + (replica // 16) * 22)
        fill = COLOURS["mark"] if member == rank else COLOURS["F"]
        picture.rect(at, (18, 18), fill=fill, name=f"replica {replica}, same shard on {_name(setup, member)}", css="part")
        centres.append((at[0] + 9, at[1] + 9))
    for start, stop in pairwise(centres):
        picture.line(start, stop, colour=COLOURS["mark"], width=1.5)
    if len(shard) > MAX_REPLICAS:
        picture.text((740, 80 + MAX_REPLICAS // 16 * 22 + 16), f"... and {len(shard) - MAX_REPLICAS} more")


def html(svg: str, *, title: str) -> str:
    """The picture as a page: the name of the part under the pointer stands below it."""
    script = (
        "const name=document.getElementById('name');document.querySelectorAll('rect').forEach(part=>{"
        "const tip=part.querySelector('title');"
        "if(tip){part.addEventListener('pointerenter',()=>{name.textContent=tip.textContent})}})"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<body style="font-family:sans-serif">\n'
        f'{svg}\n<p id="name">Point at a part: it is lifted and named.</p>\n<script>{script}</script>\n</body></html>\n'
    )


def zero1() -> str:
    """The flow of one update between two members: whole bars for what both keep, half bars for what is shared."""
    picture = Picture(760, 250, title="ZeRO-1 on two members: reduce-scatter, update, all-gather")
    picture.text((16, 24), "ZeRO-1 on two members: weights and gradients whole, optimizer records halved", size=14)
    bars = (("W bf16", "F", 1.0), ("G fp32", "B", 1.0), ("M fp32", "W", 0.5), ("Adam 2 x fp32", "W", 0.5))
    for member in range(2):
        left = 20 + member * 420
        picture.text((left, 52), f"member {member}", size=12)
        for row, (name, colour, share) in enumerate(bars):
            top = 62 + row * 34
            offset = 0 if share == 1 or member == 0 else 150
            picture.rect((left, top), (300, 26), fill=COLOURS["idle"], name=f"{name}: whole would be this long")
            picture.rect((left + offset, top), (300 * share, 26), fill=COLOURS[colour], name=f"{name} on member {member}")
            picture.text((left + offset + 6, top + 17), name)
    for top, text in ((113, "1 reduce-scatter"), (168, "2 update, each its half"), (79, "3 all-gather")):
        picture.text((380, top - 6), text, size=10, anchor="middle")
        if not text.startswith("2"):
            picture.line((322, top), (438, top), colour=COLOURS["mark"], width=1.5)
    picture.text((20, 226), "bytes a member sends per parameter: (d-1)/d x 4 (gradients), then (d-1)/d x 2 (weights)")
    return picture.render()
