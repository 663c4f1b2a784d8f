"""`ftrain plan`: what a run needs, costs and loses, before a machine is started. Answers at once, and imports no torch.

ftrain plan memory ftrain.toml --hardware b200 --explain
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftrain.cli import render
from ftrain.cli.output import PAGE, PICTURE, TRACE, Kind, OutputFile, write
from ftrain.cli.plan_phases import each_phase, of_phase
from ftrain.cli.plan_text import show_text
from ftrain.cli.types import COUNT, POSITIVE, Finite
from ftrain.units import plural
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.plan.figure import Answer
    from ftrain.plan.setup import Setup

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def plan() -> None:
    """Plan a run: does it fit, how long does it take, what is lost, and why.

    Every number says with --explain how it came about. A plan that cannot run as asked is refused: exit code 3.

    \b
    Example:
      ftrain plan memory ftrain.toml --hardware b200
    """


@dataclass(frozen=True, slots=True)
class Asked:
    """What all commands take."""

    config: str
    overrides: tuple[str, ...]
    hardware: str
    peak: float
    options: dict[str, Any]
    as_json: bool
    explain: bool
    phase: int | None = None
    """Of a config in phases; None: each of them."""
    answers: list[Answer] | None = None
    loaded: Config | None = None
    """The config, once it has been read."""


_COMMON: tuple[Callable[[F], F], ...] = (
    click.argument("config"),
    click.option("--set", "overrides", multiple=True, metavar="A.B=V", help="Override a config value."),
    click.option(
        "--hardware", default="", metavar="NAME", help="h100, h200, b200, a100, laptop, or a .toml file; else machine.hardware."
    ),
    click.option("--peak", type=POSITIVE, default=0, metavar="TFLOPS", help="Dense peak of a rank, if the profile has none."),
    click.option("--params", type=POSITIVE, default=0, metavar="N", help="A round parameter count for the ideal rows."),
    click.option("--schedule", default="", help="gpipe, 1f1b, interleaved, zb-h1, zb-v; else the config's."),
    click.option("--chunks", type=COUNT, default=0, help="Virtual stages of a rank (interleaved); else the config's."),
    click.option("--recompute", type=click.Choice(["none", "selective", "full"]), help="Else the config's."),
    click.option("--sharding", type=click.Choice(["zero1", "fsdp", "hsdp", "hfsdp"]), help="Else the config's."),
    click.option("--inner", type=COUNT, default=0, help="hsdp, hfsdp: members of an inner group; else the config's."),
    click.option("--overlap", is_flag=True, help="Hide DP communication behind compute."),
    click.option("--phase", type=COUNT, default=None, metavar="N", help="One phase of a config with [[phases]]; else each."),
    click.option("--json", "as_json", is_flag=True, help="Print as JSON."),
    click.option("--explain", is_flag=True, help="Print formula, inputs and source of every number."),
)
_OPTIONS = ("params", "schedule", "chunks", "recompute", "sharding", "inner", "overlap")


def common(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the common options, gathered in one `Asked`."""

    @functools.wraps(command)  # also takes over the command's own options
    def gathered(**given: Any) -> None:
        options = {name: given.pop(name) for name in _OPTIONS}
        options["params"] = ceil(options["params"])
        asked = Asked(
            config=given.pop("config"),
            overrides=given.pop("overrides"),
            hardware=given.pop("hardware"),
            peak=given.pop("peak"),
            options=options,
            as_json=given.pop("as_json"),
            explain=given.pop("explain"),
            phase=given.pop("phase"),
        )
        try:
            each_phase(asked, lambda one: command(one, **given))
        except ValueError as error:  # every error of the planner and of the config loader is one
            render.fail(str(error), ExitCode.CONFIG)
        except (OverflowError, ZeroDivisionError) as error:  # of figures that nothing forbids one by one
            figures = {name: value for name, value in given.items() if isinstance(value, float) and value}
            said = f"these figures lead to none ({error}): give sizes, times and rates that a cluster may have"
            render.fail(f"{said}; given: {figures}", ExitCode.CONFIG)

    wrapped: Callable[..., None] = gathered
    for option in reversed(_COMMON):
        wrapped = option(wrapped)
    return wrapped


