"""Training on two nodes with a server each: which samples come, from where, and what one node learns of another."""

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils.data.distributed import DistributedSampler

import stallfree as sf
from children import gone
from redis_jobs import LIMIT, Here, Job, Rows, check_batch, job, open_rows, open_store, reads
from redis_servers import needs_server, until
from stallfree.cache import tier as tiers
from stallfree.ipc.folders import default_root, sweep

pytestmark = needs_server

COUNT = 160


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Two nodes of two processes each, which have opened the store."""
    with job(2, 2) as made:
        yield made


def written(cached: sf.CachedDataset) -> None:
    """Wait until no process of this node has samples in its queue: after 250 ms they would be read again."""
    until(lambda: not (cached.cache.tier._state & tiers._MOVING).any())


@contextlib.contextmanager
def rows(here: Here, **options: Any) -> Iterator[sf.CachedDataset]:
    """The data set in one of the processes, until all have ended."""
    open_rows(here, COUNT, options)
    here["meet"].wait(LIMIT)
    written(here["cached"])
    here["looked at"] = reads(here["folder"]) if here["number"] == 0 else []
    here["meet"].wait(LIMIT)
    yield here["cached"]
    here["meet"].wait(LIMIT)
    here.pop("cached").close()


def train(here: Here, order: str, method: str | None, options: dict[str, Any]) -> tuple[list[list[int]], Any, Any, int]:
    """The ids of three epochs, each of which ends when all that was read is stored; the counts; what was looked at; and
    how many samples came that other nodes store.
    """
    served, workers = list[list[int]](), {"num_workers": 1, "persistent_workers": order != "torch"} if method else {}
    with rows(here, **options) as cached:
        sampler: Any = DistributedSampler(cached, here["count"], here["number"], seed=1)
        if order == "local":
            sampler = sf.LocalSampler(cached, seed=1, rank=here["number"], num_ranks=here["count"])
        kind = torch.utils.data.DataLoader if order == "torch" else sf.DataLoader
        loader = kind(cached, batch_size=8, sampler=sampler, multiprocessing_context=method, **workers)
        for epoch in range(3):
            if order != "local":  # whose epochs follow from the loader's
                sampler.set_epoch(epoch)
            served.append([id for values, ids in loader for id in check_batch(values, ids)])
            written(cached)
            here["meet"].wait(LIMIT)
        if order != "torch":
            loader.close()
        foreign = cached.tier.owner(np.array(served)) != cached.tier.me
        return served, cached.stats(), here["looked at"], int(foreign.sum())


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("sf", 0, "spawn"), ("torch", 0, "fork"))]


@pytest.mark.parametrize(("order", "capacity", "method"), [("sf", "8MiB", "fork"), ("local", 0, None), *SLOW])
def test_each_sample_comes_once_per_epoch_and_is_read_once(order: str, capacity: Any, method: Any, pair: Job) -> None:
    """By a local sampler, from the node's own server but for what makes the numbers of samples equal."""
    ran = pair.run(train, order, method, {"capacity": capacity, "name": f"{order}-{capacity}-{method}"})
    for served, _, _, foreign in ran:
        assert served[0] != served[1]
        assert (foreign <= 3) == (order == "local")
    for epoch in range(3):
        assert sorted(id for served, *_ in ran for id in served[epoch]) == list(range(COUNT))
    assert sorted(reads(pair.folder)) == sorted({*range(COUNT)} - {*ran[0][2]}), "once by all nodes"
    stats = [stats for _, stats, *_ in ran]
    assert stats[0] == stats[1], "of a node"
    for node in stats[::2]:
        assert node.tier_rejected == node.evictions == node.damaged == 0
        assert node.hits >= COUNT, "two epochs of half of all"
        assert node.tier_hits > 20, "of the other node too"


def open_auto(here: Here, private: bool) -> tuple[int | None, int]:
    """The nodes of the tier, and the memory in front of it."""
    data = Rows(here["folder"], COUNT)
    if private:
        data.fingerprint = lambda: here["meet"]  # type: ignore[assignment,method-assign,return-value]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = sf.CachedDataset(data, capacity="8MiB", store="auto")
    with cached:
        here["meet"].wait(LIMIT)
        assert private == any("each node caches samples separately" in str(warning.message) for warning in caught)
        assert (default_root() / "redis-auto").exists() != private
        return getattr(cached.tier, "num_nodes", None), cached.cache.capacity


