"""redis-py with hiredis: MGET of batches, alone and followed by checksum and copy, in one process or several.

It reads the values that a `RedisStore` has stored, from the same server.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import numpy as np
import redis
import xxhash
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.contender import emit
from benchmarks.store_records import time_reads

Json = dict[str, Any]

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
HEADER = 64
"""Bytes before the record; the first 8 are its checksum."""

_MEET_SECONDS = 60.0


def settings(path: str) -> dict[str, Json]:
    """The settings of a client: for TCP, or for a Unix socket."""
    return {
        f"protocol {protocol}, socket_read_size={size >> 10} KiB": {"protocol": protocol, "socket_read_size": size}
        for protocol in ((2,) if path else (2, 3))
        for size in SIZES
    }


class Reader:
    """A client for the records of one size.

    Args:
        server: "password", and "path" or "host" and "port".
        records: "prefix" of the keys, "ids" and "length" of a record.
        batch: samples of a batch.
        setting: a key of `settings`.
    """

    def __init__(self, server: Json, records: Json, batch: int, setting: str) -> None:
        path = server.get("path", "")
        where = {"unix_socket_path": path} if path else {"host": server["host"], "port": server["port"]}
        self._client = redis.Redis(**where, password=server["password"], **settings(path)[setting])
        self._keys = {id: f"{records['prefix']}{id}" for id in records["ids"]}
        self._rows = np.zeros((batch, records["length"]), np.uint8)

    def bare(self, ids: list[int]) -> list[Any]:
        """The values of `ids`."""
        found: list[Any] = self._client.mget([self._keys[id] for id in ids])
        return found

    def checked(self, ids: list[int]) -> Any:
        """The records of `ids`, whose checksums are correct, in standing memory."""
        rows = self._rows
        for row, id, value in zip(rows, ids, self.bare(ids), strict=False):
            record = np.frombuffer(value, np.uint8, offset=HEADER)
            if struct.unpack_from("<Q", value)[0] != xxhash.xxh3_64_intdigest(record, id):
                raise AssertionError(f"the checksum of record {id} is wrong")
            row[:] = record
        return rows


_gate: Any = None


def in_one(given: Json, run: Json, seconds: float) -> float:
    """Samples/s of this process."""
    records = given["records"][run["size"]]
    reader = Reader(given["unix" if run.get("unix") else "tcp"], records, run["batch"], run["setting"])
    reader.checked(records["ids"][: run["batch"]])
    if _gate is not None:
        _gate.wait(_MEET_SECONDS)
    return time_reads(getattr(reader, run["way"]), records["ids"], run["batch"], seconds)


def measure(given: Json, run: Json) -> float:
    """Samples/s of all processes of a run."""
    global _gate
    count = run["processes"]
    if count == 1:
        return in_one(given, run, given["seconds"])
    context = get_context("fork")
    _gate = context.Barrier(count)
    try:
        with ProcessPoolExecutor(count, mp_context=context) as pool:
            return sum(pool.map(in_one, [given] * count, [run] * count, [given["seconds"]] * count))
    finally:
        _gate = None


def tune(given: Json, run: Json) -> dict[str, float]:
    """The median samples/s of each setting, in turns."""
    names = settings("path" if run.get("unix") else "")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(given["passes"]):
        for name in names:
            found[name].append(measure(given, run | {"setting": name}))
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    given = json.loads(sys.argv[1])
    if not HIREDIS_AVAILABLE:
        raise RuntimeError("redis-py does not find hiredis")
    found = [tune(given, run) if given["passes"] else measure(given, run) for run in given["runs"]]
    emit(
        {"found": found},
        redis_py=version("redis"),
        hiredis=version("hiredis"),
        numpy=np.__version__,
        xxhash=version("xxhash"),
    )


if __name__ == "__main__":
    main()
