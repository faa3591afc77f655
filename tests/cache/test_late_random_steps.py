"""A step that proves random late, and a mark that says it is not, wherever the samples are cached."""

from __future__ import annotations

import warnings
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


class Records(torch.utils.data.Dataset[Any]):
    """Deterministic, and counts its fetches."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        self.fetched.append(id)
        return np.full(1000, id, np.float32)

    def fingerprint(self) -> str:
        return "records"


class Calls:
    """What a step was called with, which does not change what the step is."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def fingerprint(self) -> str:
        return "calls"


CALLS = Calls()


class Shifted:
    """Random, for one sample alone."""

    def __call__(self, record: Any) -> Any:
        return record + fraction() if record[0] == LATE else record


class Doubled:
    """Draws for one sample, and always gives the same output."""

    def __call__(self, record: Any) -> Any:
        CALLS.ids.append(int(record[0]))
        if record[0] == LATE:
            fraction()
        return 2 * record


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    with Server(tmp_path / "server") as server:
        yield server


Stores = dict[str, Any]


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Stores]]:
    """Makes the arguments of a cache that a later job finds again."""
    kind = request.param

    def make() -> Stores:
        if kind == "memory":
            return {"persist": True}
        if kind == "disk":
            return {"persist": True, "store": tmp_path / "disk"}
        if kind == "tier":
            return {"store": sf.DiskTier(tmp_path / "tier", capacity="4MiB", persist=True)}
        port = request.getfixturevalue("server").port
        return {"store": sf.RedisStore(hosts=[{"host": "127.0.0.1", "port": port}])}

    yield make
    for folder in default_root().iterdir():
        remove_unused(folder)


STORES = ["memory", "disk", "tier", pytest.param("redis", marks=needs_server)]


def epoch(cached: sf.CachedDataset) -> Any:
    """The samples of an epoch, by id."""
    assert cached.cache is not None
    samples = np.concatenate([np.asarray(batch) for batch in sf.DataLoader(cached, batch_size=8)])
    if cached.cache.tier is not None:
        cached.cache.tier.flush()
    return samples


@pytest.mark.parametrize("options", STORES, indirect=True)
@pytest.mark.parametrize("small", [False, True])
def test_a_step_that_proves_random_late_moves_behind_the_cache(options: Callable[[], Stores], small: bool) -> None:
    """The data set stays what it was: its samples are cached, and it may be cached again."""
    data, stores = Records(), options()
    capacity = "128KiB" if small and hasattr(stores.get("store"), "attach") else "1MiB"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sf.CachedDataset(data, transform=Shifted(), capacity=capacity, **stores) as cached:
            late = [float(epoch(cached)[LATE, 0]) for _ in range(4)]
            before, hits = len(data.fetched), cached.stats().hits
            late.append(float(epoch(cached)[LATE, 0]))
            assert len(data.fetched) == before, "nothing is fetched any more"
            assert cached.stats().hits - hits == COUNT
    assert len(set(late)) == 5, "it draws anew in every epoch"
    said = [str(warning.message) for warning in caught if warning.category is StallfreeWarning]
    assert len(said) == 1
    assert "Shifted" in said[0]
    assert "Records" not in said[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.CachedDataset(data, capacity="1MiB", name="again").close()


@pytest.mark.parametrize("options", STORES, indirect=True)
def test_a_mark_after_the_warning_is_heeded_by_the_next_job(options: Callable[[], Stores]) -> None:
    """The mark gives a new cache, without the old verdict: the output is cached, as the warning promised."""

    def job(*, mark: bool) -> list[str]:
        step = sf.mark_deterministic(Doubled()) if mark else Doubled()
        with (
            warnings.catch_warnings(record=True) as caught,
            sf.CachedDataset(Records(), transform=step, capacity="1MiB", **options()) as cached,
        ):
            warnings.simplefilter("always")
            for _ in range(3):
                CALLS.ids.clear()
                assert (epoch(cached)[:, 0] == 2 * np.arange(COUNT)).all()
        return [str(warning.message) for warning in caught if warning.category is StallfreeWarning]

    assert any("mark_deterministic" in said for said in job(mark=False))
    assert sorted(CALLS.ids) == list(range(COUNT)), "it runs again for every sample"
    assert job(mark=True) == []
    assert CALLS.ids == [], "its output is cached"
