"""Stream blocks of any size into a multipart upload, in bounded memory.

Object stores take an object in parts of at least 5 MiB. Blocks are copied once into a few part buffers that are used again and
again (fresh pages cost more than the copy), a few parts are on their way at the same time, and nothing is visible before the
last one has arrived. Which call is retried is the caller's business: it hands in an `Upload`.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain

from storage.objects import Bytes, Upload

__all__ = ["PartShape", "stream_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShape:
    """How a stream is cut, and how much of it is in memory: at most `in_flight` + 1 parts and the client's copies of them."""

    part_bytes: int = 8 * 2**20
    """Size of the first 1,000 parts: at least 5 MiB. It doubles every 1,000, because S3 takes 10,000 parts and 5 TiB."""
    in_flight: int = 4
    """Parts that are sent at the same time."""

    def __post_init__(self) -> None:
        if self.part_bytes < 5 * 2**20 or self.in_flight < 1:
            raise ValueError(f"parts need at least 5 MiB and one in flight, got {self}")

    def size_of(self, number: int) -> int:
        """Bytes of part `number` (from 1) unless it is the last."""
        return int(self.part_bytes << (number - 1) // 1000)


def stream_parts(
    blocks: Iterable[Bytes],
    shape: PartShape,
    *,
    put: Callable[[bytearray], None],
    begin: Callable[[], Upload],
    pool: ThreadPoolExecutor,
) -> int:
    """Send `blocks` and return their size. What fits one part goes through `put`; if anything fails the upload is aborted."""
    free: list[bytearray] = []
    parts = _fill(blocks, shape, free)
    first = next(parts)
    if len(first) < shape.part_bytes:
        put(first)
        return len(first)
    upload = begin()
    pending: set[Future[int]] = set()

    def send(number: int, part: bytearray) -> int:
        size = len(part)
        upload.put_part(number, part)
        free.append(part)
        return size

    try:
        size = 0
        for number, part in enumerate(chain([first], parts), 1):
            pending.add(pool.submit(send, number, part))
            size += _drain(pending, keep=shape.in_flight - 1)
        size += _drain(pending, keep=0)
        upload.complete()
    except BaseException:
        for future in pending:
            future.cancel()
        wait(pending)
        upload.abort()
        raise
    return size


def _drain(pending: set[Future[int]], *, keep: int) -> int:
    """Wait until at most `keep` parts are on their way; bytes that arrived meanwhile. Raises what a part raised."""
    size = 0
    while len(pending) > keep:
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            pending.remove(future)
            size += future.result()
    return size


def _fill(blocks: Iterable[Bytes], shape: PartShape, free: list[bytearray]) -> Iterator[bytearray]:
    """Full parts, then the rest (only if it is not empty, unless it is all there is). Buffers come from `free` if one fits."""
    number, used = 1, 0
    part = _buffer(free, shape.size_of(number))
    for block in blocks:
        view = memoryview(block).cast("B")
        while len(view):
            taken = min(len(view), len(part) - used)
            memoryview(part)[used : used + taken] = view[:taken]  # a slice of the bytearray itself would copy twice
            used, view = used + taken, view[taken:]
            if used == len(part):
                yield part
                number, used = number + 1, 0
                part = _buffer(free, shape.size_of(number))
    if used or number == 1:
        yield part[:used]


def _buffer(free: list[bytearray], size: int) -> bytearray:
    while free:
        buffer = free.pop()
        if len(buffer) == size:
            return buffer
    return bytearray(size)
