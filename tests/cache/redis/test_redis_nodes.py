"""Two nodes of a job with a real server each: whole epochs, and servers that are killed, frozen or cut off."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from redis_servers import needs_server, until
from redis_tiers import ALL, COUNT, PATIENT, held, put, tier_of
from stallfree.cache.redis import RedisStore
from stallfree.cache.redis.servers import read_records
from stallfree.errors import WaitError

pytestmark = needs_server

LIMIT = 120.0


def _keep_store(connection: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    connection.send(store.port)
    connection.poll(None)


def _live(connection: Any, number: int, count: int, root: str, port: int) -> None:
    """A process of a node: run the functions that come."""
    os.environ.update({"RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1", "STALLFREE_ROOT": root})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    kept: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            try:
                answer = True, function(kept, *arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            connection.send(answer)


class Job:
    """Processes of a job, each on a node of its own: with shared memory of its own."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.folder = Path(tempfile.mkdtemp(prefix="stallfree-test-job-", dir="/dev/shm"))
        self.ends, self.processes = [], []

        def start(target: Callable[..., None], *arguments: Any) -> Any:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(ours)
            return ours

        self._master = start(_keep_store)
        self.port = self._master.recv()
        for number in range(count):
            (self.folder / str(number)).mkdir(mode=0o700)
            start(_live, number, count, str(self.folder / str(number)), self.port)

    def begin(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        self.ends[1 + number].send((function, arguments))

    def result(self, number: int) -> Any:
        assert self.ends[1 + number].poll(LIMIT), f"node {number} has said nothing"
        good, result = self.ends[1 + number].recv()
        assert good, f"on node {number}:\n{result}"
        return result

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of a function on all nodes."""
        numbers = range(len(self.ends) - 1)
        for number in numbers:
            self.begin(number, function, *arguments)
        return [self.result(number) for number in numbers]

    def on(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(number, function, *arguments)
        return self.result(number)

    def server(self, number: int) -> psutil.Process:
        """The process of a node's server."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.processes[1 + number].pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.name() in ("redis-server", "valkey-server"):
                        return child
            return None

        found: psutil.Process = until(find, "the server runs")
        return found

    def close(self) -> None:
        for end in self.ends[1:] + self.ends[:1]:
            with contextlib.suppress(OSError):
                end.send(None) if end is self._master else end.close()
        for process in self.processes:
            process.join(LIMIT)
            process.close()
        self._master.close()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def job(count: int = 2, **options: Any) -> Iterator[Job]:
    made = Job(count)
    try:
        made.run(open_tier, options)
        yield made
        made.run(close_store)
        assert [list(folder.iterdir()) for folder in made.folder.iterdir()] == [[]] * count
    finally:
        made.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    with job(timeout=PATIENT) as made:
        yield made


# --- what processes of the nodes do ---------------------------------------------------------------------------------


def open_tier(kept: dict[str, Any], options: dict[str, Any]) -> None:
    kept["store"] = RedisStore(**{"capacity_per_node": "64MiB", **options})
    kept["tier"] = tier_of(kept["store"])


def close_store(kept: dict[str, Any]) -> None:
    kept["store"].close()


def place_of(kept: dict[str, Any]) -> tuple[int | None, int, list[int]]:
    return kept["tier"].me, kept["tier"].num_nodes, kept["tier"].owner(ALL).tolist()


def epoch(kept: dict[str, Any], ids: np.ndarray) -> tuple[int, int]:
    """Read samples, and store those that are missing: how many came from storage, and how many from the other node."""
    tier = kept["tier"]
    tier.begin_epoch()
    found = [id for part in tier.parts(ids) for id in held(tier, part)]
    missing = np.setdiff1d(ids, found)
    put(tier, missing)
    return len(missing), int((tier.owner(np.array(found, np.int64)) != tier.me).sum())


def fill(kept: dict[str, Any]) -> bool:
    """Store what is missing; whether nothing was."""
    return epoch(kept, ALL)[0] == 0


def seen(kept: dict[str, Any], seconds: float = 0.0) -> tuple[list[int], float]:
    """The samples that are read without mistake, again and again for some time at least; and the longest wait."""
    longest, end = 0.0, time.monotonic() + seconds
    while True:
        start = time.monotonic()
        found = held(kept["tier"])
        longest = max(longest, time.monotonic() - start)
        if time.monotonic() >= end:
            return found, longest


def forget(kept: dict[str, Any]) -> None:
    kept["tier"].clear()


def record_of(kept: dict[str, Any], number: int) -> dict[str, Any]:
    return read_records(kept["store"]._servers.folder.path)[number]


# --- epochs ---------------------------------------------------------------------------------------------------------


def test_each_sample_is_read_from_storage_once(pair: Job) -> None:
    places = pair.run(place_of)
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    assert places[0][2] == places[1][2]
    assert np.bincount(places[0][2]).tolist() == [COUNT // 2] * 2
    pair.on(0, forget)
    for number, part in enumerate((ALL[::2], ALL[1::2])):
        assert pair.on(number, epoch, part)[0] == COUNT // 2
    for number, part in enumerate((ALL[1::2], ALL[::2])):
        missing, remote = pair.on(number, epoch, part)
        assert missing == 0
        assert 20 < remote < 80, "hits of the other node"


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick() -> Iterator[Job]:
    """Two nodes that have stored all samples, with the usual time limit."""
    with job() as made:
        until(lambda: all(made.run(fill)), "all is stored")
        yield made


def test_a_killed_server_is_replaced_and_found(quick: Job) -> None:
    before, record = quick.server(1), quick.on(0, record_of, 1)
    before.kill()
    for number in (0, 1):
        found, longest = quick.on(number, seen, 1.0)
        assert len(found) == COUNT // 2
        assert longest < 5
    assert quick.on(0, seen)[0] == quick.on(1, seen)[0]
    until(lambda: quick.run(fill) == [True, True], "hits return")
    after = quick.on(0, record_of, 1)
    assert after["password"] != record["password"]


def test_a_frozen_server_comes_back(quick: Job) -> None:
    server = quick.server(1)
    server.suspend()
    try:
        for number in (0, 1):
            assert len(quick.on(number, seen, 1.0)[0]) == COUNT // 2
    finally:
        server.send_signal(signal.SIGCONT)
    until(lambda: [len(found) for found, _ in quick.run(seen)] == [COUNT] * 2, "hits return, without an epoch")
    assert quick.server(1).pid == server.pid


def test_no_password_is_sent_to_a_stranger_at_the_port(quick: Job) -> None:
    record = quick.on(0, record_of, 1)
    quick.server(1).kill()
    stranger = socket.socket()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    received: list[bytes] = []

    def bind() -> bool:
        with contextlib.suppress(OSError):
            stranger.bind((record["host"], record["port"]))
            return True
        return False

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = stranger.accept()
                with connection:
                    connection.settimeout(1)
                    with contextlib.suppress(OSError):
                        received.append(connection.recv(4096))

    until(bind, "the port is free")
    stranger.listen()
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert len(quick.on(0, seen, 1.5)[0]) == COUNT // 2
        until(lambda: quick.run(fill) == [True, True], "hits return")
        after = quick.on(0, record_of, 1)
        assert after["port"] != record["port"]
        assert b"".join(received) == b""
    finally:
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()
        stranger.close()


def test_a_node_whose_processes_are_killed_costs_its_hits(tmp_path: Path) -> None:
    made = Job(2)
    try:
        made.run(open_tier, {})
        until(lambda: all(made.run(fill)), "all is stored")
        server = made.server(1)
        made.processes[2].kill()
        until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "its server ends")
        assert len(made.on(0, seen, 1.0)[0]) == COUNT // 2
        made.on(0, epoch, ALL)
        made.on(0, close_store)
    finally:
        made.close()


def test_a_node_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Job(1)
    try:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(made.port))
        monkeypatch.setattr("stallfree.cache.redis.launch.RENDEZVOUS_SECONDS", 1.0)
        with pytest.raises(WaitError, match="number 1 did not create the store"):
            RedisStore(capacity_per_node="64MiB")
    finally:
        made.close()
