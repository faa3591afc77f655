"""`CacheLoader`: cache any value by a key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache import MISS, SampleCache
from stallfree.cache.policies import Policy
from stallfree.errors import InputError
from stallfree.folders import check_name
from stallfree.stats import CacheStats
from stallfree.units import parse_size

_WAYS = 8
_BYTES_PER_PLACE = 1024
_MOST_PLACES = 1 << 22


class CacheLoader:
    """Values by key, in memory that all processes of the host share, or on a local disk.

        cache = CacheLoader(capacity="4GiB", name="features")
        value = cache.get("clip-17", load)          # calls load("clip-17") when it is not there

    The cache has one place for each 1 KiB of its capacity (4 million at most). A key has 8 places that it may take, by its
    hash; when all are taken by others, its value is not stored. Keys are kept with the values, so a key never gets
    another's value.

    Args:
        capacity: bytes for values and index, as an int or such as "4GiB".
        store: "memory" or a folder on a local disk.
        name: of the cache; who gives the same name, capacity and policy shares it.
        policy: "minio", "fifo", "lru", "lfu" or "random".
        persist: keep the cache when the last process has left.

    Raises `CapacityError` and `FingerprintError` like `CachedDataset`. An object can be sent to other processes.
    """

    def __init__(
        self,
        *,
        capacity: int | str,
        store: str | Path = "memory",
        name: str,
        policy: str | Policy = "minio",
        persist: bool = False,
    ) -> None:
        size = parse_size(capacity, "capacity")
        places = min(max(size // _BYTES_PER_PLACE, _WAYS), _MOST_PLACES)
        self.cache = SampleCache(
            places,
            capacity=size,
            fingerprint=f"values by key, {places} places",
            policy=policy,
            store=store,
            name=check_name(name),
            persist=persist,
        )

    def get(self, key: str | int, load: Callable[[Any], Any]) -> Any:
        """The value of `key`; `load(key)` when it is not in the cache, which then keeps it.

        A value that `load` gives may be anything that the cache can store, None included. What `load` raises is passed on.
        """
        places = self._places(key)
        value = self._find(key, places)
        if value is not MISS:
            return value
        value = load(key)
        self.cache.count_fetch(1, 0)
        free = places[~self.cache.resident(places)]
        if len(free):
            self.cache.put(int(free[0]), (key, value))
        return value

    def __contains__(self, key: str | int) -> bool:
        return self._find(key, self._places(key)) is not MISS

    def _find(self, key: str | int, places: npt.NDArray[np.int64]) -> Any:
        for place in places[self.cache.resident(places)].tolist():
            found = self.cache.get(place)
            if found is not MISS and type(found[0]) is type(key) and found[0] == key:
                return found[1]
        return MISS

    def _places(self, key: str | int) -> npt.NDArray[np.int64]:
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise InputError(f"key={key!r}: a key is a str or an int")
        text = f"{type(key).__name__}:{key}"
        start = xxhash.xxh3_64_intdigest(text.encode()) % self.cache.num_ids
        return (start + np.arange(_WAYS)) % self.cache.num_ids

    def stats(self) -> CacheStats:
        """The counts of the cache. A look at a place that holds another key counts as a hit too."""
        return self.cache.stats()

    def clear(self) -> None:
        """Forget all values."""
        self.cache.clear()

    def close(self) -> None:
        """Leave the cache; the last process out removes it unless it persists. May be called twice."""
        self.cache.close()

    def __enter__(self) -> CacheLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
