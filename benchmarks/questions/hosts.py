"""What does a cache across hosts give?"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from benchmarks.data import capacity_for, make_records
from benchmarks.harness import Case, Condition, Contender, Figure
from benchmarks.peers import redis_py
from benchmarks.processes import Meet, run_nodes
from benchmarks.timing import check_labels, read_rate

Figures = dict[str, Any]
PATIENT = 5.0
"""The store's `timeout`: a busy machine then costs no hits."""
NODES = 2
STORE_SECONDS = 20.0


class KeepTier:
    """A store whose tier is kept, to read from it without a data set."""

    def __init__(self, store: Any) -> None:
        self.store, self.tier = store, None

    def attach(self, *arguments: Any, **options: Any) -> Any:
        self.tier = self.store.attach(*arguments, **options)
        return self.tier


@contextlib.contextmanager
def running_server() -> Iterator[Figures]:
    """The address of a server on the loopback device, as another host would reach it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"host": "127.0.0.1", "port": free.getsockname()[1], "password": "benchmark"}
    program = shutil.which("valkey-server") or shutil.which("redis-server") or "redis-server"
    command = [program, "--port", str(address["port"]), "--requirepass", "benchmark", "--save", ""]
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


@contextlib.contextmanager
def filled_server(folder: str, count: int, size: int) -> Iterator[tuple[Figures, Any]]:
    """A server with so many records, and the tier of a `RedisStore` over it."""
    with running_server() as address, sf.RedisStore([address], timeout=PATIENT) as store:
        keeper, source = KeepTier(store), make_records(folder, count, size)
        with sf.CachedDataset(source, capacity="8MiB", store=keeper, form="fetched") as data:
            for start in range(0, count, 16):
                ids = np.arange(start, min(start + 16, count))
                data.__getitems__(ids.tolist())
                deadline = time.monotonic() + STORE_SECONDS
                while any(value is sf.cache.MISS for value in keeper.tier.get_many(ids)):  # written in the background
                    if time.monotonic() > deadline:
                        raise AssertionError(f"records {start} to {start + 15} were not stored")
                    time.sleep(0.005)
            yield address, keeper.tier


def read_store(folder: str, count: int, size: int, batch: int, seconds: float) -> Figures:
    """Samples/s of batches out of a server of another node."""
    torch.set_num_threads(1)
    with filled_server(folder, count, size) as (_, tier):

        def read(ids: list[int]) -> list[Any]:
            values: list[Any] = tier.get_many(np.array(ids))
            if any(value is sf.cache.MISS for value in values):
                raise AssertionError("a record is missing")
            return values

        rate = read_rate(read, count, batch, seconds)
    return {"rate": rate, "bytes": rate * size / 1e9}


def read_with_peer(
    folder: str, count: int, size: int, batch: int, seconds: float, checked: bool, setting: str = ""
) -> Figures:
    """The same values, read by redis-py."""
    with filled_server(folder, count, size) as (address, _):
        figures = redis_py.read(address, count, batch, checked, seconds, setting)
    return figures | ({"bytes": figures["rate"] * size / 1e9} if setting else {})


# -- two nodes --------------------------------------------------------------------------------------------------------


def two_nodes(
    folder: str, samples: int, size: int, bandwidth: float, fraction: float, cache: str, epochs: int
) -> Figures:
    """Seconds of an epoch of two nodes behind one slow storage.

    `cache` is "servers" (one store for both), "tiered" (smaller servers, and memory), "own" (a cache per node that is
    not coordinated) or "all" (a cache per node that holds everything).
    """
    source = sf.testing.ThrottledSource(make_records(folder, samples, size), bandwidth=bandwidth)
    results = run_nodes(NODES, 2 + 3 * epochs, _node, source, size, fraction, cache, epochs)
    seconds, read = [], []
    for number in range(epochs):
        epoch = [result[number] for result in results]
        check_labels([ids for _, ids, _ in epoch], samples)
        seconds.append(max(taken for taken, _, _ in epoch))
        read.append(epoch[0][2] / (samples * size))
    return {"seconds": seconds, "read": read}


def _node(
    number: int, meet: Meet, source: Any, size: int, fraction: float, cache: str, epochs: int
) -> list[tuple[float, list[int], int]]:
    count = len(source)
    in_servers = {"servers": fraction, "tiered": 1 / NODES}.get(cache, 0)
    in_memory = {"own": fraction, "all": 1.0, "tiered": fraction - 1 / NODES}.get(cache, 0)
    options: Figures = {"capacity": capacity_for(round(in_memory * count), size) if in_memory else 0}
    options |= {"form": "fetched", "name": cache}
    with contextlib.ExitStack() as stack:
        if in_servers:
            room = round(in_servers * count * (1.1 * size + 1024)) + (4 << 20)
            options["store"] = stack.enter_context(sf.RedisStore(capacity_per_node=room, timeout=PATIENT, name=cache))
        data = stack.enter_context(sf.CachedDataset(source, **options))
        fast = stack.enter_context(sf.CachedDataset(source.source, **options))  # fills the cache without a limit
        sampler: Any = DistributedSampler(data, NODES, number, shuffle=True)
        fill = sf.DataLoader(fast, 64, sampler=sampler if in_servers else None, num_workers=1)
        loader = sf.DataLoader(data, 64, sampler=sampler, num_workers=1)
        meet()
        for _ in range(2):
            for _batch in fill:
                pass
        time.sleep(1)  # what is written in the background
        meet()
        results = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            meet()
            before = source.bytes
            meet()
            begun = time.perf_counter()
            labels = [ids for _, ids in loader]
            taken = time.perf_counter() - begun
            meet()
            results.append((taken, torch.cat(labels).tolist(), source.bytes - before))
        return results


HERE = "benchmarks.questions.hosts"
CASES = {
    "store_reads": Case(
        question="How many samples/s does a process get from the server of another node, and how many with "
        "redis-py's MGET of the same values?",
        setup="A server on this host, reached by TCP on the loopback device; one process reads random batches. A "
        "batch of `RedisStore` counts when headers and checksums are checked and the tensors are made; of redis-py "
        "with checksum and copy when the xxh3_64 of each record was compared and the record copied into a standing "
        "buffer. redis-py with hiredis.",
        contenders=[
            Contender("stallfree", "stallfree RedisStore", f"{HERE}:read_store"),
            Contender(
                "checked", "redis-py: MGET, checksum and copy", f"{HERE}:read_with_peer", {"checked": True}, tunes=True
            ),
            Contender("bare", "redis-py: bare MGET", f"{HERE}:read_with_peer", {"checked": False}, tunes=True),
        ],
        figures={"rate": Figure("samples/s"), "bytes": Figure("GB/s", ".2f")},
        conditions=[
            Condition(f"{size} {batch}", f"{size} KB x {batch}", {"size": 1000 * size, "batch": batch, "count": count})
            for size, count in ((110, 1024), (600, 512))
            for batch in (64, 256)
        ],
        quick={"count": 256},
        rounds=5,
    ),
    "store_partitioned": Case(
        question="Two nodes behind storage of 15 MB/s for both, each with a cache for 65% of the data: how long does "
        "an epoch take when the caches are parts of one store, and how long when each is for itself?",
        setup="3,200 samples of 60 KB, another random part for each node in each epoch, batches of 64, policy "
        "`minio`. Two nodes on one host, with a folder and a server of their own each and one worker, connected by "
        "TCP on the loopback device. The caches are filled before; the slower node counts, and the start of the "
        "workers is part of an epoch.",
        contenders=[
            Contender("own", "a cache for each, not coordinated", f"{HERE}:two_nodes", {"cache": "own"}),
            Contender("servers", "stallfree, one store for both", f"{HERE}:two_nodes", {"cache": "servers"}),
            Contender("tiered", "stallfree, one store and memory", f"{HERE}:two_nodes", {"cache": "tiered"}),
            Contender("all", "a cache of 100% for each (the bound)", f"{HERE}:two_nodes", {"cache": "all"}),
        ],
        figures={
            "seconds": Figure("s per epoch", ".3f", less=True),
            "read": Figure("read from storage / data", ".3f", less=True),
        },
        ours="servers",
        subject="one store",
        params={"samples": 3200, "size": 60_000, "bandwidth": 15e6, "fraction": 0.65, "epochs": 3},
        quick={"samples": 320, "epochs": 1},
    ),
}
