"""`examples/epochs.py`, a script of epochs and batches, goes on in the middle of an epoch bit for bit.

Here it is started without the supervisor, from a parent that has torch loaded: what is looked at is the script. The last
test that starts it has all of it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import textwrap
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from storage.local import LocalStore
from storage.run import RunStore
from tests.free_ports import later
from tests.supervised import standing, supervised, until
from tests.undisturbed import EXAMPLES, Ends, ends
from tests.world import context

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

SCRIPT = str(EXAMPLES / "epochs.py")
STEPS, PER_EPOCH = 80, 16
NOWHERE = 0


def _rank(rank: int, port: int, folder: Path, stops_at: int, stands_at: int) -> None:
    """One rank of two, which sees a request to stop at a step, or stands still at one until it is killed."""
    import torch

    import ftrain

    torch.set_num_threads(1)  # as the supervisor has it
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ["FTRAIN_RUN"] = str(folder / "run")

    def progress(step: int, **values: Any) -> bool:
        while step == stands_at:
            signal.pause()
        return step == stops_at

    vars(ftrain)["progress"] = progress
    sys.argv = [SCRIPT]
    sys.stdout = (folder / f"said-{rank}").open("w", encoding="utf-8")
    runpy.run_path(SCRIPT, run_name="__main__")
    sys.stdout.flush()


def begun(folder: Path, *, stops_at: int = NOWHERE, stands_at: int = NOWHERE) -> list[BaseProcess]:
    """Two ranks of the script."""
    port = later()
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, port, folder, stops_at, stands_at), daemon=True) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finished(folder: Path, ranks: list[BaseProcess]) -> Ends:
    """What they come to."""
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return ends((folder / "said-0").read_text(), folder / "run")


def stored_step(folder: Path) -> int:
    """The newest in storage; 0: none."""
    return max((info.step for info in RunStore(LocalStore(str(folder / "run"))).checkpoints()), default=0)


@pytest.fixture(scope="module")
def undisturbed_epochs(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("epochs")
    found = finished(folder, begun(folder))
    assert found.step == STEPS
    return found


def test_killed_in_the_middle_of_an_epoch_it_ends_with_the_same_bits(tmp_path: Path, undisturbed_epochs: Ends) -> None:
    ranks = begun(tmp_path, stands_at=27)
    until(lambda: stored_step(tmp_path) == 20, "the checkpoint of step 20")
    assert 20 % PER_EPOCH
    for rank in ranks:
        rank.kill()
        rank.join()
    assert finished(tmp_path, begun(tmp_path)) == undisturbed_epochs


@pytest.mark.slow
def test_a_stop_leaves_both_loops_and_the_next_start_goes_on(tmp_path: Path, undisturbed_epochs: Ends) -> None:
    stopped = finished(tmp_path, begun(tmp_path, stops_at=PER_EPOCH))
    assert stopped.step == PER_EPOCH  # the last of an epoch: the schedule has gone on
    assert stopped.said.startswith(f"final step {PER_EPOCH} ")
    assert finished(tmp_path, begun(tmp_path)) == undisturbed_epochs


@pytest.mark.slow
def test_supervised_and_with_processes_that_read_it_ends_with_the_same_bits(tmp_path: Path, undisturbed_epochs: Ends) -> None:
    with supervised(tmp_path, "--nproc", "2", *standing("1:0:27", SCRIPT, "--workers", "2")) as run:
        until(lambda: stored_step(tmp_path) == 20, "the checkpoint of step 20")
        os.kill(run.workers()[1], signal.SIGKILL)
        code, out, err = run.wait()
    assert code == 0, err
    assert ends(out, tmp_path / "run") == undisturbed_epochs


def test_the_guide_shows_the_script_as_it_is() -> None:
    guide = (EXAMPLES.parent / "docs/guides/adopt.md").read_text()
    shown = guide.partition('```python no-test="an excerpt of examples/epochs.py')[2].partition("\n")[2].partition("```")[0]
    parts = [part.strip("\n") for part in shown.split("...\n")]
    assert len(parts) == 3
    script = Path(SCRIPT).read_text()
    absent = [part for part in parts if part not in script and textwrap.indent(part, " " * 4) not in script]
    assert absent == []
