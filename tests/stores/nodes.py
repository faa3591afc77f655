"""Nodes of a job for tests: in processes with folders of their own as they are on hosts, or all in this process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from job_store import JobStore
from redis_servers import Server
from stallfree.stores.endpoint import Address
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.post import PostOffice
from stallfree.stores.registry import register
from stallfree.stores.spawn import Doors

from children import Child
from stallfree import Compose, RedisStore
from stallfree.cache import MISS, SampleCache
from stallfree.sources import BaseSource
from stallfree.stores import clerk
from stallfree.stores.values import data_key

LIMIT = 280.0
"""Seconds until a node that says nothing counts as hung."""

PATIENCE = 240.0
"""Seconds until something that should come counts as never coming. A clerk that starts imports torch."""

TIMEOUT = 5.0
"""For tests that want hits: a loaded machine may be silent for 250 ms."""


def until(met: Callable[[], Any], what: str) -> Any:
    """Wait until `met` gives something true, and give that. Never coming fails the test."""
    deadline = time.monotonic() + PATIENCE
    while not (found := met()):
        assert time.monotonic() < deadline, f"after {PATIENCE:.0f} s still not so: {what}"
        time.sleep(0.005)
    return found


# --- a data set whose samples tell their ids ------------------------------------------------------------------------


def stamp(id: int, salt: int = 0, size: int = 32) -> torch.Tensor:
    """Numbers that tell the id and the data set, each of them at its place."""
    return torch.from_numpy(np.arange(size) + (salt << 48 | id << 16))  # torch in a thread of a forked child may fail


def is_right(values: torch.Tensor, ids: Any, salt: int = 0) -> bool:
    """Whether rows of `values` are the samples of `ids`."""
    ids = torch.as_tensor(ids)
    return bool((values == torch.arange(values.shape[-1]) + (salt << 48 | ids[..., None] << 16)).all())


class Storage:
    """What the processes of a node have read from storage: a file to which each of them adds the ids."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def note(self, id: int) -> None:
        """One reading of a sample."""
        fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, np.int64(id).tobytes())
        finally:
            os.close(fd)

    def ids(self) -> list[int]:
        """All readings."""
        try:
            return [int(id) for id in np.fromfile(self._file, np.int64)]
        except FileNotFoundError:
            return []


class Stamped(BaseSource):
    """`count` samples `(stamp(id), id)`; notes each reading in `storage`. Those of `bad` cannot be read."""

    def __init__(self, count: int, storage: Storage, *, salt: int = 0, size: int = 32, bad: Sequence[int] = ()) -> None:
        self.pipeline = Compose([])
        self.storage, self.bad = storage, frozenset(bad)
        self._count, self._salt, self._size = count, salt, size

    def __len__(self) -> int:
        return self._count

    def _record(self, id: int) -> Any:
        self.storage.note(id)
        if id in self.bad:
            raise ValueError(f"sample {id} is bad")
        return stamp(id, self._salt, self._size), id

    def _where(self, id: int) -> str:
        return f"storage/{id}"

    def fingerprint(self) -> str:
        return f"Stamped {self._count} {self._salt} {self._size}"


# --- nodes in processes of their own --------------------------------------------------------------------------------


@dataclass
class Here:
    """The node on which a function runs.

    Attributes:
        number, count: which of how many.
        folder: of the tests, the same on all nodes.
        barrier: of all nodes.
        kept: what functions leave for those that run later.
    """

    number: int
    count: int
    folder: Path
    barrier: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def meet(self) -> None:
        """Wait for all other nodes."""
        self.barrier.wait(LIMIT)

    def storage(self, name: str) -> Storage:
        """What this node has read of a data set."""
        return storage_of(self.folder, name, self.number)

    @property
    def store(self) -> RedisStore:
        """The one that `open_store` has opened."""
        store: RedisStore = self.kept["store"]
        return store

    def mine(self, ids: Any) -> Any:
        """This node's share of a plan."""
        return ids[self.number :: self.count]


def storage_of(folder: Path, name: str, node: int) -> Storage:
    """What a node has read of a data set."""
    return Storage(folder / f"{name}.reads.{node}")


def open_store(here: Here, **options: Any) -> None:
    """Every node opens the store that they share."""
    here.kept["store"] = RedisStore(**{"capacity_per_node": "256MiB", "timeout": TIMEOUT, **options})


