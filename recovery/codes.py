"""Exit codes of a run: the one place where an outcome becomes a number that scripts and schedulers read.

A scheduler sees nothing but this number, so it must tell "done" from "ask me again", and "again, here" from "again, elsewhere".
75 is EX_TEMPFAIL of sysexits.h: asked to stop, the state is saved, the same command goes on.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit status of `ftrain run` says."""

    DONE = 0
    """The run reached its last step."""
    USAGE = 2
    """The command line is wrong (click's own number); also a file to write that cannot be written, or holds something else."""
    CONFIG = 3
    """The configuration is wrong."""
    DAMAGED = 4
    """A checkpoint that was asked for is not there, or does not verify."""
    STORAGE = 5
    """Storage cannot be used: missing, forbidden, full."""
    HELD = 6
    """Another live run owns this run's folder."""
    RETRY_SAME = 10
    """Ended early; the same command on the same machines may succeed."""
    RETRY_ELSEWHERE = 11
    """Ended early; these machines are suspect."""
    NUMERICS = 12
    """The training itself diverged; a person must look."""
    GIVEN_UP = 13
    """The budget of restarts without progress is used up."""
    STOPPED = 75
    """Asked to stop; the state is saved; the same command goes on."""
    INTERRUPTED = 130
    """Ctrl-C in a command that only looks or copies: nothing is half there; the same command begins again, or goes on."""
