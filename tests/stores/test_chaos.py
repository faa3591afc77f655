"""Everything at once: readers, forked and killed, of two data sets of one name, while their servers are maltreated."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis_tools import client, node, sample

import stallfree as sf
from children import Child
from redis_servers import Server, needs_server

pytestmark = needs_server

NUM = 1000
BATCH = 64


class Samples(torch.utils.data.Dataset):
    """One of the data sets."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, id: int) -> tuple[np.ndarray, int]:
        return sample(id, self.salt)


@pytest.mark.parametrize("reads", [4_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_no_sample_is_ever_wrong(reads: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(2):
            (tmp_path / f"server{number}").mkdir()
            servers.append(stack.enter_context(Server(tmp_path / f"server{number}")))
        readers = [
            Child(read, number, tmp_path, [server.port for server in servers], reads // 2) for number in range(2)
        ]
        harm = Harm(servers, tmp_path)
        try:
            ended = [os.waitpid(reader.pid, 0)[1] for reader in readers]
        finally:
            harm.end()
    assert ended == [0, 0]
    done = Counter(json.loads((tmp_path / "done0").read_text())) + Counter(json.loads((tmp_path / "done1").read_text()))
    assert done["reads"] >= reads
    assert min(done[kind] for kind in ("hits", "misses", "damaged", "forked", "killed")) > 0
    assert min(harm.done[kind] for kind in Harm.KINDS) > 0


# --- readers --------------------------------------------------------------------------------------------------------


def read(number: int, folder: Path, ports: list[int], reads: int) -> None:
    """Be a node that reads both data sets, one of them with memory in front, until all harm was done and met."""
    chance, done = random.Random(number), Counter[str]()
    hosts = [{"host": "127.0.0.1", "port": port} for port in ports]
    with node(folder / f"node{number}"), contextlib.ExitStack() as stack:
        store = stack.enter_context(sf.RedisStore(hosts=hosts, timeout=0.5))
        sets = [
            stack.enter_context(sf.CachedDataset(Samples(salt), capacity=room, store=store, name="chaos"))
            for salt, room in enumerate((0, "600KB"))
        ]
        (folder / f"ready{number}").touch()
        helpers: list[Child] = []
        while done["reads"] < reads or not (folder / "enough").exists() or not met(sets, done):
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
                chance.choice(sets).cache.drop(chance.sample(range(NUM), 100))
            if len(helpers) > 3:
                assert os.waitpid(helpers.pop(0).pid, 0)[1] == 0
        for helper in helpers:
            assert os.waitpid(helper.pid, 0)[1] == 0
        for dataset in sets:
            stats = dataset.cache.servers.stats()
            done.update(hits=stats.hits, misses=stats.misses, damaged=stats.damaged)
    (folder / f"done{number}").write_text(json.dumps(done))


def met(sets: list[sf.CachedDataset], done: Counter[str]) -> bool:
    """Whether all that is to happen to a reader has happened."""
    stats = [dataset.cache.servers.stats() for dataset in sets]
    seen = (sum(getattr(one, kind) for one in stats) for kind in ("hits", "misses", "damaged"))
    return min(*seen, done["forked"], done["killed"]) > 0


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


# --- harm -----------------------------------------------------------------------------------------------------------


class Harm:
    """A thread that maltreats servers, in one way after the other.

    Attributes:
        done: how often each was done.
    """

    KINDS = ("kill", "freeze", "flush", "flip", "cut", "swap", "disconnect", "fill")

    def __init__(self, servers: list[Server], folder: Path) -> None:
        self.done: Counter[str] = Counter()
        self._servers, self._folder = servers, folder
        self._chance, self._over = random.Random(5), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not all((self._folder / f"ready{number}").exists() for number in range(2)):
            if self._over.wait(0.01):
                return
        for kind in cycle(self.KINDS):
            if self._over.wait(self._chance.uniform(0.0, 0.3)):
                return
            getattr(self, f"_{kind}")(self._chance.choice(self._servers))
            if min(self.done[kind] for kind in self.KINDS) > 0:
                (self._folder / "enough").touch()

    def _kill(self, server: Server) -> None:
        server.kill()
        self._over.wait(self._chance.uniform(0.0, 1.0))
        server.start()
        self.done["kill"] += 1

    def _freeze(self, server: Server) -> None:
        server.freeze()
        self._over.wait(self._chance.uniform(0.0, 1.5))
        server.thaw()
        self.done["freeze"] += 1

    def _flush(self, server: Server) -> None:
        with client(server) as there:
            there.flushall()
        self.done["flush"] += 1

    def _flip(self, server: Server) -> None:
        self._change(server, "flip", lambda value: flipped(value, self._chance))

    def _cut(self, server: Server) -> None:
        self._change(server, "cut", lambda value: value[: self._chance.randrange(len(value))])

    def _swap(self, server: Server) -> None:
        """Give some keys the values of other samples and of the other data set."""
        with client(server) as there:
            keys = there.keys("stallfree:*")
            for key in self._chance.sample(keys, len(keys) // 4):
                value = there.get(self._chance.choice(keys))
                if value is not None:
                    there.set(key, value)
                    self.done["swap"] += 1

    def _disconnect(self, server: Server) -> None:
        with client(server) as there:
            there.client_kill_filter(_type="normal", skipme=True)
        self.done["disconnect"] += 1

    def _fill(self, server: Server) -> None:
        with client(server) as there:
            there.config_set("maxmemory", 1)
            self._over.wait(self._chance.uniform(0.0, 0.5))
            there.config_set("maxmemory", 0)
        self.done["fill"] += 1

    def _change(self, server: Server, kind: str, change: Any) -> None:
        with client(server) as there:
            keys = there.keys("stallfree:*")
            for key in self._chance.sample(keys, len(keys) // 4):
                value = there.get(key)
                if value:
                    there.set(key, change(value))
                    self.done[kind] += 1


def flipped(value: bytes, chance: random.Random) -> bytes:
    """`value` with one other bit."""
    at = chance.randrange(8 * len(value))
    changed = bytearray(value)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)
