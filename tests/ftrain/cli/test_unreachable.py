"""Storage that does not answer, or lets nobody in: what a person who looks at a run is told, before patience ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.retry import QUICK
from tests.commands import ftrain

NOBODY = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
"""The discard port of this machine, where nobody listens."""


@pytest.mark.parametrize("words", ["ckpt ls", "report"])
def test_a_store_that_nobody_reaches_is_said_within_seconds(words: str) -> None:
    done = ftrain(*words.split(), "s3://bucket/key", env=NOBODY)
    assert done.returncode == 5
    assert "http://127.0.0.1:9 cannot be reached for s3://bucket/key" in done.stderr
    assert f"given up after {QUICK.unavailable.attempts} tries" in done.stderr


def test_what_is_written_beside_the_run_is_waited_for_no_longer(tmp_path: Path) -> None:
    """Here it is the source of an import; an export's target and a view's go the same way."""
    done = ftrain("ckpt", "import", "--from", "safetensors", "s3://bucket/model", str(tmp_path / "run"), env=NOBODY)
    assert done.returncode == 5
    assert f"given up after {QUICK.unavailable.attempts} tries" in done.stderr


def test_missing_credentials_are_asked_for_by_names_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    done = ftrain("ckpt", "ls", "s3://bucket/key", env={"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)})
    assert done.returncode == 5
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from a profile in ~/.aws/credentials (AWS_PROFILE, or" in done.stderr
    assert "storage.profile in the config), or from a role of the machine" in done.stderr
