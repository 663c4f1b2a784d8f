"""`ftrain ckpt`: look at the checkpoints of a run, read every byte of them, compare two.

ftrain ckpt verify runs/demo
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ftrain.cli import ckpt_exchange, ckpt_heal, render
from ftrain.cli.problems import told
from ftrain.cli.run import split_step
from ftrain.cli.types import PLACE, Finite
from ftrain.units import format_bytes
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from storage.catalog import CheckpointInfo
    from storage.checkpoint import Checkpoint
    from storage.run import RunStore

json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


@click.group()
def ckpt() -> None:
    """Checkpoints: look, verify, diff, copy, heal, exchange.

    URL is a run's folder or URL; URL@STEP one checkpoint of it. `export` and `import` exchange them with other programs, `view`
    shows one to plain Zarr.

    \b
    Example:
      ftrain ckpt ls runs/demo
    """


@contextmanager
def opened(url: str) -> Iterator[RunStore]:
    """The run's store."""
    from ftrain.compose.stores import opened_run

    with told(url), opened_run(url) as run:
        yield run


def require_run(run: RunStore, url: str) -> None:
    """NoCheckpoint if neither a checkpoint is there nor a run that might write one, as that of a script before its first."""
    from ftrain.cli.hints import holds_run
    from ftrain.compose.ledgers import PREFIX
    from ftrain.compose.paths import folder_of
    from ftrain.schemes import is_local
    from storage.errors import NoCheckpoint
    from storage.keys import CHECKPOINTS, EPOCHS

    recorded = any(True for prefix in (EPOCHS, CHECKPOINTS, PREFIX) for _ in run.store.list(prefix))
    if not recorded and not (is_local(url) and holds_run(folder_of(url))):
        raise NoCheckpoint(f"{url}: no checkpoint is there, nor a run")


def require_step(run: RunStore, there: Mapping[int, str], step: int) -> None:
    """NoCheckpoint, with its reason, if the step is not there, or not any more: that is no damage. `there`: states by step."""
    if there.get(step) not in ("valid", "damaged", "tainted"):
        run.open(step)


@ckpt.command()
@click.argument("url", type=PLACE)
@json_option
def ls(url: str, as_json: bool) -> None:
    """List the checkpoints of a run, and why one does not count.

    A retired one was deleted by the retention policy and goes after the grace period. A tainted one lies behind the onset of
    something that the run went back from: it is kept, never chosen, and can be had by URL@STEP.

    \b
    Example:
      ftrain ckpt ls runs/demo
    """
    import msgspec

    with opened(url) as run:
        found = run.checkpoints()
        if not found:
            require_run(run, url)
    if as_json:
        render.json(msgspec.to_builtins(found))
        return
    render.table(
        ("step", "state", "epoch", "attempt", "size", "written", "eval loss", "reason"), [_row(info) for info in found]
    )
    if not found:
        render.note(f"{url}: no checkpoint is there yet")


def _row(info: CheckpointInfo) -> tuple[object, ...]:
    """A line of `ls`; what only a commit knows is left empty where there is none."""
    if info.epoch < 0:
        return info.step, info.state, "", "", "", "", "", info.reason
    metric = "" if info.metric is None else f"{info.metric:.4f}"
    return (
        info.step,
        info.state,
        info.epoch,
        info.attempt,
        format_bytes(info.nbytes),
        _clock(info.created_s),
        metric,
        info.reason,
    )


@ckpt.command()
@click.argument("url", type=PLACE)
@json_option
def show(url: str, as_json: bool) -> None:
    """Show one checkpoint: who wrote it and when, how far the run was, sizes, arrays; of a script's, all that is no array.

    \b
    Example:
      ftrain ckpt show runs/demo@100
    """
    from ftrain.checkpoint.entries import entries_of
    from ftrain.checkpoint.entries import short as shortened

    base, step = split_step(url)
    with opened(base) as run:
        checkpoint = run.open(step)
    facts = describe(checkpoint)
    shown = [(path, shortened(node)) for path, node in entries_of(checkpoint)]
    if as_json:
        render.json(facts)
        return
    for label, value in _head(facts):
        render.data(f"{label:17} {value}")
    if shown:
        render.table(("value", ""), shown)
    render.table(("array", "dtype", "shape", "tile", "digest"), [tuple(row.values()) for row in facts["arrays"]])


