"""`TierReading`: a batch read from lower tiers in parts, concurrently in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS
from stallfree.cache.base import DirectReading
from stallfree.cache.protocol import Fetch, Pool

Array = npt.NDArray[Any]
_Work = Callable[[Array], list[Any]]


class ReadInParts(Protocol):
    """The source of a `TierReading`. Ids are arrays of distinct int64 within the data set."""

    def resident(self, ids: Any) -> Array:
        """See `Cache`."""

    def get_many(self, ids: Any) -> list[Any]:
        """See `Cache`."""

    def parts(self, ids: Array) -> list[Array]:
        """Returns those of `ids` that are worth a request, in parts that threads `read` concurrently."""

    def read(self, ids: Array) -> list[Any]:
        """Returns the samples of one of the `parts`, `MISS` for those in no lower tier. Counts the hits."""

    def get_known(self, ids: Array) -> list[Any]:
        """Returns the samples of `ids`, `MISS` for those not known to be in a tier. Ids may be equal."""

    def drain(self, ids: Array) -> Array:
        """Waits, for 250 ms at most, for writes of `ids` to tiers by processes of this host.

        Returns which of `ids` are not known to be in any tier, as an array of bool.
        """


class TierReading(DirectReading):
    """The `Reading` of a cache with lower tiers.

    Samples that are worth a request are read immediately, each part in a thread. For the others a thread waits until
    their writes in flight are finished. Samples that are still missing are fetched.
    """

    def __init__(self, tiers: ReadInParts, ids: Array, pool: Pool, fetch: Fetch) -> None:
        self._tiers = tiers
        self._pool = pool
        self._started: list[tuple[_Work, Array, Future[list[Any]]]] = []
        super().__init__(tiers, ids, fetch)

    def start(self, missing: Array) -> None:
        """See `DirectReading`."""
        ids = np.array(list(dict.fromkeys(missing.tolist())), np.int64)
        parts = self._tiers.parts(ids)
        rest = ids[~np.isin(ids, np.concatenate(parts))] if parts else ids
        executor = self._pool()
        for part in parts:
            self._submit(executor, self._read, part)
        if len(rest):
            self._submit(executor, self._drain, rest)

    def _submit(self, executor: Executor, work: _Work, ids: Array) -> None:
        try:
            future = executor.submit(work, ids)
        except RuntimeError:  # the executor is being shut down
            future = Future()
            future.cancel()
        self._started.append((work, ids, future))

    def _read(self, ids: Array) -> list[Any]:
        self._tiers.drain(ids)
        values = self._tiers.read(ids)
        self.start_fetching([id for id, value in zip(ids.tolist(), values, strict=True) if value is MISS])
        return values

    def _drain(self, ids: Array) -> list[Any]:
        self.start_fetching(ids[self._tiers.drain(ids)].tolist())
        return []

    def result(self) -> list[Any]:
        """See `Reading`."""
        started, self._started = self._started, []
        found: dict[int, Any] = {}
        for work, ids, future in started:
            try:
                values = future.result()
            except CancelledError:  # the executor was shut down
                values = work(ids)
            found.update(zip(ids.tolist(), values, strict=False))
        values = [found.pop(id, MISS) for id in self._ids.tolist()]
        left = missing(values)
        if len(left):
            fill(values, left, self._tiers.get_known(self._ids[left]))
        self.start_fetching_missing(values)
        return values

    def cancel(self) -> None:
        """See `Reading`."""
        super().cancel()
        for _, _, future in self._started:
            future.cancel()


def missing(values: Sequence[Any]) -> Array:
    """The positions of `MISS`."""
    return np.array([at for at, value in enumerate(values) if value is MISS], np.int64)


def fill(values: list[Any], at: Array, found: Sequence[Any]) -> None:
    """Put `found` into `values` at the positions `at`."""
    for position, value in zip(at.tolist(), found, strict=True):
        values[position] = value
