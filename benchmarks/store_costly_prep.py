"""Costly deterministic prep: epochs out of a store's caches, and epochs that prepare all samples anew."""

from __future__ import annotations

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "store_costly_prep"
QUESTION = (
    "Preparing a sample takes 5 ms of processor time, always with the same result, and there is one worker: how much "
    "less time do the second and third epoch take with a store than without a cache?"
)
MODULE = "benchmarks.contenders.store_costly_prep"
PREP = 0.005
SIZE = 110_000
BATCH = 32
LESS = 0.6
CASES = {1: "one node, one worker", 2: "two nodes, one worker each, room for half on each"}


def run(options: Options) -> Report:
    samples, rounds = (128, 1) if options.quick else (384, 5)
    params = {"samples": samples, "size": SIZE, "prep": PREP, "batch": BATCH}
    found: dict[str, list[Json]] = {what: [] for what in CASES.values()}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for number in range(rounds):
            for nodes, what in CASES.items():
                result = run_child(MODULE, params | {"nodes": nodes, "samples": nodes * samples}, scratch=scratch)
                found[what].append(result["seconds"])
                versions = result["versions"]
                say(f"  round {number + 1}: {what}: {_less(result['seconds']):.1%} less")
    return _report(samples, found, versions)


def _less(seconds: Json) -> float:
    """The share by which epochs 2 and 3 are shorter."""
    less: float = 1 - sum(seconds["store"][1:]) / sum(seconds["plain"][1:])
    return less


def _report(samples: int, found: dict[str, list[Json]], versions: dict[str, str]) -> Report:
    rows, checks = [], []
    for what, rounds in found.items():
        for kind, words in (("plain", "no cache"), ("store", "`RedisStore`")):
            epochs = [Spread.of([each[kind][number] for each in rounds]).show(".3f") for number in range(3)]
            less = Spread.of([_less(each) for each in rounds]).show(".1%")
            rows.append([what, words, *epochs, less if kind == "store" else ""])
        spread = Spread.of([_less(each) for each in rounds])
        text = f"prep of 5 ms, {what}: epochs 2 and 3 take less time than without a cache by"
        checks.append(Check(text, spread.median, LESS, ">=", ".1%", (spread.low, spread.high)))
    return Report(
        columns=["case", "cache", "s, epoch 1", "epoch 2", "epoch 3", "epochs 2 and 3: less by"],
        rows=rows,
        checks=checks,
        notes=[
            f"{samples:,} samples of {SIZE // 1000} KB per node and epoch, batches of {BATCH}, records in memory, no "
            "device. Without a cache and then with a store in the same processes, `capacity=0`, so that every sample "
            "comes out of a server; the slower node counts; the first epoch contains the start of the workers. "
            f"{len(next(iter(found.values())))} rounds in fresh processes; median (lowest to highest).",
            "The case is the one for which Bagua's Cached Dataset was made. Bagua is not among the contenders: its "
            "source package wants the CUDA toolkit, Rust and MPI, and cannot be installed beside the others.",
        ],
        versions=versions,
        raw=found,
    )
