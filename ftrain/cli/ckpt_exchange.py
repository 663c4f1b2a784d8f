"""`ftrain ckpt export|import|cp|gc`: checkpoints that leave, arrive, move, or go.

ftrain ckpt export runs/demo@150 --to safetensors out/
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.run import split_step
from ftrain.cli.types import PLACE, POSITIVE, SOURCE
from ftrain.units import format_bytes
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from storage.retention import RetentionPolicy
    from storage.run import RunStore

json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


@click.command("export")
@click.argument("url", metavar="URL[@STEP]", type=PLACE)
@click.option("--to", "form", type=click.Choice(["safetensors", "dcp", "zarr"]), required=True, help="Format to write.")
@click.argument("destination", metavar="DEST", type=PLACE)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="float32: the master weights.")
@click.option("--state", is_flag=True, help="Masters and moments too, as master/NAME, exp_avg/NAME, exp_avg_sq/NAME.")
@click.option("--compress", is_flag=True, help="Zarr only: without loss, a sixth smaller. Pays on links under 0.2 GB/s.")
@json_option
def export_command(url: str, form: Any, destination: str, dtype: str, state: bool, compress: bool, as_json: bool) -> None:
    """Write a checkpoint's weights for other programs, under Hugging Face's names, with a config.json. Overwrites none.

    Only models that `ftrain run` trains have such names. A script's checkpoint is read as it is: `ckpt view`, ftrain.DcpReader.

    \b
    Examples:
      ftrain ckpt export runs/demo@150 --to safetensors out/model
      ftrain ckpt export runs/demo --to dcp out/dcp --state
    """
    import msgspec

    if compress and form != "zarr":
        raise click.UsageError(f"--compress: {form} files are not compressed; leave it out, or export --to zarr")
    from ftrain.cli.ckpt import opened
    from ftrain.compose.exchange import export
    from ftrain.compose.stores import open_place

    base, step = split_step(url)
    with opened(base) as run:
        target = open_place(destination)
        try:
            done = export(run.open(step), form, target, dtype=dtype, state=state, compress=compress)
        finally:
            target.close()
    if as_json:
        render.json(msgspec.to_builtins(done))
    else:
        render.data(f"step {done.step}: {done.arrays} arrays, {format_bytes(done.nbytes)}, as {form} in {destination}")


@click.command("import")
@click.option("--from", "form", type=click.Choice(["safetensors", "dcp"]), required=True, help="Format to read.")
@click.argument("source", metavar="SRC", type=SOURCE)
@click.argument("url", metavar="URL", type=PLACE)
@click.option(
    "--config", type=PLACE, metavar="FILE", help="Where SRC has no config.json: a run's TOML or a Hugging Face config.json."
)
@json_option
def import_command(form: Any, source: str, url: str, config: str | None, as_json: bool) -> None:
    """Make a run at URL of somebody else's model. `ftrain run CONFIG --from URL` begins with it.

    Weights alone become masters (widened) with zero moments, at step 0; a whole state that was exported comes back whole.

    \b
    Example:
      ftrain ckpt import --from safetensors models/llama runs/imported
    """
    import msgspec

    from ftrain.compose.exchange import import_run

    with told():
        commit = import_run(form, source, url, config=config)
    if as_json:
        render.json(msgspec.to_builtins(commit))
    else:
        render.data(f"step {commit.step}: {format_bytes(commit.nbytes)} in {url}; begin with: ftrain run CONFIG --from {url}")


@click.command("cp")
@click.argument("source", metavar="SRC[@STEP]", type=PLACE)
@click.argument("destination", metavar="DEST", type=PLACE)
@click.option("--take-over", is_flag=True, help="DEST belongs to a training run that has ended for good.")
@json_option
def copy_command(source: str, destination: str, take_over: bool, as_json: bool) -> None:
    """Copy a checkpoint to another URL, read it back there, and commit it. Started again, it goes on where it was.

    A run that lives on this machine is not taken over: stop it first.

    \b
    Example:
      ftrain ckpt cp runs/demo@150 s3://mirror/demo
    """
    import msgspec

    from ftrain.cli.ckpt import opened
    from ftrain.compose.holder import check_not_here
    from ftrain.compose.paths import absolute_url, local_dir_of
    from storage.copy import copy_checkpoint

    base, step = split_step(source)
    with opened(base) as run, opened(destination) as target:
        if take_over:
            check_not_here(target.store, local_dir_of(absolute_url(destination)))
        done = copy_checkpoint(run.open(step), target, take_over=take_over, progress=_shown())
    if as_json:
        render.json(msgspec.to_builtins(done))
    elif done.commit is None:
        render.data(f"step {done.step}: {destination} has it already (epoch {done.epoch})")
    else:
        copied = f"{format_bytes(done.copied_bytes)} copied, {format_bytes(done.nbytes)} verified"
        render.data(f"step {done.step}: {copied}; committed under epoch {done.epoch} of {destination}")


def _shown() -> Any:
    """A line of progress now and then, for a person who watches."""
    last = [time.monotonic()]

    def show(what: str, done: int, total: int) -> None:
        if render.is_terminal() and time.monotonic() - last[0] > 2:
            last[0] = time.monotonic()
            render.note(f"{what}: {format_bytes(done)} of {format_bytes(total)}")

    return show


@click.command("view")
@click.argument("url", metavar="URL[@STEP]", type=PLACE)
@click.argument("arrays", nargs=-1, metavar="[ARRAY]...")
@click.option("--to", "folder", type=PLACE, metavar="FOLDER", help="Where to write it. Default: beside the packs.")
@json_option
def view_command(url: str, arrays: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Write the Zarr view of a checkpoint, or of some of its arrays, for programs that know nothing of this one.

    Commits write it by themselves, unless there are more than a million chunks. Names as `ckpt show` has them; all arrays if
    none is named.

    \b
    Example:
      ftrain ckpt view s3://bucket/big@1000 master/layers.7.attention.wq --to views
    """
    from ftrain.cli.ckpt import opened
    from ftrain.compose.stores import open_place

    base, step = split_step(url)
    with opened(base) as run:
        target = open_place(folder) if folder else None
        try:
            files = run.open(step).write_view(arrays or None, to=target)
        finally:
            if target:
                target.close()
    if as_json:
        render.json({"files": files})
        return
    for file in files:
        render.data(file)
    render.note(f'open one with zarr.open("reference::{files[0]}", mode="r")')


