"""PyTorch Distributed Checkpoint, in and out: the only place in storage where pickles are seen and torch may be imported.

Reading needs no torch at all, and no trust: DCP's metadata is a pickle, which is a program, so it runs in a child process that
knows only inert stand-ins for the dozen names such a file may use, with its memory, time and files limited. Writing uses torch
(imported when called), because what is written must be torch's own classes.
"""

from storage.exchange.dcp.reader import read_dcp
from storage.exchange.dcp.writer import write_dcp

__all__ = ["read_dcp", "write_dcp"]
