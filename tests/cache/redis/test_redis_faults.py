"""Servers of two nodes that are killed, frozen, disconnected or changed in the middle of an epoch.

Training goes on with the right samples, and hits return when what was wrong has ended.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from torch.utils.data.distributed import DistributedSampler

import stallfree as sf
from redis_jobs import Here, Job, check_batch, job, open_rows, open_store
from redis_servers import needs_server, until
from stallfree.ipc.folders import sweep

pytestmark = needs_server

COUNT = 160
MIDDLE = 5
"""The batch after which something happens."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Two nodes that have made a data set, with the usual time limit."""
    with job(timeout=0.25) as made:
        made.run(open_rows, COUNT, {})
        yield made


def train(here: Here, epoch: int, workers: int, wait: bool) -> tuple[list[int], int, float]:
    """An epoch: the ids, those that did not come from a server, and the longest wait for a batch in seconds.

    With `wait`, the node waits in the middle until the test has done something.
    """
    cached, served, longest = here["cached"], [], 0.0
    sampler: Any = DistributedSampler(cached, here["count"], here["number"], seed=7)
    sampler.set_epoch(epoch)
    before, middle = cached.stats(), here["folder"] / f"middle{here['number']}"
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    with sf.DataLoader(cached, 8, sampler=sampler, **options) as loader:
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
        thread = threading.Thread(target=self._harm, args=(harm,))
        thread.start()
        ran = self.job.run(train, self.number, self.workers, harm is not None)
        thread.join()
        assert sorted(id for ids, _, _ in ran for id in ids) == list(range(COUNT))
        assert max(longest for _, _, longest in ran) < 5, "no batch is waited for long, on a busy machine either"
        return [reads for _, reads, _ in ran]

    def _harm(self, harm: Callable[[], None] | None) -> None:
        middles = [self.job.folder / f"middle{node}" for node in range(2)]
        if harm is not None:
            until(lambda: all(middle.exists() for middle in middles), "both nodes are in the middle")
            try:
                harm()
            finally:
                for middle in middles:
                    middle.unlink()

    def until_hits(self) -> None:
        """Train until everything comes from the servers."""
        until(lambda: self.run() == [0, 0], "hits return")


def frozen(made: Job) -> Callable[[], None]:
    server = made.server(1)
    server.suspend()
    return lambda: server.send_signal(signal.SIGCONT)


def disconnected(made: Job) -> Callable[[], None]:
    with made.admin(1) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    return lambda: None


def password_changed(made: Job) -> Callable[[], None]:
    old = made.record(1)["password"]
    with made.admin(1) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)

    def undo() -> None:
        with made.admin(1, "another") as client:
            client.config_set("requirepass", old)

    return undo


@pytest.mark.parametrize(("fault", "workers"), [(frozen, 1), (disconnected, 0), (password_changed, 0)])
def test_training_goes_on_and_hits_return(fault: Callable[[Job], Callable[[], None]], workers: int, pair: Job) -> None:
    epochs, undo = Epochs(pair, workers), []
    epochs.until_hits()
    before = pair.server(1).pid, pair.record(1)["password"]
    reads = epochs.run(lambda: undo.append(fault(pair)))
    if fault is not disconnected:
        assert all(0 < number < COUNT / 2 for number in reads), "the other server goes on"
        assert all(0 < number < COUNT / 2 for number in epochs.run())
    undo[0]()
    epochs.until_hits()
    assert (pair.server(1).pid, pair.record(1)["password"]) == before


@contextlib.contextmanager
def stranger(host: str, port: int, received: list[bytes]) -> Iterator[None]:
    """Takes the port of a server that has died, and keeps what is sent to it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def bind() -> bool:
        with contextlib.suppress(OSError):
            listener.bind((host, port))
            return True
        return False

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    received.append(connection.recv(4096))

    until(bind, "the port is free")
    listener.listen()
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_server_is_replaced_though_a_stranger_takes_its_port_who_is_sent_nothing(workers: int) -> None:
    received: list[bytes] = []
    with job(timeout=0.25) as made, contextlib.ExitStack() as stack:
        made.run(open_rows, COUNT, {})
        epochs = Epochs(made, workers)
        epochs.until_hits()
        record = made.record(1)

        def harm() -> None:
            made.server(1).kill()
            stack.enter_context(stranger(record["host"], record["port"], received))

        epochs.run(harm)
        epochs.until_hits()
        after = made.record(1)
        assert after["port"] != record["port"]
        assert after["password"] != record["password"]
    assert b"".join(received) == b""


def test_a_node_that_is_killed_costs_its_samples_and_nothing_is_left_when_all_are() -> None:
    made = Job()
    try:
        made.run(open_store, {"timeout": 0.25})
        made.run(open_rows, COUNT, {})
        Epochs(made, 1).until_hits()
        servers = [made.server(node) for node in range(2)]
        theirs = sum(made.run(count_foreign, only=0))
        made.kill(1)
        until(lambda: has_ended(servers[1]), "its server ends with it")
        until(lambda: made.run(train_alone, only=0) == [theirs], "only its samples come from storage")
        made.kill(0)
        until(lambda: has_ended(servers[0]), "its server ends with it")
        for root in made.roots:
            sweep(root)
            assert os.listdir(root) == []
    finally:
        made.close()


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def count_foreign(here: Here) -> int:
    tier = here["cached"].tier
    return int((tier.owner(range(COUNT)) != tier.me).sum())


def train_alone(here: Here) -> int:
    """How many of all samples come from storage."""
    before = here["cached"].stats().storage_reads
    with sf.DataLoader(here["cached"], 8, ranks=(0, 1)) as loader:
        assert [id for batch in loader for id in check_batch(*batch)] == list(range(COUNT))
    return int(here["cached"].stats().storage_reads - before)
