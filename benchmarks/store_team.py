"""Several nodes on one host: forked processes with a folder of their own per node, which meet as the ranks of a job do.

And what the contenders of the store's benchmarks have in common: their task and result, records, their counted
readings, loaders and epochs.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import RawValue, get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DistributedSampler

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.shared_team import Meet, Team, TeamError
from benchmarks.store_records import make_noise, make_record
from stallfree.cache.layout import plan_layout
from stallfree.cache.redis.launch import find_server
from stallfree.cache.redis.servers import read_records
from stallfree.ipc.folders import default_root
from stallfree.pipeline.codec import encode, record_size, write_record
from stallfree.sources.base import BaseSource

Json = dict[str, Any]

PATIENT = 5.0
"""The store's `timeout` where no fault is meant to happen: a busy machine then costs no hits."""

_MASTER = "127.0.0.1"
_LIMIT = 300.0
"""Seconds until nodes that have not met, or not ended, count as hung."""


def read_task() -> Json:
    """The task on the command line."""
    task: Json = json.loads(sys.argv[1])
    return task


def print_found(found: Json, **versions: str) -> None:
    """Print the result, as `contender.emit` does."""
    emit(found, stallfree=version("stallfree"), torch=torch.__version__, **versions)


class Nodes(Team):
    """Processes that run `target(number, meet, *arguments)` at once, each in the environment that torchrun sets.

    Fork them before there are threads. Use it with `with`.

    Args:
        count: of the nodes.
        ranks: processes of each node.
        watched: whether `meet` waits for the process that started them, too.
    """

    def __init__(
        self, count: int, target: Callable[..., Any], *arguments: Any, ranks: int = 1, watched: bool = False
    ) -> None:
        port = RawValue("i", 0)
        self._among = None if watched else get_context("fork").Barrier(count * ranks)
        super().__init__(count * ranks, _as_rank, count, ranks, port, self._among, target, arguments)
        self._place = TCPStore(_MASTER, 0, is_master=True, wait_for_workers=False)
        port.value = self._place.port
        self.meet()

    def result(self, number: int) -> Any:
        """What one process returned, whatever became of the others. Raises `TeamError` if it failed."""
        try:
            worked, found = self._jobs[number][1].recv() if self._jobs[number][1].poll(_LIMIT) else (False, "no result")
        except EOFError:
            worked, found = False, "it died"
        if not worked:
            raise TeamError(f"process {number}: {found or 'another one failed'}")
        return found

    @property
    def all_alive(self) -> bool:
        """Whether no process has ended."""
        return all(process.is_alive() for process, _ in self._jobs)

    def results(self) -> list[Any]:
        """What each process returned, once all have. Raises `TeamError` for one that failed."""
        deadline = time.monotonic() + _LIMIT
        waiting = [pipe for _, pipe in self._jobs]
        while waiting and time.monotonic() < deadline:
            for pipe in wait(waiting, deadline - time.monotonic()):
                waiting.remove(pipe)  # type: ignore[arg-type]
        found = super().results()
        if self._among is not None and self._among.broken:
            raise TeamError(f"the nodes have not met within {_LIMIT:.0f} s")
        return found


