"""What a cache gains a job, predicted and measured."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from cached_data import Numbers
from stallfree.errors import InputError
from stallfree.importance.benefit import measure_benefit
from stallfree.importance.plans.jobs import benefit
from stallfree.testing import ThrottledSource

BATCH = 4


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Slow(Numbers):
    """Records that take 2 s each, fetched one after the other, and a step that takes 1 s each time."""

    threads = False

    def __init__(self, time: Time, samples: int = 12) -> None:
        super().__init__(samples)
        self.time = time
        self.fetched: list[int] = []

    def _record(self, id: int) -> Any:
        self.time.sleep(2)
        self.fetched.append(id)
        return super()._record(id)


def cached(source: Any, resident: list[int]) -> sf.CachedDataset:
    """A cached data set with exactly these samples in its cache."""
    dataset = sf.CachedDataset(source, capacity="1MiB")
    dataset.cache.clear()
    if resident:
        dataset.__getitems__(resident)
    return dataset


@pytest.mark.parametrize(
    ("step", "hit", "miss", "workers", "expected"),
    [
        (1.0, 0.1, 1.0, 2, 10 / 1),  # 20 samples: 10 s of fetching against steps of 1 s
        (1.0, 0.2, 1.0, 2, 10 / 2),  # prep is slower than the steps
        (12.0, 0.1, 1.0, 2, 1.0),  # bound by the device: no gain
        (1.0, 0.1, 1.0, 1, 20 / 2),
        (1.0, 0.1, 1.0, 0, 20 / 2),
        (0.0, 0.1, 1.0, 4, 10.0),
        (1.0, 0.0, 0.0, 4, 1.0),
    ],
)
def test_prediction(step: float, hit: float, miss: float, workers: int, expected: float) -> None:
    assert benefit(step, hit, miss, workers=workers, batch_size=20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("resident", [list(range(12)), [3, 5]])
def test_measured_with_steps_included(resident: list[int]) -> None:
    time = Time()
    source = Slow(time)
    with closing(cached(source, resident)) as dataset:
        before = dataset.stats()
        fetched, came = len(source.fetched), []

        def step(batch: Any) -> None:
            time.sleep(1)
            came.append(batch[1].tolist())

        # Of each of 20 batches: 4 fetches and a step, against a step alone. One batch more warms up.
        assert measure_benefit(dataset, step, batch_size=BATCH, workers=0, clock=time) == (2 * BATCH + 1) / 1
        past, out = came[:21], came[21:]
        assert len(out) == 21
        assert {len(ids) for ids in came} == {BATCH}
        assert source.fetched[fetched:] == [id for ids in past for id in ids]
        assert set(source.fetched[fetched:]) == set(range(12))
        assert {id for ids in out for id in ids} == set(resident)
        after = dataset.stats()
        assert after.storage_reads - before.storage_reads == 21 * BATCH  # counted
        assert dataset.cache.resident(np.arange(12)).sum() == len(resident)  # and not stored
        assert after.misses == before.misses


def test_measured_with_workers_and_real_time() -> None:
    source = ThrottledSource(Numbers(64), latency=0.01)
    with closing(cached(source, list(range(0, 64, 2)))) as dataset:
        before, came = source.requests, []
        found = measure_benefit(dataset, lambda batch: came.append(batch[1]), batch_size=8, workers=1, batches=5)
        assert found > 0
        assert source.requests - before == (2 + 5) * 8
        assert [len(ids) for ids in came] == [8] * 2 * (2 + 5)
        assert all(id % 2 == 0 for ids in came[7:] for id in ids.tolist())
        assert dataset.cache.resident(np.arange(64)).sum() == 32
    source.close()


def test_what_cannot_be_measured() -> None:
    def step(batch: Any) -> None:
        raise RuntimeError("out of memory")

    with closing(cached(Numbers(), [])) as dataset:
        with pytest.raises(InputError, match="nothing is in the cache yet"):
            measure_benefit(dataset, step, batch_size=2, workers=0)
        dataset[0]
        with pytest.raises(RuntimeError, match="out of memory"):
            measure_benefit(dataset, step, batch_size=2, workers=0)
        for arguments in ({"batch_size": None}, {"batches": 0}, {"batches": 2.5}, {"workers": None}):
            with pytest.raises(InputError):
                measure_benefit(dataset, step, **{"batch_size": 2, "workers": 0, **arguments})
        with pytest.raises(InputError, match="cannot be called"):
            measure_benefit(dataset, None, batch_size=2, workers=0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no cache"):
        measure_benefit([1, 2], step, batch_size=2, workers=0)  # type: ignore[arg-type]
