"""What accuracy the plans of importance sampling buy with the storage operations they spend.

A run that was interrupted goes on where it was: what each training gave is kept in `.bench/importance_accuracy`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import ROOT, BenchmarkError, Check, Options, Report, Spread, run_child, say

NAME = "importance_accuracy"
QUESTION = (
    "CIFAR-10, a residual network of 78,042 weights. Which accuracy is there for which number of storage operations? "
    "An operation is a sample that is asked for and not in the cache; the first epoch, which fills it, counts too."
)
KEEP = ROOT / ".bench" / "importance_accuracy"
SHARES = (0.2, 0.4)
FULL_EPOCHS = (5, 10, 20, 30)
ICACHE_EPOCHS = (8, 16, 30, 45)
UNBIASED = {
    0.2: ((15, 0.1), (30, 0.13), (60, 0.15), (88, 0.155), (125, 0.155), (165, 0.155)),
    0.4: ((9, 0.14), (18, 0.216), (36, 0.25), (55, 0.25), (80, 0.25)),
}
"""Epochs, and `target_io` in each: half the operations of 5, 10, 20 and 30 full epochs, and as many samples served;
then the last of these for longer."""

FULL_EVERY = 3
SEEDS = 3


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        plan: its name.
        cache: share of the samples that it holds.
        epochs: plans drawn.
        target: operations in each of them, as a share of those of the full plan ("unbiased").
    """

    plan: str
    cache: float
    epochs: int
    target: float = 1.0

    @property
    def served(self) -> float:
        """Samples served in all, in data sets, as far as that is known beforehand; the learning rate goes by it."""
        each = {"full": 1.0, "icache": 0.5, "unbiased": self.cache + (1 - self.cache) * self.target}[self.plan]
        full = len(range(0, self.epochs, FULL_EVERY)) if self.plan == "icache" else 1
        return full + (self.epochs - full) * each

    @property
    def policy(self) -> str:
        return "minio" if self.plan == "full" else "importance"


def full(epochs: int) -> Setting:
    """The full plan. Its accuracy does not depend on the cache."""
    return Setting("full", 0.4, epochs)


def half(share: float) -> Setting:
    """The plan "unbiased" at half the operations of 30 full epochs."""
    return Setting("unbiased", share, *UNBIASED[share][3])


def settings() -> Iterator[Setting]:
    """All trainings, those that are compared in pairs first."""
    yield full(30)
    yield from (half(share) for share in reversed(SHARES))
    yield Setting("icache", 0.4, 30)
    yield from (full(epochs) for epochs in FULL_EPOCHS[:-1])
    for share in reversed(SHARES):
        yield from (Setting("unbiased", share, *point) for point in UNBIASED[share])
        yield from (Setting("icache", share, epochs) for epochs in ICACHE_EPOCHS)


def run(options: Options) -> Report:
    data = _folder(options)
    wanted = list(dict.fromkeys(settings()))
    seeds = range(1) if options.quick else range(SEEDS)
    if options.quick:
        wanted = [Setting("full", 0.4, 3), Setting("unbiased", 0.4, 4, 0.25), Setting("icache", 0.4, 4)]
    found: dict[Setting, dict[int, Any]] = {setting: {} for setting in wanted}
    for seed in seeds:
        for setting in wanted:
            found[setting][seed] = _one(setting, seed, data, options)
    return _report(found, options)


def _folder(options: Options) -> Path:
    given = options.data or Path("missing")
    for folder in (given, given.parent / "cifar10-jpeg-full"):
        if (folder / "train").is_dir() and (folder / "test").is_dir() and len(list((folder / "train").iterdir())) == 10:
            return folder
    raise BenchmarkError(f"{given} is not CIFAR-10 as JPEG files, train/CLASS/*.jpg and test/CLASS/*.jpg: give --data")


def _one(setting: Setting, seed: int, data: Path, options: Options) -> Any:
    """What one training gave, now or in an earlier run."""
    file = KEEP / f"{setting.plan}-{setting.cache}-{setting.epochs}-{seed}{'-quick' * options.quick}.json"
    if file.exists():
        return json.loads(file.read_text())
    KEEP.mkdir(parents=True, exist_ok=True)
    given = {
        "plan": setting.plan,
        "cache": setting.cache,
        "policy": setting.policy,
        "epochs": setting.epochs,
        "served": setting.served,
        "seed": seed,
        "sampler": {"unbiased": {"target_io": setting.target}, "icache": {"full_every": FULL_EVERY}}.get(
            setting.plan, {}
        ),
        "data": str(data),
        "keep": str(KEEP / "pictures.npz"),
        "threads": 1,
        "first": 2000 if options.quick else 0,
    }
    result = run_child("benchmarks.contenders.importance_accuracy", given, scratch=KEEP)
    say(f"  {setting} seed {seed}: {result['accuracy']:.2f}% for {result['operations']:.2f} N operations")
    file.write_text(json.dumps(result))
    return result


