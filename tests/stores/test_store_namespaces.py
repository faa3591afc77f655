"""Nodes on hosts of their own: network namespaces with a bridge between them, and what happens when links fail.

A link that is cut says nothing: no connection is refused or reset, packets just do not arrive any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
from namespaces import Hosts, listeners
from node_tools import ask
from nodes import Here, Nodes, Stamped, close_store, is_right, open_store, servants
from redis_servers import needs_server, until
from stallfree.stores.breaker import Breaker
from stallfree.stores.endpoint import Address
from stallfree.stores.spawn import Doors
from torch.utils.data.distributed import DistributedSampler

import stallfree
from stallfree import CachedDataset
from stallfree.loader.reader import IO_THREADS

pytestmark = [needs_server, pytest.mark.slow]

COUNT = 480
SIZE = 2048  # numbers of 8 bytes in a sample
STEP = 0.02  # seconds that a batch is trained on, so that something can happen in the middle of an epoch
LOOKED_AT = {0, COUNT - 1}
"""Samples that each node reads when the data set is made."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Two hosts that have opened the store."""
    with Hosts(2) as hosts:
        yield from ready(hosts)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Hosts]:
    """Two that do not wait for each other for long."""
    with Hosts(2) as hosts:
        yield from ready(hosts, timeout=0.25)


@pytest.fixture(scope="module")
def trio() -> Iterator[Hosts]:
    """Three of them."""
    with Hosts(3) as hosts:
        yield from ready(hosts)


def ready(hosts: Hosts, **options: Any) -> Iterator[Hosts]:
    """They have the store meanwhile."""
    hosts.run(watch)
    hosts.run(open_store, **options)
    yield hosts
    hosts.run(close_store)


# --- on a host ------------------------------------------------------------------------------------------------------


def watch(here: Here) -> None:
    """From now on note each wait in vain for a node, and each time that a node counts as lost, in whatever process."""
    trip = Breaker.trip

    def noted(self: Breaker) -> None:
        before = self.trips
        trip(self)
        if threading.current_thread().name != "stallfree-ping":  # nobody waits for that
            here.storage("waits").note(os.getpid())
            if self.trips > before:
                here.storage("trips").note(os.getpid())

    Breaker.trip = noted  # type: ignore[method-assign]


def begin(here: Here, name: str, workers: int = 0) -> list[int]:
    """Make the data set and its loader; the owners of all samples."""
    source = Stamped(COUNT, here.storage(name), size=SIZE)
    dataset = CachedDataset(source, capacity="16MiB", store=here.store, name=name)
    sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=1)  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    if workers:
        options = {"num_workers": workers, "multiprocessing_context": "fork", "persistent_workers": True}
    here.kept[name] = dataset, sampler, stallfree.DataLoader(dataset, batch_size=8, sampler=sampler, **options)
    here.meet()
    owners: list[int] = dataset.cache.owner(range(COUNT)).tolist()  # type: ignore[union-attr]
    return owners


def end(here: Here, name: str) -> int:
    """Leave the data set; how many samples this host has of it."""
    dataset, _, loader = here.kept.pop(name)
    loader.close()
    held: int = dataset.stats().resident_items
    dataset.close()
    return held


@dataclass(frozen=True)
class Epoch:
    """What a host saw in one epoch.

    Attributes:
        served: ids of the samples that came, all of them right.
        reads: ids that were read from storage.
        other_hits: samples that came from other hosts.
    """

    served: list[int]
    reads: list[int]
    other_hits: int


def train(here: Here, name: str, epoch: int) -> Epoch:
    """This host's part of an epoch."""
    dataset, sampler, loader = here.kept[name]
    sampler.set_epoch(epoch)
    reads, hits = len(here.storage(name).ids()), dataset.stats().other_hits
    served: list[int] = []
    step = threading.Event()
    for values, ids in loader:
        assert is_right(values, ids)
        served += ids.tolist()
        here.storage(f"{name}-at").note(epoch)
        step.wait(STEP)
    return Epoch(served, here.storage(name).ids()[reads:], dataset.stats().other_hits - hits)


# --- the job, as the test sees it -----------------------------------------------------------------------------------


