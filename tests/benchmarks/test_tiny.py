"""Each benchmark runs in its tiny form and prints one JSON object with its keys. What the figures are is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def tiny(name: str, folder: Path) -> dict[str, Any]:
    """The object that a benchmark prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--json", "--dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.dist
def test_checkpoint_stall(tmp_path: Path) -> None:
    result = tiny("checkpoint_stall", tmp_path)
    assert {"blocked_over_memcpy", "dcp_over_ours", "dcp_best"} < result.keys()
    assert result["blocked_over_memcpy"] > 0
    assert result["dcp_over_ours"] > 0
    assert result["verified_bytes"] > 14 * result["parameters"]  # with the checksums
    assert set(result["cases"]) == {
        "memcpy",
        "ours",
        "dcp_thread",
        "dcp_thread_kept_stager",
        "dcp_process",
        "dcp_process_kept_stager",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.chaos
@pytest.mark.dist
def test_recovery(tmp_path: Path) -> None:
    result = tiny("recovery", tmp_path)
    assert {"ours_over_torchrun", "ours_median_s", "torchrun_median_s", "ours_non_recoveries"} < result.keys()
    assert result["ours_non_recoveries"] == 0
    (ours,) = result["ours"]["samples"]
    assert ours["seconds"] >= ours["first_step_s"] > 0
    assert ours["highest_step"] - ours["resumed_at"] <= 10
    assert list(tmp_path.iterdir()) == []