def close_store(here: Here) -> None:
    """Leave it."""
    here.kept.pop("store").close()


@dataclass(frozen=True)
class Servants:
    """The processes that a node has beside its own: their numbers, and the folder where they lie."""

    folder: Path
    keeper: int
    server: int
    clerk: int


def servants(here: Here) -> Servants:
    """Those of this node, once all are there."""
    node = here.store._node
    assert node is not None
    folder = node.folder

    def look() -> Servants | None:
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            told = json.loads((folder / "server.json").read_bytes())
            for child in psutil.Process(told["keeper"]).children():
                if "stallfree.stores.clerk" in child.cmdline():
                    return Servants(folder, told["keeper"], told["pid"], child.pid)
        return None

    found: Servants = until(look, "keeper, server and clerk are there")
    return found


def _live(connection: Connection, here: Here, root: Path) -> None:
    """The life of a node: it does what it is told, until nobody tells any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(STALLFREE_ROOT=str(root), GROUP_RANK=str(here.number), GROUP_WORLD_SIZE=str(here.count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable, None)
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
            here.barrier.abort()  # nobody waits for this node in vain
        connection.send(answer)


def _meet_at(here: Here, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)


class Nodes:
    """`count` nodes, each a process with a folder for shared memory of its own. They find each other as those of a job.

    Leaving them fails if anything of theirs is left.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="stallfree-test-nodes-", dir="/dev/shm"))
        self._barrier = context.Barrier(count)
        self._ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.killed: set[int] = set()
        for number in range(count):
            ours, theirs = context.Pipe()
            root = self.folder / f"node{number}"
            root.mkdir(mode=0o700)
            here = Here(number, count, self.folder, self._barrier)
            process = context.Process(target=_live, args=(theirs, here, root))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)
        self.job_store = JobStore()
        self.run(_meet_at, self.job_store.port)

    def begin(self, number: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Have a node run `function(here, *arguments)`, which can be imported. What it gives is in `answer`."""
        self._ends[number].send((function, arguments, options))

    def answer(self, *numbers: int) -> Any:
        """What the function gave, on several nodes a list. An exception of it, or a node that hangs or dies, fails the
        test.
        """
        answers, problems = [], []
        for number in numbers:
            end = self._ends[number]
            if not end.poll(LIMIT):
                pytest.fail(f"node {number} has said nothing for {LIMIT:.0f} s")
            try:
                good, answer = end.recv()
            except EOFError:
                pytest.fail(f"node {number} has died")
            answers.append(answer)
            if not good:
                problems.append(f"on node {number}:\n{answer}")
        if problems:
            self._barrier.reset()
            first = [problem for problem in problems if "BrokenBarrierError" not in problem]
            pytest.fail("\n".join(first or problems))
        return answers if numbers[1:] else answers[0]

    def run_on(self, number: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function gives on one node."""
        self.begin(number, function, *arguments, **options)
        return self.answer(number)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What a function gives on each of the nodes, which run it at the same time."""
        alive = [number for number in range(self.count) if number not in self.killed]
        for number in alive:
            self.begin(number, function, *arguments, **options)
        return [self.answer(*alive)] if len(alive) == 1 else list(self.answer(*alive))

    def reads(self, name: str) -> list[list[int]]:
        """What each node has read of a data set, from storage."""
        return [storage_of(self.folder, name, number).ids() for number in range(self.count)]

    def kill(self, number: int) -> None:
        """End all processes of a node that belong to the job, at once."""
        process = self.processes[number]
        assert process.pid is not None
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.join(LIMIT)
        self._ends[number].close()
        self.killed.add(number)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(LIMIT)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.job_store.close()
        try:
            until(lambda: not _left(self.folder), "the folders of the nodes are empty")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _left(folder: Path) -> list[Path]:
    """Folders of caches and servers. One that a killed process held is removed by the next that comes, and is none."""
    return [path for path in folder.glob("node*/*") if not (path / "index").exists()]


# --- nodes in this process ------------------------------------------------------------------------------------------


PASSWORD = "secret"


class Office:
    """A node's server and clerk, a child of this process, without a keeper.

    Args:
        folder: for both; it is made.
        extra: lines of the server's configuration.
    """

    def __init__(self, folder: Path, *extra: str) -> None:
        (folder / "work").mkdir(parents=True)
        self.folder = folder
        self.server = Server(folder / "work", f"requirepass {PASSWORD}", *extra)
        (folder / "socket").symlink_to(self.server.path)
        (folder / "node.json").write_text(json.dumps({"version": 1, "password": PASSWORD}))
        (folder / "server.json").write_text("{}")
        path = str(Path(self.server.path).with_name("clerk"))
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=512), socket.socket(socket.AF_UNIX)]
        self._listeners[1].bind(path)
        self._listeners[1].listen(512)
        port = self._listeners[0].getsockname()[1]
        self.doors = Doors.at("127.0.0.1", self.server.port, port, PASSWORD)
        """By which other nodes reach it."""
        here = [Address(path=each, password=PASSWORD) for each in (self.server.path, path)]
        self.unix = Doors(*here)
        """By which its own processes do."""
        self.clerk: Child | None = None
        self.start_clerk()

    def post(self, timeout: float = TIMEOUT, *, unix: bool = False) -> PostOffice:
        """Its post office, as another node sees it, or one of its own processes."""
        doors = self.unix if unix else self.doors
        return PostOffice(doors.server, doors.clerk, timeout)

    def client(self) -> Any:
        """A client of its server, to be closed."""
        return self.doors.server.client(TIMEOUT)

    def settle(self) -> None:
        """Wait until all that was handed in is put away, also what was meant for others."""
        post = self.post()
        until(lambda: post._ask_clerk(lambda wire: wire.call("SETTLE", 1000)) == 1, "the clerk has put it away")
        post.close()

    def start_clerk(self) -> None:
        """Let it have a clerk again."""
        self.clerk = Child(_be_clerk, self.folder, [listener.fileno() for listener in self._listeners])

    def kill_clerk(self) -> None:
        """End it at once."""
        clerk, self.clerk = self.clerk, None
        if clerk is not None:
            clerk.kill()

    def freeze_clerk(self) -> None:
        """Stop it."""
        assert self.clerk is not None
        self.clerk.signal(signal.SIGSTOP)
        self.clerk.wait_until_stopped()

    def thaw_clerk(self) -> None:
        """Let it go on."""
        assert self.clerk is not None
        self.clerk.signal(signal.SIGCONT)

    def close(self) -> None:
        """End both."""
        self.kill_clerk()
        for listener in self._listeners:
            listener.close()
        self.server.close()


def _be_clerk(folder: Path, sockets: Sequence[int]) -> None:
    sys.argv[1:] = [str(folder), *map(str, sockets)]
    clerk.main()


@contextlib.contextmanager
def offices(folder: Path, count: int, *extra: str) -> Iterator[list[Office]]:
    """So many of them."""
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(count):
            office = Office(folder / f"office{number}", *extra)
            stack.callback(office.close)
            made.append(office)
        yield made


@contextlib.contextmanager
def parts(
    offices: Sequence[Office], num_ids: int, *, name: str = "data", fingerprint: str = "f", timeout: float = TIMEOUT,
    capacity: int | str = "4MiB", **options: Any,
) -> Iterator[list[PartitionedCache]]:  # fmt: skip
    """The cache of a data set as each of the nodes sees it."""
    key = data_key(name, fingerprint)
    names = [f"node{number}" for number in range(len(offices))]
    options = {"example": (stamp(0), 0), "allow_pickle": False, **options}
    with contextlib.ExitStack() as stack:
        caches = []
        for me, office in enumerate(offices):
            local = SampleCache(
                num_ids, capacity=capacity, fingerprint=fingerprint, name=f"{name}-{fingerprint}-{me}", **options
            )
            register(office.folder, key, local)
            posts = [other.post(timeout) for other in offices if len(offices) > 1]
            cache = PartitionedCache(local, names, me, posts, key)
            stack.callback(cache.close)
            caches.append(cache)
        yield caches


def settle(caches: Sequence[PartitionedCache]) -> int:
    """Wait until all that was handed in by any node is put away; how many samples there are then."""
    for cache in caches:
        cache.num_keys()  # a question is answered after what came before it
    (count,) = {cache.num_keys() for cache in caches}
    return count


def show(values: Sequence[Any]) -> list[int | None]:
    """The ids that stamped samples tell; None for a miss. Fails for one that is not as it was made."""
    ids: list[int | None] = []
    for value in values:
        if value is MISS:
            ids.append(None)
        else:
            assert is_right(value[0], value[1], int(value[0][0]) >> 48)
            ids.append(value[1])
    return ids
