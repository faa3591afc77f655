"""redis-py with hiredis: batches of records by plain MGET, and `numpy.frombuffer` of each value."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import redis
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.contender import emit
from benchmarks.store_records import WARM, make_noise, make_record, same

Json = dict[str, Any]

SETTINGS: dict[str, Json] = {
    f"protocol {protocol}, socket_read_size={size >> 10} KiB": {"protocol": protocol, "socket_read_size": size}
    for protocol in (2, 3)
    for size in (64 << 10, 256 << 10, 1 << 20)
}


def connect(given: Json, setting: str) -> Any:
    if not HIREDIS_AVAILABLE:
        raise RuntimeError("redis-py does not find hiredis")
    return redis.Redis(host="127.0.0.1", port=given["port"], **SETTINGS[setting])


def key(size: str, id: int) -> str:
    return f"record:{size}:{id}"


def fill(given: Json) -> None:
    """Store all records."""
    client = connect(given, next(iter(SETTINGS)))
    for size, count in given["records"].items():
        noise = make_noise(int(size))
        for id in range(count):
            client.set(key(size, id), make_record(noise, id).tobytes())


def measure(given: Json, size: str, batch: int, setting: str, seconds: float) -> float:
    """Samples/s, batch after batch, another order each time; the first batches are not counted."""
    client = connect(given, setting)
    rng, noise, records = np.random.default_rng(batch), make_noise(int(size)), given["records"][size]
    keys = [key(size, id) for id in range(records)]
    get_many: Callable[[Any], list[Any]] = lambda ids: [  # noqa: E731
        np.frombuffer(value, np.uint8) for value in client.mget([keys[id] for id in ids])
    ]
    some = rng.permutation(records)[:batch].tolist()
    for id, value in zip(some, get_many(some), strict=True):
        if not same(value, noise, id):
            raise AssertionError(f"record {id} is another one")
    count, order, at = 0, rng.permutation(records), 0
    begun, warm = time.perf_counter(), False
    while (now := time.perf_counter()) < begun + seconds or not warm:
        if not warm and count >= WARM * batch and now > begun + seconds / 10:
            begun, count, warm = now, 0, True
        if at + batch > len(order):
            order, at = rng.permutation(records), 0
        values = get_many(order[at : at + batch])
        at += batch
        count += len(values)
    taken = time.perf_counter() - begun
    client.close()
    return count / taken


def main() -> None:
    given = json.loads(sys.argv[1])
    found: Json = {}
    cells = [(size, batch) for size in given["records"] for batch in given["batches"]]
    if given["who"] == "fill":
        fill(given)
    elif given["who"] == "tune":
        for size, batch in cells:
            rates = {name: measure(given, size, batch, name, given["seconds"]) for name in SETTINGS}
            found[f"{size} x {batch}"] = rates
    else:
        for size, batch in cells:
            cell = f"{size} x {batch}"
            found[cell] = measure(given, size, batch, given["settings"][cell], given["seconds"])
    emit({"found": found}, redis_py=version("redis"), hiredis=version("hiredis"), numpy=np.__version__)


if __name__ == "__main__":
    main()
