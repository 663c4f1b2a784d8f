"""The Zarr codec behind `open_zarr`: bfloat16 bits on one side, float32 of exactly the same value on the other.

A data type would be the purer way, but NumPy has no bfloat16 to give to the caller; widening is exact, so float32 is the honest
answer. Read-only: rounding would need a rule, and checkpoints are never rewritten. Imported only when it is used, because it
imports zarr.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from zarr.abc.codec import ArrayArrayCodec
from zarr.core.dtype import UInt16

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.common import JSON

__all__ = ["BFloat16Codec"]


@dataclass(frozen=True)
class BFloat16Codec(ArrayArrayCodec):
    """float32 in memory, the upper 16 bits of it in storage."""

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """The codec has no configuration."""
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        """The name it is registered under."""
        return {"name": "ftrain.bfloat16"}

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """What the next codec sees: the same chunk as uint16."""
        return replace(chunk_spec, dtype=UInt16(), fill_value=np.uint16(0))

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Half."""
        return input_byte_length // 2

    async def _decode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        bits = np.asarray(chunk_data.as_ndarray_like()).astype(np.uint32) << np.uint32(16)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(bits.view(np.float32))

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer | None:
        raise TypeError("checkpoints are read through Zarr, not written")
