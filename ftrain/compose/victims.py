"""Whom a drill strikes: the process behind a name, found anew each time, and the newest checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec


def victim(local: Path, target: str, rank: int, status: dict[str, Any]) -> int | None:
    """The pid to strike; None if there is none at the moment."""
    agent = int(status["agent_pid"] or 0)
    if target == "agent":
        return agent
    if target == "worker":
        worker = status["workers"].get(str(rank), {})
        return None if worker.get("ended", True) else int(worker["pid"])
    if target == "coordinator":
        return int(msgspec.json.decode((local / "owner.json").read_bytes())["pid"])
    workers = {int(worker["pid"]) for worker in status["workers"].values()}
    mark = b"ftrain.compose.keeper" if target == "keeper" else b"recovery.zygote"
    return next((pid for pid in _children(agent) if pid not in workers and mark in _command(pid)), None)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def damage(url: Path, step: int) -> None:
    """Flip a bit in the middle of a pack of a checkpoint."""
    packs = sorted((url / "checkpoints" / f"step-{step:08d}").glob("*.pack"))
    with packs[0].open("r+b") as file:
        middle = packs[0].stat().st_size // 2
        file.seek(middle)
        value = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([value ^ 1]))
