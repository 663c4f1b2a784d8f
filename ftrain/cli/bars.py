"""Curves and bars of a line, for a terminal of any width and any character set.

A line that is cut off by the terminal's edge shows the wrong end of a curve, and block characters that a terminal cannot show
are a wrong curve altogether, so both are asked for before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BLOCKS, SIGNS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
"""Eight heights: where Unicode can be shown, and where not."""

COLOURS = {
    "productive": "green",
    "evaluation": "magenta",
    "checkpoint": "blue",
    "discarded": "red",
    "initialisation": "bright_black",
    "detection": "bright_red",
    "backoff": "yellow",
    "restart": "dark_orange",
    "stopping": "grey50",
    "absent": "grey30",
    "unrecorded": "bright_magenta",
    "other": "white",
}
"""Bucket of the report -> its colour; where there is none, a letter stands for it."""

LETTERS = {"detection": "D"}
"""Those whose first letter is another's."""


@dataclass(frozen=True, slots=True)
class Bars:
    """How to draw. Widths are columns of the terminal."""

    columns: int = 80
    plain: bool = False
    """Whether only ASCII can be shown."""
    coloured: bool = True

    @classmethod
    def of(cls, console: Console) -> Bars:
        """As this console can show them."""
        coloured = console.color_system is not None and not console.no_color
        return cls(columns=console.width, plain=console.options.ascii_only, coloured=coloured)

    @property
    def width(self) -> int:
        """Of a curve or bar that stands beside a number."""
        return max(8, min(40, self.columns - 34))

    def curve(self, values: Sequence[float]) -> str:
        """Means of equal parts, the lowest as the smallest bar."""
        if not values:
            return ""
        heights, parts = SIGNS if self.plain else BLOCKS, min(self.width, len(values))
        cuts = [len(values) * index // parts for index in range(parts + 1)]
        means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(cuts)]
        low, high = min(means), max(means)
        if high == low:
            return heights[0] * parts
        return "".join(heights[min(7, int((mean - low) / (high - low) * 8))] for mean in means)

    def done(self, step: int, steps: int | None) -> str:
        """How much of the way is behind."""
        done = min(self.width, round(self.width * step / steps)) if steps else 0
        behind, ahead = ("#", ".") if self.plain else ("━", "╌")
        return behind * done + ahead * (self.width - done)

    @property
    def lettered(self) -> bool:
        """Whether letters stand for colours, which a reader cannot know without a key."""
        return self.plain or not self.coloured

    def key(self, seconds: Mapping[str, float]) -> str:
        """What each letter of `shares` stands for."""
        return ", ".join(f"{_letter(name)} {name}" for name, part in seconds.items() if part > 0)

    def shares(self, seconds: Mapping[str, float]) -> Text:
        """The buckets of a time as one bar; one that has any time has at least one cell."""
        from rich.text import Text

        width = max(12, min(60, self.columns - 18))
        bar, spent = Text(), {name: part for name, part in seconds.items() if part > 0}
        total = sum(spent.values())
        cells = {name: max(1, round(width * part / total)) for name, part in spent.items()}
        if cells:
            longest = max(cells, key=lambda name: cells[name])
            cells[longest] += width - sum(cells.values())  # what the small ones took too much
        for name, count in cells.items():
            sign = _letter(name) if self.lettered else "█"
            bar.append(sign * count, style=COLOURS[name])
        return bar


def _letter(bucket: str) -> str:
    return LETTERS.get(bucket, bucket[0])