def test_auto_is_a_store_of_all_nodes_unless_the_data_set_has_no_fingerprint(pair: Job) -> None:
    assert pair.run(open_auto, False) == [(2, 0)] * 4
    assert pair.run(open_auto, True) == [(None, 8 << 20)] * 4


def train_by_importance(here: Here, plan: str) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each epoch: the plan of all ranks, the ids that were assumed to be stored, and those of this rank."""
    place = {"init_method": f"file://{here['folder'] / plan}", "rank": here["number"], "world_size": here["count"]}
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT), **place)
    epochs = []
    with rows(here, name=f"importance-{plan}", policy="importance") as cached:
        sampler = sf.ImportanceSampler(COUNT, cache=cached.cache, seed=3, max_age=20, plan=plan, on_miss=None)
        with sf.DataLoader(cached, 6, sampler=sampler) as loader:
            for number in range(3):
                served, batches = list[int](), iter(loader)  # draws the plan, with all ranks
                planned, resident = sampler.plan(number).ids.tolist(), np.flatnonzero(sampler._draw.resident).tolist()
                for batch in batches:
                    served += check_batch(*batch.data)
                    loss = 0.1 + ((batch.ids * 37 + number * 11) % 101).float() / 10
                    loader.update(batch.ids, loss)
                    distributed.all_reduce(loss.sum())  # as that of the gradients
                written(cached)
                distributed.barrier()
                epochs.append((planned, resident, served))
    distributed.destroy_process_group()
    return epochs


@pytest.mark.parametrize("plan", ["unbiased", pytest.param("icache", marks=pytest.mark.slow)])
def test_ranks_of_all_nodes_serve_one_plan_and_read_what_no_server_has(plan: str, pair: Job) -> None:
    missing = list[int]()
    for number, ranks in enumerate(zip(*pair.run(train_by_importance, plan), strict=True)):
        planned, resident, _ = ranks[0]
        assert all(rank[:2] == (planned, resident) for rank in ranks)
        served = [id for _, _, own in ranks for id in own]
        assert sorted(served) == sorted(planned)
        assert number == 0 or len(resident) > COUNT / 3
        missing += set(served) - set(resident)
    assert sorted(reads(pair.folder)) == sorted(missing)


MIDDLE = 5  # the batch after which something happens


@pytest.fixture(scope="module")
def single() -> Iterator[Job]:
    """Two nodes that have made a data set, with more than the usual time limit, as the machine may be busy."""
    with job(timeout=0.6) as made:
        made.run(open_rows, COUNT, {})
        yield made


def train_epoch(here: Here, epoch: int, workers: int, wait: bool, alone: bool = False) -> tuple[list[int], int, float]:
    """An epoch: the ids, those that did not come from a server, and the longest wait for a batch in seconds.

    With `wait`, the node waits in the middle until the test has done something.
    """
    cached, served, longest = here["cached"], [], 0.0
    ranks, rank = (1, 0) if alone else (here["count"], here["number"])
    sampler: Any = DistributedSampler(cached, ranks, rank, seed=7)
    sampler.set_epoch(epoch)
    before, middle = cached.stats(), here["folder"] / f"middle{here['number']}"
    with sf.DataLoader(cached, 8, sampler=sampler, num_workers=workers) as loader:
        start = time.monotonic()
        for number, batch in enumerate(loader):
            longest = max(longest, time.monotonic() - start)
            served += check_batch(*batch)
            if wait and number == MIDDLE:
                middle.touch()
                until(lambda: not middle.exists(), "the test goes on")
            start = time.monotonic()
    cached.cache.tier.flush()
    return served, cached.stats().storage_reads - before.storage_reads, longest


class Epochs:
    """Trains epochs on both nodes, each of which must serve every sample once."""

    def __init__(self, made: Job, workers: int) -> None:
        self.job, self.workers, self.number = made, workers, 0

    def run(self, harm: Callable[[], None] | None = None) -> list[int]:
        """An epoch, with `harm` in the middle of it; how many samples each node has read from storage."""
        self.number += 1
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self.job.run, train_epoch, self.number, self.workers, harm is not None)
            if harm is not None:
                middles = [self.job.folder / f"middle{node}" for node in range(2)]
                until(lambda: all(middle.exists() for middle in middles), "both nodes are in the middle")
                try:
                    harm()
                finally:
                    for middle in middles:
                        middle.unlink()
            ran = running.result()
        assert sorted(id for ids, _, _ in ran for id in ids) == list(range(COUNT))
        assert max(longest for _, _, longest in ran) < 30, "no batch is waited for long, on a busy machine either"
        return [reads for _, reads, _ in ran]

    def until_hits(self) -> None:
        until(lambda: self.run() == [0, 0], "hits return")


@contextlib.contextmanager
def frozen(made: Job) -> Iterator[None]:
    server = made.server(1)
    server.suspend()
    yield
    server.resume()


@contextlib.contextmanager
def disconnected(made: Job) -> Iterator[None]:
    with made.admin(1) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    yield


@contextlib.contextmanager
def password_changed(made: Job) -> Iterator[None]:
    old = made.record(1)["password"]
    with made.admin(1) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
    yield
    with made.admin(1, "another") as client:
        client.config_set("requirepass", old)


@pytest.mark.parametrize(("fault", "workers"), [(frozen, 1), (disconnected, 0), (password_changed, 0)])
def test_training_goes_on_and_hits_return(fault: Any, workers: int, single: Job) -> None:
    epochs = Epochs(single, workers)
    epochs.until_hits()
    before = single.server(1).pid, single.record(1)["password"]
    with contextlib.ExitStack() as stack:
        reads = epochs.run(lambda: stack.enter_context(fault(single)))
        if fault is not disconnected:
            assert all(0 < number < COUNT / 2 for number in (*reads, *epochs.run())), "the other server goes on"
    epochs.until_hits()
    assert (single.server(1).pid, single.record(1)["password"]) == before


@contextlib.contextmanager
def stranger(host: str, port: int, received: list[bytes]) -> Iterator[None]:
    """Takes the port of a server that has died, and keeps what is sent to it."""

    def bind() -> Any:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    received.append(connection.recv(4096))

    listener = until(bind, "the port is free")
    with listener, ThreadPoolExecutor(1) as executor:
        executor.submit(listen)
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_server_is_replaced_and_no_other_program_gets_its_port(workers: int) -> None:
    with job(timeout=0.25) as made:
        made.run(open_rows, COUNT, {})
        epochs = Epochs(made, workers)
        epochs.until_hits()
        record = made.record(1)

        def harm() -> None:
            made.server(1).kill()
            for reuse in (False, True):
                with pytest.raises(OSError, match="in use"):
                    socket.create_server((record["host"], record["port"]), reuse_port=reuse)

        epochs.run(harm)
        epochs.until_hits()
        after = made.record(1)
        assert after["port"] == record["port"]
        assert after["password"] != record["password"]


def test_a_node_that_is_killed_costs_its_samples_and_nothing_is_left_when_all_are() -> None:
    made = Job()
    try:
        made.run(open_store, {"timeout": 0.25})
        made.run(open_rows, COUNT, {})
        Epochs(made, 1).until_hits()
        servers = [made.server(node).pid for node in range(2)]
        theirs, record, received = sum(made.run(count_foreign, only=0)), made.record(1), list[bytes]()
        made.kill(1)
        until(lambda: gone(servers[1]), "its server ends with it")

        def reads_only_theirs() -> bool:
            ((ids, reads, _),) = made.run(train_epoch, 1, 0, False, True, only=0)
            assert sorted(ids) == list(range(COUNT))
            return bool(reads == theirs)

        until(reads_only_theirs, "only its samples come from storage")
        with stranger(record["host"], record["port"], received):
            until(reads_only_theirs, "only its samples come from storage")
        assert b"".join(received) == b""
        made.kill(0)
        until(lambda: gone(servers[0]), "its server ends with it")
        for root in made.roots:
            sweep(root)
            assert os.listdir(root) == []
    finally:
        made.close()


def count_foreign(here: Here) -> int:
    tier = here["cached"].tier
    return int((tier.owner(range(COUNT)) != tier.me).sum())
