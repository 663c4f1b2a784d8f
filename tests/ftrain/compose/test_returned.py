"""A node that could not be reached for a while: what its keeper was not told meanwhile, it is told when it calls again."""

from __future__ import annotations

from pathlib import Path

from ftrain.checkpoint.messages import PackFailed, Resend, Settled, encode
from tests.delegates import run_delegate

STEP = 9


def test_a_keeper_that_missed_what_is_settled_is_asked_and_told_again(tmp_path: Path) -> None:
    """Else its slot stays full, and the third save after waits for it for ever: seen where a link went down in a commit."""
    delegate, sent = run_delegate(tmp_path)
    failed = PackFailed(epoch=0, attempt=0, step=STEP, rank=1, world=2, reason="no space")
    delegate.on_keeper(encode(failed))
    assert sent == [encode(Settled(attempt=0, step=STEP))]  # this one is lost on the way to n2
    assert delegate.on_node_returned("n2") == []
    assert sent[1:] == [encode(Resend())]
    delegate.on_keeper(encode(failed))  # n2's keeper answers with what it does not know to be settled
    assert sent[2:] == [encode(Settled(attempt=0, step=STEP))]
    delegate.close()
