"""Data sets of everyday shapes without a cache: is our loader anywhere slower than torch's?"""

from __future__ import annotations

import statistics

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "plain_loader"
QUESTION = (
    "Only the loader is replaced, nothing is cached, and the samples lie in memory: is any data set served slower than "
    "by torch's `DataLoader`?"
)
MODULE = "benchmarks.contenders.plain_loader"
SHAPES = {
    "tuples": ("tuples of a tiny tensor and a number", 4000),
    "dicts": ("dicts of 10 tiny tensors", 2000),
    "lengths": ("sequences of 5 to 200 tokens, padded by `collate_fn`", 4000),
    "strings": ("strings", 4000),
    "floats": ("3x224x224 floats", 600),
    "large": ("arrays of 256 KB", 1200),
}
WORKERS = (0, 1, 2)


def run(options: Options) -> Report:
    rounds, epochs = (1, 3) if options.quick else (5, 11)
    found: dict[str, list[Json]] = {}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for shape, (_, samples) in SHAPES.items():
            for workers in WORKERS:
                turns = []
                for _ in range(rounds):
                    params = {"shape": shape, "samples": samples, "workers": workers, "epochs": epochs}
                    result = run_child(MODULE, params, scratch=scratch)
                    turns.append(result["found"])
                    versions = result["versions"]
                found[f"{shape} {workers}"] = turns
                first, whole = (Spread.of([_ratio(turn, at) for turn in turns]) for at in (0, 1))
                say(f"  {shape}, {workers} workers: {whole.show('.2f')}; to the first batch: {first.show('.2f')}")
    return _report(found, versions)


def _median(turn: Json, name: str, at: int) -> float:
    return statistics.median(pair[at] for pair in turn[name])


def _ratio(turn: Json, at: int) -> float:
    """torch's median time over ours: of the first batch (0) or of the epoch (1)."""
    return _median(turn, "torch", at) / _median(turn, "stallfree", at)


def _report(found: dict[str, list[Json]], versions: dict[str, str]) -> Report:
    rows, checks = [], []
    for key, turns in found.items():
        shape, workers = key.split()
        what, samples = SHAPES[shape]
        first, whole = (Spread.of([_ratio(turn, at) for turn in turns]) for at in (0, 1))
        cells = [f"{what}, {samples:,}", workers]
        for name in ("torch", "stallfree"):
            cells.append(Spread.of([1000 * _median(turn, name, 1) for turn in turns]).show(",.1f"))
        rows.append([*cells, whole.show(".2f"), first.show(".2f")])
        for spread, measured in ((whole, "speed"), (first, "speed to the first batch of an epoch")):
            text = f"{what}, {workers} workers: {measured} over torch's"
            checks.append(Check(text, spread.median, 1.0, spread=(spread.low, spread.high)))
    return Report(
        columns=["samples", "workers", "torch, ms an epoch", "stallfree, ms", "times torch's speed", "first batch"],
        rows=rows,
        checks=checks,
        notes=[
            "Batches of 64, shuffled, workers kept from epoch to epoch, torch's operations on one thread. Within a "
            "process, epochs of the two loaders alternate, after one that is not counted; a process gives the median "
            "of its epochs, and the table the median over processes (lowest to highest). The samples are made by "
            "indexing memory, so that the loader is all there is to measure."
        ],
        versions=versions,
        raw=found,
    )
