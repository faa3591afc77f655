"""redis-py with hiredis: MGET of batches, alone and followed by checksum and copy.

It reads the values that a `RedisStore` has stored, from the same server.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
from importlib.metadata import version
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


SETTINGS = {
    f"protocol {protocol}, socket_read_size={size >> 10} KiB": {"protocol": protocol, "socket_read_size": size}
    for protocol in (2, 3)
    for size in SIZES
}


class Reader:
    """A client for the records of one size.

    Args:
        server: "host", "port" and "password".
        records: "prefix" of the keys, "ids" and "length" of a record.
        batch: samples of a batch.
        setting: a key of `SETTINGS`.
    """

    def __init__(self, server: Json, records: Json, batch: int, setting: str) -> None:
        self._client = redis.Redis(**server, **SETTINGS[setting])
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


def measure(given: Json, run: Json) -> float:
    """Samples/s of a run."""
    records = given["records"][run["size"]]
    reader = Reader(given["tcp"], records, run["batch"], run["setting"])
    reader.checked(records["ids"][: run["batch"]])
    return time_reads(getattr(reader, run["way"]), records["ids"], run["batch"], given["seconds"])


def tune(given: Json, run: Json) -> dict[str, float]:
    """The median samples/s of each setting, in turns."""
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(given["passes"]):
        for name in SETTINGS:
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
