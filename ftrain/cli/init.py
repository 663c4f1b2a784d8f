"""`ftrain init`: a commented config for the machine at hand.

ftrain init my.toml
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ftrain.cli import render
from recovery.codes import ExitCode


@click.command()
@click.argument("path", metavar="[FILE]", type=click.Path(dir_okay=False), default="ftrain.toml")
@click.option("--url", default="runs/mine", show_default=True, help="Where the run lives: a folder, or s3://bucket/key.")
@click.option("--data", default="stdlib", show_default=True, help="Prefix of a .bin/.idx pair, or stdlib.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, or a tokenizer.json.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print it instead of writing FILE.")
def init(path: str, url: str, data: str, tokenizer: str, to_stdout: bool) -> None:
    """Write a commented config for this machine to FILE (ftrain.toml). Never overwrites.

    \b
    Example:
      ftrain init my.toml && ftrain doctor my.toml && ftrain run my.toml
    """
    from ftrain.starter import facts, text

    written = text(facts(), url=url, data=data, tokenizer=tokenizer)
    if to_stdout:
        render.data(written.rstrip("\n"))
        return
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(written)
    except FileExistsError:
        render.fail(f"{path} is there already, and is left as it is: give another name, or --stdout", ExitCode.USAGE)
    except OSError as error:
        render.fail(f"{path}: cannot be written ({error.strerror})", ExitCode.USAGE)
    for missing in _missing(data, tokenizer):
        render.note(missing)
    render.note(f"wrote {path}; next: ftrain doctor {path}, then ftrain run {path}")


def _missing(data: str, tokenizer: str) -> Iterator[str]:
    """What the config names and is not there yet: it may come, so this is a word and no refusal."""
    if data != "stdlib" and not Path(f"{data}.idx").is_file():
        yield f"{data}.idx is not there yet: `ftrain data prepare TEXTS --out {data}` makes it"
    if tokenizer != "byte" and not Path(tokenizer).is_file():
        yield f"{tokenizer} is not there yet: model.vocab is a guess that must be as large as its vocabulary"
