"""Nodes, servers, clerks and keepers that die, stand still or talk nonsense while a job trains on two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from nodes import Here, Nodes, Servants, Stamped, close_store, is_right, open_store, servants, stamp, until
from redis_servers import needs_server
from stallfree.stores.endpoint import Address
from stallfree.stores.post import POST
from torch.utils.data.distributed import DistributedSampler

from children import Child
from stallfree import CachedDataset, DataLoader, WaitError
from stallfree.pipeline.codec import encode

pytestmark = needs_server

COUNT = 160
MIDDLE = 5
"""The batch after which something happens."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes, which know each other's samples by now."""
    with Nodes(2) as nodes:
        nodes.run(open_store, timeout=1.0)
        nodes.run(fill, "faults")
        yield nodes
        nodes.run(leave)


@pytest.fixture(scope="module")
def hasty_pair() -> Iterator[Nodes]:
    """Two nodes that do not wait for each other for long."""
    with Nodes(2) as nodes:
        nodes.run(open_store, timeout=0.25)
        yield nodes
        nodes.run(close_store)


@dataclass(frozen=True)
class Epoch:
    """What one node saw of an epoch: the ids that came, and the counts of the cache in it."""

    served: list[int]
    hits: int
    misses: int
    reads: int
    other_hits: int


def fill(here: Here, name: str, **options: Any) -> None:
    """Make the data set, and read this node's half of it."""
    source = Stamped(COUNT, here.storage(name))
    dataset = CachedDataset(source, capacity="8MiB", store=here.store, name=name, **options)
    here.kept["dataset"] = dataset
    here.meet()
    dataset.__getitems__(here.mine(list(range(COUNT))))
    here.meet()


def leave(here: Here) -> None:
    """Of all that `fill` and `open_store` have made."""
    here.kept.pop("dataset").close()
    close_store(here)


def train(here: Here, epoch: int, fault: tuple[int, int] | None = None, workers: int = 0) -> Epoch:
    """One epoch. In the middle of it the first node sends a signal to a process."""
    dataset = here.kept["dataset"]
    before = dataset.stats()
    sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=7)
    sampler.set_epoch(epoch)
    served: list[int] = []
    with contextlib.closing(
        DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers, multiprocessing_context="fork")
    ) as loader:
        for number, (values, ids) in enumerate(loader):
            assert is_right(values, ids)
            served += ids.tolist()
            if number == MIDDLE and here.number == 0 and fault is not None:
                os.kill(*fault)
    now = dataset.stats()
    return Epoch(
        served,
        now.hits - before.hits,
        now.misses - before.misses,
        now.storage_reads - before.storage_reads,
        now.other_hits - before.other_hits,
    )


def hits_again(here: Here) -> bool:
    """Whether all samples come out of the caches."""
    dataset = here.kept["dataset"]
    before = dataset.stats().misses
    for id, (values, label) in enumerate(dataset.__getitems__(range(COUNT))):
        assert label == id
        assert values.equal(stamp(id))
    return bool(dataset.stats().misses == before)


def wait_for_hits(nodes: Nodes) -> None:
    """Until both nodes read everything out of the caches."""
    until(lambda: all(nodes.run(hits_again)), "all samples come out of the caches again")


def check(epochs: list[Epoch]) -> None:
    """Every sample came once, and storage gave what the caches could not."""
    assert sorted(epochs[0].served + epochs[1].served) == list(range(COUNT))
    for epoch in epochs:
        assert epoch.hits + epoch.misses == COUNT // 2
        assert epoch.reads == epoch.misses


FAULTS = {
    "server killed": ("server", signal.SIGKILL),
    "server frozen": ("server", signal.SIGSTOP),
    "clerk frozen": ("clerk", signal.SIGSTOP),
    "clerk killed": ("clerk", signal.SIGKILL),
    "keeper frozen": ("keeper", signal.SIGSTOP),
}
EVERY_DAY = [("server killed", 0), ("server frozen", 0), ("clerk frozen", 2)]
SLOW = [(fault, workers) for fault in FAULTS for workers in (0, 2) if (fault, workers) not in EVERY_DAY]


