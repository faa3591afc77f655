"""The files of a cache: `meta.json`, and an index of arrays that all processes share.

    header      64 numbers of 8 bytes (`Field`)
    counters    rows of 16 numbers (`Counters`)
    level       f64, the score of the last record that was evicted
    victims     ids to be evicted next, with the scores by which they were selected (policies.py)
    first       u32 per id     first block + 1, or 0: not resident. Written last, so it makes a record visible
    length      u32 per id     bytes of the record, or 0: it has the cache's common structure
    generation  u32 per id     changes whenever the record is removed or replaced
    score       f64 per id     only if the policy keeps scores
    checksum    u32 per id     only on a disk
    next        u32 per block  the block that follows in the record, or `FREE_BLOCK`
    free        u32            a stack of some of the free blocks

This takes 12 bytes per id and 4 per block, 20 with scores, 24 on a disk, all of it counted in the capacity. The records
are in the file `data` (arena.py), and `lock` is the lock of writers.
"""

import enum
import json
import mmap
import os
import platform
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stallfree.errors import FingerprintError, StorageError, capacity_too_small, release_mismatch, storage_full
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.codec import Structure, structure_of
from stallfree.pipeline.fingerprint import differing_parts
from stallfree.platform import OPEN, allocate, at_fork
from stallfree.stats import CacheStats
from stallfree.units import format_size

Array = np.ndarray[Any, np.dtype[Any]]

META = "meta.json"
VERSION = 5
MAGIC = 0x5741_4C4C_4652_0005
ALIGN = 64
LARGE_BLOCK = 16 << 10
SMALL_BLOCK = 256
FREE_BLOCK = 0xFFFF_FFFF
"""Marks a freed block, in place of its successor."""

ROWS = 256
COLUMNS = 16
_HEADER = 64


class DamagedError(StorageError):
    """The files of a cache are damaged."""

    page = "cache-damaged"


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
    RECOVERIES = 12  # each one frees the blocks that writers had reserved
    VICTIMS_AT = 13
    VICTIMS_END = 14
    STACKED = 15  # free blocks on the stack
    UNCACHED = 16  # number of uncached steps


# -- the layout -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meta:
    """The layout of a cache, fixed at its creation.

    Attributes:
        version: of the file layout.
        fingerprint: of the source, the deterministic part and the record format.
        num_ids: number of samples of the data set.
        block: bytes per block.
        num_blocks: maximum number of blocks.
        policy: name of the policy.
        scored: whether the policy keeps a score per id.
        common: key of the structure that all samples share, or "" if their sizes differ.
        capacity: requested bytes.
        on_disk: whether the arena is read by system calls.
    """

    version: int
    fingerprint: str
    num_ids: int
    block: int
    num_blocks: int
    policy: str
    scored: bool
    common: str
    capacity: int
    on_disk: bool

    def structure(self) -> Structure | None:
        """Return the structure that all samples share, or None."""
        return structure_of(self.common.encode("latin-1")) if self.common else None

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return index_bytes(self.num_ids, self.num_blocks, scored=self.scored, checked=self.on_disk)

    def save(self, folder: Path) -> None:
        """Write `meta.json`."""
        fields = asdict(self)
        (folder / META).write_text(json.dumps({**fields, "check": _check(fields)}, indent=1))

    @staticmethod
    def load(folder: Path) -> "Meta":
        """Read `meta.json`.

        Raises `StorageError` if it has another version, `DamagedError` if it is missing or damaged.
        """
        try:
            fields = json.loads((folder / META).read_text())
            check = fields.pop("check")
            if check != _check(fields):
                raise ValueError("its checksum is wrong")
            version = fields["version"]
            if version == VERSION:
                return Meta(**fields)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise DamagedError(
                f"the cache in {folder} cannot be read ({error}): remove it with `stallfree cache rm {folder.name}`"
            ) from error
        raise release_mismatch(
            f"the cache in {folder} was created by another version of stallfree (its format is {version}, this "
            f"version's is {VERSION}): give another name, or remove it with `stallfree cache rm {folder.name}`"
        )

    def check_same(self, path: Path, **requested: str | int) -> None:
        """Raise `FingerprintError` unless the cache in the folder `path` has the `requested` values of fields."""
        for field, value in requested.items():
            present = getattr(self, field)
            if present != value:
                what = "number of samples" if field == "num_ids" else field
                parts = differing_parts(str(present), str(value)) or f"its {what} is {present}, yours is {value}"
                raise FingerprintError(
                    f"the cache {path.name!r} in {path.parent} holds other data: {parts}. "
                    f"Give another name, or remove it with `stallfree cache rm {path.name}`"
                )


