"""Training on two nodes with one store: which samples come, and from where."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import Here, Nodes, Stamped, check_samples, close_store, is_right, open_store, stamp
from server_tools import needs_server, until
from torch.utils.data.distributed import DistributedSampler

import stallfree
from stallfree import CachedDataset, CacheLoader, LocalSampler, SampleError, StallfreeWarning
from stallfree.ipc.folders import default_root
from stallfree.stats import CacheStats
from stallfree.stores import servers_of
from stallfree.stores.launch.server import server_folders
from warm import Interpreter

pytestmark = needs_server

COUNT = 240
FIRST = {0, COUNT - 1}
"""Samples that each node reads when the data set is made."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes that have opened the store."""
    with Nodes(2) as nodes:
        nodes.run(open_store)
        yield nodes
        nodes.run(close_store)


@dataclass(frozen=True)
class Ran:
    """What one node saw of a job.

    Attributes:
        served: the ids of each epoch.
        stats: of the cache, after each epoch.
        keys: samples that all servers held then.
        skipped: samples that were left out.
        caught: errors that were raised.
    """

    served: list[list[int]]
    stats: list[CacheStats]
    keys: list[int]
    skipped: int
    caught: list[str]


def take_all(loader: Any, served: list[int], caught: list[str]) -> None:
    """Take all batches of an epoch, check them, and go on after errors."""
    batches = iter(loader)
    while True:
        try:
            values, ids = next(batches)
        except StopIteration:
            return
        except SampleError as error:
            caught.append(str(error))
            continue
        assert is_right(values, ids)
        served += ids.tolist()


def train(
    here: Here,
    name: str,
    *,
    library: Any = "stallfree",
    capacity: int | str = 0,
    bad: tuple[int, ...] = (),
    size: int = 32,
    keys: int | None = None,
    **options: Any,
) -> Ran:
    """Train three epochs. After each, wait until the servers hold `keys` samples, if given."""
    source = Stamped(COUNT, here.storage(name), bad=bad, size=size)
    ran = Ran([], [], [], 0, [])
    with CachedDataset(source, capacity=capacity, store=here.store, name=name) as dataset:
        cache = dataset.cache.servers  # type: ignore[union-attr]
        sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=1)  # type: ignore[arg-type]
        if options.get("multiprocessing_context") == "forkserver":
            multiprocessing.set_forkserver_preload(["stallfree.shared"])
        loaders = torch.utils.data if library == "torch" else stallfree
        loader: Any = loaders.DataLoader(dataset, batch_size=16, sampler=sampler, **options)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            ran.served.append([])
            here.meet()
            take_all(loader, ran.served[-1], ran.caught)
            cache.flush()
            if keys is not None:
                until(lambda: cache.num_keys() == keys, f"the servers hold {keys} samples")
            here.meet()
            ran.stats.append(dataset.stats())
            ran.keys.append(cache.num_keys())
        skipped = loader.stats().skips if hasattr(loader, "stats") else 0
        if hasattr(loader, "close"):
            loader.close()
        del loader
        if options.get("multiprocessing_context") == "forkserver":
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        here.meet()
    return Ran(ran.served, ran.stats, ran.keys, skipped, ran.caught)


