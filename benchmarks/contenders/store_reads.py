"""Hits of a store: of this node out of shared memory, of the other node by its post office, and out of a given server.

A batch counts as had when its values are there, checks included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.shared_team import Meet
from benchmarks.store_records import WARM, make_noise, make_record, same
from benchmarks.store_team import PATIENT, Nodes, Records, room_for
from stallfree.cache import MISS, SampleCache
from stallfree.stores import PartitionedCache

LOCAL = 110_000
"""Bytes of the records of this node."""

Json = dict[str, Any]


def sample(noise: Any, id: int) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(make_record(noise, id)), id


def fill(cache: Any, ids: Any, noise: Any) -> None:
    """Store records and raise unless all were taken."""
    for start in range(0, len(ids), 32):
        some = ids[start : start + 32].tolist()
        if not cache.put_many(some, [sample(noise, id) for id in some]).all():
            raise AssertionError("not all records fit")


def as_node(number: int, meet: Meet, given: Json) -> Json | None:
    """Node 0 reads, node 1 owns what node 0 asks for."""
    with sf.RedisStore(capacity_per_node="4GiB", timeout=PATIENT) as store:
        caches = {size: _attach(store, int(size), count) for size, count in given["records"].items()}
        for size, cache in caches.items():
            fill(cache, np.flatnonzero(cache.owner(np.arange(cache.num_ids)) == cache.me), make_noise(int(size)))
        meet()
        found = None
        if number == 0:
            found = {"local": _local(caches[str(LOCAL)], given), "other": {}}
            for size, cache in caches.items():
                ids = np.flatnonzero(cache.owner(np.arange(cache.num_ids)) != cache.me)
                for batch in given["batches"]:
                    rate = read(cache.get_many, ids, batch, int(size), given["seconds"])
                    found["other"][f"{size} x {batch}"] = rate
                    meet()
        else:
            for _ in range(len(caches) * len(given["batches"])):
                meet()
        meet()
        for cache in caches.values():
            cache.close()
    return found


def _attach(store: sf.RedisStore, size: int, count: int) -> PartitionedCache:
    """A data set of which each node owns `count` records."""
    source = Records(2 * count, size)
    cache = store.attach(
        2 * count,
        capacity=room_for(count, source),
        fingerprint=source.fingerprint(),
        name=f"reads-{size}",
        example=source[0],
    )
    assert isinstance(cache, PartitionedCache)
    return cache


def read(get_many: Callable[[Any], list[Any]], ids: Any, batch: int, size: int, seconds: float) -> float:
    """Samples/s of hits, batch after batch, `ids` in another order each time; the first batches are not counted."""
    noise, rng = make_noise(size), np.random.default_rng(batch)
    some = rng.permutation(ids)[:batch]
    for id, (value, label) in zip(some.tolist(), get_many(some), strict=True):
        if label != id or not same(value.numpy(), noise, id):
            raise AssertionError(f"record {id} is another one")
    count, order, at = 0, rng.permutation(ids), 0
    begun, warm = time.perf_counter(), False
    while (now := time.perf_counter()) < begun + seconds or not warm:
        if not warm and count >= WARM * batch and now > begun + seconds / 10:
            begun, count, warm = now, 0, True
        if at + batch > len(order):
            order, at = rng.permutation(ids), 0
        values = get_many(order[at : at + batch])
        at += batch
        if any(value is MISS for value in values):
            raise AssertionError("a record is missing")
        count += batch
    return count / (time.perf_counter() - begun)


def _local(cache: PartitionedCache, given: Json) -> Json:
    """Batches of this node's own records from its part of the store and from a plain cache, in turns."""
    noise, batch = make_noise(LOCAL), 64
    mine = np.flatnonzero(cache.owner(np.arange(cache.num_ids)) == cache.me)
    with SampleCache(
        cache.num_ids,
        capacity=cache.stats().capacity_bytes,
        fingerprint=cache.fingerprint,
        name="plain",
        example=sample(noise, 0),
    ) as plain:
        fill(plain, mine, noise)
        structure = cache.structure
        assert structure is not None
        found: Json = {}
        for what in ("gather", "get_many"):
            calls = []
            for each in (cache, plain):
                standing = [np.zeros((batch, size), np.uint8) for size in structure.nbytes]
                aim = each.aim(standing)
                calls.append(_gatherer(each, aim) if what == "gather" else each.get_many)
            found[what] = _in_turns(calls[0], calls[1], mine, batch, given["seconds"])
        _check_gather(cache, mine[:batch], noise)
    return found


def _gatherer(cache: Any, aim: Any) -> Callable[[Any], Any]:
    return lambda ids: cache.gather(ids, aim)


def _check_gather(cache: PartitionedCache, ids: Any, noise: Any) -> None:
    assert cache.structure is not None
    standing = [np.zeros((len(ids), size), np.uint8) for size in cache.structure.nbytes]
    if not cache.gather(ids, standing).all():
        raise AssertionError("a record is missing")
    for row, id in zip(standing[0], ids.tolist(), strict=True):
        if not same(row, noise, id):
            raise AssertionError(f"record {id} is another one")


def _in_turns(one: Callable[[Any], Any], other: Callable[[Any], Any], ids: Any, batch: int, seconds: float) -> Json:
    """Median samples/s of both, which begin in turns."""
    rng, times = np.random.default_rng(0), ([], [])  # type: tuple[Any, tuple[list[float], list[float]]]
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 10:
        some = rng.permutation(ids)[:batch]
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.perf_counter()
            (one, other)[which](some)
            times[which].append(time.perf_counter() - begun)
        turn += 1
    skip = turn // 10
    return {name: batch / float(np.median(each[skip:])) for name, each in zip(("store", "plain"), times, strict=True)}


def in_server(given: Json) -> Json:
    """The same records out of a server that runs already."""
    found: Json = {}
    hosts = [{"host": "127.0.0.1", "port": given["port"]}]
    with sf.RedisStore(hosts, capacity_per_node="4GiB", timeout=PATIENT) as store:
        for size, count in given["records"].items():
            capacity = count * (int(size) + 4096)
            cache = store.attach(count, capacity=capacity, fingerprint="reads", name=f"reads-{size}")
            fill(cache, np.arange(count), make_noise(int(size)))
            for batch in given["batches"]:
                rate = read(cache.get_many, np.arange(count), batch, int(size), given["seconds"])
                found[f"{size} x {batch}"] = rate
            cache.clear()
            cache.close()
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if given["who"] == "server":
        found: Json = {"given": in_server(given)}
    else:
        with Nodes(2, as_node, given) as nodes:
            found = nodes.results()[0]
    emit(found, stallfree=version("stallfree"), torch=torch.__version__, redis_py=version("redis"))


if __name__ == "__main__":
    main()