def _check(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


def chained_block(typical: int) -> int:
    """Return the bytes of a block if records are chains of blocks: about an eighth of `typical`, 256 B to 16 KiB."""
    block = SMALL_BLOCK
    while block < LARGE_BLOCK and block * 16 <= typical:
        block *= 2
    return block


def plan_layout(
    num_ids: int,
    capacity: int,
    *,
    fingerprint: str,
    policy: str,
    scored: bool,
    on_disk: bool,
    structure: Structure | None,
    typical: int,
    empty: bool = False,
) -> Meta:
    """Divide `capacity` bytes between index and blocks; `empty` plans a cache of no blocks.

    With a `structure` of fixed size, a block is one record. Otherwise a record is a chain of blocks: `chained_block`.

    Raises `CapacityError` if the capacity is too small for the index and a block.
    """
    common = ""
    if structure is not None and structure.fixed and structure.size > 0:
        block = -(-structure.size // ALIGN) * ALIGN
        common = structure.key.decode("latin-1")
        # One block per sample, and as many more as a 200th of the capacity can index: later samples may be larger.
        at_most = num_ids + capacity // 800
    else:
        block, at_most = chained_block(typical), (1 << 32) - 2
    beside = whole_pages(1024 + 2 * len(common)) + mmap.PAGESIZE  # meta.json and the folder

    def taken(blocks: int) -> int:
        index = index_bytes(num_ids, blocks, scored=scored, checked=on_disk)
        return beside + index + whole_pages(blocks * block)

    free = capacity - taken(0)
    num_blocks = min(max(0, free * 16 // (16 * block + 65)), at_most)  # 4 + 1/16 bytes of index each
    while num_blocks > 0 and taken(num_blocks) > capacity:
        num_blocks -= 1
    if num_blocks < 1 and not empty:
        raise capacity_too_small(
            f"capacity={format_size(capacity)} holds no record: the index of {num_ids:,} samples takes "
            f"{format_size(taken(0))} and a block {format_size(block)}. Give {format_size(taken(8))} or more"
        )
    return Meta(VERSION, fingerprint, num_ids, block, num_blocks, policy, scored, common, capacity, on_disk)


def whole_pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


# -- the index --------------------------------------------------------------------------------------------------------

_fence_lock = threading.Lock()
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Memory fence for processors that reorder loads and stores (x86 does not)."""
    if not _ORDERED:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


def _arrays(num_ids: int, num_blocks: int, scored: bool, checked: bool) -> dict[str, tuple[Any, int, int]]:
    """Return type, length and offset of each array."""
    victims = max(64, min(num_ids // 64, 1 << 17))  # amortizes the search over many evictions
    sizes = {
        "header": (np.int64, _HEADER),
        "counters": (np.int64, ROWS * COLUMNS),
        "level": (np.float64, 1),
        "victims_limit": (np.complex128, 1),
        "victims": (np.complex128, victims if scored else 0),
        "score": (np.float64, num_ids if scored else 0),
        "first": (np.uint32, num_ids),
        "length": (np.uint32, num_ids),
        "generation": (np.uint32, num_ids),
        "checksum": (np.uint32, num_ids if checked else 0),
        "next": (np.uint32, num_blocks),
        "free": (np.uint32, max(64, num_blocks // 64)),
    }
    layout: dict[str, tuple[Any, int, int]] = {}
    at = 0
    for name, (dtype, count) in sizes.items():
        layout[name] = dtype, count, at
        at += -(-count * np.dtype(dtype).itemsize // 64) * 64
    return layout


def index_bytes(num_ids: int, num_blocks: int, *, scored: bool, checked: bool) -> int:
    """Return the bytes of the index file."""
    dtype, count, at = _arrays(num_ids, num_blocks, scored, checked)["free"]
    return whole_pages(at + count * np.dtype(dtype).itemsize)


class Index:
    """The arrays of the index in `folder`, shared by all processes that map it.

    Raises `DamagedError` if the file is not an index of this layout.

    Attributes:
        folder, meta: as given.
        counters: of all processes.
        others: the arrays; `score` and `checksum` may be None.
    """

    header: Array
    level: Array
    victims_limit: Array
    victims: Array
    first: Array
    length: Array
    generation: Array
    next: Array
    free: Array

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.folder, self.meta = folder, meta
        file, size = folder / "index", meta.index_bytes
        try:
            fd = os.open(file, os.O_RDWR | OPEN)
        except OSError as error:
            raise DamagedError(f"the index {file} of a cache cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_size != size:
                raise DamagedError(f"the index {file} has {os.fstat(fd).st_size} bytes instead of {size}")
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        arrays = {
            name: np.frombuffer(memory, dtype, count, at)
            for name, (dtype, count, at) in _arrays(meta.num_ids, meta.num_blocks, meta.scored, meta.on_disk).items()
        }
        self.__dict__.update(arrays)
        self.counters = Counters(arrays["counters"].reshape(ROWS, COLUMNS))
        self.score: Array | None = arrays["score"] if meta.scored else None
        self.checksum: Array | None = arrays["checksum"] if meta.on_disk else None
        matches = self.header[: len(_head(meta))].tolist() == _head(meta)
        if not matches or not 0 <= self.header[Field.UNCACHED] < 1 << 20:
            raise DamagedError(f"the index in {folder} does not match its {META}")

    @staticmethod
    def create(folder: Path, meta: Meta) -> None:
        """Create the file of an empty index. Raises `StorageError` if the file system is full."""
        fd = os.open(folder / "index", os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o600)
        try:
            allocate(fd, 0, meta.index_bytes)
            header = np.zeros(_HEADER, np.int64)
            header[: len(_head(meta))] = _head(meta)
            header[Field.LIMIT] = meta.num_blocks
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, header.data)
        except OSError as error:
            raise storage_full(
                f"no space for the {meta.index_bytes:,} bytes of the cache's index in {folder}: {error}. Free some "
                "space, or give another folder"
            ) from error
        finally:
            os.close(fd)

    def blocks_of(self, length: Array) -> Array:
        """Return the blocks that records of `length` bytes take; 0 is the common structure, which takes one."""
        if not length.any():
            return np.ones(len(length), np.int64)
        return np.maximum(1, -(-length.astype(np.int64) // self.meta.block))

    def bytes_of(self, length: Array) -> int:
        """Return the total bytes of records of `length` bytes, as stored."""
        return int(np.where(length == 0, self.meta.block, length).sum(dtype=np.int64))

    def chains(self, heads: Array, counts: Array) -> Array:
        """Return the blocks of records, concatenated.

        `heads` holds the first block of each record and `counts` its number of blocks. A writer may change the chains
        concurrently: the numbers are then wrong but within the arena, and the caller detects it by the generation.
        """
        most = int(counts.max(initial=0))
        last_block = len(self.next) - 1
        current = np.minimum(heads, last_block).astype(np.int64)
        if most <= 1:
            return current
        out = np.empty(int(counts.sum()), np.int64)
        at = np.cumsum(counts) - counts
        alive = np.arange(len(heads))
        for step in range(most):
            out[at[alive] + step] = current[alive]
            alive = alive[counts[alive] > step + 1]
            current[alive] = np.minimum(self.next[current[alive]], last_block)
        return out


def _head(meta: Meta) -> list[int]:
    """Return the first numbers of the header, in the order of `Field`."""
    return [MAGIC, meta.num_ids, meta.num_blocks, meta.block]


# -- counters ---------------------------------------------------------------------------------------------------------


class Count(enum.IntEnum):
    """Indices into a row of counters."""

    HITS = 0
    MISSES = 1
    EVICTIONS = 2
    REJECTED = 3
    DAMAGED = 4
    READS = 5
    BYTES = 6
    TIER_HITS = 7
    TIER_REJECTED = 8


class Counters:
    """The counts of this process, and the totals of all, dead ones included. Takes no lock between processes.

    Each process adds to its own row, which it claims with a lock that the kernel releases when the process dies. A row
    is never reset: the next process that claims it continues from its values, so the sum of all rows is exact.

    Args:
        rows: one row per process. Processes without a free row share row 0: beyond 255 processes counts may be lost.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self._row = rows[0]
        self._lock = threading.Lock()
        self._claimed: tuple[int, FileLock] | None = None  # process id and lock

    def claim(self, file_lock: FileLock) -> None:
        """Claim a row for this process."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self._claimed = os.getpid(), file_lock
        self._row = self._rows[next(filter(file_lock.claim, range(1, len(self._rows))), 0)]

    def follow_fork(self) -> None:
        """Claim a new row in a forked child."""
        if self._claimed is not None and self._claimed[0] != os.getpid():
            with _after_fork:
                if self._claimed[0] != os.getpid():
                    self.claim(self._claimed[1])

    def add(self, *counts: tuple[Count, int]) -> None:
        """Add to the row of this process."""
        with self._lock:
            for column, number in counts:
                self._row[column] += number

    def totals(self) -> list[int]:
        """Return the sums over all processes, current and past, by `Count`."""
        return [int(n) for n in np.asarray(self._rows).sum(axis=0)]

    def stats(self, **state: int) -> CacheStats:
        """Return the sums, with `state`: the fields of `CacheStats` that are not counts."""
        names = {Count.READS: "storage_reads", Count.BYTES: "storage_bytes"}
        sums = self.totals()
        return CacheStats(**{names.get(count, count.name.lower()): sums[count] for count in Count}, **state)


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)
