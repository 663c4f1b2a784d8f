"""Reading Python source in a process that has run other tests before."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def syntax(path: Path) -> ast.Module:
    """The tree of a file.

    Garbage is not collected meanwhile: CPython 3.11 counts the depth of a parse for the whole process, and a finalizer that
    logs a traceback (s3fs's, of a client whose loop has ended) parses source itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if enabled:
            gc.enable()
