"""Epochs of two nodes with one store: what is read from storage, what hits, and what the first epoch costs."""

from __future__ import annotations

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "store_epochs"
QUESTION = (
    "Two nodes with one store for both: what do they read from storage in each epoch, how many samples are hits when "
    "not all fit, and how much longer does the first epoch take than one without a cache?"
)
MODULE = "benchmarks.contenders.store_epochs"
SIZE = 110_000
SHARES = (1.0, 0.7, 0.5, 0.3)
EPOCHS = 4
HITS = 0.98
CASES: dict[str, Json] = {
    "storage of 30 MB/s for both": {"samples": 600, "bandwidth": 30e6, "form": "fetched", "wanted": 0.02},
    "prep of 5 ms on all cores": {"samples": 600, "prep": 0.005, "form": "prepared", "wanted": 0.05},
}


def run(options: Options) -> Report:
    samples, rounds = (256, 1) if options.quick else (2000, 7)
    cases = {name: case | {"samples": 128} for name, case in CASES.items()} if options.quick else CASES
    with scratch_folder() as scratch:
        common = {"size": SIZE, "samples": samples, "shares": SHARES, "epochs": EPOCHS}
        reads = run_child(MODULE, common | {"what": "reads"}, scratch=scratch)
        for share, found in reads["found"]["shares"].items():
            say(f"  room for {share}: reads by epoch: {_by_epoch(found, 'requests')}")
        timed = run_child(MODULE, {"what": "time", "size": SIZE, "cases": cases, "rounds": rounds}, scratch=scratch)
        for name, turns in timed["found"].items():
            say(f"  {name}: {_overhead(turns).show('+.1%')}")
    return _report(samples, cases, reads["found"], timed["found"], reads["versions"])


def _by_epoch(found: Json, name: str) -> str:
    return ", ".join(f"{epoch[name]:,}" for epoch in found["epochs"])


def _hit_ratio(found: Json, samples: int) -> float:
    later = found["epochs"][1:]
    ratio: float = sum(epoch["hits"] for epoch in later) / (samples * len(later))
    return ratio


def _overhead(turns: list[Json]) -> Spread:
    return Spread.of([turn["cached"] / turn["plain"] - 1 for turn in turns])


def _report(samples: int, cases: Json, reads: Json, timed: Json, versions: dict[str, str]) -> Report:
    rows, checks = [], []
    for name, found in reads["shares"].items():
        share, ratio = float(name), _hit_ratio(found, samples)
        rows.append(
            [
                f"room for {share / 2:.0%} on each node",
                _by_epoch(found, "requests"),
                ", ".join(f"{epoch['bytes'] / 1e6:.1f}" for epoch in found["epochs"]),
                f"{found['keys'] / samples:.3f}",
                f"{ratio:.4f}",
            ]
        )
        if share == 1:
            size = sum(epoch["bytes"] for epoch in found["epochs"][1:])
            checks.append(Check("two nodes, 50% each: bytes from storage after the first epoch", size, 0, "==", ",.0f"))
            text = "two nodes, 50% each: samples that were not read from storage exactly once in the whole run"
            checks.append(Check(text, found["not_once"], 0, "==", ",.0f"))
        else:
            text = (
                f"room for {share:.0%} of the data on two nodes together: hit ratio from the second epoch on, over that"
            )
            checks.append(Check(text, ratio / share, HITS, form=".4f"))
    for name, turns in timed.items():
        spread = _overhead(turns)
        text = f"first epoch of a store, {name}: longer than without a cache by"
        checks.append(Check(text, spread.median, cases[name]["wanted"], "<=", ".1%", (spread.low, spread.high)))
    return Report(
        columns=["cache", "samples read by epoch", "MB read by epoch", "stored / data", "hit ratio, epochs 2 to 4"],
        rows=rows,
        checks=checks,
        notes=_notes(samples, cases, reads, timed),
        versions=versions,
        raw={"reads": reads, "first": timed},
    )


def _notes(samples: int, cases: Json, reads: Json, timed: Json) -> list[str]:
    whole = next(iter(reads["shares"].values()))
    seconds = []
    for name, turns in timed.items():
        plain, cached = (Spread.of([turn[kind] for turn in turns]) for kind in ("plain", "cached"))
        each = cases[name]["samples"] / 2
        cost = Spread.of([(turn["cached"] - turn["plain"]) / each * 1e6 for turn in turns])
        seconds.append(
            f"{name}, {cases[name]['samples']:,} samples: {plain.show('.2f')} s without cache, {cached.show('.2f')} s "
            f"with a new one, {cost.show('+,.0f')} µs per sample of a node"
        )
    return [
        f"{samples:,} samples of {SIZE // 1000} KB, random shares in each epoch (`DistributedSampler`), batches of 64, "
        "two nodes on one host with a server and one worker each, `capacity=0`: no memory tier. Room for so many "
        f"samples is what they take in a server, {reads['record']:,} bytes each by `MEMORY USAGE`, and the "
        f"{reads['empty']:,} bytes that an empty server uses: that is `capacity_per_node`. For 50% on each node it "
        "is 1 MiB more, for the buffers of connections, which take the room of 3 samples in each server. Reads and "
        "bytes are those that came out of the source on both nodes. Not counted are the "
        f"{whole['looked']} readings of the samples that each node looks at when its data set is made, which come "
        "before the first epoch; those samples are left out of the count of how often each was read. All of an epoch's "
        "samples came exactly once over both nodes. `timeout` is 5 s here, so that a busy machine costs no hits.",
        "First epoch against the same without a cache, in turns on the same nodes; a new data set of the store, with "
        f"room for all, each time; the slower node counts. {'; '.join(seconds)}. Prep of so much processor time on "
        "both cores leaves none for copying, checksums and servers: what these take is lost there.",
    ]
