"""`CachedDataset` in several jobs: one cache on the host, what stays and what goes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import stallfree as sf
from cached_data import Numbers, doubled, tripled, with_draws
from children import Child, Holder
from stallfree.testing import ThrottledSource
from unseen import unseen_ids

UNSEEN = len(unseen_ids(40))
LOOKED = 40 - UNSEEN


def job(source: Any, epochs: int = 2, **options: Any) -> None:
    """Trains for some epochs and looks at every sample."""
    with sf.CachedDataset(source, capacity="1MiB", **options) as data:
        for _ in range(epochs):
            for batch in sf.DataLoader(data, 4, shuffle=True):
                for array, label in zip(batch[0].tolist(), batch[1].tolist(), strict=True):
                    assert array == [2 * label] * 16


def holding(source: Any, **options: Any) -> Callable[[], Callable[[], None]]:
    """For a `Holder`: a job that has read everything and stays attached until it is told to end."""

    def begin() -> Callable[[], None]:
        data = sf.CachedDataset(source, capacity="1MiB", **options)
        list(data)
        return data.close

    return begin


def test_jobs_with_the_same_data_share_one_cache(store_root: Path) -> None:
    source = ThrottledSource(Numbers(40, [doubled, with_draws]))
    holder = Holder(holding(source))
    assert source.requests == 40
    with sf.CachedDataset(source, capacity="1MiB") as data:
        assert data.stats().misses == UNSEEN
        list(data)
        assert source.requests == data.stats().storage_reads == 40 + LOOKED  # the first look of this job
        assert data.stats().misses == UNSEEN
    with sf.CachedDataset(ThrottledSource(Numbers(40, [tripled])), capacity="1MiB") as other:
        assert other.stats().hits == other.stats().misses == 0
    holder.end()
    source.close()
    del other
    assert not list(store_root.iterdir())


def test_jobs_at_once_see_the_right_samples_and_count_every_read(store_root: Path) -> None:
    source = ThrottledSource(Numbers(60, [doubled, with_draws]), latency=0.0005)
    with sf.CachedDataset(source, capacity="1MiB") as data:
        jobs = [Child(job, source, 3) for _ in range(3)]
        assert [child.wait() for child in jobs] == [0, 0, 0]
        job(source)
        stats = data.stats()
        assert stats.storage_reads == source.requests
        assert stats.storage_bytes == source.bytes
        assert stats.resident_items == 60
    source.close()
    assert not list(store_root.iterdir())
