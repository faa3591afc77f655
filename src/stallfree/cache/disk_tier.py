"""`DiskTier`: a folder on a local disk as a tier behind memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.tier import Array, Record
from stallfree.errors import CapacityError, InputError, text_of
from stallfree.ipc.folders import is_address, is_path
from stallfree.pipeline.codec import read_record
from stallfree.units import format_size, parse_size

_PARTS, _PART_BYTES = 8, 256 << 10
"""Largest number of parts of a batch that are read concurrently, and the smallest size of a part."""


class DiskTier:
    """A folder on a local disk for the samples of data sets, behind memory.

    Samples are read from memory, else from the disk, else from the source. Samples of the next batches are read ahead.
    New samples are written in the background. A full or failing disk reduces hits, but raises no error.

    Args:
        folder: on a local disk; data sets share it, each under its own name. Created if missing.
        capacity: bytes on the disk for each data set that uses this tier, index included, as an int or a string like
            "200GiB". The capacity of a `CachedDataset` is memory.
        persist: keep the samples on the disk after the last process has exited, for the next job with the same data.

    Attributes:
        folder: as an absolute path.
        capacity: bytes.
        persist: as given.

    Raises `InputError` for an invalid path, `CapacityError` for an invalid size.

    Example:
        ```python
        tier = sf.DiskTier("cache", capacity="64MiB")
        with sf.CachedDataset(dataset, capacity="1MiB", store=tier) as cached:
            image, label = cached[0]  # from memory, else from the disk, else from the data set
        ```
    """

    def __init__(self, folder: str | Path, *, capacity: int | str, persist: bool = False) -> None:
        if not is_path(folder) or str(folder) == "memory" or is_address(folder):
            raise InputError(f"DiskTier(folder={folder!r:.80}): give the path of a folder on a local disk")
        self.folder = Path(folder).expanduser().absolute()
        self.capacity = parse_size(capacity, "capacity")
        self.persist = bool(persist)

    @property
    def room(self) -> int:
        """Bytes for the samples of one data set."""
        return self.capacity

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> _DiskSamples:
        """Return the samples of one data set in this folder. See `TierStore`."""
        try:
            records = SampleCache(
                num_ids,
                capacity=self.capacity,
                fingerprint=fingerprint,
                store=self.folder,
                name=f"{name}-tier",
                persist=self.persist,
                example=example,
            )
        except CapacityError as error:
            raise CapacityError(f"{self!r}: {text_of(error)}", page=error.page) from error
        return _DiskSamples(records)

    def __repr__(self) -> str:
        return f"DiskTier({str(self.folder)!r}, capacity={format_size(self.capacity)})"


class _DiskSamples:
    """The samples of one data set on a disk: a `Tier`. Nothing is evicted."""

    def __init__(self, records: SampleCache) -> None:
        self.records = records
        self._typical = 0  # bytes of a record

    def parts(self, ids: Array) -> list[Array]:
        """Return `ids` in parts that threads read concurrently."""
        if not self._typical:
            stats = self.records.stats()
            self._typical = stats.resident_bytes // max(1, stats.resident_items)
        step = max(-(-len(ids) // _PARTS), -(-_PART_BYTES // max(1, self._typical)))
        return [ids[at : at + step] for at in range(0, len(ids), step)]

    def get_many(self, ids: Array) -> list[Any]:
        """See `Tier`."""
        return self.records.get_many(ids)

    def put_many(self, ids: Array, records: Sequence[Record]) -> Array:
        """See `Tier`."""
        values = [read_record(record, copy=False, allow_pickle=True) for record in records]
        return np.asarray(self.records.put_many(ids, values))

    def drop(self, ids: Array) -> None:
        """See `Tier`."""
        self.records.drop(ids)

    def close(self) -> None:
        """See `Tier`."""
        self.records.close()

    def __repr__(self) -> str:
        return f"the disk of {self.records.path}"
