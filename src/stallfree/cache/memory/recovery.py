"""Repair of an index after a writer died at any instant, or a disk damaged it.

`first` is authoritative, because it is written last: an id is resident if and only if its chain of blocks is valid. All
other data (free blocks, counters, victims) is rebuilt from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.memory.index import FREE_BLOCK, Field, Index

Array = npt.NDArray[Any]


def chains(index: Index, heads: Array, counts: Array) -> Array:
    """The blocks of records, concatenated.

    `heads` holds the first block of each record and `counts` its number of blocks. A writer may change the chains
    concurrently: the numbers are then wrong but within the arena, and the caller detects it by the generation.
    """
    most = int(counts.max(initial=0))
    last_block = len(index.next) - 1
    if most <= 1:
        return np.minimum(heads, last_block).astype(np.int64)
    out = np.empty(int(counts.sum()), np.int64)
    at = np.cumsum(counts) - counts
    current = np.minimum(heads, last_block).astype(np.int64)
    alive = np.arange(len(heads))
    for step in range(most):
        out[at[alive] + step] = current[alive]
        alive = alive[counts[alive] > step + 1]
        current[alive] = np.minimum(index.next[current[alive]], last_block)
    return out


def blocks_of(length: Array, block: int) -> Array:
    """Number of blocks of records of `length` bytes; 0 is the common structure, which takes one."""
    if not length.any():
        return np.ones(len(length), np.int64)
    return np.maximum(1, -(-length.astype(np.int64) // block))


def check_disk(index: Index, block: int, uniform: bool, backed: int) -> int:
    """Repair an index found on a disk, whatever its content; return the number of records dropped.

    Only the first process to attach may call this. `backed` is the number of allocated blocks in the arena file.
    Damaged records with valid chains are detected by their checksums.
    """
    header = index.header
    header[Field.LIMIT] = len(index.next)  # the disk may have more space now
    header[Field.BACKED] = min(max(0, int(header[Field.BACKED])), backed)
    for field in (Field.TICK, Field.RECOVERIES):
        if not 0 <= header[field] < 1 << 52:
            header[field] = 0
    if index.score is not None:
        index.score[np.isnan(index.score)] = 0
        index.level[~np.isfinite(index.level)] = 0
    if not uniform:
        index.first[(index.first != 0) & (index.length == 0)] = 0
    dropped = recover(index, block)
    header[Field.DIRTY] = 0
    return dropped


def recover(index: Index, block: int) -> int:
    """Rebuild the data that depends on `first`, and drop records with invalid chains; return their number.

    The caller holds the writer lock. Idempotent: may be interrupted at any instant and repeated.
    """
    header = index.header
    backed = int(header[Field.BACKED])
    # A reader may be reading a record that the dead writer had dropped but not yet marked.
    index.generation[index.first == 0] += 1
    residents = np.flatnonzero(index.first)
    heads = index.first[residents].astype(np.int64) - 1
    counts = blocks_of(index.length[residents], block)
    sound = (heads < backed) & (counts <= backed)
    sound[np.cumsum(np.where(sound, counts, 0)) > backed] = False  # more blocks than allocated: damage
    bad = residents[~sound]
    residents, heads, counts = residents[sound], heads[sound], counts[sound]
    blocks = chains(index, heads, counts)
    owner = np.repeat(np.arange(len(residents)), counts)
    clash = blocks >= backed
    inner = np.ones(len(blocks), bool)
    inner[np.cumsum(counts) - 1] = False
    clash[inner] |= index.next[blocks[inner]] >= len(index.next)  # an invalid link
    clash |= np.bincount(blocks, minlength=len(index.next))[blocks] > 1
    wrong = np.zeros(len(residents), bool)
    wrong[owner[clash]] = True
    bad = np.concatenate((bad, residents[wrong]))
    index.first[bad] = 0
    index.generation[bad] += 1
    kept = blocks[~wrong[owner]]
    used = np.zeros(len(index.next), bool)
    used[kept] = True
    high = int(kept.max(initial=-1)) + 1
    free = np.flatnonzero(~used[:high])
    index.next[kept[index.next[kept] == FREE_BLOCK]] = 0
    index.next[free] = FREE_BLOCK
    lengths = index.length[residents[~wrong]].astype(np.int64)
    header[Field.FREE], header[Field.STACKED], header[Field.HIGH] = len(free), 0, high
    header[Field.RESIDENT] = len(lengths)
    header[Field.RESIDENT_BYTES] = int(np.where(lengths == 0, block, lengths).sum())
    header[Field.VICTIMS_AT] = header[Field.VICTIMS_END] = 0
    header[Field.RECOVERIES] += 1
    return len(bad)