def _as_rank(
    number: int,
    meet_all: Meet,
    count: int,
    ranks: int,
    port: Any,
    among: Any,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    torch.set_num_threads(1)
    root = node_root(number // ranks)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    meet_all()
    os.environ |= {
        "STALLFREE_ROOT": str(root),
        "MASTER_ADDR": _MASTER,
        "MASTER_PORT": str(port.value),
        "RANK": str(number),
        "WORLD_SIZE": str(count * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(number // ranks),
        "GROUP_WORLD_SIZE": str(count),
    }
    if among is None:
        return target(number, meet_all, *arguments)
    try:
        return target(number, lambda: among.wait(_LIMIT), *arguments)
    except BaseException:
        among.abort()
        raise


def node_root(node: int) -> Path:
    """What is `STALLFREE_ROOT` on a node; asked for before a process has become a node."""
    return Path(os.environ["STALLFREE_ROOT"]).parent / f"node-{node}"


@contextlib.contextmanager
def running_server() -> Iterator[Json]:
    """The address of a server on the loopback device, as another host would reach it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"host": "127.0.0.1", "port": free.getsockname()[1], "password": "benchmark"}
    command = [find_server(), "--port", str(address["port"]), "--requirepass", "benchmark", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(**address) as client:
                for _ in range(1000):
                    with contextlib.suppress(redis.RedisError):
                        client.ping()
                        break
                    time.sleep(0.01)
            yield address
        finally:
            process.kill()


# -- data -------------------------------------------------------------------------------------------------------------


@sf.mark_deterministic
class Work:
    """So many seconds of processor time, as decoding would take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._some = bytes(1 << 15)

    def __call__(self, record: Any) -> Any:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            zlib.crc32(self._some)
        return record


class Records(BaseSource):
    """`(array, id)` by id, in memory. Make it before the nodes are forked: they share its counters.

    Attributes:
        reads: how often each record was fetched, on all nodes together.

    Args:
        count: of the records.
        size: bytes of each array.
        prep: seconds of processor time that the pipeline takes for a record.
    """

    def __init__(self, count: int, size: int, prep: float = 0.0) -> None:
        self.pipeline = sf.Compose([Work(prep)] if prep else [])
        self._noise = make_noise(size)
        self._count, self._size = count, size
        self.reads: npt.NDArray[np.int64] = np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)

    def __len__(self) -> int:
        return self._count

    def _record(self, id: int) -> Any:
        self.reads[id] += 1
        return torch.from_numpy(make_record(self._noise, id)), id

    def _where(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        return f"records-{self._count}-{self._size}"


def as_record(value: Any) -> npt.NDArray[np.uint8]:
    """`value` as it is given to a tier."""
    structure, arrays = encode(value)
    record = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, record)
    return record


def _socket(name: str) -> Json:
    """The socket and password of the server that a store has started on this node."""
    folder = default_root() / f"redis-{name}"
    (server,) = read_records(folder)
    return {"unix_socket_path": str(folder / "socket"), "password": server["password"]}


def room_for(records: int, source: Records) -> int:
    """Bytes that are room for so many records of `source` and for the index, and not for one more."""
    structure, arrays = encode((torch.from_numpy(make_record(source._noise, 0)), 0))
    capacity = records * record_size(structure, arrays)
    while True:
        layout = plan_layout(
            len(source),
            capacity,
            fingerprint="",
            policy="minio",
            scored=False,
            on_disk=False,
            structure=structure,
            typical=0,
        )
        if layout.num_blocks >= records:
            return capacity
        capacity += mmap.PAGESIZE


CONNECTIONS = 1 << 20
"""Bytes that are enough for the buffers of a small job's connections to a server."""


class ServerRoom:
    """What records of `source` take in a server: by `MEMORY USAGE` of one, and what an empty server uses.

    The buffers of connections take memory of the server, too: add `CONNECTIONS` where really all records must fit.

    Make it before the nodes are forked: it starts a server for a moment.

    Attributes:
        record: bytes of one record.
        empty: bytes that an empty server uses.
    """

    def __init__(self, source: Records) -> None:
        with sf.RedisStore(capacity_per_node="64MiB", name="measured") as store:
            tier = store.attach(len(source), fingerprint=source.fingerprint(), name="measured")
            with redis.Redis(**_socket("measured"), protocol=2) as client:
                self.empty = int(client.info("memory")["used_memory"])
                value = torch.from_numpy(make_record(source._noise, 0)), 0
                tier.put_many(np.arange(1), [as_record((0, value))])
                self.record = int(client.memory_usage(client.keys("stallfree:*:0")[0], samples=0))

    def __call__(self, records: int) -> int:
        """`capacity_per_node` that is room for so many records."""
        return self.empty + records * self.record


# -- epochs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """What one node had of an epoch.

    Attributes:
        seconds: from asking for the first batch until the loader says that it has ended.
        ids: of the samples that came.
    """

    seconds: float
    ids: list[int]


def run_epoch(loader: Iterable[Any]) -> Epoch:
    """Go through one epoch."""
    labels = []
    begun = time.perf_counter()
    for _, label in loader:
        labels.append(label)
    seconds = time.perf_counter() - begun
    return Epoch(seconds, torch.cat(labels).tolist())


def share_of(data: Any, nodes: int, number: int) -> Any:
    """A sampler: another random share of `data` for node `number` of `nodes` in each epoch."""
    return DistributedSampler(data, nodes, number, shuffle=True)


def check_epoch(epochs: Iterable[Epoch], samples: int) -> None:
    """Raise unless the nodes together had each sample once."""
    ids = sorted(id for epoch in epochs for id in epoch.ids)
    if ids != list(range(samples)):
        raise AssertionError(f"{len(ids)} samples came, {len(set(ids))} of {samples} different ones")