@click.command("gc")
@click.argument("url", type=PLACE)
@click.option("--yes", is_flag=True, help="Do it. Without this only the plan is shown.")
@click.option("--keep-last", type=click.IntRange(1), help="Keep the newest N.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep steps that are multiples of N.")
@click.option("--keep-best", type=click.IntRange(1), help="Keep the N of the lowest evaluation loss.")
@click.option("--pin", multiple=True, type=click.IntRange(0), help="Keep this step. May be given several times.")
@click.option("--grace", "grace_s", type=POSITIVE, help="Packs outlive their commit by so many seconds.")
@click.option("--tainted", is_flag=True, help="Also delete those that a roll-back distrusts (ckpt ls: tainted).")
@json_option
def gc_command(url: str, yes: bool, grace_s: float | None, tainted: bool, as_json: bool, **keep: Any) -> None:
    """Show what would be deleted by the run's own retention rules, or by those given here; delete it with --yes.

    The newest checkpoint that opens is never deleted, tainted ones only when asked for. Commits go first, packs after the
    grace period: run it again then.

    \b
    Examples:
      ftrain ckpt gc runs/demo
      ftrain ckpt gc runs/demo --keep-last 2 --yes
    """
    import msgspec

    from ftrain.cli.ckpt import opened
    from ftrain.compose.holder import check_holder
    from storage.overlay import OverlayStore
    from storage.run import RunStore

    with opened(url) as run:
        _require_pinned(run, url, keep["pin"])
        policies, grace = _rules(run, keep)
        grace = grace if grace_s is None else grace_s
        if not policies:
            render.fail("nothing says what to keep: give --keep-last, --keep-every, --keep-best or --pin", ExitCode.USAGE)
        if yes:
            _require_idle(url)
            check_holder(run.store, take_over=False)
        overlay = OverlayStore(run.store)
        report = RunStore(overlay).collect(policies, now_s=time.time(), grace_s=grace, tainted=tainted)
        if yes:
            report = run.collect(policies, now_s=time.time(), grace_s=grace, tainted=tainted)
    facts = {"done": yes, **msgspec.to_builtins(report), "objects": sorted(overlay.deleted)}
    if as_json:
        render.json(facts)
        return
    render.data(f"keep      {', '.join(map(str, report.kept)) or 'nothing: no checkpoint opens'}")
    render.data(f"delete    {', '.join(map(str, sorted(report.deleted_commits))) or 'no checkpoint'}")
    render.data(
        f"sweep     {report.deleted_objects} objects, {format_bytes(report.freed_bytes)} (the rest after {grace:.0f} s)"
    )
    if report.tainted:
        render.data(f"tainted   {', '.join(map(str, report.tainted))}: kept as well; --tainted deletes them")
    for reason in report.skipped:
        render.data(f"skip      {reason}")
    if not yes:
        render.note("nothing was deleted; say --yes to do it")


def _require_pinned(run: RunStore, url: str, pinned: Sequence[int]) -> None:
    """NoCheckpoint if there is none, or one that is to be kept is not there: it was mistyped, and would go."""
    from ftrain.cli.ckpt import require_run, require_step
    from storage.errors import NoCheckpoint

    there = {info.step: info.state for info in run.checkpoints()}
    if not there:
        require_run(run, url)
        raise NoCheckpoint(f"{url}: no checkpoint is there yet")
    for step in pinned:
        require_step(run, there, step)


def _rules(run: RunStore, keep: dict[str, Any]) -> tuple[list[RetentionPolicy], float]:
    """The retention policies and grace period: those given, else those of the newest checkpoint's config."""
    import msgspec

    from ftrain.compose.coordinator import policies
    from ftrain.config import Config
    from storage import retention
    from storage.errors import NoCheckpoint

    given: list[RetentionPolicy] = []
    given += [retention.KeepLast(keep["keep_last"])] if keep["keep_last"] else []
    given += [retention.KeepEvery(keep["keep_every"])] if keep["keep_every"] else []
    given += [retention.KeepBest(keep["keep_best"])] if keep["keep_best"] else []
    given += [retention.KeepPinned(frozenset(keep["pin"]))] if keep["pin"] else []
    try:
        config = msgspec.convert(run.open().progress.get("config"), Config)
    except (NoCheckpoint, msgspec.ValidationError):
        return given, 3600.0
    return given or policies(config), config.checkpoint.grace_s


def _require_idle(url: str) -> None:
    """A live run collects by itself; two collectors at a time are one too many. HeldError names its owner."""
    from ftrain.compose.paths import local_dir_of
    from recovery.owner import claim

    folder = local_dir_of(url)
    if folder.exists():
        claim(folder).release()


COMMANDS = (export_command, import_command, copy_command, view_command, gc_command)
