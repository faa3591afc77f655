"""A cache that is written by hand, on the base class alone, passes the contract; and broken ones do not."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallfree.cache import Cache
from stallfree.testing import CacheContract
from stallfree.testing.cache_contract import MakeCache

OwnCache: Any = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_cache.py"))["CompressedCache"]


def maker(kind: Callable[..., Cache]) -> MakeCache:
    def make(num_ids: int, capacity: int, *, example: Any = None, allow_pickle: bool = True) -> Cache:
        return kind(num_ids, capacity, allow_pickle=allow_pickle)

    return make


class TestOwnCache(CacheContract):
    picklable = False

    @pytest.fixture
    def make_cache(self) -> MakeCache:
        return maker(OwnCache)


class Shares(OwnCache):
    """Equal ids get one value."""

    def get_many(self, ids: Any) -> list[Any]:
        known: dict[int, Any] = {}
        return [known.setdefault(id, value) for id, value in zip(ids, super().get_many(ids), strict=True)]


class Overwrites(OwnCache):
    """A second value takes the place of the first."""

    def _put(self, id: int, *encoded: Any) -> None:
        self.drop([id])
        super()._put(id, *encoded)


class Evicts(OwnCache):
    """Makes room though its policy says that it does not."""

    def _put(self, id: int, *encoded: Any) -> None:
        super()._put(id, *encoded)
        if id not in self._records:
            self.drop([next(iter(self._records))])
            super()._put(id, *encoded)


class Forgets(OwnCache):
    """Says that everything was stored, and does not say what is missing."""

    def put_many(self, ids: Any, values: Any, **options: Any) -> Any:
        return np.ones_like(super().put_many(ids, values, **options))


class Keeps(OwnCache):
    """Drops nothing."""

    def drop(self, ids: Any) -> None:
        pass


class Pickles(OwnCache):
    """Pickles where it may not."""

    def put_many(self, ids: Any, values: Any, **options: Any) -> Any:
        before, self.allow_pickle = self.allow_pickle, True
        try:
            return super().put_many(ids, values, **options)
        finally:
            self.allow_pickle = before


class Trusts(OwnCache):
    """Takes values that were made by other steps."""

    def put_many(self, ids: Any, values: Any, *, uncached: int = 0) -> Any:
        return super().put_many(ids, values, uncached=self.uncached_steps)


class Wraps(OwnCache):
    """Takes negative ids as Python does."""

    def get_many(self, ids: Any) -> list[Any]:
        return super().get_many(np.asarray(ids) % self.num_ids)


class Stays(OwnCache):
    """Can be used after it was closed."""

    def close(self) -> None:
        pass


class Miscounts(OwnCache):
    """Counts requests, not ids."""

    def get_many(self, ids: Any) -> list[Any]:
        before = dict(self._counts)
        values = super().get_many(ids)
        self._counts = before | {"hits": before["hits"] + 1}
        return values


class FetchesLate(OwnCache):
    """Leaves it to the caller to find out what is missing."""

    def begin_read(self, ids: Any, pool: Any, fetch: Any) -> Any:
        return super().begin_read(ids, pool, lambda missing: None)


class FetchesAll(OwnCache):
    """Has everything fetched."""

    def begin_read(self, ids: Any, pool: Any, fetch: Any) -> Any:
        fetch(list(dict.fromkeys(ids.tolist())))
        return super().begin_read(ids, pool, lambda missing: None)


class Vanishes(OwnCache):
    """What is removed meanwhile is neither read nor fetched."""

    def begin_read(self, ids: Any, pool: Any, fetch: Any) -> Any:
        reading = super().begin_read(ids, pool, fetch)
        reading.cancel()
        return reading


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Shares, "changed_values_affect_neither_cache_nor_other_values"),
        (Overwrites, "stored_values_are_unchanged_and_the_first_of_equal_ids_counts"),
        (Evicts, "a_full_cache_loses_only_evicted_samples"),
        (Forgets, "uncaching_a_step_removes_all_samples"),
        (Keeps, "drop_and_clear"),
        (Pickles, "pickle_is_refused_unless_allowed"),
        (Trusts, "uncaching_a_step_removes_all_samples"),
        (Wraps, "invalid_ids_raise"),
        (Stays, "use_after_close_raises"),
        (Miscounts, "counts"),
        (FetchesLate, "begin_read_returns_stored_samples_and_fetches_the_others"),
        (FetchesAll, "begin_read_returns_stored_samples_and_fetches_the_others"),
        (Vanishes, "samples_changed_during_a_read_are_read_or_fetched"),
    ],
)
def test_a_broken_cache_fails(kind: Any, test: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(CacheContract(), f"test_{test}")(maker(kind))
