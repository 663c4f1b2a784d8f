"""What the coordinator must not miss, kept by the agent until it is on record.

A coordinator may die between receiving a message and writing it down, or be away for a minute; its successor is then told
again. The number of bytes kept is bounded by pushing back, not by forgetting: past the limit the agent stops reading from
workers and keeper, whose sends then wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from recovery.messages import FromKeeper, FromWorker, Lasting, Numbered

LIMIT_BYTES = 64 << 20
OVERHEAD = 200


class Outbox:
    """Numbered messages, oldest first."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        """Empty."""
        self._limit = limit_bytes
        self._kept: deque[Numbered] = deque()
        self._bytes = 0
        self._seq = 0

    def add(self, message: Lasting) -> Numbered:
        """Number a message and keep it."""
        self._seq += 1
        numbered = Numbered(seq=self._seq, message=message)
        self._kept.append(numbered)
        self._bytes += size(message)
        return numbered

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq`, inclusive, is on record."""
        while self._kept and self._kept[0].seq <= seq:
            self._bytes -= size(self._kept.popleft().message)

    @property
    def full(self) -> bool:
        """Whether senders should wait."""
        return self._bytes > self._limit

    def __iter__(self) -> Iterator[Numbered]:
        """What is not acknowledged, oldest first."""
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        """How many messages are kept."""
        return len(self._kept)


def size(message: Lasting) -> int:
    """Bytes that it takes to keep a message, about."""
    payload = len(message.payload) if isinstance(message, FromWorker | FromKeeper) else 0
    return payload + OVERHEAD
