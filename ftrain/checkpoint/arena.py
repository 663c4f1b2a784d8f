"""Arena slots: where a snapshot lives between the training loop's copy and storage.

A slot is one memfd of the agent, so it outlives the worker that fills it and the keeper that reads it. It describes
itself: a header page, the table of what lies where, the progress record, then the payload, which is byte for byte
the pack that goes to storage (chunks with room for their crc32c). So a slot *is* a checkpoint: the keeper streams it
without assembling anything, a restarted worker reads it through the planner and reader that read object storage, and
a new keeper needs nothing but the descriptor.

While it is being filled a slot also says how far: the keeper may seal and store what is copied already while the rest is
still on its way.

It also says how its pack is compressed on the way to storage, because all packs of a step must be alike: a keeper that comes
later, on this node or another, may have been started with another config.

Who writes what: the worker everything but `sealed`, `upload` (which it sets to WANTED and the keeper to NONE again), `held`
and the crcs. State words are aligned stores of 4 or 8 bytes, written last; x86 and the mmap of one machine keep their order.
"""

from __future__ import annotations

import enum
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from storage.compress import Compressor
from storage.pack import ArraySpec, PackLayout, Part, seal

PAGE = 4096
PROGRESS_NBYTES = 64 * 1024
MAGIC = b"ftrslot1"
# magic, epoch, attempt, step, rank, world, table length, progress length, payload offset, payload length
_FIXED = struct.Struct("<8sIIQIIIIQQ")
_STATE_WORDS = 1024  # byte offset of state, seal, upload and turns of the copy, 4 bytes each: far from the fixed part, aligned
_FILLED = 1040  # byte offset of the number of payload bytes that are final while the slot is FILLING, 8 bytes
_HELD = 1048  # byte offset of whether it must stay for the peer tier, 4 bytes; a word of its own: `upload` is the worker's too
_COMPRESSOR = slice(1056, 1184)  # bytes of how it is compressed, JSON and zeros behind it


class SlotState(enum.IntEnum):
    """Whether the payload can be believed."""

    EMPTY = 0  # never filled, or torn: contents mean nothing
    FILLING = 1  # a worker is copying (or died while copying)
    COMPLETE = 2  # header, table, progress and payload belong together


class Upload(enum.IntEnum):
    """Whether the keeper owes this slot to storage."""

    NONE = 0
    WANTED = 1  # until the coordinator has committed the step or given it up


