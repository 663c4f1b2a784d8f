"""What a `Checkpointer` is told, checked where it is told: a word with a slip in it must not turn into a silent default.

What is wrong here would show hours later, or never: `on_error="rais"` would raise no failure at all, a negative `keep_last`
would retire what it was to keep. So each argument is refused by its name, before a rank waits for another.
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from numbers import Real

from ftrain.checkpoint.beside import Overlap
from ftrain.checkpoint.script_messages import KeeperStart
from ftrain.schemes import checked
from storage.compress import Compressor, compressor_named

RUN = "FTRAIN_RUN"
LEVEL = 5  # of compression: a higher one takes longer and saves nothing on numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of a `Checkpointer`, all of them allowed."""

    url: str
    skips: bool
    """A save is left out while two earlier ones are still on their way."""
    raises: bool
    """A save that failed raises at the next call."""
    keep_last: int
    keep_every: int
    upload_mib_s: float
    compressor: Compressor | None
    overlap: Overlap

    def keeper_start(self, rank: int, world: int) -> KeeperStart:
        """What this rank's keeper is started with, until an epoch is taken."""
        return KeeperStart(
            url=self.url,
            rank=rank,
            world=world,
            epoch=-1,
            upload_mib_s=self.upload_mib_s,
            compressor=self.compressor,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
        )


def checked_options(
    url: object,
    *,
    when_busy: object,
    on_error: object,
    keep: tuple[object, object],
    upload_mib_s: object,
    compression: object,
    overlap: object,
) -> Options:
    """The arguments as they are used; `keep` is `keep_last` and `keep_every`. Raises ValueError, naming the one that is not
    allowed.
    """
    return Options(
        url=place_of_run(url),
        skips=_word("when_busy", when_busy, "wait", "skip") == "skip",
        raises=_word("on_error", on_error, "log", "raise") == "raise",
        keep_last=_count("keep_last", keep[0]),
        keep_every=_count("keep_every", keep[1]),
        upload_mib_s=_rate("upload_mib_s", upload_mib_s),
        compressor=compressor_named(_word("compression", compression, "none", "lz4", "zstd"), LEVEL),
        overlap=_overlap(overlap),
    )


def place_of_run(url: object) -> str:
    """The URL, or the absolute path of a folder; None: that of the supervised run."""
    given = os.environ.get(RUN, "") if url is None else url
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if not isinstance(given, str):
        raise ValueError(f"url={given!r:.60}: a folder, or an object store's URL, as text")
    if not given.strip():
        raise ValueError(f"where to? Checkpointer(url), or the variable {RUN}, which `ftrain supervise` sets")
    return given if "://" in checked(given) else os.path.abspath(os.path.expanduser(given))


def _word(name: str, given: object, *allowed: str) -> str:
    if isinstance(given, str) and given in allowed:
        return given
    quoted = [f'"{word}"' for word in allowed]
    raise ValueError(f"{name}={given!r:.60}: {', '.join(quoted[:-1])} or {quoted[-1]}")


def _count(name: str, given: object) -> int:
    """A whole number from 0, as an int (one of NumPy is one, True is none)."""
    try:
        found = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if found < 0:
        raise ValueError(f"{name}={given!r:.60}: a whole number, 1 or more; 0 is no such rule")
    return found


def _rate(name: str, given: object) -> float:
    found = -1.0 if isinstance(given, bool) or not isinstance(given, Real) else float(given)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{name}={given!r:.60}: a number of MiB per second; 0 is no limit")
    return found


def _overlap(given: object) -> Overlap:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given == "manual":
        return "manual"
    raise ValueError(f'overlap={given!r:.60}: True, False, or "manual"')
