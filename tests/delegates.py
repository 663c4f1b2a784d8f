"""A run's delegate without a coordinator: what it is told is up to the test, and what it tells the keepers is kept."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.args import Launch
from ftrain.compose.delegate import RunDelegate
from ftrain.compose.endwatch import EndWatch
from recovery.notice import Lookout
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.ledgers import config


def run_delegate(folder: Path, *overrides: str) -> tuple[RunDelegate, list[Any]]:
    """Of a run of two ranks that stores in memory; and all payloads for the keepers, as they come. Close it."""
    wanted = config("parallel.ranks=2", *overrides)
    launch = Launch(config=msgspec.to_builtins(wanted), fingerprint="f", changes=[])
    watch = EndWatch(Lookout((), poll_s=60.0, clock=lambda: 0.0), margin_s=0.0)
    delegate = RunDelegate(launch, wanted, RunStore(MemoryStore()), folder=folder, policies=[], endwatch=watch)
    sent: list[Any] = []
    delegate._links = types.SimpleNamespace(to_keeper=sent.append, places=lambda: ())  # type: ignore[assignment]
    return delegate, sent