class SlotTable(msgspec.Struct, frozen=True):
    """What lies in the payload: the same parts a pack manifest names."""

    specs: list[ArraySpec]
    parts: list[Part]
    nbytes: int

    def layout(self) -> PackLayout:
        """The pack layout this table was made from."""
        return PackLayout(specs={spec.name: spec for spec in self.specs}, parts=tuple(self.parts), nbytes=self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The header of a slot at one moment."""

    state: SlotState
    sealed: bool
    upload: Upload
    epoch: int
    attempt: int
    step: int
    rank: int
    world: int
    held: bool = False
    """It stays, whatever storage is owed: other nodes hold copies of the same step."""

    @property
    def snapshot(self) -> tuple[int, int, int]:
        """Which snapshot it is: (epoch, attempt, step)."""
        return self.epoch, self.attempt, self.step


def encode_table(layout: PackLayout) -> bytes:
    """The table of a slot; its length and the layout's decide the size of the arena."""
    return msgspec.msgpack.encode(SlotTable(list(layout.specs.values()), list(layout.parts), layout.nbytes))


def slot_nbytes(layout: PackLayout) -> int:
    """Bytes of the memfd that holds one snapshot of `layout`, whole pages."""
    return _payload_offset(len(encode_table(layout))) + _pages(layout.nbytes)


def slot_name(rank: int, index: int, generation: int) -> str:
    """Name of a rank's slot. A changed layout starts a new generation, so that old slots can be read while new ones
    are filled.
    """
    return f"arena-g{generation:04d}-r{rank:05d}-s{index}"


def _seal_token(epoch: int, attempt: int, step: int) -> int:
    return (epoch * 1_000_003 + attempt * 10_007 + step) % 0xFFFF_FFFE + 1


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _payload_offset(table_nbytes: int) -> int:
    return PAGE + PROGRESS_NBYTES + _pages(table_nbytes)


class ArenaSlot:
    """One slot, mapped. Cheap to open; `close` releases the mapping, the memory stays with the agent's descriptor."""

    def __init__(self, fd: int, *, populate: bool = False) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._map = mmap.mmap(fd, 0, flags=flags)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._words = self.bytes[_STATE_WORDS : _STATE_WORDS + 16].view(np.uint32)
        self._filled = self.bytes[_FILLED : _FILLED + 8].view(np.uint64)
        self._held = self.bytes[_HELD : _HELD + 4].view(np.uint32)

    def close(self) -> None:
        """Drop the mapping; views of it must be gone."""
        del self.bytes, self._words, self._filled, self._held
        self._map.close()

    # -- reading ---------------------------------------------------------------------------------------------------------

    def header(self) -> SlotHeader:
        """The header now. A slot that was never filled is EMPTY."""
        magic, epoch, attempt, step, rank, world, *_ = _FIXED.unpack_from(self._map, 0)
        state = SlotState(int(self._words[0])) if magic == MAGIC else SlotState.EMPTY
        return SlotHeader(
            state=state,
            sealed=int(self._words[1]) == _seal_token(epoch, attempt, step),
            upload=Upload(int(self._words[2])),
            epoch=epoch,
            attempt=attempt,
            step=step,
            rank=rank,
            world=world,
            held=bool(self._held[0]),
        )

    def table(self) -> SlotTable:
        """What lies in the payload."""
        table_nbytes = _FIXED.unpack_from(self._map, 0)[6]
        start = PAGE + PROGRESS_NBYTES
        return msgspec.msgpack.decode(self.bytes[start : start + table_nbytes].tobytes(), type=SlotTable)

    def progress(self) -> dict[str, Any]:
        """The progress record saved with the snapshot."""
        nbytes = _FIXED.unpack_from(self._map, 0)[7]
        record: dict[str, Any] = msgspec.json.decode(self.bytes[PAGE : PAGE + nbytes].tobytes())
        return record

    def payload(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The pack's bytes, a writable view."""
        offset, nbytes = _FIXED.unpack_from(self._map, 0)[8:10]
        return self.bytes[offset : offset + nbytes]

    def filled(self) -> tuple[int, int]:
        """Of a slot that is being filled: bytes of the payload, from its beginning, that are final but for their crcs; and a
        number that changes while the copy moves.
        """
        return int(self._filled[0]), int(self._words[3])

    def compressor(self) -> Compressor | None:
        """What its pack is compressed with on the way to the run's store; None: it goes there as it is."""
        text = self.bytes[_COMPRESSOR].tobytes().rstrip(b"\0")
        return msgspec.json.decode(text, type=Compressor) if text else None

    # -- the worker's side ---------------------------------------------------------------------------------------------------

    def prepare(self, layout: PackLayout) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Write the table and return the payload view. Once per attempt; a snapshot of the same layout stays valid."""
        table = encode_table(layout)
        offset = _payload_offset(len(table))
        if offset + layout.nbytes > len(self.bytes):
            raise ValueError(f"a slot of {len(self.bytes)} bytes cannot hold a snapshot of {offset + layout.nbytes} bytes")
        magic, *_, table_nbytes, _progress, _offset, nbytes = _FIXED.unpack_from(self._map, 0)
        start = PAGE + PROGRESS_NBYTES
        same = magic == MAGIC and nbytes == layout.nbytes and self.bytes[start : start + table_nbytes].tobytes() == table
        if not same:
            self.forget()
            if magic == MAGIC:  # of another layout: what lies between its chunks must not end up between ours
                self.bytes[offset : offset + layout.nbytes] = 0
            self.bytes[start : start + len(table)] = np.frombuffer(table, dtype=np.uint8)
            _FIXED.pack_into(self._map, 0, MAGIC, 0, 0, 0, 0, 0, len(table), 0, offset, layout.nbytes)
        return self.bytes[offset : offset + layout.nbytes]

    def begin(self, *, epoch: int, attempt: int, step: int, rank: int, world: int, upload: bool = False) -> None:
        """From here until `complete` only what `filled` vouches for means something, and only to whoever stores it: with
        `upload` the keeper may begin.
        """
        self._words[0] = SlotState.FILLING
        self._words[1:] = 0
        self._filled[0] = self._held[0] = 0
        *_, table_nbytes, _progress, offset, nbytes = _FIXED.unpack_from(self._map, 0)
        _FIXED.pack_into(self._map, 0, MAGIC, epoch, attempt, step, rank, world, table_nbytes, 0, offset, nbytes)
        self._words[2] = Upload.WANTED if upload else Upload.NONE

    def compress_with(self, compressor: Compressor | None) -> None:
        """How the next snapshot is compressed. Before `begin`, when storage is owed none of this slot."""
        text = msgspec.json.encode(compressor) if compressor else b""
        self.bytes[_COMPRESSOR] = np.frombuffer(text.ljust(_COMPRESSOR.stop - _COMPRESSOR.start, b"\0"), np.uint8)

    def fill(self, nbytes: int) -> None:
        """So many bytes of the payload, from its beginning, are copied."""
        self._filled[0] = nbytes
        self._words[3] += 1

    def complete(self, progress: bytes, *, upload: bool) -> None:
        """The payload is whole: publish it with its progress record (JSON, at most 64 KiB)."""
        if len(progress) > PROGRESS_NBYTES:
            raise ValueError(f"a progress record of {len(progress)} bytes is over the limit of {PROGRESS_NBYTES}")
        self.bytes[PAGE : PAGE + len(progress)] = np.frombuffer(progress, dtype=np.uint8)
        fixed = list(_FIXED.unpack_from(self._map, 0))
        fixed[7] = len(progress)
        _FIXED.pack_into(self._map, 0, *fixed)
        self._words[2] = Upload.WANTED if upload else Upload.NONE
        self._words[0] = SlotState.COMPLETE

    def forget(self) -> None:
        """The contents mean nothing any more: a later step than the one the run goes on from."""
        self._words[:] = 0
        self._held[0] = 0

    # -- the keeper's side ---------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Write every chunk's crc32c. Idempotent: two sealers of a complete slot write the same values.

        The worker may overwrite a slot that is being sealed (no upload is owed); the token names the snapshot that
        was meant, so a seal that comes too late never vouches for the next one.
        """
        header = self.header()
        if header.state is SlotState.COMPLETE and not header.sealed:
            seal(self.payload(), self.table().layout())
            self.mark_sealed(header)

    def mark_sealed(self, header: SlotHeader) -> None:
        """Every chunk of the snapshot that `header` describes has its crc32c."""
        self._words[1] = _seal_token(header.epoch, header.attempt, header.step)

    def want_upload(self) -> None:
        """Storage is to have this complete snapshot after all."""
        self._words[2] = Upload.WANTED

    def hold(self, held: bool) -> None:
        """It is to stay as it is (or need not any more) for the sake of the peer tier."""
        self._held[0] = held

    def upload_ended(self) -> None:
        """The step is committed, or given up: the slot may be filled again."""
        self._words[2] = Upload.NONE
