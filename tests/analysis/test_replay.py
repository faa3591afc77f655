"""A replay decides as the live cache does, and as textbooks say."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stallfree import InputError
from stallfree.analysis import replay
from stallfree.cache import MISS, SampleCache
from stallfree.pipeline.codec import encode, record_size
from stallfree.plans import make_plan

SIZE = 64


def live(epochs: list[np.ndarray], policy: str, capacity: int, batch_size: int, sizes: np.ndarray | None) -> Any:
    """Hits, misses, evictions, rejected of each epoch in a live cache, and who is resident at the end."""
    num_ids = max(int(ids.max()) for ids in epochs) + 1 if sizes is None else len(sizes)
    found = []
    with SampleCache(
        num_ids,
        capacity=capacity,
        fingerprint="live",
        policy=policy,
        example=np.zeros(SIZE, np.uint8) if sizes is None else typical_example(sizes),
    ) as cache:
        blocks = cache.meta.num_blocks
        for ids in epochs:
            before = cache.stats()
            for start in range(0, len(ids), batch_size):
                batch = ids[start : start + batch_size]
                values = cache.get_many(batch)
                missed = list(dict.fromkeys(id for id, v in zip(batch.tolist(), values, strict=True) if v is MISS))
                if missed:
                    data = [np.zeros(SIZE, np.uint8) if sizes is None else bytes(int(sizes[id])) for id in missed]
                    cache.put_many(missed, data)
            after = cache.stats()
            names = ("hits", "misses", "evictions", "rejected")
            found.append(tuple(getattr(after, name) - getattr(before, name) for name in names))
        return found, np.flatnonzero(cache.resident(np.arange(num_ids))).tolist(), blocks


def record_bytes(length: int) -> int:
    """Bytes of the record of so many bytes."""
    return record_size(*encode(bytes(length)))


def typical_example(lengths: np.ndarray) -> bytes:
    """Bytes whose record is as long as the mean record, rounded down: `replay` plans its blocks for the mean."""
    mean = np.mean([record_bytes(length) for length in lengths.tolist()])
    return bytes(max(length for length in range(int(mean)) if record_bytes(length) <= mean))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["minio", "fifo", "lru", "lfu"]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=120), min_size=1, max_size=4),
)
def test_it_decides_as_the_live_cache(policy: str, room: int, batch_size: int, trace: list[list[int]]) -> None:
    epochs = [np.array(ids) for ids in trace]
    num_ids = max(int(ids.max()) for ids in epochs) + 1
    capacity = 200_000 + room * 64
    expected, resident, blocks = live(epochs, policy, capacity, batch_size, None)
    found = replay(trace, policy=policy, capacity=blocks, batch_size=batch_size)
    assert [(e.hits, e.misses, e.evictions, e.rejected) for e in found.epochs] == expected
    assert found.resident.tolist() == resident
    assert num_ids <= 60


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["minio", "fifo", "lru", "lfu"]), st.integers(0, 10**6), st.integers(1, 9))
@example("minio", 3914, 1)
def test_it_decides_as_the_live_cache_with_sizes(policy: str, seed: int, batch_size: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(200, 9000, 50)
    epochs = [rng.permutation(50) for _ in range(3)] + [rng.integers(0, 50, 80)]
    capacity = int(rng.integers(120_000, 320_000))
    sizes = np.array([record_bytes(length) for length in lengths.tolist()])
    expected, resident, _ = live(epochs, policy, capacity, batch_size, lengths)
    found = replay(epochs, policy=policy, capacity=capacity, sizes=sizes, batch_size=batch_size)
    assert [(e.hits, e.misses, e.evictions, e.rejected) for e in found.epochs] == expected
    assert found.resident.tolist() == resident
    assert found.total.storage_bytes >= found.total.misses * 200


def test_lru_of_single_accesses_is_the_textbook_one() -> None:
    rng = np.random.default_rng(1)
    trace = rng.zipf(1.3, 5000) % 200
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for id in trace.tolist():
        if id in cache:
            hits += 1
        elif len(cache) == 30:
            cache.popitem(last=False)
        cache[id] = None
        cache.move_to_end(id)
    found = replay(trace, policy="lru", capacity=30, batch_size=1)
    assert found.total.hits == hits
    assert found.resident.tolist() == sorted(cache)


def test_plans_and_shares() -> None:
    plans = [make_plan(1000, shuffle=True, seed=0, epoch=epoch) for epoch in range(3)]
    found = replay(plans, policy="minio", capacity="35%")
    assert [epoch.hits for epoch in found.epochs] == [0, 350, 350]
    assert found.capacity_items == 350
    assert found.total.accesses == 3000
    assert found.total.hit_ratio == pytest.approx(700 / 3000)
    sized = replay(plans, policy="minio", capacity="100%", sizes=np.full(1000, 50_000))
    assert sized.epochs[0].storage_bytes == 50_000_000
    assert 0.9 < sized.epochs[2].hit_ratio <= 1  # blocks and index take their part


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (5, {"capacity": 1}, "trace_or_plans=5"),
    ("abc", {"capacity": 1}, "trace_or_plans='abc'"),
    ([[0, -1]], {"capacity": 1}, "0 or more"),
    ([[0.5]], {"capacity": 1}, "integers"),
    ([0, 1], {"capacity": 0}, "capacity=0"),
    ([0, 1], {"capacity": "101%"}, "capacity='101%'"),
    ([0, 1], {"capacity": "x%"}, "capacity='x%'"),
    ([0, 1], {"capacity": 1, "policy": "best"}, "policy='best'"),
    ([0, 1], {"capacity": 1, "batch_size": 0}, "batch_size=0"),
    ([0, 5], {"capacity": "1MiB", "sizes": [1, 2, 3]}, "ids 0 to 5; given were 3"),
]


@pytest.mark.parametrize(("trace", "arguments", "message"), BAD)
def test_bad_input(trace: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(trace, **{"policy": "lru", **arguments})
