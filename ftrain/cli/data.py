"""`ftrain data`: text into token files, and a look at what a run will be fed.

The second command is there because most failures of a first run are in the data, and none of them shows in the loss before an
hour has passed: a wrong tokenizer, documents run together, a blend with the weights swapped. It shows the very sequences that
the training loop will ask for, by the same code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ftrain.config import Config
from ftrain.course import course, cursor_at
from ftrain.data.dataset import Batch, Dataset
from ftrain.data.errors import DataError, InputError
from ftrain.data.prepare import PrepareReport, Progress
from ftrain.data.prepare import prepare as prepare_tokens
from ftrain.data.reading import Reading, reading
from ftrain.data.stdlib import cache_root
from ftrain.data.tokenizer import Tokenizer, load_tokenizer
from ftrain.load import ConfigProblems, load
from ftrain.phases import effective
from ftrain.units import format_bytes, format_count, plural
from recovery.codes import ExitCode

MOST_SHOWN = 10_000
"""Sequences that one look may ask for: they are all in memory."""

_PREPARE_EXAMPLE = """\b
Example:
  ftrain data prepare books/ news.jsonl --out tokens/mine"""

_INSPECT_EXAMPLE = """\b
Example:
  ftrain data inspect ftrain.toml --first 100 --count 2"""


@click.group()
def data() -> None:
    """Prepare token files, and look at what a run is fed.

    \b
    Example:
      ftrain data inspect ftrain.toml
    """


@data.command(epilog=_PREPARE_EXAMPLE)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path())
@click.option("--out", required=True, metavar="PREFIX", help="Writes PREFIX.bin and PREFIX.idx.")
@click.option("--tokenizer", default="byte", show_default=True, help="`byte`, a tokenizer.json, or a .tiktoken file.")
@click.option("--key", default="text", show_default=True, help="Where a JSONL line or a Parquet row holds its text.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=1), help="Processes that tokenise.")
@click.option("--replace", is_flag=True, help="Replace a pair that is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def prepare(inputs: tuple[str, ...], out: str, tokenizer: str, key: str, workers: int, replace: bool, as_json: bool) -> None:
    """Turn text into a token file in Megatron's format.

    An INPUT is a text file (one document), a folder of them (a document each), a JSONL file (a document a line) or a Parquet
    file (a document a row). Much input, or several workers: the same command goes on after an interruption.
    """
    if out.endswith("/") or Path(out).name in ("", ".."):
        raise click.UsageError(f"--out {out!r} is a folder: give a prefix, as in {Path(out) / 'mine'}")
    with _reported():
        there = [out + ending for ending in (".idx", ".bin") if Path(out + ending).exists()]
        if there and not replace:  # the second alone may be anybody's, such as a model's pytorch_model.bin
            raise InputError("is there already; --replace replaces it", there[0])
        with _progress_bar() as progress:
            report = prepare_tokens(
                inputs, out, tokenizer=load_tokenizer(tokenizer), progress=progress, key=key, workers=workers
            )
    click.echo(json.dumps(_report_data(report)) if as_json else _report_text(report))


@data.command(epilog=_INSPECT_EXAMPLE)
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="A.B=V", help="Override a value; may be repeated.")
@click.option("--phase", default=0, show_default=True, type=click.IntRange(min=0), help="Of a config with [[phases]].")
@click.option("--first", default=0, show_default=True, type=click.IntRange(min=0), help="Index of the first sequence.")
@click.option("--count", default=4, show_default=True, type=click.IntRange(1, MOST_SHOWN), help="How many sequences.")
@click.option("--heldout", is_flag=True, help="Show held-out sequences instead of training ones.")
@click.option("--cache", default=None, metavar="FOLDER", help="Where the built-in corpus is prepared.")
@click.option("--json", "as_json", is_flag=True, help="Print the sequences as JSON.")
def inspect(
    config_path: str,
    overrides: tuple[str, ...],
    phase: int,
    first: int,
    count: int,
    heldout: bool,
    cache: str | None,
    as_json: bool,
) -> None:
    """Show the sequences a run is fed, as text.

    Each comes with its source, its place in it, and the targets that do not count. Step s of a run consumes the sequences
    s * global_batch and following (fewer under a batch.ramp; within each phase they count from 0: --dry-run shows both).
    """
    with _reported():
        whole = load(config_path, overrides)
        config = effective(whole, phase)
        dataset = Dataset(config, root=cache or cache_root(), reading=_reading(whole, phase))
        batch = dataset.heldout(first, count) if heldout else dataset.sequences(first, count)
        tokenizer = load_tokenizer(config.data.tokenizer)
    view = _view(config, dataset, batch, tokenizer, first)
    click.echo(json.dumps(view, ensure_ascii=False) if as_json else _view_text(view))


def _reading(config: Config, phase: int) -> Reading:
    """Where the stream of a phase begins, in a run that went through those before."""
    if phase > len(config.phases):
        raise click.UsageError(f"--phase {phase}: the config has the phases 0 to {len(config.phases)}")
    cursor = cursor_at(config, course(config)[phase].first_step)
    if cursor.phase != phase:
        raise click.UsageError(f"--phase {phase}: a run of {config.run.steps} steps does not come to it")
    return reading(config, cursor)


def _view(config: Config, dataset: Dataset, batch: Batch, tokenizer: Tokenizer, first: int) -> dict[str, Any]:
    """What `inspect` shows, as plain data."""
    paths = [source.path for source in config.data.sources]
    sources = [
        {
            "path": path,
            "documents": source.file.num_documents,
            "tokens": source.file.num_tokens,
            "train_sequences": source.train.num_windows,
            "heldout_sequences": source.heldout.num_windows,
        }
        for path, source in zip(paths, dataset.sources, strict=True)
    ]
    sequences = [
        {
            "index": first + row,
            "source": paths[int(batch.sources[row])],
            "window": int(batch.ids[row]),
            "valid_targets": int(batch.valid[row].sum()),
            "masked_targets": [i for i, counts in enumerate(batch.valid[row].tolist()) if not counts],
            "text": tokenizer.decode(batch.tokens[row]),
        }
        for row in range(len(batch))
    ]
    return {"identity": dataset.identity, "seq_len": dataset.seq_len, "sources": sources, "sequences": sequences}


def _view_text(view: dict[str, Any]) -> str:
    lines = [f"corpus {view['identity']}, sequences of {view['seq_len']} tokens"]
    lines += [
        f"  {source['path']}: {format_count(source['tokens'])} tokens in {plural(source['documents'], 'document')}; "
        f"{source['train_sequences']} training and {source['heldout_sequences']} held-out sequences"
        for source in view["sources"]
    ]
    for sequence in view["sequences"]:
        masked = ", ".join(str(i) for i in sequence["masked_targets"])
        note = f"; not counted: targets {masked} (first of a document)" if masked else ""
        counts = f"{sequence['valid_targets']} of {view['seq_len']} targets count{note}"
        lines += ["", f"--- sequence {sequence['index']}: {sequence['source']}, window {sequence['window']}; {counts}"]
        lines.append(sequence["text"])
    return "\n".join(lines)


def _report_data(report: PrepareReport) -> dict[str, Any]:
    return {
        "prefix": report.prefix,
        "documents": report.documents,
        "tokens": report.tokens,
        "bytes_read": report.bytes_read,
        "dtype": report.dtype,
        "skipped": list(report.skipped),
        "resumed": report.resumed,
    }


def _report_text(report: PrepareReport) -> str:
    source = f"{plural(report.documents, 'document')} from {format_bytes(report.bytes_read)}"
    text = f"{report.prefix}: {format_count(report.tokens)} tokens ({report.dtype}) in {source}"
    if report.resumed:
        text += f"\n{report.resumed} parts were there from an earlier, interrupted preparation"
    if report.skipped:
        shown = ", ".join(report.skipped[:3]) + (", ..." if len(report.skipped) > 3 else "")
        text += f"\npassed over, no text: {plural(len(report.skipped), 'file')} ({shown})"
    return text


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """A bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label="preparing", file=sys.stderr) as bar:

        def show(progress: Progress) -> None:
            bar.length = max(1, progress.bytes_total)
            bar.update(progress.bytes_done - bar.pos)

        yield show


class _ConfigFailure(click.ClickException):
    """What was asked for cannot be done as asked."""

    exit_code = int(ExitCode.CONFIG)


class _StorageFailure(click.ClickException):
    """A folder cannot be used."""

    exit_code = int(ExitCode.STORAGE)


@contextmanager
def _reported() -> Iterator[None]:
    """Wrong input ends the command with one message and the exit code that says whose fault it is."""
    try:
        yield
    except (ConfigProblems, DataError) as error:
        raise _ConfigFailure(str(error)) from error
    except OSError as error:
        raise _StorageFailure(f"{error.filename}: {error.strerror}") from error
