"""What was meant by a command or an option that there is not: another program's word, or a slip of the finger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import click

from ftrain.nearest import slip

COMMANDS = {
    **dict.fromkeys(("train", "start", "resume", "continue", "launch"), "run"),
    **dict.fromkeys(("torchrun", "exec"), "supervise"),
    **dict.fromkeys(("kill", "cancel", "halt"), "stop"),
    **dict.fromkeys(("checkpoint", "checkpoints"), "ckpt"),
    **dict.fromkeys(("generate", "chat"), "sample"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
}
"""What other programs call it, and what it is called here."""

_GOES_ON = "It needs none: `ftrain run CONFIG` goes on with a run that exists"
_RANKS = "The config says how many: --set parallel.ranks=N"
OPTIONS: Mapping[tuple[str, str], str] = {
    **{("run", option): _GOES_ON for option in ("--resume", "--continue", "--restart")},
    **{("run", option): _RANKS for option in ("--nproc", "--nproc-per-node", "--gpus", "--ranks")},
    ("run", "--nnodes"): "The config says how many ranks a node has: --set machine.ranks_per_node=N",
    ("supervise", "--nproc-per-node"): "Did you mean '--nproc'?",
}
"""A command's option that there is not, and the sentence that says how to have it."""


def meant_command(word: str, known: Iterable[str]) -> str:
    """The command that was meant; empty if nobody can tell."""
    return COMMANDS.get(word) or slip(word, known)


@contextmanager
def options_meant() -> Iterator[None]:
    """A wrong option's error with what was meant; click suggests whatever has some letters in common."""
    try:
        yield
    except click.NoSuchOption as error:
        command = error.ctx.command if error.ctx is not None else click.Command("")
        if said := OPTIONS.get((command.name or "", error.option_name.replace("_", "-"))):
            raise click.UsageError(f"there is no option {error.option_name!r}. {said}", error.ctx) from error
        known = (name for parameter in command.params for name in parameter.opts)
        near = slip(error.option_name, (option for option in known if option.startswith("--")))
        raise click.NoSuchOption(error.option_name, possibilities=[near] if near else None, ctx=error.ctx) from error
