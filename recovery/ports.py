"""A port that a program will listen on when it comes to that: chosen now, by whoever starts it on that machine."""

from __future__ import annotations

import socket
from collections.abc import Callable

PORTS = (20_000, 31_999)  # below the kernel's own choices: nobody gets one of them by accident
STRIDE = 37


def free_port(host: str, ports: tuple[int, int] = PORTS, *, start: int, bind: Callable[[str, int], bool] | None = None) -> int:
    """The first free port of `ports` (first and last), from one that `start` chooses; a single one is taken as it is.

    Different `start`s in a row give different ports, so that what an earlier attempt left behind is in nobody's way. OSError if
    none is free.
    """
    first, last = ports
    if first == last:
        return first
    free, count = bind or can_bind, last - first + 1
    for number in range(count):
        port = first + (start * STRIDE + number) % count
        if free(host, port):
            return port
    raise OSError(f"no port of {first} to {last} is free on {host}")


def can_bind(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
