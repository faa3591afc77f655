"""The memory of a batch under construction, to whose rows the samples are written as they are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.collate import Bytes, Reserve, compose
from stallfree.errors import CodecError
from stallfree.pipeline.codec import encode, stack_build
from stallfree.pipeline.compose import Out
from stallfree.pipeline.structure import Structure, leaf_dtypes

_NONE = Out(())


class BatchBuffer:
    """Collects `count` samples of a fixed structure in one batch.

    Args:
        structure: structure of the samples.
        count: number of samples.
        reserve: returns memory of at least the given size.

    Attributes:
        size: size of the batch in bytes; 0 if such samples cannot be stacked, and the buffer cannot be used.
        whole: whether all samples have been written.
    """

    def __init__(self, structure: Structure, count: int, reserve: Reserve) -> None:
        self._structure, self._count, self._filled, self._open = structure, count, 0, True
        composed = compose(structure, count, reserve)
        self._columns, self.size, _ = composed or ([], 0, None)
        self._typed = [
            column.view(leaf_dtypes(leaf.kind, leaf.dtype)[0]).reshape(count, *leaf.shape)
            for leaf, column in zip(structure.leaves, self._columns, strict=False)
            if leaf.kind in ("array", "tensor") and leaf.nbytes
        ]
        self._starts = [_address(column) for column in self._columns]
        ends = [start + column.size for start, column in zip(self._starts, self._columns, strict=True)]
        self._low, self._high = min(self._starts, default=0), max(ends, default=0)

    @property
    def whole(self) -> bool:
        return self._open and self._filled == self._count

    def row(self) -> Out:
        """Return the rows that the next sample may write to."""
        return Out([typed[self._filled] for typed in self._typed]) if self._open else _NONE

    def put(self, sample: Any) -> bool:
        """Write the next sample, unless it is in its row already.

        Returns False for a sample of another structure; the buffer then accepts no more samples.
        """
        if not self._open:
            return False
        try:
            structure, arrays = encode(sample)
        except CodecError:
            structure = None
        if structure is not self._structure:
            self._open = False
            return False
        self._write(arrays)
        return True

    def next(self) -> None:
        """Confirm the sample that was put, and continue with the next row."""
        self._filled += 1

    def restart(self) -> None:
        """Discard all samples."""
        self._filled, self._open = 0, True

    def copied(self) -> list[Any]:
        """Return copies of the confirmed samples; the buffer accepts no more samples."""
        self._open = False
        count = self._filled
        return stack_build(self._structure, [column[:count].copy() for column in self._columns], count)

    def _write(self, arrays: Sequence[Bytes]) -> None:
        moves = []
        for column, start, array in zip(self._columns, self._starts, arrays, strict=True):
            row = column[self._filled]
            place = _address(array)
            if place == start + self._filled * column.shape[1]:
                continue
            if self._low <= place < self._high:  # it lies in a row of another leaf, which is overwritten below
                array = array.copy()
            moves.append((row, array))
        for row, array in moves:
            row[:] = array


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
