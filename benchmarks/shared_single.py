"""A single job: what the shared loader costs one that shares with nobody."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.contender import Task, make_samples
from benchmarks.harness import Contender, Options, Report, Spread, alternate, check_ratio, ratios, scratch_folder
from benchmarks.photos import make_photos

NAME = "shared_single"
QUESTION = "What does `SharedLoader` cost a job that is alone in its group, against `DataLoader`?"
MODULE = "benchmarks.contenders.shared_single"
LEAST = 0.97
SIDE, BATCH, WORKERS = 224, 64, 2


def run(options: Options) -> Report:
    rounds, seconds = (2, 0.5) if options.quick else (7, 2.0)
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 640)
        task = Task(SIDE, 640 if options.quick else 3200, BATCH, WORKERS, seconds, str(scratch))
        make_samples(task)
        common = asdict(task) | {"photos": str(scratch / "photos")}
        found = {}
        for data in ("jpeg", "prepared"):
            pair = [
                Contender(f"{loader}, {data}", MODULE, {"data": data, "loader": loader})
                for loader in ("DataLoader", "SharedLoader")
            ]
            alternate(pair, common, rounds, scratch)
            found[data] = pair
    words = {
        "jpeg": "JPEG in the cache, decoded, cropped and flipped by 2 workers",
        "prepared": f"prepared {SIDE}x{SIDE}x3 in the cache, gathered",
    }
    return Report(
        columns=["samples", "DataLoader, samples/s", "SharedLoader, samples/s", "SharedLoader over DataLoader"],
        rows=[
            [
                words[data],
                Spread.of(alone.rates()).show(),
                Spread.of(ours.rates()).show(),
                ratios(ours, alone).show(".2f"),
            ]
            for data, (alone, ours) in found.items()
        ],
        checks=[
            check_ratio(f"one job, {words[data]}: SharedLoader against DataLoader", ours, alone, LEAST)
            for data, (alone, ours) in found.items()
        ],
        notes=[
            f"{what}; {task.samples:,} prepared pictures. Batches of {BATCH}, another random order each epoch, "
            f"{WORKERS} workers; whole epochs are timed, the loop receives each batch and touches nothing. The first "
            f"epoch, which fills the cache, is not timed. Median of {rounds} rounds in turns; ratios within a round."
        ],
        versions=found["jpeg"][1].results[0]["versions"],
        raw={contender.name: contender.results for pair in found.values() for contender in pair},
    )
