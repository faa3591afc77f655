"""Servers, supervisors and nodes that are killed or frozen while a job trains on two nodes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes import Here, Nodes, Pids, Stamped, check_samples, close_store, is_right, open_store, pids
from server_tools import is_alive, needs_server, record, until
from torch.utils.data.distributed import DistributedSampler

from children import Child
from stallfree import CachedDataset, DataLoader
from stallfree.stores.shard import Shard

pytestmark = needs_server

COUNT = 160
MIDDLE = 5
"""The batch after which something happens."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes that have made a data set."""
    with Nodes(2) as nodes:
        nodes.run(note_failures)
        nodes.run(open_store, timeout=0.25)
        nodes.run(make_dataset)
        yield nodes
        nodes.run(leave)


def note_failures(here: Here) -> None:
    """From now on note the port of each server that did not reply to a request, in this process and its workers."""
    fail = Shard._fail

    def noted(self: Shard, number: int, error: Exception) -> None:
        found = self.location.find()
        here.storage("failures").note(found[1].port if found else 0)
        fail(self, number, error)

    Shard._fail = noted  # type: ignore[method-assign]


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
        failures: for each request without a reply, the port of the server.
    """

    served: list[int]
    reads: int
    failures: list[int]


def train(here: Here, epoch: int, fault: tuple[int, int] | None = None, workers: int = 0) -> Epoch:
    """One epoch. In the middle of it the first node sends a signal to a process."""
    dataset = here.kept["dataset"]
    before, failures = dataset.stats(), len(here.storage("failures").ids())
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
    assert now.misses - before.misses == reads
    assert now.hits - before.hits + reads == COUNT // 2
    return Epoch(served, reads, here.storage("failures").ids()[failures:])


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
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        ("server killed", 0),
        ("server frozen", 2),
        ("supervisor killed", 2),
        pytest.param("server killed", 2, marks=SLOW),
        pytest.param("server frozen", 0, marks=SLOW),
        pytest.param("supervisor killed", 0, marks=SLOW),
        pytest.param("supervisor frozen", 0, marks=SLOW),
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


def port_of_server(here: Here) -> int:
    """Of the server of this node."""
    return int(here.store._server.address().port)


def test_workers_of_later_epochs_do_not_wait_for_a_server_that_is_known_to_be_lost(pair: Nodes) -> None:
    wait_for_hits(pair)
    server, port = pair.run_on(1, pids).server, pair.run_on(1, port_of_server)
    os.kill(server, signal.SIGSTOP)
    try:
        first, *later = [check(pair.run(train, epoch, workers=2)) for epoch in range(3)]
    finally:
        os.kill(server, signal.SIGCONT)
    assert all(port in epoch.failures for epoch in first)
    assert not any(port in epoch.failures for epochs in later for epoch in epochs)
    assert all(epoch.reads > 0 for epochs in later for epoch in epochs)
    wait_for_hits(pair)


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


# --- all faults at once ---------------------------------------------------------------------------------------------


READS = 5_000
"""Of each node."""


def test_many_reads_under_all_faults_give_no_wrong_sample(pair: Nodes) -> None:
    wait_for_hits(pair)
    folders = [there.folder for there in pair.run(pids)]
    over, faults = threading.Event(), Counter[str]()
    thread = threading.Thread(target=make_faults, args=(folders, over, faults))
    thread.start()
    try:
        ran: list[Counter[str]] = pair.run(read_in_chaos, READS)
    finally:
        over.set()
        thread.join()
    assert min(node["read"] for node in ran) >= READS
    assert min(node[kind] for node in ran for kind in ("hits", "storage", "forked", "killed")) > 0
    assert min(faults["killed"], faults["frozen"]) > 0
    wait_for_hits(pair)


def read_in_chaos(here: Here, reads: int) -> Counter[str]:
    """Read two data sets of one name, with forked processes, some of which are killed."""
    chance, done = random.Random(here.number), Counter[str]()
    children: list[Child] = []
    with contextlib.ExitStack() as stack:
        sets = []
        for salt in (1, 2):
            source = Stamped(1000, here.storage(f"chaos{salt}"), salt=salt)
            sets.append(stack.enter_context(CachedDataset(source, capacity=0, store=here.store, name="chaos")))
        while done["read"] < reads:
            read_some(sets, chance)
            done["read"] += 64
            step = chance.randrange(20)
            if step < 2:
                children.append(Child(read_in_child, sets, chance.random()))
                done["forked"] += 1
            elif step == 2 and children:
                children.pop().kill()
                done["killed"] += 1
            elif step == 3:
                chance.choice(sets).cache.drop(chance.sample(range(1000), 100))
            if len(children) > 2:
                assert children.pop(0).wait() == 0
        assert [child.wait() for child in children] == [0] * len(children)
        done["hits"] = sum(dataset.stats().hits for dataset in sets)
        done["storage"] = sum(dataset.stats().storage_reads for dataset in sets)
        here.meet()
    return done


def read_in_child(sets: list[Any], seed: float) -> None:
    chance = random.Random(seed)
    for _ in range(5):
        read_some(sets, chance)


def read_some(sets: list[Any], chance: random.Random) -> None:
    number, ids = chance.randrange(2), [chance.randrange(1000) for _ in range(64)]
    check_samples(sets[number].__getitems__(ids), ids, number + 1)


def make_faults(folders: list[Path], over: threading.Event, faults: Counter[str]) -> None:
    """Kill and freeze the servers of nodes, of either node at the start, then at random."""
    chance = random.Random(5)
    plan = ["killed", "frozen"]
    while not over.wait(chance.uniform(0.0, 0.3)):
        fault = plan.pop() if plan else chance.choice(("killed", "frozen", "frozen"))
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(record(chance.choice(folders))["pid"])
            if fault == "killed":
                server.kill()
            else:
                server.suspend()
                over.wait(chance.uniform(0.05, 1.0))
                server.resume()
            faults[fault] += 1
