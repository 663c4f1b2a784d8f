"""What lies in storage is read by stock zarr, copied and damaged: damage is found, named and passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from ftrain.cli.entry import cli
from ftrain.compose.proof import stored_digests
from recovery.events import CheckpointPassedOver, Event, InterruptionClassified, RunStarted
from tests.commands import copy_of, flip_array, ftrain, opened, step_files
from tests.runs import TinyRun, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

LAST, BEFORE = 30, 27
ARRAY = "master/layers.1.mlp.w2"


def zarr_group(view: Path, **options: Any) -> zarr.Group:
    return zarr.open_group(f"reference::{view}", mode="r", storage_options=options or None)


def check_values(group: zarr.Group, run: TinyRun) -> None:
    checkpoint = opened(run)
    assert len(checkpoint.names) == 4 * 21
    for name in checkpoint.names:
        array = group[name]
        assert isinstance(array, zarr.Array)
        ours = checkpoint.read(name)
        assert ours.any() or name.endswith("norm")
        np.testing.assert_array_equal(np.asarray(array[...]).view(ours.dtype), ours, strict=True)


def test_stock_zarr_reads_the_newest_checkpoint(unbroken_run: TinyRun) -> None:
    group = zarr_group(step_files(unbroken_run, LAST, "*.zarr.json")[0])
    assert group["weights/embedding"].dtype == np.uint16
    check_values(group, unbroken_run)
    weights = np.asarray(group["weights/layers.0.attention.wq"][...]).astype(np.uint32) << 16
    masters = np.asarray(group["master/layers.0.attention.wq"][...])
    assert np.abs(weights.view(np.float32) - masters).max() <= np.abs(masters).max() * 2**-8  # bfloat16 has 8 bits


def test_a_copy_is_read_by_stock_zarr_when_the_original_is_damaged(unbroken_run: TinyRun, tmp_path: Path) -> None:
    original = copy_of(unbroken_run, tmp_path / "original")
    copy = copy_of(original, tmp_path / "copy")
    pack = flip_array(original, LAST, ARRAY)
    view = step_files(copy, LAST, "*.zarr.json")[0]
    content = view.read_text().replace(str(unbroken_run.url), original.url)  # as if the run had been made there
    view.write_text(content)
    with pytest.raises(ValueError, match="checksum"):
        zarr_group(view)[ARRAY][...]
    assert pack in content
    check_values(zarr_group(view, template_overrides={"u": str(view.parent)}), copy)


def passed_over(run: TinyRun) -> list[CheckpointPassedOver]:
    """Those of the newest start of the run."""
    events: list[Event] = run.events()
    start = max(i for i, event in enumerate(events) if isinstance(event, RunStarted))
    return [event for event in events[start:] if isinstance(event, CheckpointPassedOver)]


def check_goes_on(run: TinyRun, unbroken: dict[str, str], *words: str) -> None:
    """A resume says what it passes over and ends where the unbroken run did."""
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    passed = passed_over(run)
    assert [event.step for event in passed] == [LAST]
    for word in words:
        assert word in passed[0].reason
        assert word in output
    assert f"checkpoint of step {LAST} passed over" in output
    assert stored_digests(run.url) == (LAST, unbroken)


def test_a_flipped_byte_is_found_named_and_passed_over(unbroken_run: TinyRun, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = copy_of(unbroken_run, tmp_path)
    pack = flip_array(run, LAST, ARRAY)
    verified = ftrain("ckpt", "verify", run.url)
    assert verified.returncode == 4
    lines = {line.partition(":")[0]: line for line in verified.stdout.splitlines()}
    assert ARRAY in lines[f"step {LAST}"]
    assert pack in lines[f"step {LAST}"]
    assert lines[f"step {BEFORE}"] == f"step {BEFORE}: ok"
    with pytest.raises(Exception, match=r"(?i)crc32c|checksum"):
        zarr_group(
            step_files(run, LAST, "*.zarr.json")[0], template_overrides={"u": str(step_files(run, LAST, pack)[0].parent)}
        )[ARRAY][...]
    check_goes_on(run, unbroken, ARRAY, pack)
    assert ftrain("ckpt", "verify", f"{run.url}@{LAST}").returncode == 0  # written anew, and the newer one counts


def test_a_flipped_byte_in_the_weights_alone_is_found_by_verify(unbroken_run: TinyRun, tmp_path: Path) -> None:
    """A resume does not read them: they are the rounded masters. But whoever takes the weights must be able to tell."""
    run = copy_of(unbroken_run, tmp_path)
    pack = flip_array(run, LAST, "weights/embedding")
    verified = ftrain("ckpt", "verify", f"{run.url}@{LAST}")
    assert verified.returncode == 4
    assert "weights/embedding" in verified.stdout
    assert pack in verified.stdout
    sampled = ftrain("sample", run.url, "--tokens", "4")
    assert sampled.returncode == 4
    assert "weights/embedding" in sampled.stderr


@pytest.mark.parametrize("keep", [pytest.param(0, id="empty", marks=pytest.mark.slow), pytest.param(200, id="cut")])
def test_a_truncated_manifest_is_passed_over(
    keep: int, unbroken_run: TinyRun, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = copy_of(unbroken_run, tmp_path)
    manifest = step_files(run, LAST, "*.manifest")[0]
    manifest.write_bytes(manifest.read_bytes()[:keep])
    verified = ftrain("ckpt", "verify", run.url)
    assert verified.returncode == 4
    assert manifest.name in verified.stdout
    check_goes_on(run, unbroken, manifest.name)


@pytest.mark.slow
def test_a_truncated_pack_is_passed_over(unbroken_run: TinyRun, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = copy_of(unbroken_run, tmp_path)
    pack = step_files(run, LAST, "*.pack")[1]
    pack.write_bytes(pack.read_bytes()[:-100])
    assert ftrain("ckpt", "verify", run.url).returncode == 4
    check_goes_on(run, unbroken, pack.name)


def test_a_damaged_commit_is_shown_and_passed_over(unbroken_run: TinyRun, tmp_path: Path, unbroken: dict[str, str]) -> None:
    run = copy_of(unbroken_run, tmp_path)
    commit = step_files(run, LAST, "commit-*.json")[0]
    commit.write_bytes(commit.read_bytes()[:-10])
    listed = ftrain("ckpt", "ls", run.url)
    assert listed.returncode == 0
    assert "damaged" in next(line for line in listed.stdout.splitlines() if line.startswith(f"{LAST} "))
    assert ftrain("ckpt", "verify", run.url).returncode == 4
    check_goes_on(run, unbroken, commit.name)


def state_files(run: TinyRun) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((Path(run.url) / "checkpoints").rglob("*")) if path.is_file()}


@pytest.mark.parametrize("part", ["packs", "manifests", "commits"])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(part: str, unbroken_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(unbroken_run, tmp_path)
    packs = []
    for step in (18, BEFORE, LAST):
        if part == "packs":
            packs.append(flip_array(run, step, ARRAY))
        else:
            for path in step_files(run, step, {"manifests": "*.manifest", "commits": "commit-*"}[part]):
                path.write_bytes(path.read_bytes()[:50])
    before = state_files(run)
    with no_process_left(run):
        code, output = run.run()
    assert code == 4, output
    said = output
    if packs:
        assert ARRAY in output
        assert packs[-1] in output
        said = next(event.verdict for event in run.events() if isinstance(event, InterruptionClassified)).evidence[0].text
        assert said.count(ARRAY) == 3
    assert all(f"step {step}" in said for step in (18, BEFORE, LAST)), said
    assert state_files(run) == before


def test_a_finished_run_is_left_as_it_is(unbroken_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(unbroken_run, tmp_path)
    before = state_files(run)
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert state_files(run) == before


def test_a_run_without_any_one_segment_of_its_ledger_is_reported_with_the_gap_or_not_at_all(
    corpus: str, tmp_path: Path
) -> None:
    """Of a run with a restart in it, here and in storage."""
    run = TinyRun(folder=tmp_path / "whole", corpus=corpus, steps=20)
    stopped = run.run("--set", "run.steps=12")
    assert (stopped[0], run.run()[0]) == (0, 0), stopped[1]
    names = [path.name for path in sorted((run.local / "ledger").glob("e*.jsonl"))]
    assert len(names) >= 7
    told = dict.fromkeys(names, 0)
    for name in names:
        broken = copy_of(run, tmp_path / name)
        (broken.local / "ledger" / name).unlink()
        Path(broken.url, "ledger", name).unlink()
        for words in (["report", broken.url], ["watch", broken.url, "--once"], ["compare", broken.url, run.url]):
            done = CliRunner().invoke(cli, words, catch_exceptions=False)
            assert done.exit_code in (0, 4), done.output
            assert name.removesuffix(".jsonl") in done.output, words
            told[name] += done.exit_code == 0
    begins = [
        name for name in names if name.endswith("000000.jsonl")
    ]  # an attempt, of which there is more: only `watch` shows that
    assert told == {name: 1 if name in begins else 3 for name in names}
