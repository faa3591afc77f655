"""Servers, supervisors and nodes that are killed or frozen while a job trains on two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from nodes import Here, Nodes, Pids, Stamped, check_samples, close_store, is_right, open_store, pids
from server_tools import is_alive
from torch.utils.data.distributed import DistributedSampler

from redis_servers import needs_server, until
from stallfree import CachedDataset, DataLoader

pytestmark = needs_server

COUNT = 160
MIDDLE = 5
"""The batch after which something happens."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes that have made a data set."""
    with Nodes(2) as nodes:
        nodes.run(open_store, timeout=0.25)
        nodes.run(make_dataset)
        yield nodes
        nodes.run(leave)


def make_dataset(here: Here) -> None:
    """Make the data set."""
    source = Stamped(COUNT, here.storage("faults"))
    here.kept["dataset"] = CachedDataset(source, capacity=0, store=here.store, name="faults")
    here.meet()


def leave(here: Here) -> None:
    """Leave data set and store."""
    here.kept.pop("dataset").close()
    close_store(here)


@dataclass(frozen=True)
class Epoch:
    """What one node saw of an epoch.

    Attributes:
        served: the ids.
        reads: samples that were read from storage.
    """

    served: list[int]
    reads: int


def train(here: Here, epoch: int, fault: tuple[int, int] | None = None, workers: int = 0) -> Epoch:
    """One epoch. In the middle of it the first node sends a signal to a process."""
    dataset = here.kept["dataset"]
    before = dataset.stats()
    sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=7)
    sampler.set_epoch(epoch)
    served: list[int] = []
    context = "fork" if workers else None
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=workers, multiprocessing_context=context)
    with contextlib.closing(loader):
        for number, (values, ids) in enumerate(loader):
            assert is_right(values, ids)
            served += ids.tolist()
            if number == MIDDLE and here.number == 0 and fault is not None:
                os.kill(*fault)
    now = dataset.stats()
    reads = now.storage_reads - before.storage_reads
    # A sample that is stored between the first look and the second counts as a miss, a read and a hit.
    assert now.misses - before.misses >= reads
    assert now.hits - before.hits + now.misses - before.misses >= COUNT // 2
    return Epoch(served, reads)


def check(epochs: list[Epoch]) -> list[Epoch]:
    """Each sample came once."""
    assert sorted(epochs[0].served + epochs[1].served) == list(range(COUNT))
    return epochs


def only_hits(here: Here) -> bool:
    """Whether all samples come out of the servers; stores those that do not."""
    dataset = here.kept["dataset"]
    before = dataset.stats().storage_reads
    check_samples(dataset.__getitems__(range(COUNT)), range(COUNT))
    dataset.cache.flush()
    return bool(dataset.stats().storage_reads == before)


def wait_for_hits(nodes: Nodes) -> None:
    """Until both nodes read everything out of the servers."""
    until(lambda: all(nodes.run(only_hits)), "all samples come out of the servers")


FAULTS = {
    "server killed": ("server", signal.SIGKILL),
    "server frozen": ("server", signal.SIGSTOP),
    "supervisor killed": ("supervisor", signal.SIGKILL),
    "supervisor frozen": ("supervisor", signal.SIGSTOP),
}


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        ("server frozen", 2),
        ("supervisor killed", 0),
        pytest.param("server killed", 2, marks=pytest.mark.slow),
        pytest.param("supervisor frozen", 0, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_and_hits_come_back(fault: str, workers: int, pair: Nodes) -> None:
    wait_for_hits(pair)
    before: Pids = pair.run_on(1, pids)
    who, number = FAULTS[fault]
    pid = getattr(before, who)
    try:
        check(pair.run(train, 1, fault=(pid, number), workers=workers))
        epochs = check(pair.run(train, 2, workers=workers))
        if fault == "server frozen":
            assert all(0 < epoch.reads < COUNT // 2 for epoch in epochs)  # the other server goes on
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    wait_for_hits(pair)
    after: Pids = pair.run_on(1, pids)
    assert (after.server == before.server) == (number == signal.SIGSTOP)
    assert (after.supervisor == before.supervisor) == (fault != "supervisor killed")
    check(pair.run(train, 3, workers=workers))


def test_a_node_whose_processes_are_all_killed_costs_its_hits_and_nothing_else() -> None:
    with Nodes(2) as nodes:
        nodes.run(open_store)
        nodes.run(make_dataset)
        wait_for_hits(nodes)
        there: Pids = nodes.run_on(1, pids)
        nodes.begin(0, read_until_lost)
        nodes.kill(1)
        assert 0 < nodes.results(0)[0] < COUNT
        until(lambda: not is_alive(there.supervisor) and not is_alive(there.server), "nothing of the node runs")
        assert not there.folder.exists()
        nodes.run(leave)


def read_until_lost(here: Here) -> int:
    """Read all samples again and again until the other node is lost; how many come from storage each time then."""
    dataset = here.kept["dataset"]

    def read() -> int:
        before = dataset.stats().storage_reads
        check_samples(dataset.__getitems__(range(COUNT)), range(COUNT))
        dataset.cache.flush()
        return int(dataset.stats().storage_reads - before)

    theirs = int((dataset.cache.owner(range(COUNT)) != here.number).sum())
    until(lambda: read() == theirs, "the other node is lost")
    assert [read() for _ in range(3)] == [theirs] * 3
    return theirs


"""Of each node."""
