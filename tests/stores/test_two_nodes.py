"""Training on two nodes with one store: which samples come, and from where."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import Here, Nodes, Stamped, check_samples, close_store, is_right, open_store, stamp
from stallfree.stores import servers_of
from stallfree.stores.launch.server import server_folders
from torch.utils.data.distributed import DistributedSampler

import stallfree
from redis_servers import needs_server, until
from stallfree import CachedDataset, CacheLoader, LocalSampler, StallfreeWarning
from stallfree.ipc.folders import default_root
from unseen import unseen_ids
from warm import Interpreter

pytestmark = needs_server

COUNT = 240
FIRST = {*range(COUNT)} - {*unseen_ids(COUNT)}
"""Samples that each node reads when the data set is made."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes that have opened the store."""
    with Nodes(2) as nodes:
        nodes.run(open_store)
        yield nodes
        nodes.run(close_store)


def take_all(loader: Any) -> list[int]:
    """The ids of an epoch, whose samples are checked."""
    served: list[int] = []
    for values, ids in loader:
        assert is_right(values, ids)
        served += ids.tolist()
    return served


def train(here: Here, name: str, library: str, capacity: int | str, **options: Any) -> list[tuple[list[int], Any]]:
    """Train three epochs: the ids of each, and the counts after it. Each ends when the servers hold all samples."""
    ran = []
    source = Stamped(COUNT, here.storage(name))
    with CachedDataset(source, capacity=capacity, store=here.store, name=name) as dataset:
        cache = dataset.cache.servers
        sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=1)
        loaders = torch.utils.data if library == "torch" else stallfree
        loader: Any = loaders.DataLoader(dataset, batch_size=16, sampler=sampler, **options)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            here.meet()
            served = take_all(loader)
            cache.flush()
            until(lambda: cache.num_keys() == COUNT, "the servers hold all samples")
            here.meet()
            ran.append((served, dataset.stats()))
        if library != "torch":
            loader.close()
        here.meet()
    return ran


@pytest.mark.parametrize(
    ("library", "capacity", "options"),
    [
        ("stallfree", "8MiB", {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}),
        pytest.param("stallfree", 0, {"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        pytest.param("torch", 0, {"num_workers": 2, "multiprocessing_context": "fork"}, marks=pytest.mark.slow),
    ],
)
def test_each_sample_comes_once_per_epoch_and_from_storage_once_in_all(
    library: str, capacity: int | str, options: dict[str, Any], pair: Nodes
) -> None:
    name = f"{library}-{capacity}"
    ran = pair.run(train, name, library, capacity, **options)
    for epoch in range(3):
        assert sorted(ran[0][epoch][0] + ran[1][epoch][0]) == list(range(COUNT))
    reads = Counter(id for node in pair.reads(name) for id in node)
    assert reads == {id: 2 if id in FIRST else 1 for id in range(COUNT)}
    for number, node in enumerate(ran):
        first, last = node[0][1], node[-1][1]
        assert last.storage_reads == first.storage_reads == len(pair.reads(name)[number])
        assert last.rejected == last.evictions == last.damaged == 0
        assert last.hits - first.hits == COUNT  # two epochs of half of all
        if capacity:
            assert 0 < last.lower_hits - first.lower_hits < COUNT


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
                served.append(take_all(loader))
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
        sizes = until(  # a server that does not answer in time shows none
            lambda: sizes if len(sizes := {status.capacity_bytes for status in servers.status()}) == 1 else None,
            "both servers show their capacity",
        )
        (most,) = sizes
        here.meet()
    return servers.num_nodes, dataset.cache.capacity, most, folders


def test_auto_without_a_fingerprint_is_the_memory_of_each_node(pair: Nodes) -> None:
    """The nodes could not know that they have the same data set."""
    assert pair.run(read_private) == [(False, 8 << 20, ["default"])] * 2


def read_private(here: Here) -> tuple[bool, int, list[str]]:
    """Whether there are servers, the memory of this node, and the names of the servers that are left."""
    with (
        pytest.warns(StallfreeWarning, match="this cache is private"),
        pytest.warns(RuntimeWarning, match=r"each node caches samples separately: .*lock has no fingerprint"),
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


@pytest.mark.slow
def test_a_process_may_fork_at_once_while_its_thread_connects_for_the_first_time(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    """A child that is forked while a thread imports redis-py would wait for the import's lock forever."""
    for number in range(3):
        root = tmp_path / str(number)
        root.mkdir(mode=0o700)
        done = interpreter.run(FORKS_AT_ONCE, str(root))
        assert done.code == 0, done.err
