"""The defects are imported by tests here, and by workers, by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
