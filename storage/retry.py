"""Riding out a store that does not answer for a while: policies as values, and the wrapper that applies them.

The client libraries retry for about two seconds, without jitter: too little for a throttling storm, in which thousands of
writers that come back at the same moment keep it going. So the libraries' own retries are switched off (they also hide whether
a create was sent twice), and this wrapper retries each request on its own: one range, one part, never a whole pack. Waits are
drawn uniformly between 0 and a growing limit ("full jitter"). What does not get better by waiting (missing, denied, damaged)
is raised at once. Expired credentials are the exception: fresh ones are fetched once for each request that was refused.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from storage.errors import ExpiredCredentials, ObjectMissing, StorageError, Throttled, Unavailable
from storage.multipart import PartShape, stream_parts
from storage.objects import MAX_OBJECT_BYTES, ByteRange, Bytes, BytesList, ObjectInfo, ObjectStore, Upload
from storage.perprocess import PerProcess
from storage.traffic import traffic
from storage.wrapper import WrappingStore

__all__ = ["PATIENT", "QUICK", "WATCHED", "Backoff", "RetryPolicy", "RetryStats", "RetryingStore"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Tries of one class of errors, at most `attempts`; wait n (from 0) is drawn from 0 to min(most_s, first_s * 2**n)."""

    attempts: int
    first_s: float
    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """One backoff per class of errors, and one deadline for all tries of a request together."""

    deadline_s: float
    throttled: Backoff
    unavailable: Backoff
    at_first: "RetryPolicy | None" = None
    """Instead, until the store has answered once: a person who named a wrong place should not wait for minutes to learn it."""

    def backoff(self, error: BaseException) -> Backoff:
        """The backoff for `error`, which is worth a retry."""
        return self.throttled if isinstance(error, Throttled) else self.unavailable


PATIENT = RetryPolicy(
    deadline_s=300.0,
    throttled=Backoff(attempts=60, first_s=1.0, most_s=30.0),
    unavailable=Backoff(attempts=40, first_s=0.2, most_s=15.0),
)
"""For a run nobody watches: minutes of a store's absence are cheaper than an interruption of the training."""

QUICK = RetryPolicy(
    deadline_s=8.0,
    throttled=Backoff(attempts=4, first_s=0.5, most_s=2.0),
    unavailable=Backoff(attempts=3, first_s=0.2, most_s=1.0),
)
"""For a person who waits for an answer."""

WATCHED = replace(PATIENT, at_first=QUICK)
"""For a command of a person: where nobody answers it ends in seconds; once it is at work it rides out as much as a run does."""


