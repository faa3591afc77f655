"""Collates samples into batches, directly in the memory of a slot if possible.

The result equals that of `torch.utils.data.default_collate`. If all samples share one fixed structure, each leaf of the
batch is the samples' leaves, row by row; such a batch is composed in the slot without allocating memory. Each structure
is tested once against torch's function, with two samples of random bytes.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from stallfree.errors import CodecError
from stallfree.loader.messages import Bytes
from stallfree.pipeline.codec import Structure, encode, encode_own, open_record, record_size, stack_build, write_record
from stallfree.pipeline.compose import Out

Collate = Callable[[list[Any]], Any]
Reserve = Callable[[int], Bytes]

_PERIOD = 65_521
"""Random bytes that are repeated in a large leaf; a prime number, so that no two rows are equal."""

_NO_ROWS = Out(())


@lru_cache(maxsize=256)
def batch_structure(sample: Structure, count: int) -> Structure | None:
    """Return the structure of a batch of `count` samples; None if its leaves are not the samples' leaves stacked."""
    pair = _pair_structure(sample)
    return None if pair is None else pair.with_rows(count)


@lru_cache(maxsize=256)
def _pair_structure(sample: Structure) -> Structure | None:
    """Return the structure that torch gives to a batch of two samples; None if it does not stack their leaves."""
    if not sample.fixed or not sample.leaves:
        return None
    columns = [_random_pair(leaf.kind, leaf.nbytes) for leaf in sample.leaves]
    try:
        structure, arrays = encode(collate_default(stack_build(sample, [c.copy() for c in columns], 2)))
    except Exception:
        return None  # torch cannot collate them: the real call raises the error
    same = structure.fixed and len(arrays) == len(columns)
    if not same or not all(np.array_equal(a, c.reshape(-1)) for a, c in zip(arrays, columns, strict=True)):
        return None
    return structure if all(leaf.shape[:1] == (2,) for leaf in structure.leaves) else None


def _random_pair(kind: str, nbytes: int) -> Bytes:
    """Bytes of two leaves, shape (2, nbytes)."""
    high = 2 if kind in ("bool", "tensor", "array", "scalar") else 100  # 0 and 1 are valid for every dtype
    few = np.random.default_rng(0).integers(0, high, min(2 * nbytes, _PERIOD), np.uint8)
    return np.resize(few, (2, nbytes))


def collate_default(samples: list[Any]) -> Any:
    """Call `default_collate` so that it does not allocate torch's shared memory in a worker."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = info


def compose(sample: Structure, count: int, reserve: Reserve) -> tuple[list[Bytes], int, Bytes] | None:
    """Write the head of a batch of `count` samples into the memory that `reserve(bytes)` returns.

    Returns an array (count, bytes) per leaf, the size of the batch and its head; None if the samples cannot be stacked.
    """
    structure = batch_structure(sample, count)
    if structure is None:
        return None
    size = record_size(structure, [])
    memory = reserve(size)
    regions = open_record(structure, memory)
    rows = [region.reshape(count, leaf.nbytes) for region, leaf in zip(regions, sample.leaves, strict=True)]
    return rows, size, memory[: structure.head.size]


def stack(samples: Sequence[Any], reserve: Reserve) -> tuple[int, Structure | None]:
    """Collate `samples` as torch does, into the memory that `reserve(bytes)` returns.

    Returns the size of the batch and the structure of the samples; 0 and None if they share no fixed structure.
    """
    try:
        structure, _ = encode(samples[0])
    except CodecError:
        return 0, None
    buffer = BatchBuffer(structure, len(samples), reserve)
    for sample in samples:
        if not buffer.size or not buffer.put(sample):
            return 0, None
        buffer.next()
    return buffer.size, structure


def write_batch(batch: Any, reserve: Reserve) -> int:
    """Write a collated batch into the memory that `reserve(bytes)` returns; returns its size.

    Raises `CodecError` if the batch cannot be pickled.
    """
    structure, arrays = encode_own(batch)
    return write_record(structure, arrays, reserve(record_size(structure, arrays)))


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
        self._columns, self.size, _ = compose(structure, count, reserve) or ([], 0, None)
        self._rows: list[Any] = []  # of leaves that samples may be written to; made when the first is asked for

    def _make_rows(self) -> None:
        self._rows = [
            column.view(leaf.dtype).reshape(self._count, *leaf.shape)
            for leaf, column in zip(self._structure.leaves, self._columns, strict=False)
            if leaf.kind in ("array", "tensor") and leaf.nbytes
        ]
        self._starts = [_address(column) for column in self._columns]
        self._low = min(self._starts)
        self._high = max(start + column.size for start, column in zip(self._starts, self._columns, strict=True))

    @property
    def whole(self) -> bool:
        return self._open and self._filled == self._count

    def row(self) -> Out:
        """Return the rows that the next sample may write to."""
        if not self._rows:
            self._make_rows()
        return Out([rows[self._filled] for rows in self._rows]) if self._open else _NO_ROWS

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
        if not self._rows:
            for column, array in zip(self._columns, arrays, strict=True):
                column[self._filled] = array
            return
        moves = []
        for column, start, array in zip(self._columns, self._starts, arrays, strict=True):
            row = column[self._filled]
            address = _address(array)
            if address == start + self._filled * column.shape[1]:
                continue
            if self._low <= address < self._high:  # it lies in a row of another leaf, which is overwritten below
                array = array.copy()
            moves.append((row, array))
        for row, array in moves:
            row[:] = array


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