def resolve(asked: Asked) -> Setup:
    """The setup of the plan. Hardware: --hardware, else the config's, else the laptop for CPU runs or h100, which is said."""
    from ftrain.load import load
    from ftrain.plan import profile
    from ftrain.plan.setup import Setup, options_of, wrong_inner, wrong_sharding

    config = of_phase(asked.loaded or load(asked.config, asked.overrides), asked.phase)
    name = asked.hardware or profile.of(config)
    of_more = asked.answers is not None and asked.phase  # then it was said of phase 0
    if not (asked.hardware or config.machine.hardware or of_more):
        render.note(f"--hardware not given: {name} assumed")
    hardware = profile.load(name)
    if asked.peak:
        hardware = hardware.with_peak(asked.peak, config.machine.compute_dtype)
    found = Setup(config=config, profile=hardware, options=options_of(config, **asked.options))
    if wrong := wrong_inner(found) or wrong_sharding(config, found.options):
        raise ValueError(wrong)
    return found


def show(asked: Asked, answer: Answer) -> None:
    """Print an answer; a refused plan ends with exit code 3. Of several phases they are kept until all are there."""
    if asked.answers is not None:
        asked.answers.append(answer)
        return
    render.json(answer.as_dict()) if asked.as_json else show_text(answer, explain=asked.explain)
    if answer.refusals:
        raise SystemExit(int(ExitCode.CONFIG))


def _write(path: Path, kind: Kind, text: str) -> None:
    write(path, kind, text)
    render.note(f"wrote {path}")


@plan.command()
@common
def memory(asked: Asked) -> None:
    """Memory of every rank: weights, gradients, optimizer, activations. Does it fit?

    \b
    Example:
      ftrain plan memory ftrain.toml --hardware b200
    """
    from ftrain.plan import memory as planner

    show(asked, planner.answer(resolve(asked)))


@plan.command()
@common
@click.option("--stages", type=COUNT, default=0, help="Another number of stages than the config's.")
@click.option("--microbatches", type=COUNT, default=0, help="Another number of micro-batches.")
@click.option("--svg", type=OutputFile(PICTURE), metavar="FILE", help="Write the chart as SVG.")
@click.option("--perfetto", type=OutputFile(TRACE), metavar="FILE", help="Write the chart for ui.perfetto.dev.")
def schedule(asked: Asked, stages: int, microbatches: int, svg: Path | None, perfetto: Path | None) -> None:
    """Pipeline schedule: how long stages wait, drawn from the object the engine executes.

    \b
    Example:
      ftrain plan schedule ftrain.toml --stages 2 --microbatches 3 --svg chart.svg
    """
    from ftrain.plan import chart
    from ftrain.plan import schedule as planner

    setup = resolve(asked)
    if svg or perfetto:
        name, v = setup.options.schedule, setup.chunks
        line = planner.timeline(name, p=stages or setup.mesh.pp, m=microbatches or setup.microbatches, v=v)
        if line is None:
            raise ValueError("too many actions to draw: give fewer --microbatches")
        stages_, batches = plural(line.schedule.num_ranks, "stage"), plural(line.schedule.num_microbatches, "micro-batch")
        title = f"{name}, {stages_}, {batches}"
        if svg:
            _write(svg, PICTURE, chart.svg(line, title=title))
        if perfetto:
            _write(perfetto, TRACE, chart.perfetto(line, unit_us=1000))
    show(asked, planner.answer(setup, stages=stages, microbatches=microbatches))


@plan.command()
@common
@click.option("--ring", type=COUNT, default=0, metavar="N", help="Members of the ring to explain.")
@click.option("--size", type=POSITIVE, default=0, metavar="BYTES", help="Buffer of that ring.")
def traffic(asked: Asked, ring: int, size: float) -> None:
    """Bytes that each group sends, the slowest link on its way, and the time at best.

    \b
    Example:
      ftrain plan traffic ftrain.toml --hardware h100 --ring 128 --size 10e9
    """
    from ftrain.plan import traffic as planner

    show(asked, planner.answer(resolve(asked), members=ring, buffer_bytes=round(size)))


