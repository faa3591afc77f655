"""Growth on paper: what a job of 10^9 samples on 1,000 nodes would take, computed from constants measured here.

`python -m benchmarks.scale` renders `docs/scale.md` from `benchmarks/results/scale.json`.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DistributedSampler

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import RESULTS, ROOT, Json, Options, Report, between, run_child, say, scratch_folder, table
from benchmarks.shared_team import Meet
from benchmarks.store_records import make_noise, make_record, time_reads
from benchmarks.store_team import Nodes, as_record, running_server
from stallfree.analysis.model import Loading, Rates, law, sustained
from stallfree.cache.layout import index_bytes
from stallfree.cache.redis.tier import owners
from stallfree.datasets.cached_dataset import local_shares
from stallfree.datasets.epoch_source import make_plan
from stallfree.datasets.ranks import deal
from stallfree.ipc.shared_array import SharedCounts

KEEPS_RAW = True
NAME = "scale"
QUESTION = (
    "What does stallfree take per sample, per node and per request, in memory and in time? The constants of [Growth on "
    "paper](scale.md)."
)
MODULE = "benchmarks.scale"
SITE = ROOT / "docs" / "scale.md"

STEPS = ((10**6, 10), (10**8, 100), (10**9, 1000))
"""Samples and nodes of the tables."""
RECORD = 110_000
RANKS, WORKERS, BATCH = 8, 8, 256
"""Ranks per node, workers per rank and samples per batch, as in `docs/howto/nodes.md`."""
ROOM = 120 << 30
"""Bytes of a node's server."""
STORAGE = 100e9
"""Bytes per second of the storage, for all nodes together."""
COMPUTE = 20_000
"""Samples per second of the accelerators of a node."""
JOBS = 100
PER_SERVER = 2
"""Connections of a worker to each server: one to read, one to write."""
_SEED = 1
_KEYS = (1, 4, 16, 64)


# -- measuring --------------------------------------------------------------------------------------------------------


def run(options: Options) -> Report:
    count = 10**6 if options.quick else 10**7
    raw: Json = {}
    tasks: list[tuple[str, Json]] = [
        *((what, {"ids": count}) for what in ("state", "order", "distributed", "local", "counts")),
        ("owners", {"ids": 1 << 17 if options.quick else 1 << 20, "nodes": [10, 40]}),
        ("requests", {"samples": 256 if options.quick else 1024, "seconds": options.seconds / 3}),
        ("messages", {"nodes": 1000, "seconds": options.seconds / 3}),
    ]
    for what, params in tasks:
        say(f"  {what}")
        with scratch_folder() as scratch:
            raw[what] = run_child(MODULE, {"what": what, **params}, scratch=scratch)
        versions = raw[what].pop("versions")
    return Report(
        columns=["what", "found"],
        rows=_rows(raw),
        notes=[
            f"Memory is the growth of the largest resident size, {count:,} ids in a fresh process each; of the shared "
            "state, the size of its files. The owners are computed for 10 and for 40 nodes; the figure is that of 40. "
            "Requests: `get_many` of 110 KB samples from one server of this host, one process; a line through "
            f"{', '.join(map(str, _KEYS[:-1]))} and {_KEYS[-1]} keys gives the two parts, and the processor time of "
            "the server its own two. Messages: four clients at once ask one `TCPStore` on this host."
        ],
        versions=versions,
        raw=raw,
    )


def _rows(found: Json) -> list[list[str]]:
    each = [
        ["shared state of a data set in servers, bytes per sample and node", f"{found['state']['bytes']:.1f}"],
        ["counts of a `CachedDataset`, bytes per sample and rank", f"{found['counts']['bytes']:.1f}"],
    ]
    for what, words in (
        ("order", "order of an epoch, `ranks=`"),
        ("distributed", "order of an epoch, `DistributedSampler` of torch"),
        ("local", "order of an epoch, `LocalSampler`"),
    ):
        one = found[what]
        each.append([f"{words}: bytes per sample and rank, peak", f"{one['peak']:.1f}"])
        each.append([f"{words}: bytes per sample and rank, held during the epoch", f"{one['held']:.1f}"])
        each.append([f"{words}: ns per sample", f"{one['seconds'] * 1e9:.1f}"])
    each.append(["owner of a sample: ns per sample and node", f"{found['owners']['seconds'] * 1e9:.2f}"])
    for what, words in (("client", "process that reads"), ("server", "server")):
        fixed, value = found["requests"][what]
        each.append([f"{words}: µs per request, and per sample in it", f"{fixed * 1e6:.0f} and {value * 1e6:.0f}"])
    for what, seconds in found["messages"].items():
        each.append([f"one `TCPStore`, `{what}`: µs", f"{seconds * 1e6:.1f}"])
    return each


