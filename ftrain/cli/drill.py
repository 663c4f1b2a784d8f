"""`ftrain drill`: random faults under the real supervisor, and the proof that nothing was lost.

ftrain drill ftrain.toml --minutes 2
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.types import Finite
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.compose.drill import Outcome


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option("--minutes", type=Finite(0.1), default=2.0, show_default=True, help="Length of the drill.")
@click.option("--every", "gap_s", type=Finite(0.1), default=10.0, show_default=True, help="Mean seconds between faults.")
@click.option(
    "--faults",
    default="all",
    show_default=True,
    help="Kinds, by comma (`--faults help` lists them), or table5: the mix of Llama 3's interruptions.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which faults, when, to whom.")
@click.option("--folder", type=click.Path(file_okay=False), help="Where both runs go; by default run.url with -drill.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def drill(
    config_path: str,
    overrides: tuple[str, ...],
    minutes: float,
    gap_s: float,
    faults: str,
    seed: int,
    folder: str | None,
    as_json: bool,
) -> None:
    """Run what CONFIG describes twice, once undisturbed and once under random faults, and compare the results bit for bit.

    The compared checkpoint comes after the last fault. Leaves with 0 if the states are equal and every fault was recognised,
    with 4 otherwise, or if no fault came before that checkpoint: then nothing is proved.

    \b
    Example:
      ftrain drill ftrain.toml --minutes 2 --seed 7
    """
    from ftrain.compose.course import DrillError
    from ftrain.compose.drill import EXIT, Orders
    from ftrain.compose.drill import drill as carry_out
    from ftrain.load import load
    from ftrain.schemes import is_local

    kinds = possible(chosen("all" if faults == "table5" else faults))
    with told():
        config = load(config_path, overrides)
        if folder is None and not is_local(config.run.url):
            render.fail(f"{config.run.url} is not a local folder: say --folder", ExitCode.USAGE)
        place = Path(folder or config.run.url.removeprefix("file://").rstrip("/") + "-drill").absolute()
        try:
            orders = Orders(minutes=minutes, mean_gap_s=gap_s, kinds=kinds, seed=seed, table_5=faults == "table5")
            outcome = carry_out(config, place, orders, render.note)
        except DrillError as error:
            render.fail(str(error), ExitCode.DAMAGED)
    render.json({**_plain(outcome), "good": outcome.good}) if as_json else show(outcome)
    sys.exit(EXIT[outcome.good])


def chosen(faults: str) -> tuple[str, ...]:
    """The kinds of faults that are asked for; leaves with a word on those that are none, or with the list if it is wanted."""
    from ftrain.compose.strikes import BY_NAME

    if faults == "all":
        return tuple(BY_NAME)
    if faults == "help":
        _list()
    names = tuple(name.strip() for name in faults.split(",") if name.strip())
    wrong = [_wrong(name) for name in names if name not in BY_NAME]
    if wrong or not names:
        told = "; ".join(wrong) or "no kind of fault is named"
        render.fail(f"--faults: {told}. `ftrain drill CONFIG --faults help` lists them", ExitCode.USAGE)
    return names


def _list() -> NoReturn:
    """The kinds as an answer."""
    from ftrain.compose.strikes import KINDS

    render.table(("kind", "what happens"), [(kind.name, kind.about) for kind in KINDS])
    render.data("\nall: each of them in its turn; table5: drawn by the shares of Llama 3's interruptions")
    sys.exit(ExitCode.DONE)


def _wrong(name: str) -> str:
    """That there is no such kind, and which ones may be meant."""
    from ftrain.compose.strikes import BY_NAME
    from ftrain.nearest import nearest_words

    if name in ("all", "table5", "help"):
        return f"{name!r} stands alone"
    close = nearest_words(name, BY_NAME)
    return f"{name!r} is no kind of fault" + (f" (did you mean {' or '.join(close)}?)" if close else "")


def possible(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this user may inflict; says which are left out. Leaves with a sentence if none is left."""
    from ftrain.compose.outage import private_mounts
    from ftrain.compose.strikes import BY_NAME

    stores = tuple(name for name in kinds if BY_NAME[name].target == "store")
    if not stores or private_mounts():
        return kinds
    said = f"left out, because mounts of its own need root: {', '.join(stores)}"
    left = tuple(name for name in kinds if name not in stores)
    render.note(said) if left else render.fail(said, ExitCode.USAGE)
    return left


def show(outcome: Outcome) -> None:
    """The table of faults, the confusion matrix, and the proof."""
    rows = [
        (
            strike.step,
            strike.kind,
            strike.class_,
            "right" if strike.right else "WRONG",
            strike.action,
            strike.steps_lost,
            "-" if strike.down_s is None else f"{strike.down_s:.2f}",
        )
        for strike in outcome.struck
    ]
    render.table(("step", "fault", "class", "", "action", "steps lost", "down s"), rows)
    classes = sorted({name for counts in outcome.confusion.values() for name in counts})
    render.data("")
    render.table(
        ("fault \\ class", *classes),
        [(kind, *(counts.get(name, "") for name in classes)) for kind, counts in outcome.confusion.items()],
    )
    for row in outcome.unexplained:
        render.data(f"no fault of ours: {row.class_}: {row.reason}")
    render.data(f"\neffective time {outcome.effective_time:.1%}; started again by hand {outcome.restarts} times")
    same = "equal" if outcome.equal else f"DIFFERENT: {', '.join(outcome.different[:5])}"
    if outcome.seams:
        same += f"; {outcome.seams} changes of layout, proved by digests; bit for bit up to the first, the same tokens after"
    render.data(f"state of step {outcome.step}, after {outcome.covered} of the faults, recomputed from storage: {same}")
    if not outcome.covered:
        render.data("NOT PROVED: no fault came before that checkpoint, so that it says nothing about a recovery")


def _plain(outcome: Outcome) -> dict[str, object]:
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(outcome, str_keys=True)
    return plain
