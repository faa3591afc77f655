"""Hits of a store across hosts, against redis-py reading the same values."""

from __future__ import annotations

import statistics

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs

NAME = "store_reads"
QUESTION = (
    "How many samples/s does a process get from the server of another node, and how many with redis-py's MGET of the "
    "same values?"
)
MODULE = "benchmarks.contenders.store_reads"
RECORDS = {"110000": 1024, "600000": 512}
BATCHES = (64, 256)
WAYS = {"checked": ("redis-py: MGET, checksum and copy", 1.0), "bare": ("redis-py: bare MGET", 0.7)}
"""Compared with, and what is wanted."""


def run(options: Options) -> Report:
    records = dict.fromkeys(RECORDS, 256) if options.quick else RECORDS
    batches = BATCHES[:1] if options.quick else BATCHES
    rounds, passes, seconds = (1, 1, 0.1) if options.quick else (5, 1, 0.5)
    reason = venvs.why_missing("redis")
    params = {"batches": batches, "rounds": rounds, "passes": passes, "seconds": seconds, "peer": reason is None}
    with scratch_folder() as scratch:
        found = run_child(MODULE, params | {"records": records}, scratch=scratch)
    for number, each in enumerate(found["rounds"], 1):
        say(f"  round {number}: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in each.items()))
    return _report(records, batches, found, reason)


def _report(records: Json, batches: tuple[int, ...], found: Json, reason: str | None) -> Report:
    rows, checks = [], []
    for size in records:
        for batch in batches:
            what = f"{int(size) // 1000} KB x {batch}"
            ours = _rates(found, f"{size} x {batch} ours")
            for way, (words, wanted) in WAYS.items():
                text = f"remote hits, {what}: samples/s over {words}"
                if reason:
                    rows.append([what, _rate(ours, size), f"{words}: {reason}", ""])
                    checks.append(Check(text, None, wanted, failed=reason))
                    continue
                theirs = _rates(found, f"{size} x {batch} {way}")
                ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
                rows.append([what, _rate(ours, size), f"{words} {_rate(theirs, size)}", ratio.show(".2f")])
                checks.append(Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high)))
    return Report(
        columns=["hits", "`RedisStore`, samples/s (GB/s)", "compared with, samples/s (GB/s)", "ratio"],
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
        f"A server on this host, reached by TCP on the loopback device, holds {amount}; one process reads them in "
        "another random order each time. A batch of a store is counted when headers and checksums are checked and the "
        "tensors are made; of redis-py with checksum and copy when the xxh3_64 of each record was compared with the "
        "header's and the record copied into standing memory; of bare MGET when the values have come. The last batch "
        f"is held while the next one is read. {len(found['rounds'])} rounds, in turns; redis-py in fresh processes; "
        "the first 4 batches and a tenth of the time are not counted; median (lowest to highest).",
        f"redis-py with hiredis, at the best of its settings for each row, tried before the rounds: {best}.",
    ]


def _rate(rates: list[float], size: str) -> str:
    return f"{Spread.of(rates).show()} ({statistics.median(rates) * int(size) / 1e9:.2f})"
