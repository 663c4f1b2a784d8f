"""Full, read-only and missing: a save that cannot be stored fails loudly and alone; a start that cannot work is refused."""

from __future__ import annotations

from io import RawIOBase
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.events import CheckpointCommitted, CheckpointFailed, StorageNotice, steps_of
from tests.commands import ftrain, ftrain_json
from tests.conftest import remount_read_only
from tests.runs import TinyRun, finish, halt, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

KEEP_ALL = ("--set", "checkpoint.retention=[]", "--set", "checkpoint.every_steps=3")  # ten checkpoints of half a MiB
KEEP_TWO = ("--set", "checkpoint.retention=[{keep='last', n=2}]", "--set", "checkpoint.every_steps=3")


def failed(run: TinyRun) -> list[CheckpointFailed]:
    return [event for event in run.events() if isinstance(event, CheckpointFailed)]


def committed(run: TinyRun) -> list[int]:
    return [event.step for event in run.events() if isinstance(event, CheckpointCommitted)]


def check_whole(run: TinyRun) -> None:
    """All that is committed verifies, and nothing else takes room."""
    assert ftrain("ckpt", "verify", run.url).returncode == 0
    listed = ftrain_json("ckpt", "ls", run.url)
    assert [info["step"] for info in listed if info["state"] == "valid"] == committed(run)
    left = [path for path in Path(run.url).rglob("*") if path.name.startswith(".ftrain-tmp-")]
    assert left == []


def test_a_full_disk_fails_that_save_and_training_goes_on(small_disk, corpus: str, tmp_path: Path, unbroken) -> None:
    disk = small_disk(8)
    run = TinyRun(
        folder=tmp_path / "config", corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"), extra=halt(19)
    )
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(6_900_000))
    parent = run.start(*KEEP_ALL)
    run.wait_for(lambda events: any(isinstance(event, CheckpointFailed) for event in events))
    ballast.unlink()
    run.halted().resume()
    with no_process_left(run):
        code, output = finish(parent)
    assert code == 0, output
    assert "no space left" in failed(run)[0].reason
    assert f"checkpoint of step {failed(run)[0].step} failed" in output
    steps = [record.step for event in run.events() for record in steps_of(event)]
    assert steps == list(range(1, run.steps + 1)), "a worker was restarted"
    check_whole(run)
    assert 3 in committed(run)
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_disk_that_stays_full_is_said_at_the_end(small_disk, corpus: str, tmp_path: Path, unbroken) -> None:
    """The state of the last step is nowhere: that is no success. With room again, the same command finishes the run."""
    disk = small_disk(8)
    run = TinyRun(folder=tmp_path / "config", corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"))
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(6_900_000))
    with no_process_left(run):
        code, output = run.run(*KEEP_ALL)
    assert code == 5, output
    assert "no space left" in output
    assert failed(run)[-1].step == run.steps
    ballast.unlink()
    check_whole(run)
    code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_what_is_deleted_anyway_makes_room_for_the_next_save(small_disk, corpus: str, tmp_path: Path, unbroken) -> None:
    """Room for five checkpoints, two of which are to be kept: the others' grace period is longer than the run."""
    disk = small_disk(8)
    run = TinyRun(folder=tmp_path / "config", corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"))
    (disk / "ballast").write_bytes(bytes(5_600_000))
    with no_process_left(run):
        code, output = run.run(*KEEP_TWO, "--set", "checkpoint.grace_s=3600")
    assert code == 0, output
    assert failed(run) == []
    assert committed(run) == list(range(3, run.steps + 1, 3))
    notices = [event for event in run.events() if isinstance(event, StorageNotice) and event.topic == "room"]
    assert notices
    assert "(checkpoint.grace_s) were over" in notices[0].text
    assert ftrain("ckpt", "verify", run.url).returncode == 0
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.slow
def test_a_failed_save_may_stop_the_run(small_disk, corpus: str, tmp_path: Path) -> None:
    disk = small_disk(8)
    run = TinyRun(folder=tmp_path / "config", corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"))
    (disk / "ballast").write_bytes(bytes(6_900_000))
    with no_process_left(run):
        code, output = run.run(*KEEP_ALL, "--set", "checkpoint.if_failed=stop")
    assert code in (5, 75), output
    assert "if_failed" in output
    assert max(record.step for event in run.events() for record in steps_of(event)) < run.steps
    check_whole(run)


# -- before the first step ---------------------------------------------------------------------------------------------


def refused(run: TinyRun, code: int, *words: str, options: tuple[str, ...] = ()) -> None:
    """The start is refused in words, and nothing was started."""
    found, output = run.run(*options)
    assert found == code, output
    assert "Traceback" not in output
    for word in words:
        assert word in output
    assert not (run.local / "logs").exists()


def test_a_read_only_folder(small_disk, corpus: str, tmp_path: Path) -> None:
    disk = small_disk(1)
    remount_read_only(disk)
    refused(TinyRun(folder=tmp_path, corpus=corpus, url=str(disk / "run")), 5, str(disk), "ead-only")


def test_a_read_only_local_folder(small_disk, corpus: str, tmp_path: Path) -> None:
    disk = small_disk(1)
    remount_read_only(disk)
    refused(TinyRun(folder=tmp_path, corpus=corpus, local_dir=str(disk / "local")), 5, str(disk), "ead-only")


def fill(disk: Path) -> None:
    """Not one block is left."""

    def write(file: RawIOBase) -> None:
        while True:
            file.write(bytes(4096))

    with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write(file)


def test_a_disk_that_is_full_from_the_start(small_disk, corpus: str, tmp_path: Path) -> None:
    disk = small_disk(1)
    (disk / "run").mkdir()
    fill(disk)
    run = TinyRun(folder=tmp_path, corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"))
    refused(run, 5, "no space left", str(disk))


def test_a_file_where_the_folder_should_be(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    refused(TinyRun(folder=tmp_path, corpus=corpus), 5, str(tmp_path / "run"))


def test_a_missing_corpus(tmp_path: Path) -> None:
    refused(TinyRun(folder=tmp_path, corpus=str(tmp_path / "nowhere")), 3, "nowhere")


def test_arenas_larger_than_the_memory_limit(corpus: str, tmp_path: Path) -> None:
    large = ("model.layers=100", "model.hidden=16384", "model.heads=128", "model.ffn=53248", "model.vocab=128256")
    options = tuple(word for change in large for word in ("--set", change))
    run = TinyRun(folder=tmp_path, corpus=corpus)
    refused(run, 3, "arenas larger than the memory limit", "GiB", "checkpoint.slots", options=options)
    assert not Path(run.url).exists()
