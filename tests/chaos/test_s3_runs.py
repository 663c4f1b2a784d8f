"""Whole runs whose checkpoints lie in a real S3 server: the same kills, the same end, the same words about damage."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest
from seaweed import BUCKET, SeaweedServer

from ftrain.compose.proof import stored_digests
from recovery.events import CheckpointCommitted, CheckpointPassedOver, InterruptionClassified, Ready
from tests.chaos.table import SLOWLY
from tests.chaos.test_kills import fault
from tests.commands import ftrain
from tests.runs import TinyRun, asked_to_stop, finish, halt, kill_tree, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.s3]


@pytest.fixture
def run(s3: SeaweedServer, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """A run in the bucket; credentials and endpoint come from the environment, as everywhere."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/runs/{uuid.uuid4().hex}"
    return TinyRun(folder=tmp_path / "run", corpus=corpus, url=url, local_dir=str(tmp_path / "local"))


def with_faults(run: TinyRun, *faults: str) -> TinyRun:
    run.extra += "".join(faults)
    run.__post_init__()
    return run


def test_worker_keeper_and_coordinator_are_killed(run: TinyRun, unbroken: dict[str, str]) -> None:
    """One after the other: the keeper in its first upload, the coordinator before a commit, a worker in its copy."""
    with_faults(run, fault("upload", 9), fault("before_commit", 18), fault("copy", 24))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    events = run.events()
    assert [event.step for event in events if isinstance(event, CheckpointCommitted)] == [9, 18, 27, 30]
    assert sum(isinstance(event, InterruptionClassified) for event in events) == 1  # only the worker's death interrupts
    ready = [event.step for event in events if isinstance(event, Ready)]
    assert list(dict.fromkeys(ready)) == [0, 21]  # a coordinator that dies before its receipt is told again by the agent


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before_manifest", "after_manifest", "after_commit"])
def test_the_coordinator_is_killed_around_a_commit(point: str, run: TinyRun, unbroken: dict[str, str]) -> None:
    with_faults(run, fault(point, 9))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_the_whole_tree_is_killed_and_another_folder_goes_on(run: TinyRun, unbroken: dict[str, str], tmp_path: Path) -> None:
    """As on another machine: nothing but the bucket is left."""
    parent = with_faults(run, halt(11)).start()
    run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
    kill_tree(run, parent)
    run.local_dir = str(tmp_path / "elsewhere")
    run.__post_init__()
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_flipped_byte_in_the_bucket_is_named_and_passed_over(
    run: TinyRun, s3: SeaweedServer, unbroken: dict[str, str]
) -> None:
    assert run.run()[0] == 0
    client, prefix = s3.client(), run.url.removeprefix(f"s3://{BUCKET}/")
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/checkpoints/step-00000030/")["Contents"]
    key = next(entry["Key"] for entry in listed if entry["Key"].endswith("r00001.pack"))
    data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    client.close()
    pack = key.rpartition("/")[2]
    verified = ftrain("ckpt", "verify", f"{run.url}@30")
    assert verified.returncode == 4
    assert pack in verified.stdout
    assert any(f"{slot}/" in verified.stdout for slot in ("weights", "master", "exp_avg", "exp_avg_sq"))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    passed = [event for event in run.events() if isinstance(event, CheckpointPassedOver)]
    assert [event.step for event in passed] == [30]
    assert pack in passed[0].reason
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_a_stop_is_saved_in_the_bucket(run: TinyRun, unbroken: dict[str, str]) -> None:
    parent = with_faults(run, SLOWLY, halt(4)).start()
    halted = run.halted()
    os.kill(parent.pid, signal.SIGTERM)
    run.wait_for(asked_to_stop)
    halted.resume()
    code, output = finish(parent)
    assert code == 75, output
    code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.parametrize(
    ("bucket", "env", "says"),
    [
        pytest.param("no-such-bucket", {}, "no-such-bucket", id="missing-bucket"),
        pytest.param(BUCKET, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "AWS_SECRET_ACCESS_KEY", id="wrong-secret"),
        pytest.param(BUCKET, {"AWS_ACCESS_KEY_ID": "nobody"}, "AWS_ACCESS_KEY_ID", id="wrong-key"),
        pytest.param(
            BUCKET,
            {"AWS_ACCESS_KEY_ID": "read-only-key", "AWS_SECRET_ACCESS_KEY": "read-only-secret"},
            BUCKET,
            id="read-only-key",
        ),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_before_the_start(
    bucket: str, env: dict[str, str], says: str, run: TinyRun
) -> None:
    run.url = f"s3://{bucket}/run"
    run.env = env
    run.__post_init__()
    code, output = run.run(timeout_s=60)
    assert code == 5, output
    assert says in output
    assert "Traceback" not in output
    assert not run.local.exists()
