"""A preload whose workers die between the fork and their hello."""

from __future__ import annotations

import os

depth = 0


def after_fork() -> None:
    """Die in the second generation: the first is the process in the middle."""
    global depth
    depth += 1
    if depth == 2:
        os._exit(9)


os.register_at_fork(after_in_child=after_fork)
