"""redis-py with hiredis: MGET of batches that a `RedisStore` has stored, alone and followed by checksum and copy.

It runs in the environment of stallfree, which uses redis-py itself.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import redis
import xxhash
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.timing import read_rate

HEADER = 64
"""Bytes before the record; the first 8 are its checksum."""

SETTINGS = {
    f"protocol {protocol}, socket_read_size={size} KiB": {"protocol": protocol, "socket_read_size": size << 10}
    for protocol in (2, 3)
    for size in (64, 256, 1024, 4096)
}


def read(server: dict[str, Any], count: int, batch: int, checked: bool, seconds: float, setting: str) -> dict[str, Any]:
    """Samples/s with a setting; without one, the fastest setting."""
    if not HIREDIS_AVAILABLE:
        raise RuntimeError("redis-py does not find hiredis")
    if setting:
        return {"rate": measure(server, count, batch, checked, seconds, setting)}
    tried = {name: measure(server, count, batch, checked, min(0.3, seconds), name) for name in SETTINGS}
    return {"setting": max(tried, key=lambda name: tried[name]), "tried": len(tried)}


def measure(server: dict[str, Any], count: int, batch: int, checked: bool, seconds: float, setting: str) -> float:
    client = redis.Redis(**server, **SETTINGS[setting])
    (first,) = client.keys("stallfree:*:0")
    keys = {id: first[:-1] + str(id).encode() for id in range(count)}
    rows = np.zeros((batch, client.strlen(first) - HEADER), np.uint8)

    def bare(ids: list[int]) -> Any:
        return client.mget([keys[id] for id in ids])

    def with_checksum(ids: list[int]) -> Any:
        for row, id, value in zip(rows, ids, bare(ids), strict=False):
            record = np.frombuffer(value, np.uint8, offset=HEADER)
            if struct.unpack_from("<Q", value)[0] != xxhash.xxh3_64_intdigest(record, id):
                raise AssertionError(f"the checksum of record {id} is wrong")
            row[:] = record
        return rows

    with_checksum(list(range(batch)))
    return read_rate(with_checksum if checked else bare, count, batch, seconds)