@plan.command()
@common
@click.option("--tokens", type=POSITIVE, default=0, metavar="D", help="Tokens of the run, instead of steps x batch.")
@click.option("--flops", type=POSITIVE, default=0, help="Operations of the run, instead of 6 N D.")
@click.option("--achieved", type=POSITIVE, default=0, metavar="TFLOPS", help="TFLOP/s of a GPU, for the plain arithmetic.")
@click.option("--effective", type=Finite(0, 1, min_open=True), default=1.0, help="Share of the time that counts.")
@click.option("--replicas", type=COUNT, default=0, help="Check a number of replicas somebody multiplied by.")
@click.option("--against", multiple=True, metavar="A.B=V", help="Predict the step under these overrides beside it.")
def time(asked: Asked, against: tuple[str, ...], achieved: float, **given: Any) -> None:
    """Operations, tokens per update, days, MFU with its peak and convention.

    \b
    Example:
      ftrain plan time ftrain.toml --hardware h100 --achieved 400
    """
    from dataclasses import replace

    from ftrain.load import load
    from ftrain.plan import time as planner

    setup = resolve(asked)
    other = replace(setup, config=of_phase(load(asked.config, (*asked.overrides, *against)), asked.phase)) if against else None
    work = planner.Work(achieved_tflops=achieved, **given)
    show(asked, planner.answer(setup, work, other=other))


@plan.command()
@common
@click.option("--stall", type=POSITIVE, default=0.0, metavar="S", help="Seconds a save blocks training; 0: the copy to memory.")
@click.option("--restart", type=POSITIVE, default=600.0, metavar="S", help="Seconds from failure to the first step again.")
@click.option("--rate", type=POSITIVE, default=0.0, help="Interruptions per 1,000 node-days; 0: from --failures.")
@click.option("--failures", default="llama3", help="Table of causes: a name that ships, or a .toml file.", show_default=True)
@click.option("--store-gb-s", type=POSITIVE, default=0.0, help="Bandwidth of the whole store; 0: unknown.")
@click.option("--left", type=POSITIVE, default=0.0, metavar="S", help="Seconds until the job is ended: would a save still fit?")
def checkpoint(asked: Asked, **given: Any) -> None:
    """Size, writers, requests and cost of a checkpoint; stall, interval and effective time.

    \b
    Example:
      ftrain plan checkpoint ftrain.toml --hardware h100 --stall 5 --restart 600
    """
    from ftrain.plan import checkpoint as planner

    costs = planner.Costs(
        stall_s=given["stall"],
        restart_s=given["restart"],
        rate=given["rate"],
        table=given["failures"],
        store_gb_s=given["store_gb_s"],
        left_s=given["left"],
    )
    show(asked, planner.answer(resolve(asked), costs))


@plan.command()
@common
@click.option("--rank", type=COUNT, default=0, help="The rank to explain.")
@click.option("--place", default="", metavar="STAGE,CARD,REPLICA", help="The same by place, counted from 0.")
@click.option("--step", type=COUNT, default=0, help="The step whose samples are shown.")
@click.option("--topic", type=click.Choice(["tp", "dp", "zero1", "ep"]), help="A worked example instead of a rank.")
@click.option(
    "--svg", type=OutputFile(PICTURE), metavar="FILE", help="Write the picture: card, server, replica, cluster; or the topic's."
)
@click.option("--html", type=OutputFile(PAGE), metavar="FILE", help="The same as a page that names what is under the pointer.")
def explain(asked: Asked, **given: Any) -> None:
    """One rank: its place, layers, peers, links, boxes and samples.

    \b
    Example:
      ftrain plan explain ftrain.toml --hardware b200 --place 0,0,0 --svg topology.svg
    """
    from ftrain.plan import draw, worked
    from ftrain.plan import explain as planner

    if given["topic"] and (given["html"] or (given["svg"] and given["topic"] != "zero1")):
        raise click.UsageError("of the topics only zero1 has a picture (--svg), and none a page (--html)")
    setup = resolve(asked)
    if given["topic"]:
        if given["svg"]:
            _write(given["svg"], PICTURE, draw.zero1())
        show(asked, worked.answer(given["topic"]))
        return
    rank = given["rank"]
    if given["place"]:
        stage, card, replica = _place(given["place"])
        rank = planner.find_rank(setup, stage=stage, card=card, replica=replica)
    answer = planner.answer(setup, rank, step=given["step"])
    if given["svg"]:
        _write(given["svg"], PICTURE, draw.topology(setup, rank))
    if given["html"]:
        _write(given["html"], PAGE, draw.html(draw.topology(setup, rank), title=answer.title))
    show(asked, answer)