KINDS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "memory tier": {"num_workers": 1, "multiprocessing_context": "fork", "capacity": "8MiB"},
    "torch": {"library": "torch", "num_workers": 2, "multiprocessing_context": "fork"},
}
SLOW_KINDS: dict[str, dict[str, Any]] = {
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
    "spawn, memory tier": {"num_workers": 1, "multiprocessing_context": "spawn", "capacity": "8MiB"},
    "torch, memory tier": {"library": "torch", "capacity": "8MiB"},
}


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
def test_each_sample_comes_once_per_epoch_and_from_storage_once_in_all(kind: str, pair: Nodes) -> None:
    name, options = kind.replace(", ", "-").replace(" ", "-"), (KINDS | SLOW_KINDS)[kind]
    ran = pair.run(train, name, keys=COUNT, **options)
    for epoch in range(3):
        assert sorted(ran[0].served[epoch] + ran[1].served[epoch]) == list(range(COUNT))
    reads = Counter(id for node in pair.reads(name) for id in node)
    assert reads == {id: 2 if id in FIRST else 1 for id in range(COUNT)}
    for number, node in enumerate(ran):
        first, *_, last = node.stats
        assert last.storage_reads == first.storage_reads == len(pair.reads(name)[number])
        assert last.rejected == last.evictions == last.damaged == 0
        assert last.hits - first.hits == COUNT  # two epochs of half of all
        if "capacity" in options:
            assert 0 < last.lower_hits - first.lower_hits < COUNT


