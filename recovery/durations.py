"""How long something of a run took, or will take, in the words of a person: in seconds or longer, never in milliseconds.

For waits, attempts, outages and what is left of a run. Times of steps and of their parts are measurements, which
`ftrain.units.format_seconds` shows as fine as they are.
"""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """`0.055` as `0.06 s`, `12.34` as `12.3 s`, `75` as `1m 15s`, `7260` as `2h 01m`, `90000` as `1d 01h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s" if seconds else "0 s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {whole % 60:02d}s"
