"""The toy is a module of its own, because the processes under test must be able to import it too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
