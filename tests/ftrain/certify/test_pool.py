"""The warm workers of a certificate, when they are no more."""

import os
import signal

import pytest

from ftrain.train.certify.pool import Pool, TaskFailedError


@pytest.mark.dist
def test_workers_that_were_killed_are_named_and_replaced():
    with Pool(2) as pool:
        assert pool.run([], world=2) == []
        process = pool._process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(TaskFailedError, match=r"rank \d: died without a word"):
            pool.run([], world=2)
        assert pool.run([], world=2) == []
