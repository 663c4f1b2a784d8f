"""Small records with their own checksum: commits, epochs, tombstones.

One line of JSON, `{"crc32c":"<8 hex digits>","body":{...}}`, where the checksum is that of the body's exact bytes. A person can
read it with any tool; any single flipped bit is noticed, be it in the body or around it.

Unknown fields are ignored, because a later version of the format may add some: `min_reader` says who may not read on.
"""

from __future__ import annotations

import re
from typing import TypeVar

import google_crc32c
import msgspec

from storage.errors import FormatError

__all__ = ["MAX_RECORD_BYTES", "decode_json", "decode_record", "encode_record"]

MAX_RECORD_BYTES = 1 << 20
T = TypeVar("T")

_FRAME = re.compile(rb'\{"crc32c":"([0-9a-f]{8})","body":(\{.*\})\}\n', re.DOTALL)


def encode_record(body: msgspec.Struct) -> bytes:
    """The record's bytes."""
    raw = msgspec.json.encode(body)
    return b'{"crc32c":"%08x","body":%b}\n' % (google_crc32c.value(raw), raw)


def decode_record(data: bytes, kind: type[T], *, key: str) -> T:
    """The record in `data`; `FormatError` naming `key` if it is not exactly what was written."""
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{key} has {len(data)} bytes, a record has at most {MAX_RECORD_BYTES}", key)
    frame = _FRAME.fullmatch(data)
    if frame is None:
        raise FormatError(f"{key} is not a record of this format", key)
    if google_crc32c.value(frame[2]) != int(frame[1], 16):
        raise FormatError(f"{key} does not match its own checksum", key)
    return decode_json(frame[2], kind, key=key)


def decode_json(raw: bytes, kind: type[T], *, key: str) -> T:
    """JSON as a `kind`; `FormatError` naming `key` if it is not one."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{key} cannot be parsed: {problem}", key) from problem
