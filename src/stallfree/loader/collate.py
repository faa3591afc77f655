"""Samples to batches, straight into the memory of a slot where that is possible.

`torch.utils.data.default_collate` says what a batch is. When all samples share one fixed structure, the bytes of a batch are
those of its samples, leaf by leaf and row by row; then the batch is composed in the slot and no memory is made. Whether this
holds for a structure is not argued but tried once, with random bytes, against torch's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from stallfree.pipeline.codec import Structure, encode, open_record, record_size, stack_build, write_record

Bytes = npt.NDArray[np.uint8]
Collate = Callable[[list[Any]], Any]
Reserve = Callable[[int], Bytes | None]


@lru_cache(maxsize=256)
def batch_structure(sample: Structure, count: int) -> Structure | None:
    """The structure of a batch of `count` samples, if its leaves are the samples' leaves stacked; else None."""
    if not sample.fixed or not sample.leaves:
        return None
    rng = np.random.default_rng(0)
    columns = [_random_rows(rng, leaf.kind, leaf.nbytes, count) for leaf in sample.leaves]
    try:
        structure, arrays = encode(default_collate(stack_build(sample, [c.copy() for c in columns], count)))
    except Exception:
        return None  # torch cannot collate them: let the real call say so
    same = structure.fixed and len(arrays) == len(columns)
    if not same or not all(np.array_equal(a, c.reshape(-1)) for a, c in zip(arrays, columns, strict=True)):
        return None
    return structure


def _random_rows(rng: np.random.Generator, kind: str, nbytes: int, count: int) -> Bytes:
    high = 2 if kind == "bool" else 100
    rows = rng.integers(0, high, (count, nbytes), np.uint8)
    if kind in ("tensor", "array", "scalar"):
        rows &= 1  # valid for every dtype, booleans too
    return rows


def batch_bytes(structure: Structure) -> int:
    """Bytes of a batch of a fixed structure."""
    return record_size(structure, [])


def compose(sample: Structure, count: int, reserve: Reserve) -> tuple[list[Bytes], int] | None:
    """Room for `count` samples in the memory that `reserve(bytes)` gives: one (count, bytes) array per leaf, and the size.

    None when the batch has to be made in another way.
    """
    structure = batch_structure(sample, count)
    memory = None if structure is None else reserve(batch_bytes(structure))
    if structure is None or memory is None:
        return None
    regions = open_record(structure, memory)
    rows = [region.reshape(count, leaf.nbytes) for region, leaf in zip(regions, sample.leaves, strict=True)]
    return rows, batch_bytes(structure)


def write_batch(samples: list[Any], collate: Collate | None, reserve: Reserve) -> int | Bytes:
    """Collate `samples` into the memory that `reserve(bytes)` gives; the bytes used.

    When there is no room for the batch, the batch itself is returned as bytes. `collate` None stands for torch's default.
    Raises `CodecError` for a batch that cannot even be pickled, and what `collate` raises.
    """
    if collate is None and (used := _stack(samples, reserve)):
        return used
    batch = (collate or default_collate)(samples)
    structure, arrays = encode(batch, allow_pickle=True)
    size = record_size(structure, arrays)
    memory = reserve(size)
    if memory is None:
        memory = np.empty(size, np.uint8)
        write_record(structure, arrays, memory)
        return memory
    return write_record(structure, arrays, memory)


def _stack(samples: Sequence[Any], reserve: Reserve) -> int:
    """Compose the batch in place; 0 when the samples do not share one fixed structure."""
    encoded = [encode(sample, allow_pickle=True) for sample in samples]
    first = encoded[0][0]
    if any(structure is not first for structure, _ in encoded):
        return 0
    room = compose(first, len(samples), reserve)
    if room is None:
        return 0
    rows, size = room
    for at, (_, arrays) in enumerate(encoded):
        for leaf, array in zip(rows, arrays, strict=True):
            leaf[at] = array
    return size