@pytest.mark.parametrize(
    ("fault", "workers"), [*EVERY_DAY, *(pytest.param(*given, marks=pytest.mark.slow) for given in SLOW)]
)
def test_training_goes_on_and_the_node_comes_back(fault: str, workers: int, pair: Nodes) -> None:
    wait_for_hits(pair)
    before: Servants = pair.run_on(1, servants)
    who, number = FAULTS[fault]
    pid = getattr(before, who)
    check(pair.run(train, 0))
    try:
        check(pair.run(train, 1, fault=(pid, number), workers=workers))
        epochs = pair.run(train, 2, workers=workers)
        check(epochs)
        if (who, number) == ("clerk", signal.SIGSTOP):
            assert epochs[0].reads > 0  # all that the other node holds
        elif who == "server":
            assert min(epoch.other_hits for epoch in epochs) > 0  # what is asked for is nothing to it
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    wait_for_hits(pair)
    after: Servants = pair.run_on(1, servants)
    assert after.keeper == before.keeper
    assert (getattr(after, who) == pid) == (number == signal.SIGSTOP)
    check(pair.run(train, 3, workers=workers))


@pytest.mark.slow
def test_a_killed_keeper_takes_server_and_clerk_along_and_the_next_store_brings_them_back(pair: Nodes) -> None:
    wait_for_hits(pair)
    before: Servants = pair.run_on(1, servants)
    check(pair.run(train, 1, fault=(before.keeper, signal.SIGKILL)))
    until(lambda: not any(map(psutil.pid_exists, (before.server, before.clerk))), "server and clerk have ended")
    epochs = pair.run(train, 2)
    check(epochs)
    assert epochs[0].other_hits == 0
    assert epochs[1].other_hits > 0  # of the node whose clerk lives
    pair.run_on(1, open_again)
    wait_for_hits(pair)
    check(pair.run(train, 3))


def open_again(here: Here) -> None:
    """Another process of the node, or this one, opens the store."""
    first = here.store
    open_store(here, timeout=1.0)
    first.close()


def test_flipped_bytes_in_the_post_cost_hits_and_nothing_else(pair: Nodes) -> None:
    wait_for_hits(pair)
    there: Servants = pair.run_on(1, servants)
    client = pair.run_on(1, address).client(30.0)
    os.kill(there.clerk, signal.SIGSTOP)
    try:
        pair.run(drop_half)
        pair.run_on(0, leave_in_the_post)  # and nobody takes it
        left = client.llen(POST)
        assert flip_all(client, random.Random(0))
        assert client.llen(POST) == left
    finally:
        os.kill(there.clerk, signal.SIGCONT)
    until(lambda: not client.llen(POST), "the post is empty")
    client.close()
    check(pair.run(train, 2))
    wait_for_hits(pair)


def leave_in_the_post(here: Here) -> None:
    """Hand in half of what the second node owns, whether its clerk counts as lost or not."""
    dataset = here.kept["dataset"]
    ids = [id for id in range(0, COUNT, 2) if not dataset.cache.owns(id)]
    office = dataset.cache._offices[1]
    for id in ids:
        assert office.hand_in(dataset.cache.key, [id], [encode((stamp(id), id))]) is True


def address(here: Here) -> Address:
    """Of this node's server, with its password."""
    found = here.store._node
    assert found is not None
    assert found.public is not None
    return found.public.server


def drop_half(here: Here) -> None:
    dataset = here.kept["dataset"]
    with contextlib.suppress(WaitError):  # a clerk that stands still may hold the lock
        dataset.cache.drop(range(0, COUNT, 2))
    here.meet()


def flip_all(client: Any, chance: random.Random) -> int:
    """Change one bit of every second message in the post."""
    changed = 0
    with contextlib.suppress(Exception):  # it is taken at this moment
        for number, message in enumerate(client.lrange(POST, 0, -1)):
            if number % 2:
                at = chance.randrange(len(message))
                flipped = message[:at] + bytes([message[at] ^ 1 << chance.randrange(8)]) + message[at + 1 :]
                client.lset(POST, number, flipped)
                changed += 1
    return changed


def test_a_node_whose_processes_are_all_killed_costs_its_hits(pair: Nodes) -> None:
    """The last test of the pair."""
    wait_for_hits(pair)
    there: Servants = pair.run_on(1, servants)
    pair.begin(0, read_on_until_lost)
    pair.kill(1)
    assert pair.answer(0) > 0
    until(lambda: not any(map(psutil.pid_exists, (there.keeper, there.server, there.clerk))), "nothing of it runs")
    assert not there.folder.exists()


