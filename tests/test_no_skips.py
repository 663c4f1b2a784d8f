"""In CI a skipped test is a failure, unless it needs a GPU: the rule of tests/conftest.py, tried on a suite of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

def test_runs(): pass

def test_skips(): pytest.skip("no server")

@pytest.mark.skipif(True, reason="not here")
def test_is_skipped(): pass

@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU")

@pytest.mark.xfail
def test_known(): assert False
"""
MODULE = "import pytest\npytest.importorskip('no_such_library')\n"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("1", {"passed": 1, "failed": 1, "skipped": 1, "xfailed": 1, "errors": 2}),
        ("", {"passed": 1, "skipped": 4, "xfailed": 1}),
    ],
    ids=["CI", "newcomer"],
)
def test_skips(tmp_path: Path, setting: str, expected: dict[str, int]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "--continue-on-collection-errors",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "FTRAIN_TESTS_MUST_NOT_SKIP": setting}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    closing = done.stdout.splitlines()[-1].strip("= ")
    counts = dict(reversed(part.split()) for part in closing.partition(" in ")[0].split(", "))
    assert {name: int(count) for name, count in counts.items()} == expected, done.stdout
