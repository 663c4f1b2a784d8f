"""`ftrain status|save|stop|drain|admit|resize`: a live run, from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ftrain.cli import render
from ftrain.cli.hints import meant
from ftrain.cli.problems import told
from ftrain.cli.types import PLACE
from ftrain.units import plural
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from recovery.state import RunState

local_option = click.option("--local-dir", default="", help="The run's run.local_dir, if it has one.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


def ask(run_url: str, local_dir: str, kind: str, **args: Any) -> dict[str, Any]:
    """Ask the live coordinator of a run; leaves with a sentence if there is none."""
    from ftrain.compose.paths import absolute_url, local_dir_of
    from recovery.client import NotRunningError
    from recovery.client import ask as request

    folder = local_dir_of(absolute_url(run_url), local_dir)
    with told():
        try:
            return request(folder, kind, args)
        except NotRunningError as error:
            render.fail(f"{run_url}: {_not_running(run_url, local_dir) or f'{error}.{meant(run_url)}'}", ExitCode.USAGE)
        except ValueError as error:
            render.fail(f"{run_url}: {error}", ExitCode.USAGE)


def _not_running(run_url: str, local_dir: str) -> str:
    """What the ledger says of a run whose coordinator does not answer, and what to do; empty if no ledger is there.

    Raises LedgerFormatError if it is damaged.
    """
    from ftrain.compose.ledgers import read_ledger
    from ftrain.compose.paths import absolute_url, local_dir_of
    from ftrain.view.record import command_of
    from recovery.owner import read_owner
    from recovery.state import Phase, fold
    from storage.errors import StorageError

    try:
        events = read_ledger(run_url, local_dir)
        state = fold(events)
    except StorageError:
        return ""
    if not state.events:
        return ""
    if command_of(events):
        return _script_not_running(state, run_url)
    again = "`ftrain run CONFIG` with more run.steps" if state.outcome == "finished" else "`ftrain run CONFIG`"
    then = f"{again} goes on with it, `ftrain report {run_url}` explains"
    folder = local_dir_of(absolute_url(run_url), local_dir)
    if (owner := read_owner(folder)) is not None and owner.lives_elsewhere(str(folder)):
        return f"it is a copy: {owner.describe()}, runs the one that it was made of, in {owner.place}; ask for that one"
    if state.phase is not Phase.ENDED:
        where = f"its coordinator does not answer; its ledger goes to step {state.step}"
        return f"{where}: ask again in a moment, it may be restarting; if it is gone, {then}"
    reason = f" ({state.outcome_reason})" if state.outcome_reason else ""
    return f"the run is not running: {state.outcome.replace('_', ' ')} at step {state.step}{reason}; {then}"


def _script_not_running(state: RunState, run_url: str) -> str:
    """The same of a supervised script, whose steps are known only if it told them."""
    how = state.outcome.replace("_", " ") if state.outcome else "its supervisor does not answer"
    step = f" at step {state.step}" if state.step else ""
    reason = f" ({state.outcome_reason})" if state.outcome_reason else ""
    then = f"the same `ftrain supervise` command starts it again, `ftrain report {run_url}` explains"
    return f"the script is not running: {how}{step}{reason}; {then}"


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@local_option
@json_option
def status(run_url: str, local_dir: str, as_json: bool) -> None:
    """Where a live RUN is: step, loss, attempt, last checkpoint, what each rank does.

    \b
    Example:
      ftrain status runs/demo
    """
    from ftrain.cli.status_text import lines

    facts = ask(run_url, local_dir, "status")
    if as_json:
        render.json(facts)
        return
    render.data("\n".join(lines(facts, run_url)))


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@local_option
@json_option
def save(run_url: str, local_dir: str, as_json: bool) -> None:
    """Write a checkpoint to storage at the next step boundary.

    \b
    Example:
      ftrain save runs/demo
    """
    facts = ask(run_url, local_dir, "save")
    render.json(facts) if as_json else render.note("a checkpoint will be written at the next step boundary")


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@local_option
@json_option
def stop(run_url: str, local_dir: str, as_json: bool) -> None:
    """Finish the step, save, and end the run; `ftrain run` goes on with it later.

    \b
    Example:
      ftrain stop runs/demo
    """
    facts = ask(run_url, local_dir, "stop")
    script = "the script is told to leave, by SIGTERM if it does not use ftrain.progress"
    what = script if facts.get("saves") is False else "the run finishes its step, saves and ends"
    render.json(facts) if as_json else render.note(what)


place_argument = click.argument("place")


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@place_argument
@local_option
@json_option
def drain(run_url: str, place: str, local_dir: str, as_json: bool) -> None:
    """Take PLACE away from a live RUN at the next step boundary: a node, node/3, or 3 where there is one node.

    A spare takes its part; without one the run goes on with the best layout for what is left: same batches, same data.

    \b
    Example:
      ftrain drain runs/demo 3
    """
    facts = ask(run_url, local_dir, "drain", place=place, by="ftrain drain")
    render.json(facts) if as_json else render.note(f"{place} is taken away at the next step boundary; left: {_left(facts)}")


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@place_argument
@local_option
@json_option
def admit(run_url: str, place: str, local_dir: str, as_json: bool) -> None:
    """Give PLACE back to a live RUN, which grows at the next step boundary if it had shrunk, without waiting for layout_hold_s.

    \b
    Example:
      ftrain admit runs/demo 3
    """
    facts = ask(run_url, local_dir, "admit", place=place, by="ftrain admit")
    render.json(facts) if as_json else render.note(f"{place} is back; the run has {_left(facts)}")


def _left(facts: dict[str, Any]) -> str:
    return plural(len(facts["places"]), "place")


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to go on with.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Another value of [parallel], or batch.micro_batch.")
@local_option
@json_option
def resize(run_url: str, ranks: int | None, overrides: tuple[str, ...], local_dir: str, as_json: bool) -> None:
    """Go on with other ranks, or cut the model in another way, at the next step boundary of a live RUN.

    The global batch and the order of the data stay; what the seam proves stands in the ledger. Of a run in phases it is the
    present phase that changes, and later ones that do not name the same value.

    \b
    Example:
      ftrain resize runs/demo --ranks 4 --set parallel.tp=2
    """
    if ranks and any(change.partition("=")[0].strip() == "parallel.ranks" for change in overrides):
        raise click.UsageError("--ranks and --set parallel.ranks say the same thing: give one of them")
    facts = ask(run_url, local_dir, "resize", ranks=ranks or 0, set=list(overrides), by="ftrain resize")
    made = "; ".join(f"{it['path']} {it['old']} -> {it['new']}" for it in facts.get("changes", ()))
    said = f"at the next step boundary: {made}" if made else "the run has that layout already"
    render.json(facts) if as_json else render.note(said)
