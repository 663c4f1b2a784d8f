"""The public names, and that importing them costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import storage


def test_every_public_name_is_there() -> None:
    assert sorted(storage._MODULES) == sorted(storage.__all__)
    assert all(getattr(storage, name) is not None for name in storage.__all__)
    assert dir(storage) == sorted(storage.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = storage.nonsense  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing() -> None:
    code = "import storage, sys; print([m for m in ('numpy', 'msgspec', 'storage.run', 'fsspec') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
