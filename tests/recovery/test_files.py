"""A file that others read at any moment."""

from pathlib import Path

import pytest

from recovery.files import replace_file


def test_it_is_replaced_whole_with_its_mode_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace_file(path, b"a long first content", mode=0o600)
    before = path.stat().st_ino
    replace_file(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert path.stat().st_ino != before  # whoever has it open still reads the first one
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "record.json", b"")
