"""Hits of a store across hosts: out of this node's memory, out of the other node, and out of a given server."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.store_team import free_port
from stallfree.stores.spawn import find_server

NAME = "store_reads"
QUESTION = (
    "How many samples/s does one process get from a store of two nodes, if they are its own node's, if they are the "
    "other node's, and out of a given server; and how many by redis-py from the same server?"
)
OURS = "benchmarks.contenders.store_reads"
PEER = "benchmarks.peers.redis_py_bench"
RECORDS = {"110000": 1024, "600000": 512}
BATCHES = (64, 256)
LOCAL, REMOTE, FALL = 0.7, 2.0, 0.95
"""What is wanted: of a plain cache's local hits, of redis-py's rate, and of a batch of 64 in one of 256."""
WAYS = {"other": "the other node of a store", "given": "given server, `hosts=`", "peer": "redis-py, MGET"}


def run(options: Options) -> Report:
    rounds, seconds = (1, 0.1) if options.quick else (5, 1.0)
    records = dict.fromkeys(RECORDS, 256) if options.quick else RECORDS
    common = {"records": records, "batches": BATCHES, "seconds": seconds}
    reason = venvs.why_missing("redis")
    found: list[Json] = []
    versions: dict[str, str] = {}
    with scratch_folder() as scratch, running_server(scratch) as port:
        common |= {"port": port}
        tried: dict[str, dict[str, float]] = {}
        if not reason:
            _peer(common | {"who": "fill"}, scratch)
            tried = _peer(common | {"who": "tune", "seconds": min(0.5, seconds)}, scratch)["found"]
        settings = {cell: max(rates, key=lambda name: rates[name]) for cell, rates in tried.items()}
        for number in range(rounds):
            nodes = run_child(OURS, common | {"who": "nodes"}, scratch=scratch)
            given = run_child(OURS, common | {"who": "server"}, scratch=scratch)
            each = {"local": nodes["local"], "other": nodes["other"], "given": given["given"]}
            versions |= nodes["versions"]
            if not reason:
                peer = _peer(common | {"who": "read", "settings": settings}, scratch)
                each["peer"] = peer["found"]
                versions |= peer["versions"]
            found.append(each)
            say(f"  round {number + 1}: {_in_words(each)}")
    return _report(found, settings, reason, versions, {"settings": tried, "rounds": found, "records": records})


def _peer(params: Json, scratch: Path) -> Json:
    return run_child(PEER, params, scratch=scratch, python=venvs.python_of("redis"))


def _in_words(each: Json) -> str:
    words = [f"{what} {rates['store'] / rates['plain']:.2f}" for what, rates in each["local"].items()]
    for cell in each["other"]:
        words.append(f"{cell}: " + ", ".join(f"{each[way][cell]:,.0f}" for way in WAYS if way in each))
    return "; ".join(words)


@contextmanager
def running_server(scratch: Path) -> Iterator[int]:
    """A server on a port of the loopback device, with nothing set that would slow it down."""
    port = free_port()
    folder = scratch / "server"
    folder.mkdir()
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    settings += ["--client-output-buffer-limit", "normal 0 0 0"]
    server = subprocess.Popen([find_server(), *settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.kill()
        server.wait()


def _report(
    found: list[Json], settings: dict[str, str], reason: str | None, versions: dict[str, str], raw: Json
) -> Report:
    rows, checks = [], []
    for what in found[0]["local"]:
        store, plain = ([each["local"][what][name] for each in found] for name in ("store", "plain"))
        ratio = _ratio(store, plain)
        rows.append(
            [f"this node's, `{what}`", "110 KB x 64", _rate(store, 110_000), _rate(plain, 110_000), ratio.show(".2f")]
        )
        text = f"local hits, 110 KB, batch 64, `{what}`: samples/s of a store over those of a plain cache"
        checks.append(_checked(text, ratio, LOCAL))
    for cell in found[0]["other"]:
        size, batch = (int(part) for part in cell.split(" x "))
        shown = f"{size // 1000} KB x {batch}"
        peer = [each["peer"][cell] for each in found] if not reason else []
        for way in ("other", "given"):
            rates = [each[way][cell] for each in found]
            cells = [WAYS[way], shown, _rate(rates, size)]
            what = f"remote hits, {size // 1000} KB, batch {batch}, {WAYS[way]}: samples/s over redis-py's MGET"
            if peer:
                rows.append([*cells, _rate(peer, size), _ratio(rates, peer).show(".2f")])
                checks.append(_checked(what, _ratio(rates, peer), REMOTE))
            else:
                rows.append([*cells, str(reason), ""])
                checks.append(Check(what, None, REMOTE, failed=str(reason)))
    for of in RECORDS:
        for way in ("other", "given"):
            small, large = ([each[way][f"{of} x {batch}"] for each in found] for batch in BATCHES)
            text = f"remote hits, {int(of) // 1000} KB, {WAYS[way]}: samples/s with batches of 256 over those with 64"
            checks.append(_checked(text, _ratio(large, small), FALL))
    return Report(
        columns=["hits", "batch", "samples/s (GB/s)", "a plain `SampleCache`; redis-py", "ratio"],
        rows=rows,
        checks=checks,
        notes=_notes(len(found), settings, raw["records"]),
        versions=versions,
        raw=raw,
    )


def _notes(rounds: int, settings: dict[str, str], records: Json) -> list[str]:
    best = "; ".join(f"{cell}: {name}" for cell, name in settings.items()) or "none"
    amount = " and ".join(f"{count:,} of {int(size) // 1000} KB" for size, count in records.items())
    return [
        "Two nodes on one host, with folders, servers and clerks of their own, which meet by TCP on the loopback "
        f"device: both cores are shared by all of them. {amount} per node, another random order each time. A batch is "
        "had when its values are there: for a store with their headers and checksums looked at and their tensors made, "
        "for redis-py `numpy.frombuffer` of what it gives. This node's hits are copied into standing memory (`gather`) "
        "or given as values (`get_many`), in turns with a plain `SampleCache` that holds the same, batch by batch, "
        f"median. The others are in turns in fresh processes, {rounds} rounds, samples over time, the first 4 batches "
        "and a tenth of the time not counted; median (lowest to highest).",
        "A given server, and redis-py: one server on a port of the loopback device, which holds the values under plain "
        f"keys. redis-py with hiredis; its best setting for each batch, tried before the rounds: {best}. The batch "
        "before is still held when the next one is asked for, as in a loop over batches. That is in favour of "
        "redis-py: when it is dropped first, the memory of every reply is asked of the kernel anew, and it is slower.",
        f"No fall from batch 64 to 256: {FALL:.2f} is asked, since rounds differ by that much.",
    ]


def _ratio(ours: list[float], theirs: list[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def _checked(text: str, ratio: Spread, wanted: float) -> Check:
    return Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high))


def _rate(rates: list[float], size: int) -> str:
    return f"{Spread.of(rates).show()} ({statistics.median(rates) * size / 1e9:.2f})"
