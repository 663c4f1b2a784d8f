"""Hook of the documentation site: a page that nobody put into the navigation stands under "How it works", not nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTION = "How it works"


def on_config(config: Any) -> Any:
    """Called by MkDocs with its settings; the navigation is a list of {title: page or list}."""
    listed = set(_pages(config["nav"]))
    section = next(entry[SECTION] for entry in config["nav"] if SECTION in entry)
    for path in sorted(Path(config["docs_dir"]).glob("*.md")):
        if path.name not in listed:
            section.append(path.name)
    return config


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in _pages(part)]
