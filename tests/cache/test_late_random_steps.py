"""A step that proves random late, and a mark that says it is not, wherever the samples are cached."""

import itertools
import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from children import Child
from loader_data import Made
from redis_servers import Server, needs_server
from stallfree.cache import SampleCache
from stallfree.ipc.folders import default_root, remove_unused
from unseen import fraction, unseen_ids

COUNT = 64
LATE = unseen_ids(COUNT)[-20]
CALLS: list[int] = []  # what `Doubled` was called with in this process


def record(id: int) -> Any:
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


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Makes the arguments of a cache, the same for each process and for a later job."""
    kind, _, persist = request.param.partition(" ")
    server = Server(tmp_path) if kind == "redis" else None

    def make() -> dict[str, Any]:
        if kind == "tier":
            store = sf.DiskTier(tmp_path / "tier", capacity="4MiB", persist=bool(persist))
            return {"store": store, "capacity": "128KiB"}
        if server is not None:
            return {"store": sf.RedisStore(hosts=[server.host], timeout=60.0), "capacity": "128KiB"}
        return {"store": {"disk": tmp_path / "disk"}.get(kind, kind), "capacity": "1MiB", "persist": bool(persist)}

    yield make
    for folder in default_root().iterdir():
        remove_unused(folder)
    if server is not None:
        server.close()


PERSISTENT = ["memory persists", "disk persists", "tier persists", pytest.param("redis", marks=needs_server)]
processes = pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])


def in_processes(count: int, work: Callable[[int, Callable[[Any], Any]], Any], folder: Path) -> list[Any]:
    """The results of `work(number, epoch)`, and the warnings of this library, in some processes at once.

    `epoch(cached)` returns the samples of an epoch, by id, when all processes have stored theirs.
    """
    meet = multiprocessing.Barrier(count)

    def run(number: int) -> None:
        seeds = itertools.count(100 * number)

        def epoch(cached: sf.CachedDataset) -> Any:
            samples = np.concatenate([np.asarray(batch) for batch in sf.DataLoader(cached, 8, seed=next(seeds))])
            if cached.cache.tier is not None:
                cached.cache.tier.flush()
            meet.wait(60)
            return samples

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = work(number, epoch)
        said = [str(warning.message) for warning in caught if warning.category is sf.StallfreeWarning]
        (folder / f"{number}.json").write_text(json.dumps([result, said]))

    children = [Child(run, number) for number in range(count)]
    assert [child.wait() for child in children] == [0] * count
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


@processes
@pytest.mark.parametrize("options", [
    "memory", "disk", "tier", *(pytest.param(kind, marks=pytest.mark.slow) for kind in PERSISTENT[:3]), PERSISTENT[3],
], indirect=True)  # fmt: skip
def test_a_step_that_proves_random_late_moves_behind_the_cache(options: Any, processes: int, tmp_path: Path) -> None:
    """The data set stays what it was: its samples are cached, and it may be cached again."""

    def work(number: int, epoch: Callable[[Any], Any]) -> list[float]:
        data = Made(COUNT, record)
        with sf.CachedDataset(data, transform=Shifted(), **options()) as cached:
            late = [float(epoch(cached)[LATE, 0]) for _ in range(4)]
            before = cached.stats()
            late.append(float(epoch(cached)[LATE, 0]))
            after = cached.stats()
            assert after.storage_reads == before.storage_reads, "nothing is fetched any more"
            assert COUNT <= after.hits - before.hits <= processes * COUNT
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sf.CachedDataset(data, capacity="1MiB", name=f"again{number}").close()
        return late

    ran = in_processes(processes, work, tmp_path)
    drawn = [value for late, _ in ran for value in late]
    assert len(set(drawn)) == len(drawn) == 5 * processes, "it draws anew in every epoch"
    for _, (message,) in ran:
        assert "Shifted" in message
        assert "Made" not in message


@processes
@pytest.mark.parametrize("options", PERSISTENT, indirect=True)
def test_a_mark_after_the_warning_is_heeded_by_the_next_job(options: Any, processes: int, tmp_path: Path) -> None:
    """The mark gives a new cache, without the old verdict: the output is cached, as the warning promised."""

    def work(mark: bool, epoch: Callable[[Any], Any]) -> list[int]:
        step = sf.mark_deterministic(Doubled()) if mark else Doubled()
        with sf.CachedDataset(Made(COUNT, record), transform=step, **options()) as cached:
            for _ in range(3):
                CALLS.clear()
                assert (epoch(cached)[:, 0] == 2 * np.arange(COUNT)).all()
        return sorted(CALLS)

    for calls, said in in_processes(processes, lambda _, epoch: work(False, epoch), tmp_path):
        assert calls == list(range(COUNT)), "it runs again for every sample"
        assert any("mark_deterministic" in message for message in said)
    ran = in_processes(processes, lambda _, epoch: work(True, epoch), tmp_path)
    assert ran == [[[], []]] * processes, "its output is cached"


def test_the_second_process_that_finds_the_same_step_removes_nothing() -> None:
    with SampleCache(10, capacity="1MiB", fingerprint="f") as cache:
        assert cache.uncache_steps(1)
        cache.put_many([3], [b"three"], uncached=1)
        assert not cache.uncache_steps(1)
        assert cache.get_many([3]) == [b"three"]