def _place(text: str) -> tuple[int, int, int]:
    try:
        stage, card, replica = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--place {text}: wanted STAGE,CARD,REPLICA, three numbers counted from 0") from error
    return stage, card, replica


@plan.command()
@common
@click.option("--top", type=click.IntRange(1), default=10, help="Layouts to show.", show_default=True)
@click.option("--sweep", type=click.Choice(["pp"]), help="Vary one axis instead: what more stages cost and save.")
def search(asked: Asked, top: int, sweep: str | None) -> None:
    """All legal layouts for this model and number of GPUs, ranked, with a reason each.

    \b
    Example:
      ftrain plan search ftrain.toml --hardware b200
    """
    from ftrain.plan import search as planner

    setup = resolve(asked)
    show(asked, planner.sweep(setup) if sweep else planner.answer(setup, top=top))


@plan.command()
@common
@click.option("--days", type=Finite(0, min_open=True), default=54.0, help="Length of the run.", show_default=True)
@click.option("--seed", type=int, default=0, help="Of the drawn failures.")
@click.option("--failures", default="llama3", help="Table of causes: a name that ships, or a .toml file.", show_default=True)
@click.option("--rate", type=POSITIVE, default=0.0, help="Interruptions per 1,000 node-days; 0: the table's.")
@click.option("--stragglers", type=POSITIVE, default=0.0, help="Slow machines per 1,000 node-days.")
@click.option("--trace", default="", metavar="FILE", help="Replay a trace or a ledger instead.")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Times and counts; the answer lists them.")
@click.option("--policies", is_flag=True, help="Also answer the same failures in other ways.")
@click.option("--measured", default="", metavar="RUN", help="Take times of recovery from a run of yours; --assume goes before.")
@click.option(
    "--lengths", default="", metavar="LENGTH:COUNT,...", help="Compare static and dynamic CP on this histogram instead."
)
def simulate(asked: Asked, lengths: str, measured: str, **given: Any) -> None:
    """A run over days with failures, by the supervisor's own policy: effective time, and what limits it.

    \b
    Example:
      ftrain plan simulate ftrain.toml --hardware h100 --assume restart_s=600 --assume stall_s=5
    """
    from ftrain.plan import dynamic_cp, simulation

    setup = resolve(asked)
    if lengths:
        show(asked, dynamic_cp.answer(setup, lengths))
        return
    if measured:
        given["assume"] = (*_recovery_of(measured), *given["assume"])
    several = asked.answers is not None  # of all phases the intervals would be compared for longer than anybody waits
    question = simulation.Question(table=given.pop("failures"), intervals=not several, **given)
    show(asked, simulation.answer(setup, question))


def _recovery_of(url: str) -> tuple[str, ...]:
    """What a run measured of its recovery, as assumptions; and a word on what that is worth."""
    from ftrain.cli.problems import told
    from ftrain.view.record import read
    from ftrain.view.recovery import assumptions
    from recovery.report import ReportError

    with told():
        try:
            run = read(url)
        except ReportError as error:
            raise ValueError(f"--measured {url}: {error}") from error
    found = assumptions(run)
    if not found:
        raise ValueError(f"--measured {url}: that run recovered from nothing and saved nothing: there is nothing to take over")
    ranks = max(row.ranks for row in run.report.attempts)
    times = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
    render.note(f"measured on {plural(ranks, 'rank')}: {times}; more ranks need longer")
    return tuple(f"{name}={value!r}" for name, value in found.items())
