"""What the engine asks of the data: sequences by their global index, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Arrays(Protocol):
    """A batch as the data layer makes it."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[B, T]"""

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """[B, T]: the token one place later"""

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """[B, T]: this target counts in the loss"""


class Data(Protocol):
    """Both streams are pure functions of the index, the same on every rank."""

    def sequences(self, first: int, count: int) -> Arrays:
        """Training sequences [first, first + count)."""

    def heldout(self, first: int, count: int) -> Arrays:
        """Held-out sequences [first, first + count)."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The same as tensors on the rank's device."""

    tokens: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [B, T] int64
    valid: torch.Tensor  # [B, T] bool

    @staticmethod
    def of(arrays: Arrays, device: torch.device) -> Sequences:
        """Without a copy on CPU."""
        tensors = (torch.from_numpy(array).to(device) for array in (arrays.tokens, arrays.targets, arrays.valid))
        return Sequences(*tensors)

    def __getitem__(self, rows: slice) -> Sequences:
        return Sequences(self.tokens[rows], self.targets[rows], self.valid[rows])