class Job:
    """Training on all hosts, epoch after epoch. Every sample comes exactly once in each of them, whatever happens."""

    def __init__(self, hosts: Hosts, name: str, workers: int = 0) -> None:
        self.hosts, self.name = hosts, name
        self.owners, *others = hosts.run(begin, name, workers)
        assert all(other == self.owners for other in others)
        self.epoch = -1

    def train(self, meanwhile: Callable[[], None] | None = None) -> list[Epoch]:
        """An epoch; what `meanwhile` does happens when all hosts are in the middle of it."""
        self.epoch += 1
        hosts = self.hosts
        for number in range(hosts.count):
            hosts.begin(number, train, self.name, self.epoch)
        if meanwhile is not None:
            until(lambda: all(at.count(self.epoch) >= 5 for at in hosts.reads(f"{self.name}-at")), "all have begun")
            meanwhile()
        ran: list[Epoch] = [hosts.answer(number) for number in range(hosts.count)]
        assert sorted(id for host in ran for id in host.served) == list(range(COUNT))
        for host in ran:
            assert set(host.reads) <= set(host.served)
            assert max(Counter(host.reads).values(), default=0) <= 1
        return ran

    def owned_by(self, ids: Sequence[int], owners: Sequence[int]) -> list[int]:
        """Those of `ids` that one of these hosts owns, sorted."""
        return sorted(id for id in ids if self.owners[id] in owners)

    def check_reads(self, ran: list[Epoch], lost: Sequence[Sequence[int]]) -> None:
        """Each host reads from storage what those hosts own that are `lost` for it; all else it has of the others."""
        for number, host in enumerate(ran):
            away = self.owned_by(host.served, [other for other in range(len(ran)) if other != number])
            assert sorted(host.reads) == self.owned_by(host.served, lost[number])
            assert host.other_hits == len(away) - len(host.reads)

    def train_until_all_are_hits(self) -> None:
        """Epochs, until nothing is read from storage any more."""

        def nothing_is_read() -> bool:
            return not any(host.reads for host in self.train())

        until(nothing_is_read, "an epoch without a look at storage")

    def end(self) -> None:
        """On all hosts; all samples are there then, each of them once."""
        assert sum(self.hosts.run(end, self.name)) == COUNT


def notes(hosts: Nodes, name: str) -> list[Counter[int]]:
    """How often each process of each host has noted something."""
    return [Counter(host) for host in hosts.reads(name)]


# --- where the servers are ------------------------------------------------------------------------------------------


def test_server_and_clerk_listen_where_the_other_hosts_reach_them_and_nowhere_else(pair: Hosts) -> None:
    found = pair.run(look_at_servants)
    for number, (public, heard_at) in enumerate(found):
        doors = public.server, public.clerk
        for door, heard in zip(doors, heard_at, strict=True):
            assert door.host == pair.network.addresses[number]
            assert heard == {(door.host, door.port)}
            assert pair.run_on(number, is_refused, "127.0.0.1", door.port)
            assert pair.run_on(number, is_refused, f"192.168.77.{number + 1}", door.port)
            assert pair.run_on(1 - number, ask_without_password, door).startswith(b"-NOAUTH")


def look_at_servants(here: Here) -> tuple[Doors | None, list[set[tuple[str, int]]]]:
    """The addresses of server and clerk that others are told, and where they really listen."""
    node, found = here.store._node, servants(here)
    assert node is not None
    return node.public, [listeners(found.server), listeners(found.clerk)]


