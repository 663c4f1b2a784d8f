"""`ftrain metrics`: a run's curves in TensorBoard or Weights & Biases.

ftrain metrics runs/demo --tensorboard tb
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftrain.cli import render
from ftrain.cli.live import local_option
from ftrain.cli.types import PLACE
from recovery.codes import ExitCode
from recovery.events import Event, RunEnded
from recovery.gaps import SegmentsMissing

if TYPE_CHECKING:
    from ftrain.view.sinks import Sink

LOOK_EVERY_S = 2.0


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@click.option("--tensorboard", default="", metavar="FOLDER", help="Write event files there.")
@click.option("--wandb", default="", metavar="PROJECT", help="Log to that project; WANDB_MODE=offline works.")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
@local_option
def metrics(run_url: str, tensorboard: str, wandb: str, follow: bool, local_dir: str) -> None:
    """Hand the curves of RUN, live or finished, to a dashboard. The run does not notice.

    \b
    Examples:
      ftrain metrics runs/demo --tensorboard tb
      ftrain metrics runs/demo --wandb my-project --follow
    """
    from ftrain.cli.watch import source
    from ftrain.compose.paths import absolute_url, local_dir_of
    from ftrain.view.sinks import MissingExtraError, Pump

    if not tensorboard and not wandb:
        render.fail("where to? Give --tensorboard FOLDER, --wandb PROJECT, or both", ExitCode.USAGE)
    events, first = source(run_url, local_dir)
    for event in first:
        if isinstance(event, SegmentsMissing):
            render.note(f"{run_url}: {event.sentence()}; the curves have a gap there")
    try:
        sinks = _sinks(tensorboard, wandb, run_url)
    except MissingExtraError as error:
        render.fail(str(error), ExitCode.USAGE)
    except OSError as error:
        render.fail(f"{error.filename or tensorboard}: cannot be written ({error.strerror})", ExitCode.USAGE)
    lines = _lines(local_dir_of(absolute_url(run_url), local_dir) / "metrics.jsonl")
    pumps = [Pump(sink) for sink in sinks]
    try:
        new, over = first, _is_over(first)
        _pour(pumps, new, lines())
        while follow and not over:
            time.sleep(LOOK_EVERY_S)
            new = events()
            over = _is_over(new)
            _pour(pumps, new, lines())
    except KeyboardInterrupt:
        render.note("stopped; the run goes on")
    finally:
        for sink in sinks:
            sink.close()
    if tensorboard:
        render.note(f"wrote {tensorboard}: tensorboard --logdir {shlex.quote(tensorboard)}")


def _sinks(tensorboard: str, wandb: str, run_url: str) -> list[Sink]:
    from ftrain.view.sinks import TensorBoard, WeightsAndBiases

    made: list[Sink] = []
    if tensorboard:
        made.append(TensorBoard(Path(tensorboard)))
    if wandb:
        made.append(WeightsAndBiases(wandb, run_url))
    return made


def _pour(pumps: Sequence[Any], events: Sequence[Event], lines: Sequence[dict[str, Any]]) -> None:
    for pump in pumps:
        pump.add(events, lines)


def _is_over(events: Sequence[Event]) -> bool:
    """Whether the run had ended by the last of these events."""
    return bool(events) and isinstance(events[-1], RunEnded)


def _decoded(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """What a full disk or a lost page has left of a line is none: the ledger has the steps all the same."""
    import msgspec

    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=dict[str, Any])


def _lines(path: Path) -> Callable[[], list[dict[str, Any]]]:
    """New whole lines of metrics.jsonl since the last call; none where that file is not on this machine."""
    read = 0

    def new() -> list[dict[str, Any]]:
        nonlocal read
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        read += whole
        return list(_decoded(data[:whole].splitlines()))

    return new
