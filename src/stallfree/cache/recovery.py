"""Make an index whole again after a writer died at any instant, or after a disk damaged it.

What counts is `first`, because it is written last: an id is resident if and only if its chain of blocks is sound. All the
rest (free blocks, counters, victims) follows from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.index import Field, Index

Array = npt.NDArray[Any]


def chains(index: Index, heads: Array, counts: Array) -> Array:
    """The blocks of records, one record after the other.

    `heads` holds the first block of each record and `counts` its number of blocks. A writer may be changing the chains
    under our eyes: the numbers are then wrong but always within the arena, and the caller finds out by the generation.
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
    """Blocks that records of `length` bytes take; 0 stands for the common structure, which takes one."""
    return np.maximum(1, -(-length.astype(np.int64) // block))


def recover(index: Index) -> int:
    """Rebuild what follows from `first`, drop records whose chain is not sound; their number.

    The caller holds the lock of writers.
    """
    header = index.header
    block = int(header[Field.BLOCK])
    backed = int(np.clip(header[Field.BACKED], 0, len(index.next)))
    header[Field.BACKED] = backed
    # A reader may be at a record that the dead writer had dropped but not yet marked.
    index.generation[index.first == 0] += 1
    residents = np.flatnonzero(index.first)
    heads = index.first[residents].astype(np.int64) - 1
    counts = blocks_of(index.length[residents], block)
    sound = (heads < backed) & (counts <= backed)
    sound[np.cumsum(np.where(sound, counts, 0)) > backed] = False  # more blocks than there are: damage
    bad = residents[~sound]
    residents, heads, counts = residents[sound], heads[sound], counts[sound]
    blocks = chains(index, heads, counts)
    times_used = np.bincount(blocks, minlength=backed)
    owner = np.repeat(np.arange(len(residents)), counts)
    wrong = np.zeros(len(residents), bool)
    clash = blocks >= backed
    clash |= times_used[blocks] > 1
    wrong[owner[clash]] = True
    bad = np.concatenate((bad, residents[wrong]))
    index.first[bad] = 0
    index.generation[bad] += 1
    kept = blocks[~wrong[owner]]
    used = np.zeros(len(index.next), bool)
    used[kept] = True
    high = int(kept.max(initial=-1)) + 1
    free = np.flatnonzero(~used[:high])
    index.free[: len(free)] = free[::-1]
    lengths = index.length[residents[~wrong]].astype(np.int64)
    header[Field.FREE], header[Field.HIGH] = len(free), high
    header[Field.RESIDENT] = len(lengths)
    header[Field.RESIDENT_BYTES] = int(np.where(lengths == 0, block, lengths).sum())
    header[Field.VICTIMS_AT] = header[Field.VICTIMS_END] = 0
    header[Field.RECOVERIES] += 1
    return len(bad)
