"""Asking a live run from another terminal, or from another machine that sees its folder: `ftrain status|save|stop|drain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery import paths
from recovery.identity import IdentityError
from recovery.messages import ClientReply, ClientRequest
from recovery.rendezvous import control_folder, dial_coordinator
from recovery.wire import Channel, channel, connect


class NotRunningError(Exception):
    """No coordinator answers: the run is not running, or its coordinator is just being restarted."""


def ask(local_dir: Path, kind: str, args: dict[str, Any] | None = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Data of the reply to a request; NotRunningError if nobody answers, ValueError if refused.

    `local_dir`: the run's local folder, or the one that its nodes share.
    """
    link = _reach(local_dir, timeout_s)
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


def _reach(local_dir: Path, limit_s: float) -> Channel[Any]:
    """Through the socket if it is on this machine, else by the address that the nodes find it at."""
    try:
        return channel(connect(paths.coordinator_socket(local_dir)), ClientReply)
    except OSError as error:
        control = control_folder(local_dir)
        if not control.is_dir():
            raise NotRunningError(f"no live run at {local_dir}: {error.strerror}") from error
    try:
        return dial_coordinator(control, ClientReply, limit_s=limit_s)
    except (OSError, IdentityError) as error:
        raise NotRunningError(f"no live run at {local_dir}: {error}") from error
