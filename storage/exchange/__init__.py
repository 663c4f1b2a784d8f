"""In and out of other people's formats: safetensors, PyTorch DCP, plain Zarr.

Every format is a list of named arrays that can be read box by box (`Tensor`), so that anything goes from anywhere to anywhere
in bounded memory: slabs of rows, never a whole model. Names and training meaning are not storage's business: the caller says
what an array is called on the other side.
"""

from storage.exchange.tensor import Tensor, bfloat16_bits, from_checkpoint, index, slabs, stack, widened

__all__ = ["Tensor", "bfloat16_bits", "from_checkpoint", "index", "slabs", "stack", "widened"]
