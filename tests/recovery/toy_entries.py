"""Tiny entry functions."""

from __future__ import annotations

import os
import sys
import time

from recovery.worker import WorkerContext


def leave(context: WorkerContext) -> None:
    """With the code that is asked for."""
    sys.exit(context.args["code"])


def tell(context: WorkerContext) -> None:
    """Who we are."""
    context.send(f"{os.environ['TOY']} {context.rank} {context.attempt} {context.epoch}".encode())


def wait_for_flag(context: WorkerContext) -> None:
    """Until a signal has set it."""
    context.send(b"waiting")
    while not context.terminated:
        time.sleep(0.005)
    context.send(b"terminated True")
