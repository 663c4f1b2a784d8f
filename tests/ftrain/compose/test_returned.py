"""A node that could not be reached for a while: what its keeper was not told meanwhile, it is told when it calls again."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import msgspec

from ftrain.checkpoint.messages import PackFailed, Resend, Settled, encode
from ftrain.compose.args import Launch
from ftrain.compose.delegate import RunDelegate
from ftrain.compose.endwatch import EndWatch
from recovery.notice import Lookout
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.ledgers import config

STEP = 9


def test_a_keeper_that_missed_what_is_settled_is_asked_and_told_again(tmp_path: Path) -> None:
    """Else its slot stays full, and the third save after waits for it for ever: seen where a link went down in a commit."""
    wanted = config("parallel.ranks=2")
    launch = Launch(config=msgspec.to_builtins(wanted), fingerprint="f", changes=[])
    watch = EndWatch(Lookout((), poll_s=60.0, clock=lambda: 0.0), margin_s=0.0)
    delegate = RunDelegate(launch, wanted, RunStore(MemoryStore()), folder=tmp_path, policies=[], endwatch=watch)
    sent: list[Any] = []
    delegate._links = types.SimpleNamespace(to_keeper=sent.append)  # type: ignore[assignment]
    failed = PackFailed(epoch=0, attempt=0, step=STEP, rank=1, world=2, reason="no space")
    delegate.on_keeper(encode(failed))
    assert sent == [encode(Settled(attempt=0, step=STEP))]  # this one is lost on the way to n2
    assert delegate.on_node_returned("n2") == []
    assert sent[1:] == [encode(Resend())]
    delegate.on_keeper(encode(failed))  # n2's keeper answers with what it does not know to be settled
    assert sent[2:] == [encode(Settled(attempt=0, step=STEP))]
    delegate.close()
