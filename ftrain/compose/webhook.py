"""Tell a person that the run has stopped for one: the packet, as JSON, to a URL of theirs, when the run has ended.

Nobody may wait for it longer than its limit: the run has ended, the exit code is due, and a chat server that hangs is no reason
to keep a node. So the whole request, redirects and a dripping answer included, runs beside, and is left behind when its time is
over. What became of it is logged; the packet is on disk whatever became of it.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.packets import packet_file
from recovery.packet import Packet
from recovery.state import RunState

log = logging.getLogger(__name__)

ATTEMPTS = 2


def stop_packet(folder: Path, state: RunState) -> Packet | None:
    """The packet of the stop that a run has ended in; None if it has not stopped for a person."""
    decided = state.last_decision
    if decided is None or decided.action != "stop_for_human":
        return None
    path = packet_file(folder, decided.verdict_id)
    return msgspec.json.decode(path.read_bytes(), type=Packet) if path.is_file() else None


def body(packet: Packet, run_url: str) -> dict[str, Any]:
    """What is sent. `text` is what chat servers show; the rest is for programs."""
    return {
        "text": "\n".join([f"{run_url}: {packet.headline}", *packet.lines()[1:]]),
        "run": run_url,
        "packet": msgspec.to_builtins(packet),
    }


def announce(url: str, packet: Packet, *, run_url: str, limit_s: float) -> str:
    """Post the packet. Returns why it did not arrive within `limit_s` seconds, or nothing."""
    request = urllib.request.Request(
        url, data=json.dumps(body(packet, run_url)).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    outcome = [f"no answer within {limit_s:g} s"]

    def post() -> None:
        for attempt in range(ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=limit_s):
                    outcome[0] = ""
                    return
            except urllib.error.HTTPError as error:
                outcome[0] = f"answered {error.code}"
                if error.code < 500 or attempt:
                    return
            except (OSError, ValueError) as error:
                if not isinstance(getattr(error, "reason", error), TimeoutError):  # which is said already
                    outcome[0] = str(error)

    worker = threading.Thread(target=post, name="webhook", daemon=True)
    worker.start()
    worker.join(limit_s)
    return outcome[0]


def tell(url: str, folder: Path, state: RunState, *, run_url: str, limit_s: float) -> None:
    """Announce the stop that the run has ended in, if it has and there is somebody to be told."""
    packet = stop_packet(folder, state) if url else None
    if packet is None:
        return
    trouble = announce(url, packet, run_url=run_url, limit_s=limit_s)
    if trouble:
        log.error("the webhook was not reached: %s; the packet is in %s", trouble, folder / "packets")
    else:
        log.info("the webhook has the packet")
