"""Everything at once: readers, forked and killed, of two data sets of one name, while their servers are maltreated."""

import contextlib
import json
import os
import random
import threading
from collections import Counter
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

import stallfree as sf
from children import Child
from redis_servers import Server, needs_server
from redis_tiers import admin, sample
from stallfree.ipc.folders import default_root

NUM = 1000
BATCH = 64


@sf.mark_deterministic
class Samples(torch.utils.data.Dataset[tuple[np.ndarray, int]]):
    """One of the data sets."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, id: int) -> tuple[np.ndarray, int]:
        return sample(id, self.salt)


@needs_server
@pytest.mark.parametrize("reads", [4_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_no_sample_is_ever_wrong(reads: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(2):
            (tmp_path / f"server{number}").mkdir()
            servers.append(stack.enter_context(Server(tmp_path / f"server{number}")))
        hosts = [server.host for server in servers]
        readers = [Child(read, number, tmp_path, hosts, reads // 2) for number in range(2)]
        harm = Harm(servers, tmp_path)
        try:
            ended = [os.waitpid(reader.pid, 0)[1] for reader in readers]
        finally:
            harm.end()
    assert ended == [0, 0]
    done = sum((Counter(json.loads((tmp_path / f"done{number}").read_text())) for number in range(2)), Counter[str]())
    assert done["reads"] >= reads
    assert min(done[kind] for kind in ("tier_hits", "misses", "forked", "killed")) > 0
    assert min(harm.done[kind] for kind in Harm.KINDS) > 0


# -- readers ----------------------------------------------------------------------------------------------------------


def read(number: int, folder: Path, hosts: list[dict[str, object]], reads: int) -> None:
    """Be a node that reads both data sets, one of them with memory in front, until all harm was done."""
    chance, done, helpers = random.Random(number), Counter[str](), list[Child]()
    os.environ["STALLFREE_ROOT"] = str(folder / f"node{number}")
    default_root().mkdir(0o700, parents=True)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(sf.RedisStore(hosts, timeout=0.5))
        sets = [
            stack.enter_context(sf.CachedDataset(Samples(salt), capacity=capacity, store=store, name=f"chaos{salt}"))
            for salt, capacity in enumerate((0, "600KB"))
        ]
        (folder / f"ready{number}").touch()
        while done["reads"] < reads or not (folder / "enough").exists() or min(done["forked"], done["killed"]) == 0:
            read_some(sets, chance)
            done["reads"] += BATCH
            step = chance.randrange(100)
            if step < 3:
                helpers.append(Child(help_reading, sets, chance.random()))
                done["forked"] += 1
            elif step < 5 and helpers:
                helpers.pop(0).kill()
                done["killed"] += 1
            elif step == 5:
                chance.choice(sets).cache.tier.drop(np.array(chance.sample(range(NUM), 100)))
            if len(helpers) > 3:
                assert os.waitpid(helpers.pop(0).pid, 0)[1] == 0
        for helper in helpers:
            assert os.waitpid(helper.pid, 0)[1] == 0
        for dataset in sets:
            done.update(tier_hits=dataset.stats().tier_hits, misses=dataset.stats().misses)
    assert list(default_root().iterdir()) == []
    (folder / f"done{number}").write_text(json.dumps(done))


def help_reading(sets: list[sf.CachedDataset], seed: float) -> None:
    """Be a process that a reader has forked."""
    chance = random.Random(seed)
    for _ in range(20):
        read_some(sets, chance)


def read_some(sets: list[sf.CachedDataset], chance: random.Random) -> None:
    salt = chance.randrange(2)
    ids = [chance.randrange(NUM) for _ in range(BATCH)]
    for id, (array, label) in zip(ids, sets[salt].__getitems__(ids), strict=True):
        assert label == id
        assert np.array_equal(array, sample(id, salt)[0])
        array[:] = -1  # it is the reader's own


# -- harm -------------------------------------------------------------------------------------------------------------


class Harm:
    """A thread that maltreats servers, in one way after the other.

    Attributes:
        done: how often each was done.
    """

    KINDS = ("kill", "freeze", "flush", "flip", "cut", "swap", "disconnect", "fill")

    def __init__(self, servers: list[Server], folder: Path) -> None:
        self.done = Counter[str]()
        self._servers, self._folder = servers, folder
        self._chance, self._over = random.Random(5), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not all((self._folder / f"ready{number}").exists() for number in range(2)):
            if self._over.wait(0.01):
                return
        for kind in cycle(self.KINDS):
            if self._over.wait(self._chance.uniform(0.0, 0.2)):
                return
            self.done[kind] += self._do(kind, self._chance.choice(self._servers))
            if min(self.done[kind] for kind in self.KINDS) > 0:
                (self._folder / "enough").touch()

    def _do(self, kind: str, server: Server) -> int:
        """Do harm to a server; how often."""
        seconds = self._chance.uniform(0.0, 1.0)
        if kind in ("kill", "freeze"):
            server.kill() if kind == "kill" else server.freeze()
            self._over.wait(seconds)
            server.start() if kind == "kill" else server.thaw()
            return 1
        with admin(server) as client:
            if kind == "flush":
                client.flushall()
            elif kind == "disconnect":
                client.client_kill_filter(_type="normal", skipme=True)
            elif kind == "fill":
                client.config_set("maxmemory", 1)
                self._over.wait(seconds / 2)
                client.config_set("maxmemory", 0)
            else:
                return self._change(client, kind)
        return 1

    def _change(self, client: redis.Redis, kind: str) -> int:
        """Change a quarter of the values; how many. Some get those of other samples and of the other data set."""
        number, before = 0, b""
        keys = client.keys("stallfree:*")
        for key in self._chance.sample(keys, len(keys) // 4):
            if value := client.get(key):
                changed, bit = bytearray(value), self._chance.randrange(8 * len(value))
                changed[bit // 8] ^= 1 << bit % 8
                client.set(key, {"flip": bytes(changed), "cut": value[: bit // 8], "swap": before or value}[kind])
                number, before = number + 1, value
        return number
