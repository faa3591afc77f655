"""The first batch of a new loader: how long after `DataLoader(...)`, against torch's?"""

from __future__ import annotations

from benchmarks.harness import Check, Options, Report, Spread, run_child, say, scratch_folder

NAME = "first_batch"
QUESTION = "In a fresh process, how long does it take from `DataLoader(...)` to its first batch, against torch's?"
MODULE = "benchmarks.contenders.first_batch"
SHAPES = {"tuples": "tuples of a tiny tensor and a number", "floats": "3x224x224 floats", "photographs": "JPEG files"}
WORKERS = (0, 1, 2)
LOADERS = ("torch", "stallfree")


def run(options: Options) -> Report:
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for shape in SHAPES:
            for workers in WORKERS:
                times = found[shape, workers] = {loader: [] for loader in LOADERS}
                for turn in range(options.rounds):
                    for loader in sorted(LOADERS, reverse=turn % 2 == 1):
                        result = run_child(
                            MODULE, {"shape": shape, "workers": workers, "loader": loader}, scratch=scratch
                        )
                        times[loader].append(result["seconds"])
                        versions |= result["versions"]
                say(f"  {shape}, {workers} workers: {_ratio(times).show('.2f')}")
    return Report(
        columns=["samples", "workers", "torch, ms", "stallfree, ms", "stallfree over torch"],
        rows=[
            [
                SHAPES[shape],
                str(workers),
                *(Spread.of([1000 * seconds for seconds in times[loader]]).show(",.1f") for loader in LOADERS),
                _ratio(times).show(".2f"),
            ]
            for (shape, workers), times in found.items()
        ],
        checks=[
            Check(
                f"first batch of a new loader, {SHAPES[shape]}, {workers} workers: time over torch's",
                (ratio := _ratio(times)).median,
                1.0,
                "<=",
                spread=(ratio.low, ratio.high),
            )
            for (shape, workers), times in found.items()
        ],
        notes=[
            "Each time is taken in a process of its own, from before the call of `DataLoader(...)`, after the imports, "
            "to the first batch of 64; it includes the start of the workers. No cache; shuffled. Tuples and floats are "
            "in memory; JPEG files of 640x480 are decoded by Pillow, cut at random and resized to 224x224. Median of "
            f"{options.rounds} turns (lowest to highest); ratios within a turn."
        ],
        versions=versions,
        raw={f"{shape} {workers}": times for (shape, workers), times in found.items()},
    )


def _ratio(times: dict[str, list[float]]) -> Spread:
    return Spread.of([ours / theirs for theirs, ours in zip(times["torch"], times["stallfree"], strict=True)])
