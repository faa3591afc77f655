"""What a lost node costs the workers that come after, and what a clerk that is behind costs those who hand in."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import (
    Here,
    Nodes,
    Office,
    Stamped,
    close_store,
    is_right,
    offices,
    open_store,
    parts,
    servants,
    stamp,
    until,
)
from redis_servers import needs_server
from stallfree.stores.endpoint import Endpoint
from stallfree.stores.partition import PartitionedCache
from torch.utils.data.distributed import DistributedSampler

from stallfree import CachedDataset, DataLoader
from stallfree.stores import post

pytestmark = needs_server

COUNT = 160


@pytest.fixture(scope="module")
def pair() -> Iterator[Nodes]:
    """Two nodes that do not wait for each other for long, and whose caches hold all samples."""
    with Nodes(2) as nodes:
        nodes.run(watch)
        nodes.run(open_store, timeout=0.25)
        nodes.run(begin)
        yield nodes
        nodes.run(end)


# --- on a node ------------------------------------------------------------------------------------------------------


def watch(here: Here) -> None:
    """From now on note each wait in vain for a node, in milliseconds, in whatever process."""
    run, fail = Endpoint.run, Endpoint._fail
    failed = threading.local()

    def noted_fail(self: Endpoint, *arguments: Any) -> None:
        failed.now = True
        fail(self, *arguments)

    def noted_run(self: Endpoint, *arguments: Any) -> Any:
        failed.now, started = False, time.monotonic()
        try:
            return run(self, *arguments)
        finally:
            if failed.now:
                here.storage("waits").note(round(1000 * (time.monotonic() - started)))

    Endpoint._fail = noted_fail  # type: ignore[assignment, method-assign]
    Endpoint.run = noted_run  # type: ignore[assignment, method-assign]


def begin(here: Here) -> None:
    """Make the data set, and fill the caches."""
    dataset = CachedDataset(Stamped(COUNT, here.storage("lost")), capacity="8MiB", store=here.store, name="lost")
    here.kept["dataset"] = dataset
    here.meet()
    while dataset.cache.num_keys() < COUNT:  # type: ignore[union-attr]
        dataset.__getitems__(here.mine(list(range(COUNT))))
    here.meet()


def end(here: Here) -> None:
    """Leave data set and store."""
    here.kept.pop("dataset").close()
    close_store(here)


@dataclass(frozen=True)
class Epoch:
    """What a node saw of an epoch.

    Attributes:
        away: ids of samples that the other node owns, sorted.
        reads: ids that were read from storage, sorted.
        waits: milliseconds of each wait in vain, of all workers.
    """

    away: list[int]
    reads: list[int]
    waits: list[int]


def train(here: Here, attach: bool = False) -> Epoch:
    """One epoch with two workers that are started anew; with `attach`, of a process that is new to all."""
    dataset = here.kept["dataset"]
    if attach:
        dataset = pickle.loads(pickle.dumps(dataset))
    reads, waits = len(here.storage("lost").ids()), len(here.storage("waits").ids())
    sampler: Any = DistributedSampler(dataset, here.count, here.number, seed=7)
    served: list[int] = []
    with contextlib.closing(
        DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    ) as loader:
        for values, ids in loader:
            assert is_right(values, ids)
            served += ids.tolist()
    assert len(set(served)) == COUNT // 2
    away = np.array(sorted(served))
    away = away[~dataset.cache.here(away)]
    if attach:
        dataset.close()
    return Epoch(away.tolist(), sorted(here.storage("lost").ids()[reads:]), here.storage("waits").ids()[waits:])


# --- workers that come after ----------------------------------------------------------------------------------------


def test_workers_of_later_epochs_do_not_wait_for_a_node_that_is_known_to_be_lost(pair: Nodes) -> None:
    lost = pair.run_on(1, servants)
    for pid in (lost.clerk, lost.server):
        os.kill(pid, signal.SIGSTOP)
    try:
        epochs = [pair.run_on(0, train), pair.run_on(0, train), pair.run_on(0, train, attach=True)]
        for epoch in epochs:
            assert epoch.reads == epoch.away
            assert epoch.away
        assert epochs[0].waits
        assert [epoch.waits for epoch in epochs[1:]] == [[], []]
    finally:
        for pid in (lost.server, lost.clerk):
            os.kill(pid, signal.SIGCONT)


# --- a clerk that is behind -----------------------------------------------------------------------------------------


SIZE = 8192  # numbers of 8 bytes in a sample
MANY = 800
LIMIT = (1 << 20) // (SIZE * 8)
"""Samples that may lie in a post office: a 25th of those that are handed in."""


@pytest.fixture
def behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Office, list[PartitionedCache]]]:
    """A node whose clerk stands still, with 12 MiB for what is on its way, and the caches of it and of another one."""
    monkeypatch.setattr(post, "_MUCH", 1 << 20)
    monkeypatch.setattr(post, "MOST", 1 << 18)
    monkeypatch.setattr("stallfree.stores.partition._PATIENCE", 600.0)  # however slow this machine is
    with (
        offices(tmp_path, 2, "maxmemory 12mb", "maxmemory-policy noeviction") as two,
        parts(two, MANY, capacity="64MiB", example=stamp(0, size=SIZE)) as caches,
    ):
        two[1].freeze_clerk()
        yield two[1], caches
        two[1].thaw_clerk()


def hand_in(cache: PartitionedCache, ids: Any) -> list[bool]:
    """Store samples, 16 at a time; which were taken."""
    taken: list[bool] = []
    for start in range(0, len(ids), 16):
        some = ids[start : start + 16]
        taken += cache.put_many(some, [stamp(id, size=SIZE) for id in some.tolist()]).tolist()
    return taken


def test_a_source_that_is_quicker_than_the_clerk_waits_for_it_and_loses_nothing(
    behind: tuple[Office, list[PartitionedCache]],
) -> None:
    office, (cache, owner) = behind
    theirs = np.flatnonzero(cache.owner(range(MANY)) == 1)
    taken: list[bool] = []
    writer = threading.Thread(target=lambda: taken.extend(hand_in(cache, theirs)))
    writer.start()
    client = office.client()
    until(lambda: client.llen(post.POST) >= LIMIT, "there is much in the post office")
    looked = client.info("commandstats")["cmdstat_llen"]["calls"]
    until(lambda: client.info("commandstats")["cmdstat_llen"]["calls"] > looked + 10, "the writer looks and waits")
    assert client.llen(post.POST) <= LIMIT + 16
    assert writer.is_alive()
    office.thaw_clerk()
    writer.join()
    assert all(taken)
    assert len(taken) == len(theirs)
    until(lambda: client.llen(post.POST) == 0, "the clerk has taken all of it")
    client.close()
    assert cache.num_keys() == len(theirs)
    assert owner.local.resident(theirs).all()


def test_a_node_whose_clerk_counts_as_lost_is_handed_nothing(behind: tuple[Office, list[PartitionedCache]]) -> None:
    office, (cache, owner) = behind
    theirs = np.flatnonzero(cache.owner(range(MANY)) == 1)[:64]
    cache._offices[1]._clerk.breaker.trip()
    assert not any(hand_in(cache, theirs))
    client = office.client()
    assert client.llen(post.POST) == 0
    client.close()
    office.thaw_clerk()
    until(lambda: all(hand_in(cache, theirs)), "it is back")
    until(lambda: owner.local.resident(theirs).all(), "all is put away")
