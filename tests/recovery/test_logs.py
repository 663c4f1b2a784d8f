"""A log that is cut short in the middle while it is written: what stays, what is said, and who goes on where."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recovery import logs
from recovery.logs import HEAD, LEAST, PAGE, LogLimit, limit_in, trim

LINE = b"step %010d of a run that does not end" + b"." * 460 + b"\n"


def write(path: Path, first: int, nbytes: int) -> int:
    """As a rank does; returns the number of its next line."""
    with path.open("ab", buffering=0) as file:
        number = first
        written = 0
        while written < nbytes:
            block = b"".join(LINE % n for n in range(number, number + 100))
            written += file.write(block)
            number += 100
    return number


def test_the_middle_goes_and_the_log_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    following = write(path, 0, 2 * LEAST)
    size = path.stat().st_size
    before = path.read_bytes()
    with path.open("ab", buffering=0) as rank:  # it writes on while that happens
        dropped = trim(path, LEAST)
        rank.write(LINE % following)
    assert path.stat().st_size == size + len(LINE % 0), "whoever follows the log goes on at the same place"
    assert path.stat().st_blocks * 512 <= LEAST
    found = path.read_bytes()
    assert found[:HEAD] == before[:HEAD]
    assert found[HEAD + dropped : size] == before[HEAD + dropped :]
    assert len(before) - HEAD - dropped >= LEAST // 2
    assert found[HEAD + PAGE : HEAD + dropped].strip(b"\0") == b""
    (note,) = found[HEAD : HEAD + PAGE].strip().splitlines()
    assert note.startswith(f"[ftrain: {dropped:,} bytes of this log, from here on, were dropped at ".encode())
    assert found.endswith(LINE % following)


def test_a_log_is_cut_again_and_the_line_counts_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    number, missing = 0, [0]
    for _ in range(4):
        number = write(path, number, LEAST)
        missing.append(trim(path, LEAST) or missing[-1])
        assert path.stat().st_blocks * 512 <= LEAST + PAGE
    assert missing == sorted(missing)
    assert f"[ftrain: {missing[-1]:,} bytes" in path.read_bytes()[HEAD : HEAD + PAGE].decode()
    assert path.read_bytes().count(b"[ftrain:") == 1


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    write(path, 0, LEAST // 2)
    before = path.read_bytes()
    assert trim(path, LEAST) == 0
    assert trim(path, 0) == 0
    assert path.read_bytes() == before


def test_what_the_limit_is() -> None:
    assert limit_in({}) == 1 << 30
    assert limit_in({"FTRAIN_LOG_MIB": "64"}) == 64 << 20
    assert limit_in({"FTRAIN_LOG_MIB": "0"}) == 0
    assert limit_in({"FTRAIN_LOG_MIB": "1"}) == LEAST


@pytest.mark.parametrize("said", ["much", "-5", "1.5", "²", "9" * 5000])
def test_a_limit_that_cannot_be_read_counts_as_none_given_and_is_told_once(said: str) -> None:
    environment = {"FTRAIN_LOG_MIB": said}
    assert limit_in(environment) == 1 << 30
    limit = LogLimit(environment)
    told = f"FTRAIN_LOG_MIB={said[:16]}: allowed: a whole number of MiB, or 0 for no limit; 1024 is used"
    assert (limit.look([]), limit.look([])) == (told, "")
    assert LogLimit({"FTRAIN_LOG_MIB": "64"}).look([]) == LogLimit({}).look([]) == ""


def test_a_file_system_that_cannot_is_told_once_and_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank.log"
    write(path, 0, 2 * LEAST)
    before = path.read_bytes()

    def cannot(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(logs, "_punch", cannot)
    limit = LogLimit({"FTRAIN_LOG_MIB": "4"})
    assert limit.look([tmp_path / "none.log"]) == ""
    assert "rank.log is over FTRAIN_LOG_MIB and cannot be cut short" in limit.look([path])
    assert limit.look([path]) == ""
    assert path.read_bytes() == before
