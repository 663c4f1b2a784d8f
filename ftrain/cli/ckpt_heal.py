"""`ftrain ckpt heal`: put damaged bytes of a checkpoint back from a copy.

ftrain ckpt heal runs/demo@150 --from s3://mirror/demo
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from ftrain.cli import render
from ftrain.cli.run import split_step
from ftrain.cli.types import PLACE
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint
    from storage.run import RunStore


@click.command()
@click.argument("url", metavar="URL@STEP", type=PLACE)
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=PLACE,
    metavar="URL",
    help="A copy; may be given again. Default: the run's own tiers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def heal(url: str, sources: tuple[str, ...], as_json: bool) -> None:
    """Put damaged bytes of a checkpoint back from copies that verify, and verify the whole.

    A copy is any run that holds the same state at that step: the local tier and the mirror of the run (taken if none is named),
    or what `ckpt cp` made. What is put back is byte for byte what was written. Exit code 4 if damage is left.

    \b
    Example:
      ftrain ckpt heal runs/demo@150 --from s3://mirror/demo
    """
    import msgspec

    from ftrain.cli.ckpt import opened, require_run
    from storage.heal import heal as put_back

    base, step = split_step(url)
    if step is None:
        render.fail(f"{url}: say which checkpoint: URL@STEP", ExitCode.USAGE)
    with opened(base) as run:
        require_run(run, base)
        with _donors(run, step, sources) as donors:
            report = put_back(run.store, step, donors)
    if as_json:
        render.json(msgspec.to_builtins(report))
    elif not report.objects:
        render.data(f"step {step}: whole; nothing was written")
    else:
        render.data(f"step {step}: {report.num_chunks} chunks put back in {len(report.objects)} objects; it verifies")


@contextmanager
def _donors(run: RunStore, step: int, sources: Sequence[str]) -> Iterator[list[Checkpoint]]:
    """The copies of a step that open; a note for each that does not."""
    from ftrain.compose.stores import open_known
    from storage.errors import StorageError
    from storage.run import RunStore

    found: list[Checkpoint] = []
    with ExitStack() as stack:
        for source in sources or _tiers(run):
            try:
                store = open_known(source)
                stack.callback(store.close)
                found.append(RunStore(store).open(step))
            except StorageError as problem:
                render.note(f"{source}: {problem}")
        if not found:
            render.fail(f"no copy of step {step} can be opened: name one with --from", ExitCode.DAMAGED)
        yield found


def _tiers(run: RunStore) -> list[str]:
    """Local tier and mirror, as the newest checkpoint that opens remembers them."""
    import msgspec

    from ftrain.compose.stores import local_tier_url
    from ftrain.config import Config
    from storage.errors import NoCheckpoint

    try:
        config = msgspec.convert(run.open().progress.get("config"), Config)
    except (NoCheckpoint, msgspec.ValidationError):
        return []
    return [url for url in (local_tier_url(config), config.checkpoint.mirror_url) if url]
