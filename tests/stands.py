"""Runs a script that stands still at a step until it is killed, so that whoever is to kill it there is never too late.

python tests/stands.py RANK:ATTEMPT:STEP[,RANK:ATTEMPT:STEP...] SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import ftrain

PLACES = {tuple(map(int, place.split(":"))) for place in sys.argv[1].split(",")}
HERE = (int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
told = ftrain.progress


def progress(step: int, **values: Any) -> bool:
    """Tell the step, as the script wants, then stand still if this is the place."""
    stop = told(step, **values)
    while (*HERE, step) in PLACES:
        signal.pause()
    return stop


vars(ftrain)["progress"] = progress
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
