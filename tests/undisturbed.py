"""`examples/ddp.py` as it ends when nothing disturbs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from storage.local import LocalStore
from storage.run import RunStore
from tests.once import once
from tests.supervised import python, supervised

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 240
DDP = (str(EXAMPLES / "ddp.py"), "--steps", str(STEPS), "--batch", "256", "--width", "256")


@dataclass(frozen=True)
class Ends:
    """The script's last line, the newest step in storage and its digests, recomputed from storage."""

    said: str
    step: int
    digests: dict[str, int]


def ends(said: str, run_folder: Path) -> Ends:
    """Of a run; NumPy's generator, which the script never seeds, apart."""
    checkpoint = RunStore(LocalStore(str(run_folder))).open()
    assert checkpoint.verify().ok
    digests = {name: value for name, value in checkpoint.manifest.digests.items() if "/numpy/" not in name}
    return Ends(next(line for line in reversed(said.splitlines()) if line.startswith("final ")), checkpoint.step, digests)


def undisturbed_ddp(factory: pytest.TempPathFactory) -> Ends:
    """Two ranks on one machine."""
    folder = once(factory, "undisturbed-ddp", _run_ddp)
    found: Ends = msgspec.json.decode((folder / "ends.json").read_bytes(), type=Ends)
    return found


def _run_ddp(folder: Path) -> None:
    with supervised(folder, "--nproc", "2", *python(*DDP)) as run:
        code, out, err = run.wait()
    assert code == 0, err
    (folder / "ends.json").write_bytes(msgspec.json.encode(ends(out, folder / "run")))
