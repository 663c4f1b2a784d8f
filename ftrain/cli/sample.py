"""`ftrain sample`: a few tokens from a checkpoint, to see that it is a language model.

ftrain sample runs/demo@150 --prompt "def "
"""

from __future__ import annotations

from typing import Any

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.run import split_step
from ftrain.cli.types import PLACE, POSITIVE

SEED = click.IntRange(-(2**63), 2**63 - 1)
"""What a generator takes."""


@click.command()
@click.argument("url", metavar="URL[@STEP]", type=PLACE)
@click.option("--prompt", default="def ", show_default=True, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 4096), default=100, show_default=True, help="How many tokens to add.")
@click.option("--temperature", type=POSITIVE, default=0.7, show_default=True, help="0: always the likeliest token.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the choice.")
@click.option("--tokenizer", default="", metavar="FILE", help="Else the model's own; of an import, the one beside its weights.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def sample(url: str, prompt: str, as_json: bool, **given: Any) -> None:
    """Continue a prompt with the weights of a checkpoint (the newest of URL, unless @STEP says which).

    \b
    Example:
      ftrain sample runs/demo --prompt "def "
    """
    from ftrain.compose.sampling import sample_text

    base, step = split_step(url)
    with told(base):
        text = sample_text(base, step=step, prompt=prompt, **given)
    if as_json:
        render.json({"prompt": prompt, "text": text})
    else:
        render.data(text)
