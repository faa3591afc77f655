"""Jobs of several nodes for tests: processes whose nodes have shared memory and servers of their own, as on hosts."""

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import stallfree as sf
from redis_servers import server_in
from stallfree.cache.redis.launch import PROGRAMS
from stallfree.cache.redis.servers import ID, read_records

LIMIT = 120.0  # seconds until a process that returns nothing counts as hung
PATIENT = 30.0  # time limit of servers in tests that expect hits: a loaded machine may be silent for 250 ms
STORE = "train"

Here = dict[str, Any]
"""What a process keeps between the functions that it runs; "number", "count" and "folder" are given."""


@sf.mark_deterministic
class Rows(torch.utils.data.Dataset[Any]):
    """Samples that show their ids. Each reading is written to the file `reads` of a folder, which all nodes share."""

    def __init__(self, folder: Path, count: int) -> None:
        self.file, self.count = str(folder / "reads"), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        file = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, np.int64(id).tobytes())
        os.close(file)
        return np.arange(300) + (id << 16), id

    def fingerprint(self) -> str:
        return f"rows {self.count}"


def reads(folder: Path) -> list[int]:
    """The ids that were read from storage since the last call."""
    file = folder / "reads"
    ids = np.fromfile(file, np.int64).tolist() if file.exists() else []
    file.unlink(missing_ok=True)
    return ids


def check_batch(values: Any, ids: Any) -> list[int]:
    """The ids of a batch of `Rows`. Fails for a sample that is another or damaged."""
    assert torch.equal(values, torch.arange(300) + (ids[:, None] << 16))
    return list(ids.tolist())


def _keep_store(connection: Any) -> None:
    """Be the agent of torchrun, which keeps the key-value store of the job."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.poll(None)


def _live(connection: Any, here: Here, environment: dict[str, str]) -> None:
    """Run the functions that come, until the connection is closed."""
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.environ.update(environment)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            try:
                answer = True, function(here, *arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            connection.send(answer)


class Job:
    """The processes of a job. Their folders must be empty when it is closed."""

    def __init__(self, nodes: int = 2, per_node: int = 1) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self.folder = Path(tempfile.mkdtemp(prefix="stallfree-test-job-", dir="/dev/shm"))
        self.ends, self.processes, self.per_node = [], [], per_node
        self._master, self._keeper = self._start(_keep_store)
        self.port = str(self._master.recv())
        self.roots = [self.folder / str(number) / f"stallfree-{os.getuid()}" for number in range(nodes)]
        count = nodes * per_node
        self._barrier = self._context.Barrier(count)  # freed here, it could not be opened there
        for root in self.roots:
            root.mkdir(mode=0o700, parents=True)
        for number in range(count):
            environment = {"RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": self.port}
            environment |= {"LOCAL_RANK": number % per_node, "MASTER_ADDR": "127.0.0.1"}
            environment["STALLFREE_ROOT"] = self.roots[number // per_node].parent
            here = {"number": number, "count": count, "folder": self.folder, "meet": self._barrier}
            end, process = self._start(_live, here, {name: str(value) for name, value in environment.items()})
            self.ends.append(end)
            self.processes.append(process)

    def _start(self, target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments))
        process.start()
        theirs.close()
        return ours, process

    def run(self, function: Callable[..., Any], *arguments: Any, only: int | None = None) -> list[Any]:
        """The results of `function(here, *arguments)`, which can be imported, in all processes that live; or in one."""
        alive = [at for at, process in enumerate(self.processes) if process.is_alive() and only in (at, None)]
        for at in alive:
            self.ends[at].send((function, arguments))
        results = []
        for at in alive:
            assert self.ends[at].poll(LIMIT), f"process {at} has returned nothing"
            results.append(self.ends[at].recv())
        assert all(good for good, _ in results), "\n".join(str(result) for good, result in results if not good)
        return [result for _, result in results]

    def server(self, node: int) -> psutil.Process:
        return server_in(self.roots[node] / f"redis-{STORE}")

    def record(self, node: int, seen_by: int = 0) -> dict[str, Any]:
        """The address of a node's server, as another node knows it."""
        id = (self.roots[node] / f"redis-{STORE}" / ID).read_text()
        return next(one for one in read_records(self.roots[seen_by] / f"redis-{STORE}") if one["id"] == id)

    @contextlib.contextmanager
    def admin(self, node: int, password: str | None = None) -> Iterator[redis.Redis]:
        """A client of a node's server, for a test's own commands."""
        path = str(self.roots[node] / f"redis-{STORE}" / "socket")
        given = password or self.record(node, node)["password"]
        with redis.Redis(unix_socket_path=path, password=given, protocol=2) as client:
            yield client

    def kill(self, node: int) -> None:
        """Kill the processes of a node and their children, all but its server."""
        for process in self.processes[node * self.per_node : (node + 1) * self.per_node]:
            for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                with contextlib.suppress(psutil.Error):
                    if one.name() not in PROGRAMS:
                        one.kill()
            process.join(LIMIT)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        with contextlib.suppress(OSError):
            self._master.send(None)
        for process in (*self.processes, self._keeper):
            process.join(LIMIT)
            process.close()
        self._master.close()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def job(nodes: int = 2, per_node: int = 1, **options: Any) -> Iterator[Job]:
    """A job whose nodes have a store, which they leave in the end."""
    made = Job(nodes, per_node)
    try:
        made.run(open_store, options)
        yield made
        made.run(close_store)
        assert [list(root.iterdir()) for root in made.roots] == [[]] * nodes, "nothing is left"
    finally:
        made.close()


def open_store(here: Here, options: dict[str, Any]) -> None:
    here["store"] = sf.RedisStore(**{"capacity_per_node": "64MiB", "name": STORE, "timeout": PATIENT, **options})


def close_store(here: Here) -> None:
    if "cached" in here:
        here.pop("cached").close()
    here["meet"].wait(LIMIT)
    here.pop("store").close()


def open_rows(here: Here, count: int, options: dict[str, Any]) -> None:
    """Make the data set, with no memory in front unless `options` say so."""
    options = {"capacity": 0, "store": here["store"], "name": "rows", **options}
    here["cached"] = sf.CachedDataset(Rows(here["folder"], count), **options)
