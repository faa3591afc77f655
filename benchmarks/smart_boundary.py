"""What the end of an epoch costs: the first batch when the window has just moved, and when it never moves."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import Check, Contender, Json, Options, Report, Spread, run_child, scratch_folder
from benchmarks.smart_cache import STEPS, TASK
from benchmarks.volumes import make_volumes

NAME = "smart_boundary"
QUESTION = "How long does the swap of a tenth of the window hold training up at the end of an epoch?"
MODULE = "benchmarks.contenders.smart_volumes"


def run(options: Options) -> Report:
    moving = Contender("a tenth is replaced", MODULE, {"rate": TASK["rate"]})
    still = Contender("nothing is replaced (replace_rate=0)", MODULE, {"rate": 0})
    with scratch_folder() as scratch:
        folder, what = make_volumes(scratch / "volumes", options.data, 80 if options.quick else 260)
        common = TASK | {"volumes": str(folder), "step": STEPS[0], "seconds": 3 * options.seconds}
        common |= {"who": "stallfree", "workers": 1}
        for _ in range(options.rounds):
            for contender in (moving, still):
                params = common | contender.params
                contender.results.append(run_child(MODULE, params, scratch=scratch))
    pairs = list(zip(moving.results, still.results, strict=True))
    lost = Spread.of([first(a) - first(b) for a, b in pairs])
    shares = Spread.of([(first(a) - first(b)) / epoch(a) for a, b in pairs])
    return Report(
        columns=[
            "window",
            "until the epoch has begun, ms",
            "first batch of an epoch, ms",
            "epoch, ms",
            "share of the epoch",
            "epochs with a wait",
        ],
        rows=[_row(contender) for contender in (moving, still)],
        checks=[
            Check(
                f"swap of {TASK['size'] * TASK['rate']:.0f} of {TASK['size']} volumes: share of the epoch lost",
                shares.median,
                0.01,
                "<",
                ".4f",
                (shares.low, shares.high),
            )
        ],
        notes=[
            f"{what}; the pipeline and the loader of the table above, steps of {STEPS[0] * 1000:.0f} ms. From asking "
            "for the epoch until its first batch is there, median over the epochs after the first; that batch is "
            "cropped, flipped and noised in this time, whether the window has moved or not. The swap takes the "
            f"difference: {_milliseconds(lost)} ms. "
            f"Median of {options.rounds} rounds in turns (lowest to highest)."
        ],
        versions=moving.results[0]["versions"],
        raw={contender.name: contender.results for contender in (moving, still)},
    )


def first(result: Json) -> float:
    """Seconds until the first batch of an epoch."""
    return statistics.median(result["first"])


def epoch(result: Json) -> float:
    """Seconds of an epoch."""
    steps = -(-TASK["size"] // TASK["batch"])
    return float(steps / statistics.median(result["steps"]))


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1000:.2f} ({spread.low * 1000:.2f} to {spread.high * 1000:.2f})"


def _row(contender: Contender) -> list[str]:
    def show(figures: list[float]) -> str:
        return _milliseconds(Spread.of(figures))

    results: list[Any] = contender.results
    return [
        contender.name,
        show([statistics.median(result["begun"]) for result in results]),
        show([first(result) for result in results]),
        show([epoch(result) for result in results]),
        f"{statistics.median(first(result) / epoch(result) for result in results):.3f}",
        str(sum(result["late_epochs"] for result in results)),
    ]
