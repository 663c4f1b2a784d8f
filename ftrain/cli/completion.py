"""`ftrain completion`: the lines that teach a shell ftrain's words.

ftrain completion bash >> ~/.bashrc
"""

from __future__ import annotations

import click

from ftrain.cli import render


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print completion for SHELL: commands, options, and what they may be.

    \b
    Examples:
      ftrain completion bash >> ~/.bashrc
      ftrain completion zsh >> ~/.zshrc
      ftrain completion fish > ~/.config/fish/completions/ftrain.fish
    """
    from click.shell_completion import get_completion_class

    from ftrain.cli.entry import cli

    found = get_completion_class(shell)
    assert found is not None  # the choice above names those that there are
    render.data(found(cli, {}, "ftrain", "_FTRAIN_COMPLETE").source())
