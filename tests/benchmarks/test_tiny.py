"""Each benchmark runs in its tiny form and prints one JSON object with its keys. What the figures are is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.supervision_overhead import upper_bound

ROOT = Path(__file__).parent.parent.parent


def tiny(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """The object that a benchmark prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--json", "--dir", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.dist
def test_checkpoint_stall(tmp_path: Path) -> None:
    result = tiny("checkpoint_stall", tmp_path)
    assert {"blocked_over_memcpy", "blocked_over_memcpy_one_call", "dcp_over_ours", "dcp_best"} < result.keys()
    assert result["blocked_over_memcpy"] > 0
    assert result["blocked_over_memcpy_one_call"] > 0
    assert result["dcp_over_ours"] > 0
    assert result["blocking"]["dcp_defaults_over_ours"] >= result["blocking"]["dcp_over_ours"] > 0
    assert result["verified_bytes"] > 14 * result["parameters"]  # with the checksums
    assert result["overlapped"]["blocked_over_memcpy"] > 0
    beside = {"overlapped", "overlapped_stored", "dcp_thread_async_stager", "dcp_process_async_stager"}
    assert result["overlapped"]["dcp_over_ours"] > 0
    for case in beside:
        inflation = result["overlapped"]["inflation"][case]
        assert inflation["low_over_memcpy"] <= inflation["over_memcpy"] <= inflation["high_over_memcpy"]
    assert set(result["cases"]) == beside | {
        "memcpy",
        "memcpy_one_call",
        "ours",
        "step",
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


@pytest.mark.dist
def test_bubble(tmp_path: Path) -> None:
    result = tiny("bubble", tmp_path)
    for cases in (result["sleeps_p4"], result["matmuls_p2"]):
        assert set(cases) == {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"}
        for case in cases.values():
            assert 0 < case["formula"] < 1
            assert 0 < case["measured"] < 1
            assert 0 < case["simulated"] < 1
            assert set(case["all_rounds"]) == {key for key in case if key.startswith("measured_over_")}
    for case in result["sleeps_p4"].values():  # nothing is chosen there
        assert case["all_rounds"]["measured_over_formula"] == case["measured_over_formula"]


@pytest.mark.dist
@pytest.mark.slow
def test_context(tmp_path: Path) -> None:
    result = tiny("context", tmp_path)
    assert result["ring_peak_times_cp"] == pytest.approx(2, abs=0.05)  # two blocks of keys and values, two of their gradients
    assert result["ring_over_all_gather"]["cp2"] == pytest.approx(2 / 3, abs=0.02)  # 2 of 1 + cp
    assert all(value > 0 for value in result["cpu_over_one_process"].values())


@pytest.mark.dist
@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    result = tiny("experts", tmp_path)
    assert all(value > 0 for value in result["over_plain_loop"].values())
    assert result["cpu_of_ep2"] > 0


@pytest.mark.dist
@pytest.mark.slow
def test_engine(tmp_path: Path) -> None:
    result = tiny("engine", tmp_path)
    figures = {
        "single_over_plain_pytorch",
        "tp2_over_dtensor",
        "pp2_over_torch_pipelining",
        "zero1_dp2_over_ddp",
        "zero1_dp2_over_fsdp2",
    }
    assert figures < result.keys()
    assert all(result[figure] > 0 for figure in figures)
    for case in result["cases"].values():
        losses = [contestant["first_loss"] for contestant in case["contestants"].values()]
        assert max(losses) - min(losses) < 0.01, "a peer that learns something else is no peer"


def test_save(tmp_path: Path) -> None:
    result = tiny("save", tmp_path, "--compression", "lz4")
    assert {"cpu_s_per_gib", "cpu_s_per_gib_with_digest", "wall_over_plain_fsync", "dcp_wall_over_ours"} < result.keys()
    assert result["cpu_s_per_gib"] > 0
    assert result["verified_bytes"] >= result["gib"] * 2**30 * 0.9
    assert set(result["cases"]) == {"ours", "ours_digest", "plain_fsync", "dcp", "dcp_2", "ours_compressed"}
    assert result["compression"]["compressor"] == "lz4 5"
    assert result["compression"]["ratio"] > 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dist
def test_reshard(tmp_path: Path) -> None:
    result = tiny("reshard", tmp_path)
    assert {"bytes_read_over_needed", "dcp_wall_over_ours", "peak_memory_over_state"} < result.keys()
    assert set(result["pairs"]) == {"rows_to_columns", "4_to_2", "4_to_3", "dp_to_tp_pp"}
    for pair in result["pairs"].values():
        assert pair["dcp"]["bytes_read_over_needed"] >= 1
        assert 1 <= pair["bytes_read_over_needed"] < 1.5, "of 1 MiB the manifests are a part"
    assert result["pairs"]["rows_to_columns"]["dcp_bytes_over_ours"] > 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.s3
def test_s3(tmp_path: Path) -> None:
    result = tiny("s3", tmp_path)
    assert {"dcp_client_cpu_over_ours", "dcp_wall_over_ours", "peak_memory_over_state"} < result.keys()
    assert set(result["dcp_client_cpu_over_ours"]) == {"obstore", "s3fs"}
    assert all(value > 0 for value in result["dcp_client_cpu_over_ours"].values())
    assert list(tmp_path.iterdir()) == []


def test_scale(tmp_path: Path) -> None:
    result = tiny("scale", tmp_path)
    keys = {"manifest_mb", "commit_check_s", "read_plan_s", "chunks", "requests_per_rank", "mean_range_kib"}
    assert keys < result.keys()
    for model in result["models"].values():
        assert model["writers"] == 16
        assert 1 <= model["bytes_read_over_needed"] < 1.1
        assert 1 <= model["bytes_over_14"] < 1.01
        assert 0 < model["view_one_array_mb"] <= model["view_mb"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dist
@pytest.mark.slow
def test_times(tmp_path: Path) -> None:
    result = tiny("times", tmp_path)
    assert set(result["cases"]) == {"single", "tp2", "pp2", "dp2", "tp2_pp2"}
    for case in result["cases"].values():
        assert case["measured_over_plain"] > 0
        assert sum(case["shares"].values()) == pytest.approx(1, abs=0.01)


@pytest.mark.dist
@pytest.mark.slow
def test_checkpointer(tmp_path: Path) -> None:
    result = tiny("checkpointer", tmp_path)
    assert {"dcp_stall_over_ours", "dcp_wall_over_ours", "bytes_read_over_needed"} < result.keys()
    assert result["verified_bytes"] > 0
    # so small an array is one chunk, and a chunk is read whole: by each of the four ranks of the widest layout at most
    assert 1 <= result["bytes_read_over_needed"] <= 4
    assert result["dcp_stall_over_ours"] > 0
    assert result["blocking"]["dcp_stall_over_ours"] > 0
    assert result["phases_ms"]["ours_overlapped"].keys() == {"look", "settle", "publish", "hook"}
    assert result["phases_ms"]["dcp_thread_async_stager"].keys() == {"state", "call", "hook"}
    assert set(result["overlapped"]["inflation"]) == {"ours_overlapped", "dcp_thread_async_stager", "dcp_process_async_stager"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.dist
def test_supervision_overhead(tmp_path: Path) -> None:
    result = tiny("supervision_overhead", tmp_path)
    assert {"ratio", "wall_ratio", "step_s", "blocks"} < result.keys()
    assert len(result["cpu_ratios"]) == len(result["wall_ratios"]) == result["blocks"]
    assert result["malloc"] == "kept"
    assert min(result["cpu_ratios"]) <= result["ratio_median"] <= result["ratio"] <= max(result["cpu_ratios"])
    assert list(tmp_path.iterdir()) == []


def test_the_bound_of_the_median_is_an_order_statistic() -> None:
    """Of 20 values the 15th lies above the median with 97.9 % (the 14th with 94.2 %): binomial tails."""
    assert upper_bound([float(value) for value in range(1, 21)]) == 15.0
    assert upper_bound([3.0]) == 3.0
