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
FILLS = 2
"""Epochs before those that are timed: the first fills the caches, the second the memory tier."""
KINDS = {
    "servers": "one store for both, 65% in each node's server",
    "tiered": "one store for both, 50% in each node's server and 15% in its memory",
    "local": "one store for both, 65% in each node's server, `LocalSampler`",
    "own": "a cache for each, not coordinated",
    "whole": "a cache of 100% for each (the bound of a store)",
}
STORES = ("servers", "tiered")


def run(options: Options) -> Report:
    samples, rounds = (320, 1) if options.quick else (3200, 7)
    params = {
        "samples": samples,
        "size": SIZE,
        "bandwidth": BANDWIDTH,
        "share": SHARE,
        "rounds": rounds,
        "fills": FILLS,
    }
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
        row = [what, f"{read.median:.3f}", Spread.of(_seconds(rounds, name)).show(".3f")]
        row.append(f"{own_bound if name == 'own' else whole:.3f}")
        rows.append([*row, "1" if name == "own" else _over(rounds, "own", name).show(".1f")])
    checks = []
    for name in STORES:
        ratio = _over(rounds, "own", name)
        text = (
            f"two nodes, 65% each, 15 MB/s: time of an epoch with caches of their own over that with {KINDS[name]}; "
            f"the paper, on its disks: {PAPER}; bound here: {own_bound / whole:.1f}"
        )
        checks.append(Check(text, ratio.median, min(PAPER, own_bound / whole), ">=", ".1f", (ratio.low, ratio.high)))
        read = max(turn[name]["bytes"] for turn in rounds)
        text = f"two nodes, 65% each, {KINDS[name]}: bytes from storage in a later epoch, the most"
        checks.append(Check(text, read, 0, "==", ",.0f"))
    speed = max(turn["own"]["bytes"] / turn["own"]["seconds"] for turn in rounds)
    return Report(
        columns=[
            "caches",
            "read from storage / data",
            "s per epoch",
            "bound, s",
            "times as fast as caches of their own",
        ],
        rows=rows,
        checks=checks,
        notes=[
            f"{samples:,} samples of {SIZE // 1000} KB behind one `ThrottledSource` that both nodes share (caches of "
            f"their own read at {speed / 1e6:.2f} MB/s at most, both together), random shares in each epoch, batches "
            "of 64, two nodes on one host with one worker each, policy `minio`; no device, so nothing hides a wait. "
            "Room in servers is measured with `MEMORY USAGE`, plus what an empty server uses and 1 MiB for the "
            "buffers of connections. "
            f"Full caches: {FILLS} epochs before filled them from storage that is not slow. The slower node counts; "
            "start and end of the workers are part of an epoch. "
            f"Bound of caches of their own: (1 - {SHARE}) of the bytes at 15 MB/s. Bound of a store: the time of the "
            "same loaders when each node has all samples in its own memory, measured in the same rounds. "
            f"{len(rounds)} rounds, in turns, ratios within a round; median (lowest to highest). The paper is CoorDL "
            "(Mohan et al., VLDB 2021); its factor is that of its networks and disks."
        ],
        versions=versions,
        raw=rounds,
    )
