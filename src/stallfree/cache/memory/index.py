"""The index of a sample cache: arrays in one shared file, one entry per id.

    header      64 numbers of 8 bytes (`Field`)
    counters    rows of 16 numbers; each attached process adds to its own row (see counters.py)
    level       f64, the score of the last record that was evicted
    victims     ids to be evicted next, with the scores by which they were selected (see policies.py)
    first       u32 per id     first block + 1, or 0: not resident. Written last, so it makes a record visible
    length      u32 per id     bytes of the record, or 0: it has the cache's common structure
    generation  u32 per id     changes whenever the record is removed or replaced
    score       f64 per id     only if the policy keeps scores
    checksum    u32 per id     only on a disk
    next        u32 per block  the block that follows in the record, or `FREE_BLOCK`
    free        u32            a stack of some of the free blocks

This takes 12 bytes per id and 4 per block, 20 with scores, 24 on a disk, all of it counted in the capacity.
"""

from __future__ import annotations

import enum
import mmap
import os
import platform
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import StorageError, storage_full
from stallfree.platform import OPEN, allocate

Array = npt.NDArray[Any]


class DamagedError(StorageError):
    """The files of a cache are damaged."""

    page = "cache-damaged"


MAGIC = 0x5741_4C4C_4652_0004
FREE_BLOCK = 0xFFFF_FFFF
"""Marks a freed block, in place of its successor."""

ROWS = 256
COLUMNS = 16
_HEADER = 64


class Field(enum.IntEnum):
    """Indices into the header."""

    MAGIC = 0
    NUM_IDS = 1
    NUM_BLOCKS = 2
    BLOCK = 3
    DIRTY = 4  # a writer is active; if the lock is free, it died
    HIGH = 5  # blocks below this one have been used at least once
    BACKED = 6  # blocks with allocated memory
    LIMIT = 7  # maximum number of allocated blocks; lowered when the file system is full
    FREE = 8  # freed blocks below HIGH
    TICK = 9  # number of uses: the time of policies
    RESIDENT = 10  # records
    RESIDENT_BYTES = 11  # their bytes, as stored
    RECOVERIES = 12
    VICTIMS_AT = 13
    VICTIMS_END = 14
    STACKED = 15  # free blocks on the stack
    UNCACHED = 16  # twice the number of uncached steps; odd while old records are being dropped


_fence_lock = threading.Lock()
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Memory fence for processors that reorder loads and stores (x86 does not)."""
    if not _ORDERED:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


def victims_size(num_ids: int) -> int:
    """Length of the victim queue: a 64th of the ids, which amortizes the search over many evictions."""
    return max(64, min(num_ids // 64, 1 << 17))


def _arrays(num_ids: int, num_blocks: int, scored: bool, checked: bool) -> dict[str, tuple[Any, int, int]]:
    """Type, length and offset of each array."""
    victims = victims_size(num_ids) if scored else 0
    sizes = {
        "header": (np.int64, _HEADER),
        "counters": (np.int64, ROWS * COLUMNS),
        "level": (np.float64, 1),
        "victims_limit": (np.complex128, 1),
        "victims": (np.complex128, victims),
        "score": (np.float64, num_ids if scored else 0),
        "first": (np.uint32, num_ids),
        "length": (np.uint32, num_ids),
        "generation": (np.uint32, num_ids),
        "checksum": (np.uint32, num_ids if checked else 0),
        "next": (np.uint32, num_blocks),
        "free": (np.uint32, max(64, num_blocks // 64)),
    }
    places: dict[str, tuple[Any, int, int]] = {}
    at = 0
    for name, (dtype, count) in sizes.items():
        places[name] = dtype, count, at
        at += -(-count * np.dtype(dtype).itemsize // 64) * 64
    return places


def index_bytes(num_ids: int, num_blocks: int, *, scored: bool, checked: bool) -> int:
    """Bytes of the index file."""
    dtype, count, at = _arrays(num_ids, num_blocks, scored, checked)["free"]
    return whole_pages(at + count * np.dtype(dtype).itemsize)


def whole_pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Index:
    """The arrays of the index in `file`, shared by all processes that map it.

    Raises `DamagedError` if the file is not an index of these dimensions.
    """

    header: Array
    counters: Array
    level: Array
    victims_limit: Array
    victims: Array
    first: Array
    length: Array
    generation: Array
    next: Array
    free: Array

    def __init__(self, file: Path, num_ids: int, num_blocks: int, *, scored: bool, checked: bool) -> None:
        size = index_bytes(num_ids, num_blocks, scored=scored, checked=checked)
        try:
            fd = os.open(file, os.O_RDWR | OPEN)
        except OSError as error:
            raise DamagedError(f"the index {file} of a cache cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_size != size:
                raise DamagedError(f"the index {file} has {os.fstat(fd).st_size} bytes instead of {size}")
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        arrays = {
            name: np.frombuffer(self._map, dtype, count, at)
            for name, (dtype, count, at) in _arrays(num_ids, num_blocks, scored, checked).items()
        }
        self.__dict__.update(arrays)
        self.counters = arrays["counters"].reshape(ROWS, COLUMNS)
        self.score: Array | None = arrays["score"] if scored else None
        self.checksum: Array | None = arrays["checksum"] if checked else None

    @staticmethod
    def create(file: Path, num_ids: int, num_blocks: int, block: int, *, scored: bool, checked: bool) -> None:
        """Create the file of an empty index. Raises `StorageError` if the file system is full."""
        size = index_bytes(num_ids, num_blocks, scored=scored, checked=checked)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o600)
        try:
            allocate(fd, 0, size)
        except OSError as error:
            raise storage_full(
                f"no space for the {size:,} bytes of the cache's index in {file.parent}: {error}. Free some space, or "
                "give another folder"
            ) from error
        finally:
            os.close(fd)
        header = Index(file, num_ids, num_blocks, scored=scored, checked=checked).header
        header[Field.NUM_IDS], header[Field.NUM_BLOCKS], header[Field.BLOCK] = num_ids, num_blocks, block
        header[Field.LIMIT] = num_blocks
        header[Field.MAGIC] = MAGIC