def is_refused(here: Here, host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as knocking:
        try:
            knocking.connect((host, port))
        except ConnectionRefusedError:
            return True
    return False


def ask_without_password(here: Here, address: Address) -> bytes:
    """What a stranger on this host is told."""
    return ask(address, "LLEN post")


# --- while all is well ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_each_sample_is_read_once_and_then_comes_from_the_host_that_owns_it(delay: float, pair: Hosts) -> None:
    name = f"well-{delay}"
    job = Job(pair, name)
    with pair.network.poor(1, delay=delay) if delay else contextlib.nullcontext():
        ran = [job.train() for _ in range(3)]
    reads = Counter(id for host in pair.reads(name) for id in host)
    assert reads == {id: 2 if id in LOOKED_AT else 1 for id in range(COUNT)}
    for later in ran[1:]:
        job.check_reads(later, [[], []])
    job.end()


# --- hosts that are lost --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cut(hosts: Hosts, number: int) -> Iterator[None]:
    """Packets from and to a host vanish."""
    hosts.network.cut(number)
    try:
        yield
    finally:
        hosts.network.mend(number)


def much_too_slow(hosts: Hosts, number: int) -> AbstractContextManager[None]:
    """Packets from and to a host take so long that every wait is in vain."""
    return hosts.network.poor(number, delay=3.0)


def frozen(hosts: Hosts, number: int) -> AbstractContextManager[None]:
    """The server and the clerk of a host take connections, and say nothing."""
    found = hosts.run_on(number, servants)
    return stopped(found.server, found.clerk)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def lose(outage: Callable[..., AbstractContextManager[None]], job: Job, number: int, lost: Sequence[list[int]]) -> None:
    """Lose a host in the middle of an epoch, for all of the next two, and find it again.

    Args:
        outage: how it is lost.
        job: whose caches have all samples.
        number: of the host.
        lost: the hosts that each host cannot ask meanwhile.
    """
    hosts = job.hosts
    waits, trips = notes(hosts, "waits"), notes(hosts, "trips")
    coming = outage(hosts, number)
    with contextlib.ExitStack() as stack:
        ran = job.train(lambda: stack.enter_context(coming))
        for host, gone in zip(ran, lost, strict=True):
            assert set(host.reads) <= set(job.owned_by(host.served, gone))
        for _ in range(2):
            job.check_reads(job.train(), lost)
        for place, gone in enumerate(lost):
            waited = notes(hosts, "waits")[place] - waits[place]
            tripped = notes(hosts, "trips")[place] - trips[place]
            assert tripped.keys() <= waited.keys()
            assert bool(tripped) == bool(gone)
            for process in waited:
                assert tripped[process] <= 2 * len(gone)  # server and clerk are given up at once, and not asked again
                assert waited[process] <= IO_THREADS + 1  # and those that were waiting did so at the same time
    job.train_until_all_are_hits()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_link_that_is_cut_costs_one_wait_and_is_taken_up_again(workers: int, pair: Hosts) -> None:
    job = Job(pair, f"cut-{workers}", workers)
    job.train_until_all_are_hits()
    for _ in range(2):
        lose(cut, job, 1, [[1], [0]])
    job.end()


def test_a_link_that_is_much_too_slow_is_as_one_that_is_cut(pair: Hosts) -> None:
    job = Job(pair, "too-slow")
    job.train_until_all_are_hits()
    lose(much_too_slow, job, 1, [[1], [0]])
    job.end()


def test_a_host_whose_server_is_frozen_is_not_asked_and_goes_on_itself(pair: Hosts) -> None:
    job = Job(pair, "frozen")
    job.train_until_all_are_hits()
    lose(frozen, job, 1, [[1], []])
    job.end()


BAD = {
    "thin": {"rate": 1e6},
    "lossy": {"loss": 0.1},
    "both": {"loss": 0.02, "rate": 4e6, "delay": 0.01},
}


@pytest.mark.parametrize(("link", "workers"), [("thin", 0), ("thin", 2), ("lossy", 2), ("both", 2)])
def test_a_bad_link_costs_few_waits_and_no_sample(link: str, workers: int, hasty: Hosts) -> None:
    """It lets pings through, and sometimes samples. Who fails again and again is asked less and less often."""
    job = Job(hasty, f"{link}-{workers}", workers)
    job.train_until_all_are_hits()
    trips, started = notes(hasty, "trips"), time.monotonic()
    with hasty.network.poor(1, **BAD[link]):
        for _ in range(4):
            for number, host in enumerate(job.train()):
                assert set(host.reads) <= set(job.owned_by(host.served, [1 - number]))
    # A pause doubles from half a second on, unless five seconds were good. There is a breaker for the server, and one
    # for the clerk; two processes may find the same at the same instant.
    most = 2 * (7 + (time.monotonic() - started) / 5 + workers)
    for now, before in zip(notes(hasty, "trips"), trips, strict=True):
        assert sum((now - before).values()) <= most
    job.train_until_all_are_hits()
    job.end()


@pytest.mark.parametrize("outage", [cut, frozen])
def test_an_outage_while_the_caches_are_filled_loses_no_sample(
    outage: Callable[..., AbstractContextManager[None]], pair: Hosts
) -> None:
    job = Job(pair, f"filling-{outage.__name__}")
    coming = outage(pair, 1)
    with contextlib.ExitStack() as stack:
        job.train(lambda: stack.enter_context(coming))
        job.train()
    job.train_until_all_are_hits()
    job.end()


def test_of_three_hosts_two_go_on_with_one_another_when_one_is_cut_off(trio: Hosts) -> None:
    job = Job(trio, "three")
    job.train_until_all_are_hits()
    lose(cut, job, 2, [[2], [2], [0, 1]])
    with cut(trio, 0):  # whoever leaves need not be heard by anybody
        job.end()