def _operations(setting: Setting, results: dict[int, Any], share: float) -> float:
    """Operations per sample of the data set, with a cache of `share`."""
    if setting.plan == "full":
        return 1 + (setting.epochs - 1) * (1 - share)
    return statistics.mean(result["operations"] for result in results.values())


def _report(found: dict[Setting, dict[int, Any]], options: Options) -> Report:
    rows = []
    for share in SHARES:
        for setting, results in found.items():
            if setting.plan == "full" or setting.cache == share:
                accuracy = Spread.of([result["accuracy"] for result in results.values()])
                rows.append(
                    [
                        f"{share:.0%}",
                        setting.plan,
                        str(setting.epochs),
                        f"{statistics.mean(result['served'] for result in results.values()):.1f}",
                        f"{_operations(setting, results, share):.2f}",
                        accuracy.show(".2f"),
                        str(len(results)),
                    ]
                )
    rows.sort(key=lambda row: (row[0], row[1], float(row[4])))
    checks = [] if options.quick else _checks(found)
    any_of = next(iter(found.values()))
    any_result: Any = next(iter(any_of.values()))
    return Report(
        columns=["cache", "plan", "epochs", "samples served / N", "operations / N", "top-1, %", "seeds"],
        rows=rows,
        checks=checks,
        notes=[
            f"On the CPU, one thread for each training; {len(any_of)} seed(s), which draw the weights, the order and "
            "the augmentation; a pair has the same seed. The learning rate goes by samples served, so that every "
            "training ends its schedule.",
            "An operation is a sample that is asked for and not in the cache; what `icache` serves in place of it is "
            "none. The first epoch, which fills the cache, counts for all.",
            "`icache` has a full epoch every third one, as released. `full` stands for all policies that never evict: "
            "its accuracy does not depend on the cache.",
        ],
        versions=any_result["versions"] | {"numpy": np.__version__, "torch": torch.__version__},
        raw=[
            {"plan": s.plan, "cache": s.cache, "epochs": s.epochs, "seed": seed} | result
            for s, results in found.items()
            for seed, result in results.items()
        ],
    )


def _checks(found: dict[Setting, dict[int, Any]]) -> list[Check]:
    """The pairs, and the curves."""
    checks = [_pair(found, Setting("icache", 0.4, 30), "`icache`, 30 epochs, 40% cache", 1.0)]
    for share in SHARES:
        spent = _operations(half(share), found[half(share)], share) / _operations(full(30), {}, share)
        name = f"`unbiased`, {half(share).epochs} epochs, {share:.0%} cache, {spent:.2f} of the operations"
        checks.append(_pair(found, half(share), name, 0.2))
    for share in SHARES:
        for rival in ("full", "icache"):
            margins, points = _margins(found, share, rival)
            text = (
                f"{share:.0%} cache: points of `unbiased` above `{rival}` at the same operations, the least of "
                f"{len(margins)} of its {points} points"
            )
            checks.append(Check(text, min(margins), 0.0, ">=", "+.2f", spread=(min(margins), max(margins))))
    return checks


def _pair(found: dict[Setting, dict[int, Any]], setting: Setting, name: str, wanted: float) -> Check:
    mine, full30 = found[setting], found[full(30)]
    below = [full30[seed]["accuracy"] - mine[seed]["accuracy"] for seed in mine]
    text = f"{name}: points below 30 full epochs, mean of {len(below)} pairs"
    return Check(text, statistics.mean(below), wanted, "<=", "+.2f", spread=(min(below), max(below)))


def _curve(found: dict[Setting, dict[int, Any]], plan: str, share: float) -> list[tuple[float, float]]:
    """Operations and mean accuracy, rising."""
    points = []
    for setting, results in found.items():
        if setting.plan == plan and (plan == "full" or setting.cache == share):
            mean = statistics.mean(result["accuracy"] for result in results.values())
            points.append((_operations(setting, results, share), mean))
    return sorted(points)


def _margins(found: dict[Setting, dict[int, Any]], share: float, rival: str) -> tuple[list[float], int]:
    """At each point of the rival's curve from our first one on: how far ours, drawn with straight lines, is above.

    And how many points that curve has. Beyond our last point ours counts as level: what was not trained is not claimed.
    """
    ours, theirs = _curve(found, "unbiased", share), _curve(found, rival, share)
    xs, ys = zip(*ours, strict=True)
    return [float(np.interp(at, xs, ys)) - accuracy for at, accuracy in theirs if xs[0] <= at], len(theirs)
