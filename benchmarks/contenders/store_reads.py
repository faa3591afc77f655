"""Samples of a server that is reached by TCP: `RedisStore` reads them, and redis-py reads the same values, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.harness import run_child
from benchmarks.peers import venvs
from benchmarks.store_records import make_noise, make_record, same, time_reads
from benchmarks.store_team import PATIENT, Json, as_record, print_found, read_task, running_server
from stallfree.cache.records import MISS
from stallfree.cache.redis.tier import RedisTier

PEER = "benchmarks.peers.redis_py_bench"


class Data:
    """The records of one size in the server.

    Args:
        store: on the server.
        size: bytes of a record.
        count: number of records.
    """

    def __init__(self, store: sf.RedisStore, size: int, count: int) -> None:
        self.tier: RedisTier = store.attach(count, fingerprint=f"records of {size}", name=f"reads-{size}")
        self.ids, noise = np.arange(count), make_noise(size)
        for id in range(count):
            record = as_record((torch.from_numpy(make_record(noise, id)), id))
            if not self.tier.put_many(self.ids[id : id + 1], [record]).all():
                raise AssertionError(f"record {id} was not stored")
        self.records = {"prefix": self.tier._prefix.decode(), "ids": self.ids.tolist(), "length": len(record)}
        for id in range(count):
            ((value, label),) = self.tier.get_many(self.ids[id : id + 1])
            if label != id or not same(value.numpy(), noise, id):
                raise AssertionError(f"record {id} is another one")

    def rate(self, batch: int, seconds: float) -> float:
        """Samples/s of batches."""

        def read(ids: list[int]) -> list[Any]:
            values = self.tier.get_many(np.array(ids))
            if any(value is MISS for value in values):
                raise AssertionError("a record is missing")
            return values

        return time_reads(read, self.ids.tolist(), batch, seconds)


def main() -> None:
    given = read_task()
    torch.set_num_threads(1)
    versions: dict[str, str] = {}
    with running_server() as address, sf.RedisStore([address], timeout=PATIENT) as store:
        data = {size: Data(store, int(size), count) for size, count in given["records"].items()}
        common = {"tcp": address, "records": {size: one.records for size, one in data.items()}}

        def peer(run: Json, passes: int, seconds: float) -> Any:
            """Samples/s of redis-py; with `passes`, of each of its settings."""
            params = {**common, "seconds": seconds, "runs": [run], "passes": passes}
            result = run_child(PEER, params, scratch=Path("/nonexistent"), python=venvs.python_of("redis"))
            versions.update(result["versions"])
            return result["found"][0]

        cells = [(size, batch) for size in data for batch in given["batches"]]
        ways = ("checked", "bare") if given["peer"] else ()
        runs = {(*cell, way): {"size": cell[0], "batch": cell[1], "way": way} for cell in cells for way in ways}
        tried = {cell: peer(run, given["passes"], min(0.3, given["seconds"])) for cell, run in runs.items()}
        best = {cell: max(rates, key=rates.__getitem__) for cell, rates in tried.items()}
        rounds = []
        for number in range(given["rounds"]):
            found: Json = {}
            for size, batch in cells:
                turns = ["ours", *ways]
                for way in turns[number % len(turns) :] + turns[: number % len(turns)]:
                    name = f"{size} x {batch} {way}"
                    if way == "ours":
                        found[name] = data[size].rate(batch, given["seconds"])
                    else:
                        run = {**runs[size, batch, way], "setting": best[size, batch, way]}
                        found[name] = peer(run, 0, given["seconds"])
            rounds.append(found)
    settings = {f"{size} x {batch} {way}": setting for (size, batch, way), setting in best.items()}
    print_found({"rounds": rounds, "best": settings}, **versions)


if __name__ == "__main__":
    main()
