"""Pictures as SVG, written by hand: text that any browser opens, that diffs in a repository, and that needs no library.

Shapes are collected in drawing order; `render` adds the frame. Coordinates are pixels from the top left corner.
Colours come from one table, so that a forward is the same blue in every picture.
"""

from __future__ import annotations

from html import escape

COLOURS = {
    "F": "#7aa6da",
    "B": "#e0a458",
    "I": "#e0a458",
    "W": "#8fbc8f",
    "idle": "#f2f2f2",
    "box": "#ffffff",
    "mark": "#c0504d",
    "line": "#555555",
    "soft": "#dddddd",
}


class Picture:
    """A picture under construction."""

    def __init__(self, width: int, height: int, *, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def rect(self, at: tuple[float, float], size: tuple[float, float], *, fill: str, name: str = "", css: str = "") -> None:
        """A filled box; `name` is what a browser shows under the pointer."""
        tip = f"<title>{escape(name)}</title>" if name else ""
        kind = f' class="{css}"' if css else ""
        place = f'x="{at[0]:g}" y="{at[1]:g}" width="{size[0]:g}" height="{size[1]:g}"'
        self._parts.append(f'<rect{kind} {place} fill="{fill}" stroke="#555555" stroke-width="0.5">{tip}</rect>')

    def text(self, at: tuple[float, float], text: str, *, size: int = 11, anchor: str = "start") -> None:
        """A line of text; `at` is its baseline."""
        place = f'x="{at[0]:g}" y="{at[1]:g}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    def line(self, start: tuple[float, float], stop: tuple[float, float], *, colour: str, width: float = 1.0) -> None:
        """A straight line."""
        ends = f'x1="{start[0]:g}" y1="{start[1]:g}" x2="{stop[0]:g}" y2="{stop[1]:g}"'
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>')

    def render(self, *, style: str = "") -> str:
        """The whole file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" role="img">'
        )
        sheet = f"<style>{style}</style>" if style else ""
        title = f"<title>{escape(self._title)}</title>{sheet}"
        ground = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join([head, title, ground, *self._parts, "</svg>", ""])
