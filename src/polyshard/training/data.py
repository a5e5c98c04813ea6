"""Text as batches of bytes, the same on every rank for the same seed."""

from __future__ import annotations

import random
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from polyshard.config.structuring import KeyPathError

if TYPE_CHECKING:
    from torch import Tensor

    from polyshard.training.config import TrainingConfig

__all__ = ["Batches", "read_text"]


def read_text(path: str | None) -> bytes:
    """Return the bytes of a file, or for None those of the text that comes with the package.

    That text is fixed, so that a run without a text of its own has the same losses everywhere.

    Raises:
        KeyPathError: The file cannot be read.
    """
    if path is None:
        return files("polyshard.training").joinpath("text.txt").read_bytes()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise KeyPathError(
            f"expected a text file, found {Path(path).absolute()}, which cannot be read: "
            f"{error.strerror}",
            ("data", "path"),
        ) from error


class Batches:
    """An endless sequence of global batches of a text.

    The text is cut into windows that do not overlap; every epoch goes through all of them in a
    new order.

    Args:
        text: The bytes.
        config: Says how long a window is, how many make a batch, and the seed.

    Raises:
        KeyPathError: The text is too short for one batch.
    """

    def __init__(self, text: bytes, config: TrainingConfig) -> None:
        self._text = text
        # One byte more than the model reads: each byte is predicted from those before it.
        self._length = config.data.sequence_length + 1
        self._size = config.batch_size
        self._seed = config.seed
        self._windows = len(text) // self._length
        # A batch reaches into two epochs, into more only if the text is very short.
        self._order = lru_cache(maxsize=2)(self._shuffled)
        if self._windows < self._size:
            source = config.data.path or "the built-in text"
            raise KeyPathError(
                f"expected at least {self._size * self._length:,} bytes, a batch of {self._size} "
                f"sequences of {self._length} bytes, found {len(text):,} in {source}; give a "
                "longer text, or a smaller batch_size or data.sequence_length",
                ("data", "path"),
            )

    def windows(self, step: int) -> list[int]:
        """Return which windows of the text make up the global batch of a step."""
        first = step * self._size
        return [self._window(index) for index in range(first, first + self._size)]

    def share(self, step: int, rank: int, world_size: int) -> Tensor:
        """Return a rank's part of a step's batch: int64 of shape (sequences, length + 1)."""
        import torch

        each = self._size // world_size
        mine = self.windows(step)[rank * each : (rank + 1) * each]
        rows = (self._text[w * self._length : (w + 1) * self._length] for w in mine)
        return torch.tensor([list(row) for row in rows])

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self._windows)
        return self._order(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._windows))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
