"""The index of a sample cache: arrays in one shared file, one entry per id.

    header      64 numbers of 8 bytes (`Field`)
    counters    one row of 16 numbers per attached process; row 0 sums up those that have left
    victims     ids that are next to be evicted, with the scores they were chosen by (see policies.py)
    first       u32 per id     first block + 1, or 0: not resident. Written last, so it makes a record visible
    length      u32 per id     bytes of the record, or 0: laid out as the cache's common structure says
    generation  u32 per id     changes whenever the record goes or another comes
    score       f64 per id     only if the policy keeps scores
    checksum    u32 per id     only on a disk
    next        u32 per block  the block that follows in the record
    free        u32 per block  a stack of blocks that were given back

That is 12 bytes per id and 8 per block, 20 with scores, 24 on a disk. All of it is counted in the capacity.
"""

from __future__ import annotations

import enum
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import StorageError

Array = npt.NDArray[Any]

MAGIC = 0x5741_4C4C_4652_0001
ROWS = 256
COLUMNS = 16
_HEADER = 64


class Field(enum.IntEnum):
    """What stands where in the header."""

    MAGIC = 0
    NUM_IDS = 1
    NUM_BLOCKS = 2
    BLOCK = 3
    DIRTY = 4  # a writer is at work; if it holds no lock any more, it died
    HIGH = 5  # blocks below this one have been used at least once
    BACKED = 6  # blocks that have memory behind them
    LIMIT = 7  # blocks that may get memory; falls when the file system is full
    FREE = 8  # height of the stack of free blocks
    TICK = 9  # counts uses; the time of policies
    RESIDENT = 10  # records
    RESIDENT_BYTES = 11  # their bytes, as they were put
    RECOVERIES = 12
    VICTIMS_AT = 13
    VICTIMS_END = 14
    POPULATED = 15


def victims_size(num_ids: int) -> int:
    """How many victims are found at a time: a 64th of the ids, so that the search is paid by many evictions."""
    return max(64, min(num_ids // 64, 1 << 17))


def index_bytes(num_ids: int, num_blocks: int, *, scored: bool, checked: bool) -> int:
    """Bytes of the index file."""
    fixed = 8 * _HEADER + 8 * ROWS * COLUMNS + 8
    if scored:
        fixed += 12 * victims_size(num_ids)
    per_id = 12 + (8 if scored else 0) + (4 if checked else 0)
    return _page(fixed + 64 * 8 + per_id * num_ids + 8 * num_blocks)


def _page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Index:
    """The arrays of the index in `file`, shared by all processes that map it.

    Raises `StorageError` when the file is not an index of these numbers.
    """

    def __init__(self, file: Path, num_ids: int, num_blocks: int, *, scored: bool, checked: bool) -> None:
        size = index_bytes(num_ids, num_blocks, scored=scored, checked=checked)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                raise StorageError(f"{file} has {os.fstat(fd).st_size} bytes, an index of this cache has {size}")
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._at = 0
        self.header: Array = self._take(_HEADER, np.int64)
        self.counters: Array = self._take(ROWS * COLUMNS, np.int64).reshape(ROWS, COLUMNS)
        self.victims_limit: Array = self._take(1, np.float64)
        room = victims_size(num_ids) if scored else 0
        self.victim_scores: Array = self._take(room, np.float64)
        self.score: Array | None = self._take(num_ids, np.float64) if scored else None
        self.victim_ids: Array = self._take(room, np.uint32)
        self.first: Array = self._take(num_ids, np.uint32)
        self.length: Array = self._take(num_ids, np.uint32)
        self.generation: Array = self._take(num_ids, np.uint32)
        self.checksum: Array | None = self._take(num_ids, np.uint32) if checked else None
        self.next: Array = self._take(num_blocks, np.uint32)
        self.free: Array = self._take(num_blocks, np.uint32)

    def _take(self, count: int, dtype: Any) -> Array:
        array = np.frombuffer(self._map, dtype, count, self._at)
        self._at += -(-array.nbytes // 64) * 64
        return array

    @staticmethod
    def create(file: Path, num_ids: int, num_blocks: int, block: int, *, scored: bool, checked: bool) -> None:
        """Make the file of an empty index. Raises `StorageError` if the file system has no room for it."""
        size = index_bytes(num_ids, num_blocks, scored=scored, checked=checked)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise StorageError(f"no room for the {size:,} bytes of the cache's index in {file.parent}: {error}") from error
        finally:
            os.close(fd)
        header = Index(file, num_ids, num_blocks, scored=scored, checked=checked).header
        header[Field.NUM_IDS], header[Field.NUM_BLOCKS], header[Field.BLOCK] = num_ids, num_blocks, block
        header[Field.LIMIT] = num_blocks
        header[Field.MAGIC] = MAGIC
