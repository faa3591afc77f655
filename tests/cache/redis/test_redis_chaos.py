"""Everything at once: readers, forked and killed, of two data sets of one name, while their servers are maltreated."""

import contextlib
import json
import os
import random
import threading
import time
from collections import Counter
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import redis

import stallfree as sf
from children import Child
from loader_data import Made
from redis_servers import Server, needs_server, until
from redis_tiers import admin, sample
from stallfree.ipc.folders import default_root

NUM = 1000
BATCH = 64


@needs_server
@pytest.mark.parametrize("reads", [4_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_no_sample_is_ever_wrong(reads: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(tmp_path)) for _ in range(2)]
        hosts = [server.host for server in servers]
        readers = [Child(read, number, tmp_path, hosts, reads // 2) for number in range(2)]
        over, harmed = threading.Event(), Counter[str]()
        harm = threading.Thread(target=maltreat, args=(servers, tmp_path, over, harmed))
        harm.start()
        try:
            ended = [os.waitpid(reader.pid, 0)[1] for reader in readers]
        finally:
            over.set()
            harm.join()
    assert ended == [0, 0]
    done = sum((Counter(json.loads((tmp_path / f"done{number}").read_text())) for number in range(2)), Counter[str]())
    assert done["reads"] >= reads
    assert min(done[kind] for kind in ("tier_hits", "misses", "forked", "killed")) > 0
    assert min(harmed[kind] for kind in KINDS) > 0


def read(number: int, folder: Path, hosts: list[dict[str, object]], reads: int) -> None:
    """Be a node that reads both data sets, one of them with memory in front, until all harm was done."""
    chance, done, helpers = random.Random(number), Counter[str](), list[Child]()
    os.environ["STALLFREE_ROOT"] = str(folder / f"node{number}")
    default_root().mkdir(0o700, parents=True)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(sf.RedisStore(hosts, timeout=0.5))
        sets = list[sf.CachedDataset]()
        for salt, capacity in enumerate((0, "600KB")):
            data = sf.mark_deterministic(Made(NUM, partial(sample, salt=salt)))
            cached = sf.CachedDataset(data, capacity=capacity, store=store, name=f"chaos{salt}")
            sets.append(stack.enter_context(cached))
        (folder / f"ready{number}").touch()
        while done["reads"] < reads or not (folder / "enough").exists() or min(done["forked"], done["killed"]) == 0:
            read_some(sets, chance)
            done["reads"] += BATCH
            step = chance.randrange(100)
            if step < 3:
                helpers.append(Child(read_some, sets, random.Random(chance.random()), 20))
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


def read_some(sets: list[sf.CachedDataset], chance: random.Random, times: int = 1) -> None:
    for _ in range(times):
        salt, ids = chance.randrange(2), [chance.randrange(NUM) for _ in range(BATCH)]
        for id, (array, label) in zip(ids, sets[salt].__getitems__(ids), strict=True):
            assert label == id
            assert np.array_equal(array, sample(id, salt)[0])
            array[:] = -1  # it is the reader's own


KINDS = ("kill", "freeze", "flush", "flip", "cut", "swap", "disconnect", "fill")


def maltreat(servers: list[Server], folder: Path, over: threading.Event, harmed: Counter[str]) -> None:
    """Do harm to servers, in one way after the other, and count it, until it is over."""
    chance = random.Random(5)
    until(lambda: over.is_set() or all((folder / f"ready{number}").exists() for number in range(2)), "readers read")
    for kind in cycle(KINDS):
        if over.wait(chance.uniform(0.0, 0.2)):
            return
        harmed[kind] += do_harm(kind, chance.choice(servers), chance)
        if min(harmed[kind] for kind in KINDS) > 0:
            (folder / "enough").touch()


def do_harm(kind: str, server: Server, chance: random.Random) -> int:
    """Do harm to a server; how often."""
    seconds = chance.uniform(0.0, 1.0)
    if kind in ("kill", "freeze"):
        server.kill() if kind == "kill" else server.freeze()
        time.sleep(seconds)
        server.start() if kind == "kill" else server.thaw()
        return 1
    with admin(server) as client:
        if kind == "flush":
            client.flushall()
        elif kind == "disconnect":
            client.client_kill_filter(_type="normal", skipme=True)
        elif kind == "fill":
            client.config_set("maxmemory", 1)
            time.sleep(seconds / 2)
            client.config_set("maxmemory", 0)
        else:
            return change(client, kind, chance)
    return 1


def change(client: redis.Redis, kind: str, chance: random.Random) -> int:
    """Change a quarter of the values; how many. Some get those of other samples and of the other data set."""
    number, before = 0, b""
    keys = client.keys("stallfree:*")
    for key in chance.sample(keys, len(keys) // 4):
        if value := client.get(key):
            changed, bit = bytearray(value), chance.randrange(8 * len(value))
            changed[bit // 8] ^= 1 << bit % 8
            client.set(key, {"flip": bytes(changed), "cut": value[: bit // 8], "swap": before or value}[kind])
            number, before = number + 1, value
    return number
