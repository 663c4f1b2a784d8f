"""A store that nobody can write to for a moment, seen by the drill and whoever it starts, and by nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import subprocess, sys
from pathlib import Path
from ftrain.compose.outage import begin_outage, end_outage, private_mounts
folder = Path(sys.argv[1])
if not private_mounts():
    sys.exit(77)
held = (folder / "held").open("w")
begin_outage(folder)
print("written" if subprocess.run(["touch", folder / "new"], capture_output=True).returncode == 0 else "refused")
held.write("goes on")
held.close()
print(folder.name in Path("/proc/1/mounts").read_text())
end_outage(folder)
(folder / "after").touch()
try:
    end_outage(folder)
except OSError as error:
    print(error.strerror)
"""


def test_an_outage_is_private_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "only-for-the-drill"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("mounts of one's own need root")
    assert done.stdout.splitlines() == ["refused", "False", f"umount {folder}"], done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["after", "held"]
    assert (folder / "held").read_text() == "goes on"