def read_on_until_lost(here: Here) -> int:
    """Read everything over and over until the other node is gone; what it then takes from storage each time."""
    dataset = here.kept["dataset"]

    def read() -> int:
        before = dataset.stats().storage_reads
        for id, (values, label) in enumerate(dataset.__getitems__(range(COUNT))):
            assert label == id
            assert values.equal(stamp(id))
        return int(dataset.stats().storage_reads - before)

    theirs = COUNT - int(dataset.cache.here(range(COUNT)).sum())
    until(lambda: read() == theirs, "the other node is gone")
    for _ in range(3):
        assert read() == theirs
    return theirs


# --- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_thousand_reads_under_all_faults_give_no_wrong_sample(hasty_pair: Nodes) -> None:
    nodes = hasty_pair
    addresses = nodes.run(address)
    there: list[Servants] = nodes.run(servants)
    over = threading.Event()
    harm: Counter[str] = Counter()
    storm = threading.Thread(target=do_harm, args=(addresses, [one.folder for one in there], over, harm))
    storm.start()
    try:
        ran: list[Counter[str]] = nodes.run(read_in_chaos, 50_000)
    finally:
        over.set()
        storm.join()
    total = ran[0] + ran[1]
    assert total["read"] >= 100_000
    assert min(total[kind] for kind in ("other_hits", "own_hits", "storage", "forked", "killed")) > 0
    assert min(harm[kind] for kind in ("killed", "frozen", "flipped")) > 0


def read_in_chaos(here: Here, reads: int) -> Counter[str]:
    """Read two data sets of one name, with forked helpers, some of which are killed."""
    chance = random.Random(here.number)
    done: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        sets = []
        for salt in (1, 2):
            source = Stamped(1000, here.storage(f"chaos{salt}"), salt=salt, size=64)
            sets.append(stack.enter_context(CachedDataset(source, capacity="4MiB", store=here.store, name="chaos")))
        here.meet()
        helpers: list[Child] = []
        while done["read"] < reads:
            salt = chance.choice((1, 2))
            read_some(sets[salt - 1], salt, chance)
            done["read"] += 64
            step = chance.randrange(100)
            if step < 3:
                helpers.append(Child(help_reading, sets, chance.random()))
                done["forked"] += 1
            elif step < 5 and helpers:
                helpers.pop(0).kill()
                done["killed"] += 1
            elif step < 12:
                with contextlib.suppress(WaitError):
                    sets[salt - 1].cache.drop(chance.sample(range(1000), 100))
            elif step == 12:
                with contextlib.suppress(WaitError):
                    sets[salt - 1].cache.clear()
            if len(helpers) > 3:
                assert helpers.pop(0).wait() == 0
        for helper in helpers:
            assert helper.wait() == 0
        for dataset in sets:
            stats = dataset.stats()
            done["other_hits"] += stats.other_hits
            done["own_hits"] += stats.hits - stats.other_hits
            done["storage"] += stats.storage_reads
        here.meet()
    return done


def help_reading(sets: list[CachedDataset], seed: float) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        salt = chance.choice((1, 2))
        read_some(sets[salt - 1], salt, chance)


def read_some(dataset: CachedDataset, salt: int, chance: random.Random) -> None:
    ids = [chance.randrange(1000) for _ in range(64)]
    for (values, label), id in zip(dataset.__getitems__(ids), ids, strict=True):
        assert label == id
        assert values.equal(stamp(id, salt, 64))


def do_harm(addresses: list[Address], folders: list[Any], over: threading.Event, harm: Counter[str]) -> None:
    """Kill and freeze servers and clerks, and change what lies in the post."""
    chance = random.Random(5)
    while not over.wait(chance.uniform(0.0, 0.2)):
        node = chance.randrange(2)
        with contextlib.suppress(Exception):
            children = psutil.Process(keeper_of(folders[node])).children()
            kind = chance.randrange(10)
            victim = chance.choice(children)
            if kind == 0:
                victim.kill()
                harm["killed"] += 1
                over.wait(chance.uniform(0.5, 3))
            elif kind <= 2:
                victim.suspend()
                harm["frozen"] += 1
                over.wait(chance.uniform(0.05, 1))
                victim.resume()
            else:
                clerks = [child for child in children if "stallfree.stores.clerk" in child.cmdline()]
                for clerk in clerks:
                    clerk.suspend()  # or it would take what comes at once
                try:
                    client = addresses[node].client(1.0)
                    deadline = time.monotonic() + 0.1
                    while time.monotonic() < deadline and not (flipped := flip_all(client, chance)):
                        pass
                    harm["flipped"] += flipped
                    client.close()
                finally:
                    for clerk in clerks:
                        clerk.resume()


def keeper_of(folder: Any) -> int:
    return int(json.loads((folder / "server.json").read_bytes())["keeper"])