def test_room_for_half_of_the_samples_gives_about_half_of_the_hits(pair: Nodes) -> None:
    pair.run(close_store)
    pair.run(open_store, name="small", capacity_per_node="6MiB")
    try:
        ran = pair.run(train, "half", size=8192)  # 15 MiB in all, and an empty server uses about 1 MiB
    finally:
        pair.run(close_store)
        pair.run(open_store)
    assert 0.4 * COUNT < ran[0].keys[0] < 0.8 * COUNT
    for epoch in (1, 2):
        hits = sum(node.stats[epoch].hits - node.stats[epoch - 1].hits for node in ran)
        reads = sum(node.stats[epoch].storage_reads - node.stats[epoch - 1].storage_reads for node in ran)
        assert ran[0].keys[epoch - 1] <= hits <= ran[0].keys[epoch]  # there may be room for a few more
        assert hits + reads == COUNT
        assert sorted(ran[0].served[epoch] + ran[1].served[epoch]) == list(range(COUNT))
    assert sum(node.stats[-1].rejected for node in ran) > 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_that_cannot_be_read_are_raised_or_skipped_on_the_node_that_needs_them(
    workers: int, pair: Nodes
) -> None:
    bad = (5, 77, 78, 120)
    options = {"bad": bad, "num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    ran = pair.run(train, f"skip{workers}", on_error="skip", **options)
    for epoch in range(3):
        assert sorted(ran[0].served[epoch] + ran[1].served[epoch]) == sorted({*range(COUNT)} - {*bad})
    assert sum(node.skipped for node in ran) == 3 * len(bad)
    assert not any(node.caught for node in ran)
    ran = pair.run(train, f"raise{workers}", **options)
    caught = [error for node in ran for error in node.caught]
    assert len(caught) >= 3
    assert all(any(f"sample {id} is bad" in error for id in bad) for error in caught)
    for epoch in range(3):
        served = ran[0].served[epoch] + ran[1].served[epoch]
        assert len(set(served)) == len(served) >= COUNT - len(bad) * 16


def test_a_node_that_makes_its_data_set_late_reads_from_the_servers_what_the_other_stored(pair: Nodes) -> None:
    pair.run(read_in_turn)
    assert [set(reads) for reads in pair.reads("late")] == [set(range(COUNT)), FIRST]


def read_in_turn(here: Here) -> None:
    """The first node reads all before the second one makes the data set."""
    if here.number:
        here.meet()
    with CachedDataset(Stamped(COUNT, here.storage("late")), capacity=0, store=here.store, name="late") as dataset:
        check_samples(dataset.__getitems__(range(COUNT)), range(COUNT))
        dataset.cache.flush()  # type: ignore[union-attr]
        if not here.number:
            here.meet()
        here.meet()


def test_two_data_sets_of_one_name_are_never_mixed(pair: Nodes) -> None:
    for counts in pair.run(read_two):
        assert counts == [COUNT, COUNT // 2]


def read_two(here: Here) -> list[int]:
    """Two data sets of one name, read in turns; the first one is cleared at the end."""
    with contextlib.ExitStack() as stack:
        sets: list[Any] = []
        for salt, count in ((1, COUNT), (2, COUNT // 2)):
            source = Stamped(count, here.storage(f"twins{salt}"), salt=salt)
            sets.append(stack.enter_context(CachedDataset(source, capacity=0, store=here.store, name="twins")))
        for _ in range(3):
            for salt, dataset in enumerate(sets, start=1):
                ids = range(here.number, len(dataset), 2)
                check_samples(dataset.__getitems__(ids), ids, salt)
                dataset.cache.flush()
                here.meet()
        counts = [dataset.cache.num_keys() for dataset in sets]
        here.meet()
        if here.number == 0:
            sets[0].cache.clear()
        here.meet()
        assert [dataset.cache.num_keys() for dataset in sets] == [0, counts[1]]
        here.meet()
    return counts


def test_values_of_a_cache_loader_are_loaded_once_by_all_nodes(pair: Nodes) -> None:
    loads = pair.run(load_by_key)
    assert Counter(loads[0] + loads[1]) == Counter([*range(40), *map(str, range(40))])


def load_by_key(here: Here) -> list[Any]:
    """Each node loads its half of the keys, then all."""
    keys: list[Any] = [*range(40), *map(str, range(40))]
    loads: list[Any] = []

    def load(key: Any) -> Any:
        loads.append(key)
        return None if key == "7" else {"key": key}

    with CacheLoader(capacity="4MiB", store=here.store, name="keys") as loader:
        here.meet()
        for some in (keys[here.number :: 2], keys, keys):
            for key in some:
                assert loader.get(key, load) == (None if key == "7" else {"key": key})
            loader.cache.flush()  # type: ignore[union-attr]
            here.meet()
    return loads


def test_workers_that_are_killed_are_replaced_and_nothing_is_lost(pair: Nodes) -> None:
    for served in pair.run(train_with_deaths):
        assert sorted(served) == list(range(COUNT))


def train_with_deaths(here: Here) -> list[int]:
    """Read all on each node, and kill workers meanwhile."""
    served: list[int] = []
    with CachedDataset(Stamped(COUNT, here.storage("deaths")), capacity=0, store=here.store, name="deaths") as dataset:
        loader = stallfree.DataLoader(dataset, batch_size=16, num_workers=2, multiprocessing_context="fork")
        for number, (values, ids) in enumerate(loader):
            assert is_right(values, ids)
            served += ids.tolist()
            if number in (1, 5):
                multiprocessing.active_children()[0].kill()
        assert loader.stats().workers_replaced > 0
        loader.close()
        here.meet()
    return served


def test_an_id_that_is_twice_in_a_batch_gives_samples_of_their_own(pair: Nodes) -> None:
    pair.run(change_repeated)


def change_repeated(here: Here) -> None:
    """Once with all samples out of storage, once with all of them out of the servers."""
    ids = [*range(20), *range(20), 3, 7]
    with CachedDataset(Stamped(COUNT, here.storage("twice")), capacity=0, store=here.store, name="twice") as dataset:
        here.meet()
        reads = []
        for _ in range(2):
            for (values, label), id in zip(dataset.__getitems__(ids), ids, strict=True):
                assert label == id
                assert values.equal(stamp(id))
                values[:] = -1
            dataset.cache.flush()  # type: ignore[union-attr]
            reads.append(dataset.stats().storage_reads)
            here.meet()
        assert reads[0] == reads[1]


def test_a_local_sampler_gives_a_node_what_its_own_server_holds(pair: Nodes) -> None:
    ran = pair.run(train_locally)
    for epoch in range(2):
        assert sorted(ran[0][epoch] + ran[1][epoch]) == list(range(COUNT))
        assert ran[0][0] != ran[0][1]


def train_locally(here: Here) -> list[list[int]]:
    """The ids of two epochs. Only what a node owns beyond its half of all samples is served by the other one."""
    with CachedDataset(Stamped(COUNT, here.storage("local")), capacity=0, store=here.store, name="local") as dataset:
        owner = servers_of(dataset.cache).owner(range(COUNT))  # type: ignore[union-attr]
        served: list[list[int]] = []
        with stallfree.DataLoader(dataset, 16, sampler=LocalSampler(dataset, seed=1)) as loader:
            for _ in range(2):
                served.append([])
                take_all(loader, served[-1], [])
                foreign = sum(int(owner[id]) != here.number for id in served[-1])
                assert foreign == max(0, COUNT // 2 - int((owner == here.number).sum()))
        here.meet()
    return served


def test_auto_is_a_store_of_all_nodes_where_a_job_has_several(pair: Nodes) -> None:
    ran = pair.run(read_auto)
    assert ran == [(2, 0, 8 << 20, ["auto", "default"])] * 2


def read_auto(here: Here) -> tuple[int, int, int, list[str]]:
    """The number of nodes of the store, its memory on this one (in front, of the server), and the servers on it."""
    with CachedDataset(Stamped(COUNT, here.storage("auto")), capacity="8MiB", store="auto") as dataset:
        check_samples(dataset.__getitems__(range(COUNT)), range(COUNT))
        servers, folders = servers_of(dataset.cache), sorted(server_folders(default_root()))
        assert servers is not None
        (most,) = {status.capacity_bytes for status in servers.status()}
        here.meet()
    return servers.num_nodes, dataset.cache.capacity, most, folders


def test_auto_without_a_fingerprint_is_the_memory_of_each_node(pair: Nodes) -> None:
    """The nodes could not know that they have the same data set."""
    assert pair.run(read_private) == [(False, 8 << 20, ["default"])] * 2


def read_private(here: Here) -> tuple[bool, int, list[str]]:
    """Whether there are servers, the memory of this node, and the names of the servers that are left."""
    with (
        pytest.warns(StallfreeWarning, match="this cache is private"),
        pytest.warns(RuntimeWarning, match=r"on each node for itself: .*lock has no fingerprint"),
    ):
        dataset = CachedDataset(Locked(COUNT, here.storage("private")), capacity="8MiB", store="auto")
    with dataset:
        check_samples(dataset.__getitems__(range(COUNT)), range(COUNT))
        return servers_of(dataset.cache) is not None, dataset.cache.capacity, sorted(server_folders(default_root()))


class Locked(Stamped):
    """A source without a stable fingerprint."""

    def fingerprint(self) -> Any:
        return threading.Lock()


def test_auto_is_memory_without_a_server_on_one_node(tmp_path: Path) -> None:
    with CachedDataset([stamp(id) for id in range(COUNT)], capacity="8MiB", store="auto") as dataset:
        assert servers_of(dataset.cache) is None
        assert not server_folders(default_root())


FORKS_AT_ONCE = """
import os, signal, sys, numpy as np, stallfree
from stallfree.cache import MISS
assert "redis" not in sys.modules
os.environ["STALLFREE_ROOT"] = sys.argv[1]
store = stallfree.RedisStore(capacity_per_node="16MiB", timeout=60.0)
cache = store.attach(100, fingerprint="f", name="data")
cache.put_many(range(100), [np.arange(id + 1) for id in range(100)])
children = []
for _ in range(8):  # while the thread that stores connects for the first time
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(60)  # ends a child that hangs
        values = cache.get_many(range(100))
        os._exit(sum(value is not MISS and len(value) != id + 1 for id, value in enumerate(values)))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
cache.flush()
assert all(len(value) == id + 1 for id, value in enumerate(cache.get_many(range(100))))
cache.close()
store.close()
"""


def test_a_process_may_fork_at_once_while_its_thread_connects_for_the_first_time(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    """A child that is forked while a thread imports redis-py would wait for the import's lock forever."""
    for number in range(3):
        root = tmp_path / str(number)
        root.mkdir(mode=0o700)
        done = interpreter.run(FORKS_AT_ONCE, str(root))
        assert done.code == 0, done.err
