"""`BaseCache`: default methods of a `Cache`, and `DirectReading`, which reads without threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.cache.policies import Policy
from stallfree.cache.protocol import Cache, Fetch, Pool, Reading
from stallfree.cache.records import MISS, Aim, checked_ids, checked_scores
from stallfree.pipeline.structure import Structure

if TYPE_CHECKING:
    from typing_extensions import Self

Array = npt.NDArray[Any]


class BaseCache:
    """A cache without `gather`, with synchronous writes, whose reads need no threads.

    A context manager.

    A subclass has the attributes `num_ids`, `name`, `path`, `fingerprint`, `allow_pickle`, `capacity` and
    `uncached_steps`, and the methods `resident`, `get_many`, `put_many`, `drop`, `uncache_steps`, `count_fetch`,
    `stats` and `close`: see `Cache`.

    Example:
        ```python
        class Empty(sf.cache.BaseCache):  # more methods: `examples/own_cache.py`
            def resident(self, ids):
                return np.zeros(len(ids), bool)

            def get_many(self, ids):
                return [sf.cache.MISS for _ in ids]
        ```
    """

    policy: Policy = Policy()
    structure: Structure | None = None

    @property
    def complete(self: Cache) -> bool:
        """See `Cache`."""
        return bool(self.resident(np.arange(self.num_ids)).all())

    def get(self: Cache, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def put(self: Cache, id: int, value: Any) -> bool:
        """Store one sample. Returns whether it is stored now."""
        return bool(self.put_many([id], [value])[0])

    def begin_read(self: Cache, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """See `Cache`."""
        return DirectReading(self, ids, fetch)

    def aim(self: Cache, outs: Sequence[Array]) -> Aim:
        """See `Cache`."""
        return Aim(list(outs), None)

    def gather(self: Cache, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """See `Cache`: copies nothing."""
        return np.zeros(len(checked_ids(ids, self.num_ids)), bool)

    def flush(self: Cache) -> None:
        """See `Cache`: there are no background writes."""

    def set_scores(self: Cache, ids: Any, scores: Any) -> None:
        """See `Cache`: no policy uses scores."""
        checked_scores(scores, len(checked_ids(ids, self.num_ids)))

    def clear(self: Cache) -> None:
        """See `Cache`."""
        self.drop(np.arange(self.num_ids))

    def populate(self: Cache) -> None:
        """See `Cache`: does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # type: ignore[attr-defined]


class _Readable(Protocol):
    def resident(self, ids: Any) -> Array: ...
    def get_many(self, ids: Any) -> list[Any]: ...


class DirectReading:
    """The `Reading` of a cache that needs no threads: missing samples are fetched, and `result` reads."""

    def __init__(self, cache: _Readable, ids: Array, fetch: Fetch) -> None:
        self._cache, self._ids, self._fetch = cache, ids, fetch
        self._fetched: set[int] = set()
        self._cancelled = False
        resident = cache.resident(ids)
        if not resident.all():
            self.start(ids[~resident])

    def start(self, missing: Array) -> None:
        """Start fetching ids that are not resident."""
        self.start_fetching(missing.tolist())

    def start_fetching(self, ids: list[int]) -> None:
        """Pass `ids` to `fetch`, except those already passed."""
        new = [id for id in dict.fromkeys(ids) if id not in self._fetched]
        if new and not self._cancelled:
            self._fetched.update(new)
            self._fetch(new)

    def start_fetching_missing(self, values: Sequence[Any]) -> None:
        """Pass the ids whose value is `MISS` to `fetch`."""
        missing = [at for at, value in enumerate(values) if value is MISS]
        if missing:
            self.start_fetching(self._ids[missing].tolist())

    def result(self) -> list[Any]:
        """See `Reading`."""
        values = self._cache.get_many(self._ids)
        self.start_fetching_missing(values)
        return values

    def cancel(self) -> None:
        """See `Reading`."""
        self._cancelled = True
