"""Nodes of a job for tests: processes with a folder for shared memory of their own, as they are on hosts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from job_store import JobStore
from server_tools import record

from redis_servers import until
from stallfree import Compose, RedisStore
from stallfree.sources.base import BaseSource

LIMIT = 250.0
"""Seconds until a process that returns nothing counts as hung."""

TIMEOUT = 10.0
"""Of servers in tests that expect hits, as a loaded machine may be silent for 250 ms."""


# --- a data set whose samples show their ids ------------------------------------------------------------------------


def stamp(id: int, salt: int = 0, size: int = 32) -> torch.Tensor:
    """Numbers that show the id and the data set, each at its place."""
    return torch.from_numpy(np.arange(size) + (salt << 48 | id << 16))  # torch in a thread of a forked child may fail


def is_right(values: torch.Tensor, ids: Any, salt: int = 0) -> bool:
    """Whether rows of `values` are the samples of `ids`."""
    ids = torch.as_tensor(ids)
    return bool((values == torch.arange(values.shape[-1]) + (salt << 48 | ids[..., None] << 16)).all())


def check_samples(samples: Sequence[Any], ids: Sequence[int], salt: int = 0) -> None:
    """Fail if `samples` of `Stamped` are not those of `ids`."""
    assert [label for _, label in samples] == list(ids)
    assert all(is_right(values, label, salt) for values, label in samples)


class Storage:
    """The ids that some processes have read from storage, in a file to which each of them appends."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def note(self, id: int) -> None:
        """Add one reading of a sample."""
        fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, np.int64(id).tobytes())
        finally:
            os.close(fd)

    def ids(self) -> list[int]:
        """All readings."""
        return np.fromfile(self._file, np.int64).tolist() if os.path.exists(self._file) else []


class Stamped(BaseSource):
    """`count` samples `(stamp(id), id)`; notes each reading in `storage`."""

    def __init__(self, count: int, storage: Storage, *, salt: int = 0, size: int = 32) -> None:
        self.pipeline = Compose([])
        self.storage = storage
        self._count, self._salt, self._size = count, salt, size

    def __len__(self) -> int:
        return self._count

    def _record(self, id: int) -> Any:
        self.storage.note(id)
        return stamp(id, self._salt, self._size), id

    def _where(self, id: int) -> str:
        return f"storage/{id}"

    def fingerprint(self) -> str:
        return f"Stamped {self._count} {self._salt} {self._size}"


# --- processes of a job ---------------------------------------------------------------------------------------------


@dataclass
class Here:
    """The process in which a function runs.

    Attributes:
        number, count: which of how many processes; with one process per node also those of the nodes.
        node: on which node it is.
        folder: of the test, the same on all nodes.
        barrier: of all processes.
        kept: what functions leave for those that run later.
    """

    number: int
    count: int
    node: int
    folder: Path
    barrier: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def meet(self) -> None:
        """Wait for all other processes."""
        self.barrier.wait(LIMIT)

    def storage(self, name: str) -> Storage:
        """What this process has read of a data set."""
        return Storage(self.folder / f"{name}.reads.{self.number}")

    @property
    def store(self) -> RedisStore:
        """The one that `open_store` has opened."""
        store: RedisStore = self.kept["store"]
        return store


def open_store(here: Here, **options: Any) -> None:
    """Every process opens the store that the nodes share."""
    here.kept["store"] = RedisStore(**{"capacity_per_node": "64MiB", "timeout": TIMEOUT, **options})


def close_store(here: Here) -> None:
    """Leave it."""
    here.kept.pop("store").close()


@dataclass(frozen=True)
class Pids:
    """The processes that keep the server of a node, and its folder."""

    folder: Path
    supervisor: int
    server: int


def pids(here: Here) -> Pids:
    """Those of this node, once its server runs."""
    server = here.store._server
    assert server is not None

    def look() -> Pids | None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(record(server.folder)["pid"])
            if server.address() is not None:
                return Pids(server.folder, process.ppid(), process.pid)
        return None

    found: Pids = until(look, "the server runs")
    return found


def _live(connection: Connection, here: Here, per_node: int, root: Path, port: int) -> None:
    """Run the functions that come, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method("fork", force=True)
    given = {"RANK": here.number, "WORLD_SIZE": here.count, "GROUP_RANK": here.node}
    given |= {"GROUP_WORLD_SIZE": here.count // per_node, "LOCAL_RANK": here.number % per_node}
    given |= {"LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ.update(STALLFREE_ROOT=str(root), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(here, *arguments, **options)
        except BaseException:
            answer = False, traceback.format_exc()
            here.barrier.abort()  # no process waits for this one
        connection.send(answer)


class Nodes:
    """The processes of a job on `count` nodes, which find each other as those of torchrun.

    Leaving it fails if anything of theirs is left.

    Args:
        count: number of nodes.
        per_node: processes on each of them.
    """

    def __init__(self, count: int, per_node: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        self.count = count * per_node
        self.folder = Path(tempfile.mkdtemp(prefix="stallfree-test-nodes-", dir="/dev/shm"))
        self._barrier = context.Barrier(self.count)
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._killed: set[int] = set()
        self._job_store = JobStore()
        for number in range(self.count):
            ours, theirs = context.Pipe()
            root = self.folder / f"node{number // per_node}"
            root.mkdir(mode=0o700, exist_ok=True)
            here = Here(number, self.count, number // per_node, self.folder, self._barrier)
            process = context.Process(target=_live, args=(theirs, here, per_node, root, self._job_store.port))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def begin(self, number: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Have a process run `function(here, *arguments)`, which can be imported; `results` returns its result."""
        self._ends[number].send((function, arguments, options))

    def results(self, *numbers: int) -> list[Any]:
        """The results of some processes. An exception of one, or one that hangs or dies, fails the test."""
        results, problems = [], []
        for number in numbers:
            if not self._ends[number].poll(LIMIT):
                pytest.fail(f"process {number} has returned nothing for {LIMIT:.0f} s")
            try:
                good, result = self._ends[number].recv()
            except EOFError:
                pytest.fail(f"process {number} has died")
            results.append(result)
            if not good:
                problems.append(f"in process {number}:\n{result}")
        if problems:
            self._barrier.reset()
            first = [problem for problem in problems if "BrokenBarrierError" not in problem]
            pytest.fail("\n".join(first or problems))
        return results

    def run_on(self, number: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a function in one process."""
        self.begin(number, function, *arguments, **options)
        return self.results(number)[0]

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """The results of a function in all processes, which run it at the same time."""
        alive = [number for number in range(self.count) if number not in self._killed]
        for number in alive:
            self.begin(number, function, *arguments, **options)
        return self.results(*alive)

    def reads(self, name: str) -> list[list[int]]:
        """The ids of a data set that each process has read from storage."""
        return [Storage(self.folder / f"{name}.reads.{number}").ids() for number in range(self.count)]

    def kill(self, number: int) -> None:
        """End a process and its children at once."""
        pid = self._processes[number].pid
        assert pid is not None
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._processes[number].join(LIMIT)
        self._killed.add(number)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(LIMIT)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._job_store.close()
        try:
            until(lambda: not self._left(), f"the folders of the nodes are empty: {self._left()}")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _left(self) -> list[Path]:
        """What is left in shared memory; after a kill, servers only: the next process removes the rest."""
        return [path for path in self.folder.glob("node*/*") if not self._killed or path.name.startswith("redis-")]
