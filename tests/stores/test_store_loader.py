"""Training on two nodes with one store: which samples come, and from where."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from nodes import Here, Nodes, Stamped, close_store, is_right, open_store, stamp
from redis_servers import needs_server
from torch.utils.data.distributed import DistributedSampler

import stallfree
from stallfree import CachedDataset, CacheLoader, SampleError
from stallfree.stats import StoreStats

pytestmark = needs_server

COUNT = 240
LOOKED_AT = {0, COUNT - 1}
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
    """What a job saw on one node.

    Attributes:
        served: the ids of each epoch.
        stats: of the cache, after each epoch.
        skipped: samples that were left out.
        caught: errors that came up.
    """

    served: list[list[int]]
    stats: list[StoreStats]
    skipped: int
    caught: list[str]


def settle(here: Here, cache: Any) -> None:
    """Until every node has put away what others have handed in, on all of them."""
    here.meet()
    cache.num_keys()
    here.meet()


def train(
    here: Here,
    name: str,
    *,
    torch_loader: bool = False,
    epochs: int = 3,
    capacity: str = "8MiB",
    bad: tuple[int, ...] = (),
    size: int = 32,
    pause: bool = True,
    **options: Any,
) -> Ran:
    """A job on this node: it checks each sample that it is given."""
    source = Stamped(COUNT, here.storage(name), bad=bad, size=size)
    served: list[list[int]] = []
    stats, caught = [], []
    with CachedDataset(source, capacity=capacity, store=here.store, name=name) as dataset:
        sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=1)  # type: ignore[arg-type]
        if options.get("multiprocessing_context") == "forkserver":
            multiprocessing.set_forkserver_preload(["stallfree.shared"])
        library = torch.utils.data if torch_loader else stallfree
        loader: Any = library.DataLoader(dataset, batch_size=16, sampler=sampler, **options)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            served.append([])
            batches = iter(loader)
            while True:
                try:
                    values, ids = next(batches)
                except StopIteration:
                    break
                except SampleError as error:
                    caught.append(str(error))
                    continue
                assert is_right(values, ids)
                served[-1] += ids.tolist()
            if pause:
                settle(here, dataset.cache)
            else:
                here.meet()
            stats.append(dataset.stats())
        skipped = loader.stats().skips if hasattr(loader, "stats") else 0
        del batches
        if hasattr(loader, "close"):
            loader.close()
        del loader
        if options.get("multiprocessing_context") == "forkserver":
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        here.meet()
    return Ran(served, stats, skipped, caught)


KINDS: dict[str, dict[str, Any]] = {
    "stallfree, no workers": {},
    "stallfree, fork": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "torch, no workers": {"torch_loader": True},
    "torch, fork": {"torch_loader": True, "num_workers": 2, "multiprocessing_context": "fork"},
}
SLOW_KINDS: dict[str, dict[str, Any]] = {
    "stallfree, forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
    "stallfree, spawn": {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    "stallfree, workers of each epoch": {"num_workers": 2, "multiprocessing_context": "fork"},
    "torch, forkserver": {
        "torch_loader": True, "num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
def test_each_sample_comes_once_per_epoch_and_from_storage_once_in_all(kind: str, pair: Nodes) -> None:
    name = kind.replace(", ", "-").replace(" ", "-")
    ran = pair.run(train, name, **(KINDS | SLOW_KINDS)[kind])
    for epoch in range(3):
        assert sorted(ran[0].served[epoch] + ran[1].served[epoch]) == list(range(COUNT))
    reads = Counter(id for node in pair.reads(name) for id in node)
    assert reads == {id: 2 if id in LOOKED_AT else 1 for id in range(COUNT)}
    for number, node in enumerate(ran):
        first, *_, last = node.stats
        assert last.storage_reads == first.storage_reads == len(pair.reads(name)[number])
        assert last.rejected == last.evictions == last.damaged == 0
        assert last.hits - first.hits == COUNT  # two epochs of half of all
        assert 0 < last.other_hits - first.other_hits < COUNT
    assert sum(node.stats[-1].resident_items for node in ran) == COUNT


@pytest.mark.slow
def test_between_two_epochs_nothing_has_to_be_waited_for(pair: Nodes) -> None:
    for number in range(10):
        pair.run(train, f"at-once-{number}", pause=False, num_workers=number % 3)
        reads = Counter(id for node in pair.reads(f"at-once-{number}") for id in node)
        assert reads == {id: 2 if id in LOOKED_AT else 1 for id in range(COUNT)}


def test_half_of_the_data_in_both_caches_hits_as_much(pair: Nodes) -> None:
    ran = pair.run(train, "half", size=2048, capacity=str(COUNT * 8 * 2048 // 4 + 20_000))
    held = sum(node.stats[-1].resident_items for node in ran)
    assert 0.45 * COUNT < held < 0.55 * COUNT
    for epoch in (1, 2):
        hits = sum(node.stats[epoch].hits - node.stats[epoch - 1].hits for node in ran)
        reads = sum(node.stats[epoch].storage_reads - node.stats[epoch - 1].storage_reads for node in ran)
        assert (hits, reads) == (held, COUNT - held)
        assert sorted(ran[0].served[epoch] + ran[1].served[epoch]) == list(range(COUNT))
    assert sum(node.stats[-1].evictions for node in ran) == 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_that_cannot_be_had_are_left_out_or_raised_on_the_node_that_asks(workers: int, pair: Nodes) -> None:
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


def test_a_node_that_comes_late_misses_nothing(pair: Nodes) -> None:
    ran = pair.run(train_in_turn, "late")
    assert sorted(ran[0] + ran[1]) == list(range(COUNT))
    reads = Counter(id for node in pair.reads("late") for id in node)
    assert all(reads[id] == 1 or id in LOOKED_AT for id in range(COUNT))


def train_in_turn(here: Here, name: str) -> list[int]:
    """The first node is through with its epoch before the second one has made the data set."""
    source = Stamped(COUNT, here.storage(name))
    mine = here.mine(list(range(COUNT)))
    if here.number:
        here.meet()
    with CachedDataset(source, capacity="8MiB", store=here.store, name=name) as dataset:
        served = [id for start in range(0, len(mine), 16) for _, id in dataset.__getitems__(mine[start : start + 16])]
        if not here.number:
            here.meet()
        here.meet()
        time.sleep(0.3)  # the clerk looks four times a second for data sets that have come
        settle(here, dataset.cache)
        for number in range(2):
            ids = list(range(number, COUNT, 2))
            for (values, label), id in zip(dataset.__getitems__(ids), ids, strict=True):
                assert label == id
                assert values.equal(stamp(id))
        here.meet()
    return served


def test_two_data_sets_of_one_name_are_never_mixed(pair: Nodes) -> None:
    for counts in pair.run(read_two):
        assert counts == [COUNT, COUNT // 2]


def read_two(here: Here) -> list[int]:
    """Two data sets of one name, read in turns."""
    with contextlib.ExitStack() as stack:
        sets = []
        for salt, count in ((1, COUNT), (2, COUNT // 2)):
            source = Stamped(count, here.storage(f"twins{salt}"), salt=salt)
            sets.append(stack.enter_context(CachedDataset(source, capacity="8MiB", store=here.store, name="twins")))
        for _ in range(3):
            for salt, dataset in enumerate(sets, start=1):
                ids = here.mine(list(range(len(dataset))))
                for (values, label), id in zip(dataset.__getitems__(ids), ids, strict=True):
                    assert label == id
                    assert values.equal(stamp(id, salt))
                settle(here, dataset.cache)
        counts = [dataset.cache.num_keys() for dataset in sets]
        here.meet()
        if here.number == 0:
            sets[0].cache.clear()
        here.meet()
        settle(here, sets[0].cache)
        assert [dataset.cache.num_keys() for dataset in sets] == [0, counts[1]]
        here.meet()
    return counts


def test_values_by_key_are_loaded_once_by_all_nodes(pair: Nodes) -> None:
    loads = pair.run(load_by_key, "keys")
    assert Counter(loads[0] + loads[1]) == Counter([*range(40), *map(str, range(40))])


def load_by_key(here: Here, name: str) -> list[Any]:
    """Each node loads its half of the keys, then all."""
    keys: list[Any] = [*range(40), *map(str, range(40))]
    loads: list[Any] = []

    def load(key: Any) -> Any:
        loads.append(key)
        return None if key == "7" else {"key": key}

    with CacheLoader(capacity="4MiB", store=here.store, name=name) as loader:
        here.meet()
        for some in (here.mine(keys), keys, keys):
            for key in some:
                assert loader.get(key, load) == (None if key == "7" else {"key": key})
            settle(here, loader.cache)
    return loads


def test_workers_that_are_killed_are_replaced_and_nothing_is_lost(pair: Nodes) -> None:
    for served in pair.run(train_with_deaths, "deaths"):
        assert sorted(served) == list(range(COUNT))


def train_with_deaths(here: Here, name: str) -> list[int]:
    """Each node reads all; its workers are killed in the midst of it."""
    source = Stamped(COUNT, here.storage(name))
    served: list[int] = []
    with CachedDataset(source, capacity="8MiB", store=here.store, name=name) as dataset:
        loader = stallfree.DataLoader(dataset, batch_size=16, num_workers=2, multiprocessing_context="fork")
        for number, (values, ids) in enumerate(loader):
            assert is_right(values, ids)
            served += ids.tolist()
            if number in (1, 5):
                for worker in multiprocessing.active_children()[:1]:
                    worker.kill()
        loader.close()
        here.meet()
    return served


def test_an_id_that_is_twice_in_a_batch_gives_samples_of_their_own(pair: Nodes) -> None:
    pair.run(change_repeated, "repeated")


def change_repeated(here: Here, name: str) -> None:
    """Once with all samples out of storage, once with all of them out of the caches."""
    ids = [*range(20), *range(20), 3, 7]
    with CachedDataset(Stamped(COUNT, here.storage(name)), capacity="8MiB", store=here.store, name=name) as dataset:
        here.meet()
        for _ in range(2):
            samples = dataset.__getitems__(ids)
            for at, (values, label) in enumerate(samples):
                assert label == ids[at]
                assert values.equal(stamp(ids[at]))
                values[:] = -1
            settle(here, dataset.cache)
        stats = dataset.stats()
        assert stats.other_hits > 0
        here.meet()