@dataclass(slots=True)
class RetryStats:
    """What the retries of a store came to so far. Updated under a lock: several threads retry at a time."""

    num_retries: Counter[str] = field(default_factory=Counter)
    """Retries by the name of the error's class."""
    waited_s: float = 0.0
    """Sum of all waits, over all threads."""
    last_error: str = ""
    """Why the last retry was made."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, error: BaseException, wait_s: float) -> None:
        """Note that `error` is followed by a wait of `wait_s` and another try."""
        with self._lock:
            self.num_retries[type(error).__name__] += 1
            self.waited_s += wait_s
            self.last_error = str(error)


class RetryingStore(WrappingStore):
    """A store whose every request is tried again, by `policy`, while it fails with `Unavailable`."""

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy = PATIENT,
        *,
        shape: PartShape | None = None,
        piece_bytes: int = 8 * 2**20,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(inner)
        self.policy = policy
        self.stats = RetryStats()
        self._shape = shape or PartShape()
        self._piece_bytes = piece_bytes
        self._answered = False
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait  # `close` ends the waits, so that a process can end while its store is away
        self._pool = PerProcess(lambda: ThreadPoolExecutor(self._shape.in_flight, thread_name_prefix="ftrain-store"))

    @property
    def num_retries(self) -> int:
        return self.stats.num_retries.total()

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        return self._try(lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.get_ranges(key, [rng])[0]

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        plan = [_pieces(rng, self._piece_bytes) for rng in rngs]
        flat = [piece for pieces in plan for piece in pieces]
        if len(flat) <= 1:
            return [self._piece(key, piece) for piece in flat]
        found = self._pool.get().map(lambda piece: self._piece(key, piece), flat)
        return [_join([next(found) for _ in pieces]) for pieces in plan]

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        pieces = _pieces(ByteRange(start, start + len(out)), self._piece_bytes)

        def fetch(piece: ByteRange) -> None:
            with traffic.hold(len(piece)):
                self._try(lambda: self.inner.get_into(key, piece.start, out[piece.start - start : piece.stop - start]))

        for _ in self._pool.get().map(fetch, pieces):
            pass

    def put(self, key: str, data: Bytes) -> None:
        traffic.pace(len(data))
        with traffic.hold(len(data)):
            self._try(lambda: self.inner.put(key, data))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Parts are retried one by one where the store has parts. Else the whole is, if `blocks` can be read again (a list)."""
        if self.capabilities.parts:
            return stream_parts(
                blocks,
                self._shape,
                put=lambda data: self.put(key, data),
                begin=lambda: self._begin(key),
                pool=self._pool.get(),
            )
        if iter(blocks) is blocks:
            return self.inner.put_stream(key, traffic.paced(blocks))
        return self._try(lambda: self.inner.put_stream(key, traffic.paced(blocks)))

    def create(self, key: str, data: bytes) -> bool:
        """A try whose answer was lost may have won: then the object is there, and its bytes tell whose it is."""
        unsure = False

        def attempt() -> bool:
            nonlocal unsure
            try:
                created = self.inner.create(key, data)
            except Unavailable:
                unsure = True
                raise
            return created or (unsure and self._holds(key, data))

        return self._try(attempt)

    def size(self, key: str) -> int:
        return self._try(lambda: self.inner.size(key))

    def exists(self, key: str) -> bool:
        return self._try(lambda: self.inner.exists(key))

    def delete(self, key: str) -> None:
        self._try(lambda: self.inner.delete(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self._try(lambda: tuple(self.inner.list(prefix))))

    def begin_upload(self, key: str) -> Upload | None:
        return self._begin(key) if self.capabilities.parts else None

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        return self._try(lambda: self.inner.sweep_unfinished(older_than_s=older_than_s))

    def quick(self) -> ObjectStore:
        quick = RetryingStore(self.inner.quick(), QUICK, shape=self._shape, piece_bytes=self._piece_bytes)
        quick._closed, quick._sleep = self._closed, self._sleep
        quick.stats = self.stats
        return quick

    def close(self) -> None:
        """Let go of connections; what is being retried gives up now. May be called from another thread."""
        self._closed.set()
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown()
        self.inner.close()

    def _piece(self, key: str, piece: ByteRange) -> bytes:
        with traffic.hold(len(piece)):
            return self._try(lambda: self.inner.get_range(key, piece))

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.inner.size(key) == len(data) and self.inner.get(key, max_bytes=len(data)) == data
        except ObjectMissing as error:  # removed since it was refused: the question is open again
            raise Unavailable(f"{key} came and went while it was created", key) from error

    def _begin(self, key: str) -> Upload:
        upload = self._try(lambda: self.inner.begin_upload(key))
        assert upload is not None, "a store with parts begins uploads"
        return _RetryingUpload(upload, self._try)

    def _try(self, call: Callable[[], T]) -> T:
        """The result of `call`, or the last error it raised, which says how long it was tried."""
        refreshed = False

        def asked() -> T:
            try:
                found = call()
            except StorageError as error:
                self._answered |= not isinstance(error, Unavailable)
                raise
            self._answered = True
            return found

        def again(error: BaseException) -> bool:
            nonlocal refreshed
            if isinstance(error, ExpiredCredentials) and not refreshed:
                refreshed = True
                self.inner.refresh_credentials()
                return True
            return isinstance(error, Unavailable)

        return Retrying(
            sleep=self._wait,
            stop=self._must_stop,
            wait=self._wait_s,
            retry=retry_if_exception(again),
            before_sleep=self._count,
            retry_error_callback=_give_up,
        )(asked)

    @property
    def _patience(self) -> RetryPolicy:
        return self.policy if self._answered else self.policy.at_first or self.policy

    def _must_stop(self, state: RetryCallState) -> bool:
        policy = self._patience
        tries = policy.backoff(_error(state)).attempts
        return self._closed.is_set() or state.attempt_number >= tries or (state.seconds_since_start or 0.0) >= policy.deadline_s

    def _wait_s(self, state: RetryCallState) -> float:
        policy = self._patience
        backoff = policy.backoff(_error(state))
        left_s = policy.deadline_s - (state.seconds_since_start or 0.0)
        return min(wait_random_exponential(multiplier=backoff.first_s, max=backoff.most_s)(state), max(left_s, 0.0))

    def _wait(self, seconds: float) -> None:
        self._sleep(seconds)

    def _count(self, state: RetryCallState) -> None:
        self.stats.count(_error(state), state.upcoming_sleep)


class _RetryingUpload(Upload):
    """An upload whose every part is retried on its own."""

    def __init__(self, inner: Upload, retry: Callable[[Callable[[], None]], None]) -> None:
        self._inner = inner
        self._retry = retry

    def put_part(self, number: int, data: Bytes) -> None:
        traffic.pace(len(data))
        with traffic.hold(len(data)):
            self._retry(lambda: self._inner.put_part(number, data))

    def complete(self) -> None:
        self._retry(self._inner.complete)

    def abort(self) -> None:
        self._inner.abort()


def _pieces(rng: ByteRange, piece_bytes: int) -> tuple[ByteRange, ...]:
    """`rng` in pieces that are retried one by one; an empty range is one empty piece, so that a missing object shows."""
    starts = range(rng.start, max(rng.stop, rng.start + 1), piece_bytes)
    return tuple(ByteRange(start, min(start + piece_bytes, rng.stop)) for start in starts)


def _join(pieces: Sequence[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    assert error is not None, "only asked after a failure"
    return error


def _give_up(state: RetryCallState) -> None:
    error = _error(state)
    if isinstance(error, Unavailable) and state.attempt_number > 1:
        error.message += f" (given up after {state.attempt_number} tries in {state.seconds_since_start or 0.0:.0f} s)"
    raise error
