"""Progress of each rank in shared memory: not "alive", but "at step 41, backward of micro-batch 3, since 0.2 s".

A rank writes one record of 256 bytes whenever it enters a phase; that is a memory copy of a microsecond and no system call, so
it may be done for every micro-batch. The agent reads the page while the rank hangs, is stopped, or is dead: nothing of the
rank's cooperation is needed.

A record carries a sequence number and a crc32 of itself. The reader accepts a copy only if the crc agrees, which finds a copy
torn by a writer in the middle on machines with any memory order; a seqlock alone would need barriers that Python has not.

The control page goes the other way: a stop flag and a save counter, written by the agent, read by every rank at each step; and
when the agent has last read what the ranks had sent, so that they need not wake it again at once.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib

from msgspec import Struct

RECORD_SIZE = 256
PHASE_SIZE = 40
BODY = struct.Struct(f"<Qiiqiqdd{PHASE_SIZE}s")
CRC = struct.Struct("<I")
CONTROL = struct.Struct("<qqq")
CONTROL_SIZE = 4096
LOOKED = struct.Struct("<d")
LOOKED_AT = 64
"""Where it lies: in a cache line of its own, aligned, so that it is read whole."""
READ_TRIES = 20


class Beat(Struct, frozen=True, kw_only=True):
    """The latest progress of one rank."""

    rank: int
    attempt: int
    step: int
    """Step the rank works on; -1 before the first."""
    phase: str
    microbatch: int = 0
    collective: int = 0
    """Number of collectives issued so far, if the worker counts them."""
    count: int = 0
    """How often the rank has reported."""
    busy_s: float = 0.0
    """Seconds the rank has computed in this attempt without waiting for others, if the worker counts them."""
    t: float = 0.0
    """Time of the report on this machine's monotonic clock."""
    age_s: float = 0.0
    """Seconds since the report, when the page was read."""


class HeartbeatWriter:
    """One rank's record of the page. Called by that rank only; any of its threads, one at a time."""

    def __init__(self, fd: int, index: int, *, rank: int, attempt: int) -> None:
        """Map the page `fd` and own its record `index`."""
        self.rank = rank
        self.attempt = attempt
        self.step = -1
        self.collective = 0
        self.busy_s = 0.0
        self._page = mmap.mmap(fd, os.fstat(fd).st_size)
        self._start = index * RECORD_SIZE
        self._count = 0

    def beat(self, phase: str, *, step: int | None = None, microbatch: int = 0, collective: int | None = None) -> None:
        """Say where this rank is now. `step` and `collective` stay what they were unless given."""
        if step is not None:
            self.step = step
        if collective is not None:
            self.collective = collective
        self._count += 1
        text = phase.encode()[:PHASE_SIZE]
        now = time.monotonic()
        body = BODY.pack(self._count, self.rank, self.attempt, self.step, microbatch, self.collective, now, self.busy_s, text)
        record = body + CRC.pack(zlib.crc32(body))
        self._page[self._start : self._start + len(record)] = record

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


class HeartbeatReader:
    """Every record of the page, readable at any time whatever the ranks do."""

    def __init__(self, fd: int) -> None:
        """Map the page `fd` read-only."""
        self._page = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._page) // RECORD_SIZE

    def read(self, index: int) -> Beat | None:
        """The newest whole record at `index`; None if the rank has not reported yet."""
        start = index * RECORD_SIZE
        for _ in range(READ_TRIES):
            record = self._page[start : start + BODY.size + CRC.size]
            body = record[: BODY.size]
            if not any(record):
                return None
            if zlib.crc32(body) == CRC.unpack_from(record, BODY.size)[0]:
                return _beat(body)
        return None

    def beats(self) -> list[Beat]:
        """What each rank that has reported last said."""
        return [beat for beat in map(self.read, range(len(self))) if beat is not None]

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def _beat(body: bytes) -> Beat:
    count, rank, attempt, step, microbatch, collective, t, busy_s, text = BODY.unpack(body)
    return Beat(
        rank=rank,
        attempt=attempt,
        step=step,
        phase=text.rstrip(b"\0").decode(errors="replace"),
        microbatch=microbatch,
        collective=collective,
        count=count,
        busy_s=busy_s,
        t=t,
        age_s=max(0.0, time.monotonic() - t),
    )


class ControlWriter:
    """The agent's side of the control page."""

    def __init__(self, fd: int) -> None:
        """Map the page `fd`."""
        self._page = mmap.mmap(fd, CONTROL_SIZE)

    def set(self, *, stop: bool, save: int, leave: int = -1) -> None:
        """Ask every rank to stop after its step, to save once more (`save` only ever grows), or, if it is of attempt `leave` or
        an earlier one, to make way for another layout."""
        self._page[: CONTROL.size] = CONTROL.pack(int(stop), save, leave + 1)

    def looked(self, t: float) -> None:
        """What the ranks have sent until now is being read; `t` on this machine's monotonic clock."""
        LOOKED.pack_into(self._page, LOOKED_AT, t)

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


class ControlReader:
    """A rank's view of the control page. Ranks may see a change at different steps: they must agree among themselves."""

    def __init__(self, fd: int) -> None:
        """Map the page `fd` read-only."""
        self._page = mmap.mmap(fd, CONTROL_SIZE, prot=mmap.PROT_READ)

    @property
    def stop(self) -> bool:
        """Whether to finish the step, save, and leave."""
        return bool(CONTROL.unpack_from(self._page)[0])

    @property
    def save(self) -> int:
        """How often somebody has asked for a save; act when it has grown."""
        return int(CONTROL.unpack_from(self._page)[1])

    @property
    def leave(self) -> int:
        """The newest attempt whose workers are to save and leave; -1 if there is none."""
        return int(CONTROL.unpack_from(self._page)[2]) - 1

    @property
    def looked(self) -> float:
        """When the agent has last read what was sent, on this machine's monotonic clock; 0 before."""
        return float(LOOKED.unpack_from(self._page, LOOKED_AT)[0])

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
