"""A preload that never comes back from its import."""

from __future__ import annotations

import signal

while True:
    signal.pause()
