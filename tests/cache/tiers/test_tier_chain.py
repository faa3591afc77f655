"""Memory above disk above a tier shared with other hosts: a dict that can lose records, raise errors and be full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stallfree as sf
from stallfree.cache import MISS, SampleCache
from stallfree.cache.sample_cache import EVERY_STEP
from stallfree.cache.tiers.tier_stack import LowerTier
from stallfree.stats import CacheStats
from stallfree.stores import DiskTier, TieredCache
from tier_tools import COUNT, disk_of, held, is_right, put, room, room_of, sample


class Remote:
    """A tier that is given every sample. It does not say what it lacks before it is asked."""

    allow_pickle, inclusive, accepts, uncached_steps = False, True, True, 0

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.requests: list[list[int]] = []
        self.hits = self.misses = 0
        self.raises = False

    def known(self, ids: np.ndarray) -> np.ndarray:
        return np.array([id in self.values for id in ids.tolist()], bool)

    def parts(self, ids: np.ndarray) -> list[np.ndarray]:
        return [ids] if len(ids) else []

    def read(self, ids: np.ndarray) -> list[Any]:
        if self.raises:
            raise ConnectionError
        self.requests.append(ids.tolist())
        found = [self.values.get(id, MISS) for id in ids.tolist()]
        self.misses += found.count(MISS)
        self.hits += len(found) - found.count(MISS)
        return [value if value is MISS else (value[0].copy(), value[1]) for value in found]

    def put_records(self, ids: np.ndarray, records: Sequence[Any]) -> np.ndarray:
        if self.raises:
            raise ConnectionError
        for id, (_, (body, number)) in zip(ids.tolist(), records, strict=True):
            self.values[id] = body.copy(), int(number.view(np.int64)[0])
        return np.ones(len(ids), bool)

    def drop(self, ids: np.ndarray) -> None:
        for id in ids.tolist():
            self.values.pop(id, None)

    def drain(self, ids: np.ndarray) -> None:
        pass

    promoted = drain

    def stats(self) -> CacheStats:
        return CacheStats(self.hits, self.misses, 0, 0, 0, 0, 0, len(self.values), 0, 0, 0)

    def uncache_steps(self, count: int) -> bool:
        self.uncached_steps, before = EVERY_STEP, self.uncached_steps
        return not before

    def flush(self) -> None:
        pass

    close = flush


class Chain(DiskTier):
    """A `DiskTier` with another tier below it."""

    def __init__(self, folder: Path, disk: int, remote: LowerTier, *, persist: bool = False) -> None:
        super().__init__(folder, capacity=room(disk), persist=persist)
        self.remote = remote

    def attach(self, *args: Any, **given: Any) -> TieredCache:
        return super().attach(*args, **{**given, "below": self.remote})


def open_chain(folder: Path, memory: int, disk: int, remote: LowerTier, *, policy: str = "minio") -> TieredCache:
    given = {"fingerprint": "data", "name": "chain", "example": sample(0)}
    return Chain(folder, disk, remote).attach(COUNT, capacity=room(memory), policy=policy, **given)


def right(cache: TieredCache, ids: Sequence[int]) -> bool:
    return all(is_right(id, value) for id, value in zip(ids, cache.get_many(ids), strict=True))


# --- which tier holds what --------------------------------------------------------------------------------------------


def test_three_tiers_add_up(tmp_path: Path) -> None:
    """Memory and disk hold different samples, the last tier holds all; counts of a tier include those below it."""
    remote = Remote()
    with open_chain(tmp_path, 12, 20, remote) as cache:
        rooms = room_of(cache.upper), room_of(disk_of(cache))
        put(cache, range(COUNT))
        assert not held(cache.upper) & held(disk_of(cache))
        assert (len(held(cache.upper)), len(held(disk_of(cache))), len(remote.values)) == (*rooms, COUNT)
        assert right(cache, range(COUNT))
        stats = cache.stats()
        assert isinstance(stats.lower, sf.TierStats)
        assert (stats.hits, stats.misses) == (COUNT, 0)
        assert stats.lower_hits == stats.lower.hits == COUNT - rooms[0]
        assert stats.lower.lower_hits == stats.lower.lower.hits == remote.hits == COUNT - sum(rooms)


def test_what_comes_from_the_last_tier_stays_in_memory_or_on_the_disk(tmp_path: Path) -> None:
    remote = Remote()
    with open_chain(tmp_path, 12, 20, remote) as cache:
        rooms = room_of(cache.upper), room_of(disk_of(cache))
        put(cache, range(COUNT))
        cache.upper.clear()
        disk_of(cache).clear()
        for batch in np.split(np.arange(COUNT), COUNT // 8):
            assert right(cache, batch.tolist())
            cache.flush()
        assert (len(held(cache.upper)), len(held(disk_of(cache)))) == rooms
        assert not held(cache.upper) & held(disk_of(cache))
        remote.values.clear()
        assert right(cache, sorted(held(cache.upper) | held(disk_of(cache))))


def test_a_sample_that_the_disk_loses_comes_from_the_tier_below(tmp_path: Path) -> None:
    with open_chain(tmp_path, 2, 40, Remote()) as cache:
        put(cache, range(30))
        (disk_of(cache).path / "data").write_bytes(b"")
        assert right(cache, range(30))
        assert cache.stats().misses == 0


def test_samples_that_are_not_known_below_are_asked_for_once() -> None:
    """What the parts of a batch did not bring is not requested again when the batch is made."""
    remote = Remote()
    memory = SampleCache(COUNT, capacity=room(2), fingerprint="data", example=sample(0), allow_pickle=False)
    with TieredCache(memory, remote) as cache:
        (part,) = cache.stack.parts(np.arange(8))
        assert cache.stack.read(part) == [MISS] * 8
        assert cache.stack.get_known(np.arange(8)) == [MISS] * 8
        assert remote.requests == [list(range(8))]
        assert (cache.stats().hits, cache.stats().misses) == (0, 8)


# --- against a model --------------------------------------------------------------------------------------------------

batches = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "get", "get_known", "drop", "lose_below"]), batches),
        st.tuples(st.sampled_from(["lose_memory", "lose_disk", "fail", "recover", "fill_up"]), st.just([0])),
    ),
    max_size=25,
)


@pytest.fixture(params=["minio", "lru"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredCache]:
    with open_chain(tmp_path, 6, 12, Remote(), policy=request.param) as cache:
        yield cache


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_what_any_tier_holds_is_found_and_right(chain: TieredCache, steps: list[tuple[str, list[int]]]) -> None:
    remote = chain.lower[1]
    assert isinstance(remote, Remote)
    remote.raises, remote.accepts = False, True
    chain.clear()
    model: set[int] = set()
    for step, ids in steps:
        there = held(chain.upper) | held(disk_of(chain)) | (set() if remote.raises else set(remote.values))
        assert there <= model
        if step == "put":
            taken = put(chain, ids)
            model |= {id for id, kept in zip(ids, taken, strict=True) if kept}
            assert set(ids) <= set(remote.values) or remote.raises or not remote.accepts
        elif step in ("get", "get_known"):
            found = chain.get_many(ids) if step == "get" else chain.stack.get_known(np.array(ids))
            assert [value is not MISS for value in found] == [id in there for id in ids]
            assert all(is_right(id, value) for id, value in zip(ids, found, strict=True) if value is not MISS)
            chain.flush()
        elif step == "drop":
            chain.drop(ids)
            model -= set(ids)
        elif step == "lose_below":
            remote.drop(np.array(ids))
        elif step == "lose_memory":
            chain.upper.clear()
        elif step == "lose_disk":
            disk_of(chain).clear()
        else:
            remote.raises, remote.accepts = step == "fail", step != "fill_up"