def child() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    work: dict[str, Callable[[Json], Json]] = {
        "state": _state,
        "counts": _counts,
        "order": _order,
        "distributed": _distributed,
        "local": _local,
        "owners": _owners,
        "requests": _requests,
        "messages": _messages,
    }
    emit(work[given["what"]](given), stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


def _state(given: Json) -> Json:
    with (
        sf.RedisStore(capacity_per_node="64MiB") as store,
        sf.CachedDataset(range(given["ids"]), capacity=0, store=store, name="scale") as cached,  # type: ignore[arg-type]
    ):
        return {"bytes": (cached.cache.path / "tier").stat().st_size / given["ids"]}


def _counts(given: Json) -> Json:
    return {"bytes": SharedCounts(1 + given["ids"]).array.nbytes / given["ids"]}


def _order(given: Json) -> Json:
    def order(ids: int) -> Any:
        plan = make_plan(ids, shuffle=True, seed=_SEED, epoch=0)
        return deal(plan.ids, 0, STEPS[-1][1] * RANKS, drop_last=False)

    return _grown(order, given["ids"])


def _distributed(given: Json) -> Json:
    def order(ids: int) -> Any:
        return iter(DistributedSampler(range(ids), STEPS[-1][1] * RANKS, 0, seed=_SEED))  # type: ignore[arg-type]

    return _grown(order, given["ids"])


def _local(given: Json) -> Json:
    nodes = STEPS[-1][1]
    owner = np.arange(given["ids"], dtype=np.int64).astype(np.int16) % nodes

    def order(ids: int) -> Any:
        return local_shares(owner[:ids], nodes, RANKS, shuffle=True, seed=_SEED, epoch=0, drop_last=False)[0]

    return _grown(order, given["ids"])


def _grown(order: Callable[[int], Any], ids: int) -> Json:
    """Memory and time of `order(ids)`, per id."""
    order(1000)
    gc.collect()
    before, peak_before = _resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    held = order(ids)
    seconds = time.perf_counter() - start
    after, peak = _resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del held
    return {
        "peak": (peak - max(before, peak_before)) / ids,
        "held": max(0, after - before) / ids,
        "seconds": seconds / ids,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _owners(given: Json) -> Json:
    each = []
    for nodes in given["nodes"]:
        names = [f"node-{number}" for number in range(nodes)]
        owners(1000, names)
        start = time.perf_counter()
        owners(given["ids"], names)
        each.append((time.perf_counter() - start) / given["ids"] / nodes)
    return {"seconds": each[-1], "of_each": each}


def _requests(given: Json) -> Json:
    count, noise = given["samples"], make_noise(RECORD)
    with running_server() as address, sf.RedisStore([address], timeout=5.0) as store:
        tier, ids = store.attach(count, fingerprint="scale", name="scale"), np.arange(count)
        for id in range(count):
            if not tier.put_many(ids[id : id + 1], [as_record(torch.from_numpy(make_record(noise, id)))]).all():
                raise AssertionError("not all samples were stored")
        client, server = [], []
        with redis.Redis(**address) as asking:

            def used() -> float:
                cpu: Any = asking.info("cpu")
                return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

            for keys in _KEYS:
                calls = 0

                def read(some: list[int]) -> Any:
                    nonlocal calls
                    calls += 1
                    return tier.get_many(np.array(some))

                before = used()
                rate = time_reads(read, ids.tolist(), keys, given["seconds"])
                client.append(keys / rate)
                server.append((used() - before) / calls)
    return {"keys": _KEYS, "client": _line(client), "server": _line(server), "calls": [client, server]}


def _line(seconds: list[float]) -> list[float]:
    """Seconds per request and per key, of requests of `_KEYS` keys."""
    slope, constant = np.polyfit(_KEYS, seconds, 1, w=1 / np.array(seconds))
    return [max(0.0, float(constant)), float(slope)]


def _messages(given: Json) -> Json:
    with Nodes(4, _ask, given["nodes"], given["seconds"]) as clients:
        each = clients.results()
    return {what: 1 / sum(one[what] for one in each) for what in each[0]}


def _ask(number: int, meet: Meet, nodes: int, seconds: float) -> Json:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    keys = [f"stallfree/{nodes}/train/{node}" for node in range(nodes)]
    if number == 0:
        for key in keys:
            store.set(key, json.dumps({"version": 3, "host": "node-0123", "id": os.urandom(16).hex()}))
    ways: dict[str, Callable[[], Any]] = {
        "add": lambda: store.add(f"count-{number}", 1),
        "check of 1,000 keys": lambda: store.check(keys),
        "multi_get of 1,000 keys": lambda: store.multi_get(keys),
    }
    found = {}
    for what, ask in ways.items():
        meet()
        asked, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            ask()
            asked += 1
        found[what] = asked / (time.perf_counter() - start)
    meet()
    return found


# -- computing --------------------------------------------------------------------------------------------------------


def memory(found: Json) -> list[list[str]]:
    """Bytes per node for each of `STEPS`."""

    def row(words: str, size: Callable[[int], float]) -> list[str]:
        return [words, *(_size(size(samples)) for samples, _ in STEPS)]

    return [
        row("index of the cache in memory (12 bytes per sample, whatever the capacity)", _index),
        row("shared state of the servers' data set", lambda samples: found["state"]["bytes"] * samples),
        row(f"counts of `CachedDataset`, {RANKS} ranks", lambda samples: RANKS * found["counts"]["bytes"] * samples),
        *(
            row(f"{words}, {RANKS} ranks, peak", lambda samples, what=what: RANKS * found[what]["peak"] * samples)  # type: ignore[misc]
            for what, words in _ORDERS
        ),
    ]


_ORDERS = (
    ("order", 'order of an epoch, `ranks="auto"`'),
    ("distributed", "order of an epoch, `DistributedSampler`"),
    ("local", "order of an epoch, `LocalSampler`"),
)


def _index(samples: int) -> int:
    return index_bytes(samples, 0, scored=False, checked=False)


def seconds(found: Json) -> list[list[str]]:
    """Seconds before the first batch of an epoch, for each of `STEPS`."""
    rows = [
        [f"{words}, in each epoch", *(_time(found[what]["seconds"] * samples) for samples, _ in STEPS)]
        for what, words in _ORDERS
    ]
    owner = found["owners"]["seconds"]
    return [
        ["owners of all samples, once per job", *(_time(owner * samples * nodes) for samples, nodes in STEPS)],
        *rows,
    ]


def connections(found: Json) -> list[list[str]]:
    """Connections and messages for each of `STEPS`."""
    servers = [nodes for _, nodes in STEPS]
    batches = [samples / BATCH for samples, _ in STEPS]
    touched = [_touched(nodes) for nodes in servers]
    return [
        ["open connections of one worker, at most", *(f"{PER_SERVER * nodes:,}" for nodes in servers)],
        [
            "clients of one server, at most",
            *(f"{PER_SERVER * nodes * RANKS * WORKERS:,}" for nodes in servers),
        ],
        ["requests per batch of 256, random shares", *(f"{each:.0f}" for each in touched)],
        ["samples per request, random shares", *(f"{BATCH / each:.1f}" for each in touched)],
        [
            "requests per epoch, random shares",
            *(f"{each * count:.2g}" for each, count in zip(touched, batches, strict=True)),
        ],
        ["requests per epoch, `LocalSampler`", *(f"{count:.2g}" for count in batches)],
        [
            "messages to the job's one `TCPStore` until all servers are known",
            *(f"{_start_messages(nodes):.2g}" for nodes in servers),
        ],
        ["seconds of the `TCPStore` for them", *(_time(_start_seconds(found, nodes)) for nodes in servers)],
    ]


def _touched(nodes: int) -> float:
    """Servers that own some sample of a batch, in the mean."""
    return nodes * (1 - (1 - 1 / nodes) ** BATCH)


def _start_messages(nodes: int) -> float:
    """Each process checks and reads the names of all nodes; each node asks for each other one's address, twice."""
    return 2 * nodes * RANKS + 2 * nodes * (nodes - 1)


def _start_seconds(found: Json, nodes: int) -> float:
    each = found["messages"]
    names = (each["check of 1,000 keys"] + each["multi_get of 1,000 keys"]) * nodes / 1000
    return float(nodes * RANKS * names + 2 * nodes * (nodes - 1) * each["add"])


def epochs(found: Json) -> list[list[str]]:
    """Rates and times of an epoch of 10^9 samples, by the model of `stallfree.analysis`."""
    samples, nodes = STEPS[-1]
    small = nodes // JOBS
    prep = RANKS * WORKERS * _encoded_rate()
    few = min(1.0, small * ROOM / (samples * RECORD))
    cases = [
        (f"one job on {nodes:,} nodes, first epoch", nodes, 0.0, BATCH),
        (f"one job on {nodes:,} nodes, servers hold all, random shares", nodes, 1.0, BATCH / _touched(nodes)),
        (f"one job on {nodes:,} nodes, servers hold all, `LocalSampler`", nodes, 1.0, BATCH),
        (f"{JOBS} jobs of {small} nodes, each with its own servers ({few:.1%} of the data)", small, few, BATCH / small),
        (f"{JOBS} jobs of {small} nodes, `hosts=` of all {nodes:,} servers", small, 1.0, BATCH / _touched(nodes)),
    ]
    rows = []
    for words, size, hits, keys in cases:
        rates = Rates(
            compute=COMPUTE,
            prep=prep,
            prep_hit=prep,
            storage=STORAGE / RECORD / nodes,
            cache=_served(found, keys),
        )
        loading = Loading(BATCH, RANKS * WORKERS, 2 * RANKS * WORKERS, overlap=True)
        rate = sustained(rates, hits, loading)
        jobs = nodes // size
        rows.append(
            [
                words,
                f"{rate:,.0f}",
                law(rates, hits)[1],
                _time(samples / rate / size),
                f"{jobs * samples * RECORD * (1 - hits) / 1e12:,.0f}",
            ]
        )
    return rows


def _served(found: Json, keys: float) -> float:
    """Samples per second of a node from servers, in requests of `keys` samples: workers or a server are the limit."""
    client, server = (fixed / keys + value for fixed, value in (found["requests"][who] for who in ("client", "server")))
    return float(min(RANKS * WORKERS / client, 1 / server))


def _encoded_rate() -> float:
    """Pictures per second that one worker decodes, crops and resizes, of `fast_prep`."""
    rows = json.loads((RESULTS / "fast_prep.json").read_text())["rows"]
    text = next(rate for words, rate, _ in rows if words == "stallfree, encoded pictures in the cache")
    return float(text.split()[0].replace(",", "")) / 2


def _size(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}" if size < 10 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:.0f} KB"


def _time(time: float) -> str:
    for unit, factor in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if time >= factor:
            return f"{time / factor:,.1f} {unit}"
    return f"{time * 1e3:.1f} ms"


# -- the page ---------------------------------------------------------------------------------------------------------


def page(text: str, found: Json) -> str:
    """`text` of the page with the tables that follow from the constants `found`."""
    steps = [f"{samples:,} samples, {nodes:,} nodes" for samples, nodes in STEPS]
    for name, columns, rows in (
        ("memory", ["bytes per node", *steps], memory(found)),
        ("seconds", ["time before the first batch, per rank", *steps], seconds(found)),
        ("connections", ["", *steps], connections(found)),
        (
            "epochs",
            ["", "samples/s per node", "bound by", "time per epoch", "TB from storage, all jobs"],
            epochs(found),
        ),
    ):
        text = between(text, name, table(columns, rows))
    return text


def measured() -> Json:
    """The constants of the last run."""
    found: Json = json.loads((RESULTS / f"{NAME}.json").read_text())["raw"]
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child()
    else:
        SITE.write_text(page(SITE.read_text(), measured()))
