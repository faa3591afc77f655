"""The memory of a batch under construction: samples are written to their rows as soon as they are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.collate import Bytes, Reserve, compose
from stallfree.errors import CodecError
from stallfree.pipeline.codec import Structure, encode, stack_build
from stallfree.pipeline.in_place import Out
from stallfree.pipeline.structure import leaf_dtypes

_NONE = Out(())


class BatchBuffer:
    """Room for `count` samples of a fixed structure in the memory that `reserve(bytes)` gives.

    Attributes:
        size: bytes of the batch, 0 if such samples cannot be stacked: then there is no room.
        whole: all are there.
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
        """The rows that the next sample may fill."""
        return Out([typed[self._filled] for typed in self._typed]) if self._open else _NONE

    def put(self, sample: Any) -> bool:
        """Write the next sample, as far as it is not there already; False, and then always, if it does not fit."""
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
        """The sample that was put is right: go on to the next row."""
        self._filled += 1

    def restart(self) -> None:
        """Forget what was put: the batch is made again."""
        self._filled, self._open = 0, True

    def copied(self) -> list[Any]:
        """The samples that were put, with memory of their own. Nothing is put any more."""
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
            if self._low <= place < self._high:  # in a row of another leaf, which is about to be written
                array = array.copy()
            moves.append((row, array))
        for row, array in moves:
            row[:] = array


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
