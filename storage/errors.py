"""Everything that can go wrong in storage, as one tree.

One tree, so that a caller who only wants to know "did the save work" catches one class, and the supervisor can map a class to
an exit code and a retry decision without reading messages. Each error carries the key (object key or array name) it is about,
and its message is a whole sentence: what was given, what was wanted, and what to do.

    StorageError                    anything below; `.key` says what it is about (may be "")
    ├── ObjectMissing               no such object
    ├── AccessDenied                401/403, wrong credentials, a read-only folder: retrying does not help
    │   └── ExpiredCredentials      they were right once: worth one try with fresh ones
    ├── NoSpace                     disk full or quota used up; `.needed_bytes` and `.free_bytes` where they are known
    ├── Unavailable                 network, timeouts, 5xx: worth a retry
    │   └── Throttled               the server asks us to slow down: worth a retry after a longer wait
    ├── ConfigurationError          bad URL, missing bucket, missing library, bad endpoint: a person must change something
    ├── FormatError                 an object that cannot be parsed or breaks the format's rules (also hostile input)
    ├── Damaged                     bytes that do not match their checksum, digest or size; `.array`, `.pack`, `.offset`
    ├── CoverageError               arrays missing, extra, or of another shape; boxes that do not tile; `.problems` lists all
    ├── Fenced                      an epoch that may not commit any more, because a later one went on without it
    └── NoCheckpoint                nothing (valid) to load; `.candidates` says why each was passed over
"""

# ruff: noqa: N818 (the names say what is the matter: NoSpace reads better in an `except` than NoSpaceError)

from collections.abc import Sequence

__all__ = [
    "AccessDenied",
    "ConfigurationError",
    "CoverageError",
    "Damaged",
    "ExpiredCredentials",
    "Fenced",
    "FormatError",
    "NoCheckpoint",
    "NoSpace",
    "ObjectMissing",
    "StorageError",
    "Throttled",
    "Unavailable",
]


class StorageError(Exception):
    """Root of the tree. `key` is the object key or array name the error is about, "" if it is about the store."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return self.message


class ObjectMissing(StorageError):
    """The object is not there."""


class AccessDenied(StorageError):
    """The store answered that these credentials, or this user, may not do this."""


class ExpiredCredentials(AccessDenied):
    """The credentials have run out. Worth one try with those that are to be had now."""


class NoSpace(StorageError):
    """The disk is full or the quota is used up."""

    def __init__(self, message: str, key: str = "", *, needed_bytes: int | None = None, free_bytes: int | None = None) -> None:
        super().__init__(message, key)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class Unavailable(StorageError):
    """The store did not answer, or answered that it cannot now. Worth a retry."""


class Throttled(Unavailable):
    """The store asks us to slow down. Worth a retry after a longer wait."""


class ConfigurationError(StorageError):
    """What was asked for cannot work until a person changes it (URL, bucket, endpoint, library)."""


class FormatError(StorageError):
    """An object cannot be parsed, or breaks a rule of the format."""


class Damaged(StorageError):
    """Stored bytes are not the ones that were written."""

    def __init__(self, message: str, key: str = "", *, array: str = "", pack: str = "", offset: int | None = None) -> None:
        super().__init__(message, key or array or pack)
        self.array = array
        self.pack = pack
        self.offset = offset


class CoverageError(StorageError):
    """The boxes at hand are not the arrays that are wanted. `problems` lists every difference, not only the first."""

    def __init__(self, message: str, key: str = "", *, problems: Sequence[str] = ()) -> None:
        super().__init__(message, key)
        self.problems = tuple(problems)


class Fenced(StorageError):
    """A later epoch started from an earlier step: what this epoch would commit is no part of the run's history any more."""


class NoCheckpoint(StorageError):
    """There is no checkpoint to load. `candidates` says, for each one that was looked at, why it was passed over."""

    def __init__(self, message: str, key: str = "", *, candidates: Sequence[str] = ()) -> None:
        super().__init__(message, key)
        self.candidates = tuple(candidates)
