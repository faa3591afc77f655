"""`CacheLoader`: cache any value by a key."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from stallfree.cache.layout import chained_block
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.records import MISS
from stallfree.cache.store import Store, is_tier, open_cache, parse_capacity, sample_bytes_of
from stallfree.datasets.epoch_source import Ids
from stallfree.errors import CodecError, InputError, text_of, value_unstorable
from stallfree.ipc.folders import check_name
from stallfree.raising import short_traceback
from stallfree.stats import CacheStats
from stallfree.typevars import Closing, T
from stallfree.units import parse_size, parse_whole

KeyT = TypeVar("KeyT", bound=str | int)

_MOST_PLACES = 1 << 22
_MOST_TYPICAL = 1 << 20


class CacheLoader(Closing):
    """Caches values by key, in shared memory or on a local disk.

    All processes of the host share the values of one name.

    When the capacity is used up, the policy decides over all values. The cache has twice as many places as small values
    fit, 4 million at most, and a key may take 8 of them, by its hash. If other keys have all 8 (1 key in 256 at most),
    the policy decides over these. Keys are kept with the values, so a key never gets another's value.

    Args:
        capacity: bytes of this host's memory for values and index, as an int or such as "4GiB"; of the disk's if the
            store is a folder. 0 only with a tier: no memory for values is used in front of it. The same on all nodes.
        store: "memory", a folder on a local disk, a `DiskTier` or a `RedisStore`, as for `CachedDataset`. Not "auto".
        name: of the cache; who gives the same name, capacity and policy shares it.
        policy: "minio" (what is stored stays), "fifo", "lru", "lfu" or "random", for the values in
            memory; what is in a tier stays.
        persist: keep the cache when the last process has left.
        typical: bytes of a usual value. Memory is given out in blocks of about an eighth of that: larger blocks are
            read faster, and small values waste less of smaller ones. Who makes the cache decides.

    Raises `CapacityError` and `FingerprintError` like `CachedDataset`. An object can be sent to other processes.

    Example:
        ```python
        with sf.CacheLoader(capacity="8MiB", name="features") as cache:
            value = cache.get("clip-17", load)  # calls load("clip-17")
            same = cache.get("clip-17", load)  # does not call it
        ```
    """

    def __init__(
        self,
        *,
        capacity: int | str,
        store: Store = "memory",
        name: str,
        policy: str | Policy = "minio",
        persist: bool = False,
        typical: int | str = "16KiB",
    ) -> None:
        size, name, policy = parse_capacity(capacity, store), check_name(name), make_policy(policy)
        if policy.given:
            raise InputError(
                f"policy={policy.name!r} keeps what has the highest score, and keys have none: use 'minio', 'fifo', "
                "'lru', 'lfu' or 'random'"
            )
        example = bytes(min(parse_size(typical, "typical"), _MOST_TYPICAL))
        places = min(max(2 * sample_bytes_of(store, size) // chained_block(len(example)), 8), _MOST_PLACES)
        options: dict[str, Any] = {"policy": policy, "name": name, "persist": persist, "example": example}
        fingerprint = f"values by key, 8 of {places} places"
        self.cache = open_cache(store, places, capacity=size, fingerprint=fingerprint, **options)
        self._store = store if is_tier(store) else None  # which lives as long as its tiers are used

    @short_traceback
    def get(self, key: KeyT, load: Callable[[KeyT], T]) -> T:
        """The cached value of `key`, or else that of `load(key)`.

        A value that was loaded is stored.

        A value that `load` gives may be anything that the cache can store, None included; the caller may change what is
        returned. What `load` raises is passed on, and nothing is stored. Processes that miss the same key at the same
        time each load it. Raises `CodecError` for a value that cannot be stored, `InputError` for a key that is no str
        or int.

        Example:
            ```python
            with sf.CacheLoader(capacity="8MiB", name="squares") as cache:
                assert cache.get(12, lambda key: key * key) == 144
            ```
        """
        if not callable(load):
            raise InputError(f"load={load!r:.80} cannot be called: give a function that makes the value of a key")
        plain, places = self._places(key)
        value, free = self._find(plain, places)
        if value is MISS:
            value = load(key)
            self.cache.count_fetch(1, 0)
            self._keep(plain, value, places)
            if len(free):
                self.cache.tier.put_many(free, [(plain, value)], 0)
        return value  # type: ignore[no-any-return]

    def _keep(self, key: str | int, value: Any, places: Ids) -> None:
        """Store the value of `key` in a free place, or in one that the policy empties."""
        free = self.cache.free_one(places, partial(_is_of, key))
        if len(free):
            try:
                self.cache.put_many(free, [(key, value)])
            except CodecError as error:
                raise value_unstorable(f"the value of the key {key!r} cannot be stored: {text_of(error)}") from error

    def __contains__(self, key: str | int) -> bool:
        return self._find(*self._places(key))[0] is not MISS

    def _find(self, key: str | int, places: Ids) -> tuple[Any, Ids]:
        """Return the value of `key`, `MISS` if it is not there; and a free place in the tier, if it has one."""
        cache = self.cache
        key_and_value = cache.find(places[cache.resident(places)], partial(_is_of, key))
        if key_and_value is not MISS:
            return key_and_value[1], places[:0]
        values = [] if cache.tier is None else cache.tier.get_many(places, 0)
        for value in values:
            if value is not MISS and _is_of(key, value):
                cache.count_tier(1, 0)
                self._keep(key, value[1], places)
                return value[1], places[:0]
        return MISS, places[[value is MISS for value in values]][:1]

    def _places(self, key: str | int) -> tuple[str | int, Ids]:
        """`key` as a plain str or int, and the places that it may take."""
        plain: str | int = str.__str__(key) if isinstance(key, str) else parse_whole(key, "key (a str or an int)")
        text = f"str:{plain}" if isinstance(plain, str) else f"int:{plain:x}"
        return plain, np.unique(self.cache.ids_of_key(text.encode("utf-8", "surrogatepass")))

    def stats(self) -> CacheStats:
        """The counts of the cache; after `close`, those of that moment.

        `storage_reads` are the calls of `load`; what they brought is not in `storage_bytes`.
        """
        return self.cache.stats()

    def clear(self) -> None:
        """Forget all values."""
        self.cache.clear()
        if self.cache.tier is not None:
            self.cache.tier.drop(np.arange(self.cache.num_ids))

    def close(self) -> None:
        """Leave the cache. May be called twice.

        The last process to leave removes it, unless it persists.
        """
        self.cache.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}


def _is_of(key: str | int, value: tuple[str | int, Any]) -> bool:
    return type(value[0]) is type(key) and value[0] == key
