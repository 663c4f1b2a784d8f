"""`ftrain`: the command line. Commands are imported when they are called, so `ftrain --help` and `ftrain report`
never pay for torch.

Every entry runs with Python's safe path (`-P`): a folder named `storage/` where the user happens to stand must not
shadow ours. An entry that was started without it executes itself again.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Mapping
from inspect import cleandoc
from typing import Any, NoReturn

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while this imports ends it without a word; `main` takes it back

import click

from recovery.codes import ExitCode

COMMANDS: Mapping[str, str] = {
    "run": "ftrain.cli.run:run",
    "supervise": "ftrain.cli.supervise:supervise",
    "status": "ftrain.cli.live:status",
    "save": "ftrain.cli.live:save",
    "stop": "ftrain.cli.live:stop",
    "drain": "ftrain.cli.live:drain",
    "admit": "ftrain.cli.live:admit",
    "resize": "ftrain.cli.live:resize",
    "join": "ftrain.cli.join:join",
    "submit": "ftrain.cli.submit:submit",
    "report": "ftrain.cli.report:report",
    "compare": "ftrain.cli.compare:compare",
    "watch": "ftrain.cli.watch:watch",
    "metrics": "ftrain.cli.metrics:metrics",
    "ckpt": "ftrain.cli.ckpt:ckpt",
    "sample": "ftrain.cli.sample:sample",
    "data": "ftrain.cli.data:data",
    "plan": "ftrain.cli.plan:plan",
    "certify": "ftrain.cli.certify:certify",
    "classify": "ftrain.cli.classify:classify",
    "doctor": "ftrain.cli.doctor:doctor",
    "drill": "ftrain.cli.drill:drill",
    "init": "ftrain.cli.init:init",
    "completion": "ftrain.cli.completion:completion",
}


class LazyGroup(click.Group):
    """A group whose commands are modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        _example_last(command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, for words that can be recorded: launches, ledgers and manifests are JSON, which is UTF-8."""
        for word in args:
            if any("\ud800" <= sign <= "\udfff" for sign in word):  # what Python makes of other bytes
                raise click.UsageError(f"{word!r} is not UTF-8: what is given here is recorded, and records are UTF-8")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, but an interrupted command has a number of its own: 1 is `ckpt diff`'s word for a difference. What was
        meant by an option that there is not is said better.
        """
        from ftrain.cli.slips import options_meant

        try:
            with options_meant():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("interrupted", ExitCode.INTERRUPTED)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a suggestion for a command that does not exist."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from ftrain.cli.slips import meant_command

            meant = meant_command(args[0], COMMANDS)
            hint = f" Did you mean {meant!r}?" if meant else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _example_last(command: click.Command) -> None:
    """The example stands behind the options, where a terminal that scrolls leaves it in sight."""
    text, mark, example = cleandoc(command.help or "").partition("\n\n\b\nExample")
    if mark:
        command.help, command.epilog = text, mark.lstrip("\n") + example
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _example_last(inner)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ftrain-runtime", prog_name="ftrain")
def cli() -> None:
    """Training that does not care what breaks.

    \b
    Examples:
      ftrain init
      ftrain run ftrain.toml
    """


_example_last(cli)


def main(argv: list[str] | None = None) -> Any:
    """Entry point of the console script and of `python -m ftrain.cli.entry`."""
    if not sys.flags.safe_path:
        arguments = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-P", "-m", "ftrain.cli.entry", *arguments])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _spell()
    try:
        return cli(args=argv, prog_name="ftrain")
    except OSError as error:
        _say(_of_system(error), ExitCode.STORAGE)
    except Exception as error:
        _say(f"this is a fault of ftrain, not yours: {type(error).__name__}: {error}\n{_kept()}", 1)


def _of_system(error: OSError) -> str:
    """What the system refused. It names no file where a relative path begins in a folder that somebody has deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder that this was started in is not there any more: change to one that is (cd), and say it again"
    return f"{error.filename or 'the system'}: {error.strerror or error}"


def _spell() -> None:
    """What a terminal's encoding has no sign for is a question mark there, and no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def _kept() -> str:
    """Where the traceback of what is being handled went: nobody should have to read it, and whoever repairs it needs it."""
    import tempfile
    import traceback

    text = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="ftrain-", suffix=".txt", delete=False) as file:
            file.write(f"{sys.argv}\n{text}")
    except OSError:
        return text
    return f"what happened stands in {file.name}; please report it together with the command"


def _say(text: str, code: int) -> NoReturn:
    from ftrain.cli.render import complain

    complain(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
