"""The same promises against a real S3 server, and what goes wrong only there."""

import uuid
from pathlib import Path

import pytest
from seaweed import BUCKET, SeaweedServer

from storage.contract import ObjectStoreContract
from storage.objects import ObjectStore, open_store

pytestmark = pytest.mark.s3


class TestS3(ObjectStoreContract):
    """As `open_store` gives it: with retries."""

    race_threads, race_rounds = 8, 3  # SeaweedFS takes seconds to settle a race of 16; the slow test below has all 40 rounds

    @pytest.fixture(autouse=True)
    def _server(self, s3: SeaweedServer) -> None:
        self.server = s3

    def make_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", options=self.server.options)


@pytest.mark.slow
def test_create_race_of_40_rounds(s3: SeaweedServer, tmp_path: Path) -> None:
    suite = TestS3()
    suite.server, suite.race_threads, suite.race_rounds = s3, 16, 40
    suite.test_create_race(suite.make_store(tmp_path))
