"""Hits of a store across hosts, against redis-py reading the same values; and hits of a memory tier over servers."""

from __future__ import annotations

import statistics

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs

NAME = "store_reads"
QUESTION = (
    "How many samples/s do one and four processes get from the server of another node with `RedisCache.get_many`, and "
    "how many with redis-py's MGET of the same values? Is TCP or the Unix socket faster? Does a memory tier over "
    "servers read as fast as a plain cache?"
)
MODULE = "benchmarks.contenders.store_reads"
RECORDS = {"110000": 1024, "600000": 512}
BATCHES = (64, 256)
PROCESSES = (1, 4)
CHECKED, BARE, FASTER, TIER = 1.0, 0.7, 1.0, 0.95
"""What is wanted: of redis-py with checksum and copy, of bare MGET, of the Unix socket, of a plain cache."""


def run(options: Options) -> Report:
    records = dict.fromkeys(RECORDS, 256) if options.quick else RECORDS
    batches = BATCHES[:1] if options.quick else BATCHES
    rounds, passes, seconds = (1, 1, 0.1) if options.quick else (5, 1, 0.5)
    reason = venvs.why_missing("redis")
    params = {"batches": batches, "rounds": rounds, "passes": passes, "seconds": seconds, "peer": reason is None}
    found: Json = {"rounds": [{} for _ in range(rounds)], "tried": {}, "best": {}, "versions": {}}
    for size, count in records.items():
        with scratch_folder() as scratch:
            one = run_child(MODULE, params | {"records": {size: count}}, scratch=scratch)
        for name in ("tried", "best", "versions"):
            found[name] |= one[name]
        for whole, part in zip(found["rounds"], one["rounds"], strict=True):
            whole |= part
    for number, each in enumerate(found["rounds"], 1):
        say(f"  round {number}: " + "; ".join(_in_words(each, cell) for cell in _cells(records, batches)))
    return _report(records, batches, found, reason)


def _cells(records: Json, batches: tuple[int, ...]) -> list[tuple[str, int, int]]:
    return [(size, batch, processes) for size in records for batch in batches for processes in PROCESSES]


def _in_words(each: Json, cell: tuple[str, int, int]) -> str:
    name = " x ".join(map(str, cell))
    ways = [way for way in ("ours", "checked", "bare") if f"{name} {way}" in each]
    return f"{name}: " + ", ".join(f"{way} {each[f'{name} {way}']:,.0f}" for way in ways)


def _report(records: Json, batches: tuple[int, ...], found: Json, reason: str | None) -> Report:
    rows, checks = [], []
    for size, batch, processes in _cells(records, batches):
        cell, what = f"{size} x {batch} x {processes}", f"{int(size) // 1000} KB x {batch}, {_processes(processes)}"
        ours = _rates(found, f"{cell} ours")
        compared = [("checked", "redis-py: MGET, checksum and copy", CHECKED), ("bare", "redis-py: bare MGET", BARE)]
        for way, words, wanted in compared:
            text = f"remote hits, {what}: samples/s over {words}"
            if reason:
                rows.append([what, f"`get_many` {_rate(ours, size)}", f"{words}: {reason}", ""])
                checks.append(Check(text, None, wanted, failed=reason))
            else:
                theirs = _rates(found, f"{cell} {way}")
                rows.append([what, f"`get_many` {_rate(ours, size)}", f"{words} {_rate(theirs, size)}"])
                rows[-1].append(_ratio(ours, theirs).show(".2f"))
                checks.append(_checked(text, ours, theirs, wanted))
        if processes == 1:
            for way, words in (("ours", "`get_many`"), *(() if reason else (("bare", "redis-py: bare MGET"),))):
                tcp, unix = _rates(found, f"{cell} {way}"), _rates(found, f"{cell} {way} unix")
                rows.append([what, f"{words}, TCP {_rate(tcp, size)}", f"Unix socket {_rate(unix, size)}"])
                rows[-1].append(_ratio(tcp, unix).show(".2f"))
                text = f"the node's own server, {what}, {words}: samples/s by TCP, as used, over the Unix socket's"
                checks.append(_checked(text, tcp, unix, FASTER))
    for what in ("gather", "get_many"):
        tier, plain = ([each["tier"][what][name] for each in found["rounds"]] for name in ("tier", "plain"))
        rows.append([f"110 KB x 64, `{what}`, one process", f"memory tier {_rate(tier, '110000')}"])
        rows[-1] += [f"plain cache {_rate(plain, '110000')}", _ratio(tier, plain).show(".2f")]
        if what == "gather":
            text = "hits of the memory tier over servers, 110 KB x 64: `gather` over that of a plain cache"
            checks.append(_checked(text, tier, plain, TIER))
    return Report(
        columns=["hits", "samples/s (GB/s)", "compared with, samples/s (GB/s)", "ratio"],
        rows=rows,
        checks=checks,
        notes=_notes(records, found),
        versions=found["versions"],
        raw=found,
    )


def _rates(found: Json, name: str) -> list[float]:
    return [each[name] for each in found["rounds"]]


def _notes(records: Json, found: Json) -> list[str]:
    amount = " and ".join(f"{count:,} of {int(size) // 1000} KB" for size, count in records.items())
    best = "; ".join(f"{name}: {setting}" for name, setting in found["best"].items()) or "none"
    return [
        "Two nodes on one host, each with a folder and a started server of its own, reached by TCP on the loopback "
        f"device; readers and servers share the host's cores. {amount} lie in the server of the second node, and the "
        "processes of the first one read them in another random order each time, without a memory tier. Everybody "
        "reads the same keys of the same server. A batch is had, for a store, when headers and checksums are checked "
        "and the tensors are made, in standing memory; for redis-py with checksum and copy when the xxh3_64 of each "
        "record, seeded with its id, was compared with the header's and the record copied into a standing array; for "
        "bare MGET when the values are there. The last batch is held while the next one is read, as in a loop. "
        f"{len(found['rounds'])} rounds, in turns, the order shifted by one in each; redis-py in fresh processes; the "
        "first 4 batches and a tenth of the time are not counted; several processes: the sum of their rates; median "
        "(lowest to highest).",
        f"redis-py with hiredis, at the best of its settings for each row, tried in turns before the rounds: {best}.",
        "The server answers on a Unix socket too, which its supervisor uses to check it. "
        "Memory tier: `TieredCache` over `RedisCache` with all samples in memory, against a plain `SampleCache` that "
        "holds the same, batch by batch in turns.",
    ]


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _ratio(ours: list[float], theirs: list[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def _checked(text: str, ours: list[float], theirs: list[float], wanted: float) -> Check:
    ratio = _ratio(ours, theirs)
    return Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high))


def _rate(rates: list[float], size: str) -> str:
    return f"{Spread.of(rates).show()} ({statistics.median(rates) * int(size) / 1e9:.2f})"
