"""Two nodes behind slow storage, each with a cache for 65% of the data: partitioned, or each for itself."""

from __future__ import annotations

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "store_partitioned"
QUESTION = (
    "Two nodes behind storage of 15 MB/s for both, each with a cache for 65% of the data: how long does an epoch take "
    "when the caches are parts of one store, and how long when each is for itself?"
)
MODULE = "benchmarks.contenders.store_partitioned"
BANDWIDTH = 15e6
SIZE = 60_000
SHARE = 0.65
PAPER = 15
KINDS = {
    "store": "one store for both",
    "local": "the same, `LocalSampler`",
    "own": "a cache for each, not coordinated",
    "whole": "a cache of 100% for each (the bound of a store)",
}


def run(options: Options) -> Report:
    samples, rounds = (320, 1) if options.quick else (3200, 7)
    params = {"samples": samples, "size": SIZE, "bandwidth": BANDWIDTH, "share": SHARE, "rounds": rounds}
    with scratch_folder() as scratch:
        found = run_child(MODULE, params | {"kinds": list(KINDS)}, scratch=scratch)
    for number, turn in enumerate(found["rounds"], 1):
        say(f"  round {number}: " + ", ".join(f"{name} {each['seconds']:.2f} s" for name, each in turn.items()))
    return _report(samples, found["rounds"], found["versions"])


def _seconds(rounds: list[Json], name: str) -> list[float]:
    return [turn[name]["seconds"] for turn in rounds]


def _over(rounds: list[Json], name: str, other: str) -> Spread:
    """How many times as long an epoch of `name` takes as one of `other`."""
    return Spread.of([a / b for a, b in zip(_seconds(rounds, name), _seconds(rounds, other), strict=True)])


def _report(samples: int, rounds: list[Json], versions: dict[str, str]) -> Report:
    total = samples * SIZE
    own_bound = (1 - SHARE) * total / BANDWIDTH
    whole = Spread.of(_seconds(rounds, "whole")).median
    rows = []
    for name, what in KINDS.items():
        read = Spread.of([turn[name]["bytes"] / total for turn in rounds])
        other = Spread.of([turn[name]["other_hits"] / samples for turn in rounds])
        bound = own_bound if name == "own" else whole
        rows.append(
            [
                what,
                f"{read.median:.3f}",
                f"{other.median:.2f}",
                Spread.of(_seconds(rounds, name)).show(".3f"),
                "" if name == "whole" else f"{bound:.3f}",
                "1" if name == "store" else _over(rounds, name, "store").show(".2f"),
            ]
        )
    ratio = _over(rounds, "own", "store")
    text = (
        "two nodes, 65% each, 15 MB/s: time of an epoch with caches of their own over that with one store; bound "
        f"{own_bound / whole:.1f}; the paper, on its disks: {PAPER}"
    )
    read = max(turn["store"]["bytes"] for turn in rounds)
    speed = max(turn["own"]["bytes"] / turn["own"]["seconds"] for turn in rounds)
    return Report(
        columns=[
            "caches",
            "read from storage / data",
            "samples from the other node / data",
            "s per epoch",
            "bound, s",
            "times as long as one store",
        ],
        rows=rows,
        checks=[
            Check(text, ratio.median, 1.0, ">=", ".1f", (ratio.low, ratio.high)),
            Check(
                "two nodes, 65% each, one store: bytes from storage in a later epoch, the most", read, 0, "==", ",.0f"
            ),
        ],
        notes=[
            f"{samples:,} samples of {SIZE // 1000} KB behind one `ThrottledSource` that both nodes share (caches of "
            f"their own read at {speed / 1e6:.2f} MB/s at most, both together), random shares in each epoch, batches "
            "of 64, two nodes on one host with one worker each, policy `minio`; no device, so nothing hides a wait. "
            "Full caches: they were filled from storage that is not slow. The slower node counts; start and end of the "
            "workers are part of an epoch. "
            f"Bound of caches of their own: (1 - {SHARE}) of the bytes at 15 MB/s. Bound of a store: the time of the "
            "same loaders when each node has all samples in its own memory, measured in the same rounds. "
            f"{len(rounds)} rounds, in turns, ratios within a round; median (lowest to highest). The paper is CoorDL "
            "(Mohan et al., VLDB 2021); its factor is that of its networks and disks."
        ],
        versions=versions,
        raw=rounds,
    )
