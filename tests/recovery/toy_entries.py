"""Tiny entry functions."""

from __future__ import annotations

import os
import signal
import sys
import time

from recovery.worker import EAGER_S, WorkerContext


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


def murmur(context: WorkerContext) -> None:
    """Say things that can wait, long after the start, then die without a word, or live on in silence."""
    context._began -= EAGER_S
    for number in range(context.args["reports"]):
        context.send_soon(b"%d" % number)
    if context.args["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    while not context.terminated:
        time.sleep(0.005)


def shout(context: WorkerContext) -> None:
    """Say more than anybody keeps."""
    context._began -= EAGER_S
    for number in range(context.args["reports"]):
        context.send_soon(b"%d " % number + bytes(1 << 20))
