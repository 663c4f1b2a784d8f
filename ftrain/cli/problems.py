"""From an exception to a sentence and an exit code: the same for every command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ftrain.cli import render
from ftrain.cli.hints import meant
from ftrain.load import ConfigProblems
from recovery.codes import ExitCode
from recovery.events import LedgerFormatError
from recovery.memory import MemoryLimitError
from recovery.owner import HeldError
from storage.errors import CoverageError, Damaged, FormatError, NoCheckpoint, StorageError


@contextmanager
def told(url: str = "") -> Iterator[None]:
    """Turn the errors a user can do something about into a message and an exit code; bugs keep their traceback.

    `url`: the run that was asked for; if it has no checkpoint, what may have been meant is said as well.
    """
    from ftrain.compose.errors import RefusedError, UnfitError
    from ftrain.data.errors import DataError

    try:
        yield
    except ConfigProblems as error:
        render.fail(str(error), ExitCode.CONFIG)
    except UnfitError as error:
        render.fail(str(error), ExitCode.RETRY_ELSEWHERE)
    except (RefusedError, MemoryLimitError, DataError) as error:
        render.fail(str(error), ExitCode.CONFIG)
    except HeldError as error:
        render.fail(str(error), ExitCode.HELD)
    except NoCheckpoint as error:
        render.fail(f"{error}{'.' if (hint := meant(url)) else ''}{hint}", ExitCode.DAMAGED)
    except LedgerFormatError as error:
        then = "move the segment away to go on without it: what it held is reported as missing then"
        render.fail(f"{error}. Checkpoints are apart from it; {then}", ExitCode.DAMAGED)
    except (Damaged, FormatError, CoverageError) as error:
        render.fail(str(error), ExitCode.DAMAGED)
    except StorageError as error:
        render.fail(str(error), ExitCode.STORAGE)
