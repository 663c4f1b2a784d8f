"""`ftrain init`: a commented config for the machine at hand.

ftrain init my.toml
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.starter import Corpus


@click.command()
@click.argument("path", metavar="[FILE]", type=click.Path(dir_okay=False), default="ftrain.toml")
@click.option("--url", default="runs/mine", show_default=True, help="Where the run lives: a folder, or s3://bucket/key.")
@click.option("--data", default="stdlib", show_default=True, help="Prefix of a .bin/.idx pair, or stdlib.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, a tokenizer.json, or a .tiktoken file.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print it instead of writing FILE.")
def init(path: str, url: str, data: str, tokenizer: str, to_stdout: bool) -> None:
    """Write a commented config for this machine and these data to FILE (ftrain.toml). Never overwrites.

    \b
    Example:
      ftrain init my.toml && ftrain doctor my.toml && ftrain run my.toml
    """
    if not path:
        raise click.UsageError("FILE is empty: give a name, as in `ftrain init my.toml`")
    from ftrain.load import parse
    from ftrain.starter import corpus, facts, text

    with told():
        found = corpus(_prefix(data))
        written = text(facts(), url=url, data=data, tokenizer=tokenizer, corpus=found)
        config = parse(written)
    if to_stdout:
        render.data(written.rstrip("\n"))
        return
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(written)
    except FileExistsError:
        render.fail(f"{path} is there already, and is left as it is: give another name, or --stdout", ExitCode.USAGE)
    except FileNotFoundError:
        folder = Path(path).parent
        render.fail(f"{path}: cannot be written: there is no folder {folder}; make it (mkdir -p {folder})", ExitCode.USAGE)
    except OSError as error:
        render.fail(f"{path}: cannot be written ({error.strerror})", ExitCode.USAGE)
    for doubt in (*_missing(data, tokenizer), *(_unfit(data, found, config) if found else ())):
        render.note(doubt)
    render.note(f"wrote {path}; next: ftrain doctor {path}, then ftrain run {path}")


def _prefix(data: str) -> str:
    """The prefix of a pair; leaves with a sentence if one of its two files was given."""
    for ending in (".idx", ".bin"):
        if data.endswith(ending) and Path(data).is_file():
            render.fail(f"--data {data}: give the prefix of the pair, {data.removesuffix(ending)}", ExitCode.USAGE)
    return data


def _unfit(data: str, found: Corpus, config: Config) -> Iterator[str]:
    """What is wrong with the data for this config."""
    if found.highest >= config.model.vocab:
        yield (
            f"{data} holds token {found.highest} and model.vocab is {config.model.vocab}: another tokenizer made it; "
            "write the config again with --tokenizer"
        )
    if not config.evaluate.every_steps:
        yield f"{data} has {found.tokens} tokens, too few to hold any out: nothing is evaluated"


def _missing(data: str, tokenizer: str) -> Iterator[str]:
    """What the config names and is not there yet: it may come, so this is a word and no refusal."""
    if data != "stdlib" and not Path(f"{data}.idx").is_file():
        yield f"{data}.idx is not there yet: `ftrain data prepare TEXTS --out {data}` makes it"
    if tokenizer != "byte" and not Path(tokenizer).is_file():
        yield f"{tokenizer} is not there yet: model.vocab is a guess that must be as large as its vocabulary"
