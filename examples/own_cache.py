"""A cache of one's own: samples compressed in the memory of this process.

`tests/test_own_cache.py` checks it with `stallfree.testing.CacheContract`.
"""

import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import stallfree as sf
from stallfree.cache import MISS, BaseCache
from stallfree.cache.records import checked_ids, checked_pairs
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.pipeline.structure import Structure


class CompressedCache(BaseCache):
    """Samples in a dict of this process, as records that are compressed. Keeps the first ones that fit."""

    def __init__(
        self, num_ids: int, capacity: int, *, name: str = "compressed", fingerprint: str = "", allow_pickle: bool = True
    ) -> None:
        self.num_ids, self.capacity, self.name, self.fingerprint = num_ids, capacity, name, fingerprint
        self.allow_pickle, self.path, self.uncached_steps = allow_pickle, Path(tempfile.gettempdir()), 0
        self._records: dict[int, bytes] = {}
        self._lock, self._closed = threading.RLock(), False
        self._counts = dict.fromkeys(sf.CacheStats.__dataclass_fields__, 0) | {"capacity_bytes": capacity}

    def resident(self, ids: Any) -> npt.NDArray[np.bool_]:
        return np.array([id in self._records for id in checked_ids(ids, self.num_ids).tolist()], bool)

    def get_many(self, ids: Any) -> list[Any]:
        self._check_open()
        values: list[Any] = []
        with self._lock:
            for id in checked_ids(ids, self.num_ids).tolist():
                record = self._records.get(id)
                self._counts["misses" if record is None else "hits"] += 1
                values.append(MISS if record is None else self._decompressed(record))
        return values

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> npt.NDArray[np.bool_]:
        self._check_open()
        wanted = checked_pairs(ids, values, self.num_ids)
        encoded = [encode(value, allow_pickle=self.allow_pickle) for value in values]
        with self._lock:
            if uncached == self.uncached_steps:
                for id, (structure, arrays) in zip(wanted.tolist(), encoded, strict=True):
                    self._put(id, structure, arrays)
        return self.resident(wanted)

    def _put(self, id: int, structure: Structure, arrays: list[npt.NDArray[np.uint8]]) -> None:
        if id in self._records:
            return
        record = np.empty(record_size(structure, arrays), np.uint8)
        write_record(structure, arrays, record)
        compressed = zlib.compress(record.data, 1)
        if self._counts["used_bytes"] + len(compressed) > self.capacity:
            self._counts["rejected"] += 1
            return
        self._records[id] = compressed
        self._counts["used_bytes"] += len(compressed)

    def _decompressed(self, record: bytes) -> Any:
        return read_record(np.frombuffer(zlib.decompress(record), np.uint8), copy=True, allow_pickle=self.allow_pickle)

    def drop(self, ids: Any) -> None:
        with self._lock:
            for id in checked_ids(ids, self.num_ids).tolist():
                self._counts["used_bytes"] -= len(self._records.pop(id, b""))

    def uncache_steps(self, count: int) -> bool:
        with self._lock:
            if self.uncached_steps >= count:
                return False
            self.clear()
            self.uncached_steps = count
            return True

    def count_fetch(self, reads: int, size: int) -> None:
        with self._lock:
            self._counts["storage_reads"] += reads
            self._counts["storage_bytes"] += size

    def stats(self) -> sf.CacheStats:
        items = {"resident_items": len(self._records), "resident_bytes": self._counts["used_bytes"]}
        return sf.CacheStats(**self._counts | items)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise sf.InputError(f"the cache {self.name!r} is closed: make a new one")


class Compressed:
    """What `CachedDataset(store=...)` takes: makes the cache of a data set."""

    def attach(self, num_ids: int, *, capacity: int, name: str, fingerprint: str, **_: Any) -> CompressedCache:
        return CompressedCache(num_ids, capacity, name=name, fingerprint=fingerprint)


class Scans(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Pictures with little in them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        picture = torch.zeros(64, 64)
        picture[id] = id
        return picture, id


def main() -> None:
    with sf.CachedDataset(Scans(), capacity="1MiB", store=Compressed()) as cached:
        for _ in range(2):
            for pictures, ids in sf.DataLoader(cached, batch_size=8, shuffle=True):
                assert (pictures.amax((1, 2)) == ids).all()
        stats = cached.stats()
    print(
        f"{stats.hits} hits, {stats.storage_reads} reads; {stats.resident_items} samples in {stats.used_bytes:,} bytes"
    )


if __name__ == "__main__":
    main()
