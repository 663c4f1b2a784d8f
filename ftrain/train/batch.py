"""What the engine asks of the data: sequences by their global index, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ftrain.parallel.context import ContextGroup


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

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """[B, T]: number of the token's document within its sequence; read only if attention stays within documents"""


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

    documents: torch.Tensor | None = None  # [B, T] int64, always of whole sequences; None: attention does not mind them

    @staticmethod
    def of(arrays: Arrays, device: torch.device, *, document_mask: bool = False) -> Sequences:
        """Without a copy on CPU."""
        wanted = (arrays.tokens, arrays.targets, arrays.valid, *((arrays.documents,) if document_mask else ()))
        return Sequences(*(torch.from_numpy(array).to(device) for array in wanted))

    def __getitem__(self, rows: slice) -> Sequences:
        documents = None if self.documents is None else self.documents[rows]
        return Sequences(self.tokens[rows], self.targets[rows], self.valid[rows], documents)

    def part(self, group: ContextGroup | None) -> Sequences:
        """This rank's positions of the sequences."""
        if group is None:
            return self
        return Sequences(group.cut(self.tokens), group.cut(self.targets), group.cut(self.valid), self.documents)
