"""A step that proves random late, and a mark that says it is not, on every store.

What other processes do about it meanwhile is in `datasets/test_reclassified.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from redis_servers import Server, needs_server
from stallfree.errors import StallfreeWarning
from stallfree.ipc.folders import default_root, remove_unused
from unseen import fraction, unseen_ids

COUNT = 64
LATE = unseen_ids(COUNT)[-20]
CALLS: list[int] = []
"""What `Doubled` was called with."""


class Records(torch.utils.data.Dataset[Any]):
    """Deterministic."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        return np.full(1000, id, np.float32)


class Shifted:
    """Random, for one sample alone."""

    def __call__(self, record: Any) -> Any:
        return record + fraction() if record[0] == LATE else record


class Doubled:
    """Draws for one sample, and always gives the same output."""

    def __call__(self, record: Any) -> Any:
        CALLS.append(int(record[0]))
        if record[0] == LATE:
            fraction()
        return 2 * record

    def fingerprint(self) -> str:
        return "doubled"


@pytest.fixture(params=["memory", "disk", "tier", pytest.param("redis", marks=needs_server)])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Makes the arguments of a cache that persists, the same for each job."""
    server = Server(tmp_path) if request.param == "redis" else None

    def make() -> dict[str, Any]:
        if request.param == "tier":
            return {"store": sf.DiskTier(tmp_path / "tier", capacity="4MiB", persist=True), "capacity": "128KiB"}
        if server is not None:
            return {"store": sf.RedisStore(hosts=[server.host]), "capacity": "128KiB"}
        place = {"store": tmp_path / "disk"} if request.param == "disk" else {}
        return {**place, "capacity": "1MiB", "persist": True}

    yield make
    for folder in default_root().iterdir():
        remove_unused(folder)
    if server is not None:
        server.close()


def epoch(cached: sf.CachedDataset) -> Any:
    """The samples of an epoch, by id, once all are stored."""
    samples = np.concatenate([np.asarray(batch) for batch in sf.DataLoader(cached, 8)])
    if cached.cache.tier is not None:
        cached.cache.tier.flush()
    return samples


def test_a_step_that_proves_random_late_moves_behind_the_cache(options: Callable[[], dict[str, Any]]) -> None:
    with sf.CachedDataset(Records(), transform=Shifted(), **options()) as cached:
        with pytest.warns(StallfreeWarning, match="Shifted") as caught:
            drawn = [float(epoch(cached)[LATE, 0]) for _ in range(3)]
        reads = cached.stats().storage_reads
        drawn.append(float(epoch(cached)[LATE, 0]))
        assert cached.stats().storage_reads == reads, "nothing is fetched any more"
    assert (len(set(drawn)), len(caught)) == (4, 1), "it draws anew in every epoch"


def test_a_mark_after_the_warning_is_heeded_by_the_next_job(options: Callable[[], dict[str, Any]]) -> None:
    """The mark gives a new cache, without the old verdict: the output is cached, as the warning promised."""

    def calls_of_epochs(step: Any) -> list[list[int]]:
        calls = []
        with sf.CachedDataset(Records(), transform=step, **options()) as cached:
            for _ in range(3):
                CALLS.clear()
                assert (epoch(cached)[:, 0] == 2 * np.arange(COUNT)).all()
                calls.append(sorted(CALLS))
        return calls

    with pytest.warns(StallfreeWarning, match="mark_deterministic"):
        assert calls_of_epochs(Doubled())[2] == list(range(COUNT)), "it runs again for every sample"
    assert calls_of_epochs(sf.mark_deterministic(Doubled()))[2] == [], "its output is cached"
