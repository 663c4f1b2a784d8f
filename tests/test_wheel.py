"""The wheel: built, installed into an environment of its own, used outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `ftrain` words from the wheel, in an empty folder. What it depends on is taken from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("ftrain_runtime-*.whl")
    environment = folder / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    target = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    Path(target, "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    empty = folder / "empty"
    empty.mkdir()

    def run(*words: str, program: str = "ftrain") -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        argv = [str(environment / "bin" / program), *words]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=empty, env=env, timeout=300)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout

    return run


pytestmark = pytest.mark.slow


def test_it_is_the_wheel_that_runs(installed: Run) -> None:
    where = installed(
        "-P", "-c", "import ftrain, storage, recovery; print(ftrain.__file__, storage.__file__)", program="python"
    )
    assert str(ROOT) not in where
    assert "site-packages/ftrain/__init__.py" in where


def test_help_names_every_command(installed: Run) -> None:
    shown = installed("--help")
    for command in ("run", "supervise", "report", "ckpt", "plan", "doctor"):
        assert command in shown


def test_the_planner_runs(installed: Run) -> None:
    assert "Memory of" in installed("plan", "memory", str(ROOT / "configs" / "llama3-8b.toml"), "--recompute", "full")


def test_doctor_runs(installed: Run) -> None:
    config = installed("-P", "-c", CONFIG, program="python").strip()
    assert installed("doctor", config)


CONFIG = """
import pathlib
path = pathlib.Path("tiny.toml")
path.write_text('''
run = { url = "runs/tiny", steps = 10 }
model = { layers = 2, hidden = 64, heads = 4, ffn = 128, vocab = 257 }
data = { sources = [{ path = "stdlib" }], seq_len = 32 }
batch = { global_batch = 4 }
parallel = { ranks = 1 }
optimizer = { lr = 1e-3 }
''')
print(path.resolve())
"""


def test_a_script_has_the_checkpointer(installed: Run) -> None:
    code = (
        "import torch, ftrain\n"
        "c = ftrain.Checkpointer('run'); s = {'w': torch.ones(4)}\n"
        "print(c.load(s)); c.save(1, s); c.close(); print(c.committed)\n"
    )
    assert installed("-c", code, program="python").split() == ["0", "1"]
    assert "valid" in installed("ckpt", "ls", "run")