def _head(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `show` says above the arrays. A script's checkpoint has no layout, and no parameters that it would call so."""
    yield from ((key, str(facts[key])) for key in ("step", "epoch", "attempt"))
    yield "written", _clock(facts["created_s"])
    if facts["layout"]:
        yield "layout", facts["layout"]
    yield from _far(facts["progress"])
    if facts["parameters"]:
        yield "parameters", f"{facts['parameters']:,}"
        yield "bytes a parameter", f"{facts['bytes_per_parameter']:.2f}"
    yield "size", f"{format_bytes(facts['nbytes'])} ({facts['nbytes']:,} bytes)"
    if facts["compressor"]:
        yield "compressed", f"{facts['compressor']}: {facts['ratio']:.2f} to 1, from {format_bytes(facts['plain_nbytes'])}"
    yield "packs", str(facts["packs"])


def _far(progress: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """How far the run was, of what its record has."""
    if progress.get("sequences"):
        yield "tokens", f"{progress.get('tokens', 0):,} learnt from, in {progress['sequences']:,} sequences"
    if len(begun := progress.get("begun") or []) > 1:
        yield "phase", f"{len(begun) - 1}, begun after step {begun[-1][0]}"
    if progress.get("eval_loss") is not None:
        yield "held-out loss", f"{progress['eval_loss']:.4f} at step {progress['eval_step']}"
    for first, last, sequences in progress.get("skipped") or ():
        yield "passed over", f"the data of updates {first} to {last}: {sequences:,} sequences"
    if progress.get("fingerprint"):
        yield "config", f"fingerprint {progress['fingerprint']}"


def _clock(created_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_s))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything `show` says, as plain data."""
    import math

    from ftrain.checkpoint.entries import as_json, entries_of

    manifest = checkpoint.manifest
    counted = "weights/" if any(spec.name.startswith("weights/") for spec in manifest.arrays) else "master/"
    parameters = sum(math.prod(spec.shape) for spec in manifest.arrays if spec.name.startswith(counted))
    nbytes = sum(pack.nbytes for pack in manifest.packs)
    return {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "created_s": manifest.created_s,
        "layout": manifest.progress.get("layout", ""),
        "parameters": parameters,
        "nbytes": nbytes,
        "compressor": str(manifest.compressor or ""),
        "plain_nbytes": manifest.plain_nbytes,
        "ratio": manifest.plain_nbytes / nbytes if nbytes else None,
        "bytes_per_parameter": nbytes / parameters if parameters else None,
        "packs": len(manifest.packs),
        "progress": manifest.progress,
        "values": {path: as_json(node) for path, node in entries_of(checkpoint)},
        "arrays": [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "tile": list(spec.tile),
                "digest": f"{manifest.digests[spec.name]:016x}",
            }
            for spec in manifest.arrays
        ],
    }


@ckpt.command()
@click.argument("url", type=PLACE)
@click.option("--sample", type=Finite(0, 1, min_open=True), default=1.0, help="Share of the chunks to read.")
@json_option
def verify(url: str, sample: float, as_json: bool) -> None:
    """Read every chunk, check every checksum, recompute every digest. Exit code 4 if anything is wrong.

    Without @STEP all checkpoints of the run are verified. A step that was retired, or never committed, is not there (exit code
    4 as well), which is no damage.

    \b
    Example:
      ftrain ckpt verify runs/demo@100
    """
    import msgspec

    from storage.errors import CoverageError, Damaged, FormatError, NoCheckpoint, ObjectMissing

    base, step = split_step(url)
    reports: dict[int, Any] = {}
    with opened(base) as run:
        there = {info.step: info.state for info in run.checkpoints()}
        if step is not None:
            require_step(run, there, step)
        steps = [step] if step is not None else [each for each, state in there.items() if state in ("valid", "damaged")]
        for each in steps:
            try:
                found = run.open(each).verify(sample=sample)
                reports[each] = {"ok": found.ok, **msgspec.to_builtins(found)}
            except (Damaged, FormatError, CoverageError, ObjectMissing, NoCheckpoint) as error:
                reports[each] = {"ok": False, "problems": [{"reason": str(error)}]}
    if as_json:
        render.json({str(each): facts for each, facts in reports.items()})
    else:
        for each, facts in reports.items():
            render.data(
                f"step {each}: " + ("ok" if facts["ok"] else "; ".join(problem["reason"] for problem in facts["problems"]))
            )
    if not reports:
        render.fail(f"{base}: no checkpoint is there", ExitCode.DAMAGED)
    if not all(facts["ok"] for facts in reports.values()):
        render.fail(
            "damage was found: a resume passes over a checkpoint whose state is damaged (weights/* it makes anew)",
            ExitCode.DAMAGED,
        )


@ckpt.command()
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two checkpoints: which arrays differ, by how much, and what differs beside them. Exit code 1 if anything does.

    Arrays are compared by the digests that were recorded when they were written, and only those that differ are read: damage
    since then is `ckpt verify`'s to find.

    Beside the arrays: everything in a script's state (an epoch, a schedule, random generators); of a run of `ftrain run` where
    it goes on in its data. Steps, times, layouts, configs and what was measured are not compared.

    \b
    Example:
      ftrain ckpt diff runs/demo@150 runs/demo-unbroken@150
    """
    import msgspec

    from ftrain.checkpoint.entries import diff_entries
    from storage.diff import diff as compare

    (url_a, step_a), (url_b, step_b) = split_step(a), split_step(b)
    with opened(url_a) as run_a, opened(url_b) as run_b:
        both = run_a.open(step_a), run_b.open(step_b)
        arrays, entries = compare(*both), diff_entries(*both)
    rows = [msgspec.to_builtins(row) for row in (*arrays, *entries)]
    if as_json:
        render.json(rows)
    elif not rows:
        render.data("equal: every array has the same recorded digest, and everything else the same value")
        render.note("no array was read, so damage since it was written would not show: `ftrain ckpt verify` reads them")
    else:
        for row in rows:
            render.data(row["text"])
        of = len({spec.name for one in both for spec in one.manifest.arrays})
        beside = f"; and {len(entries)} of what is no array" if entries else ""
        render.note(f"{len(arrays)} of {of} arrays differ{beside}")
    raise SystemExit(1 if rows else 0)


for command in (*ckpt_exchange.COMMANDS, ckpt_heal.heal):
    ckpt.add_command(command)
