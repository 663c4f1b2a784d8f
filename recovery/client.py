"""Asking a live run from another terminal: `ftrain status|save|stop`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery import paths
from recovery.messages import ClientReply, ClientRequest
from recovery.wire import channel, connect


class NotRunningError(Exception):
    """No coordinator answers: the run is not running on this machine, or its coordinator is just being restarted."""


def ask(local_dir: Path, kind: str, args: dict[str, Any] | None = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Data of the reply to a request (`status`, `save`, `stop`); NotRunningError if nobody answers, ValueError if refused."""
    path = paths.coordinator_socket(local_dir)
    try:
        link = channel(connect(path), ClientReply)
    except OSError as error:
        raise NotRunningError(f"no live run at {local_dir}: {error.strerror}") from error
    try:
        link.send(ClientRequest(kind=kind, args=args or {}))
        frame = link.receive(timeout_s)
    finally:
        link.close()
    if frame is None:
        raise NotRunningError(f"the run at {local_dir} did not answer within {timeout_s:g} s")
    reply: ClientReply = frame.message
    if not reply.ok:
        raise ValueError(reply.error)
    return reply.data
