"""Steps/s on volumes: no cache, stallfree's Smart Cache, MONAI's, against the bound of the device."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import (
    BenchmarkError,
    Check,
    Contender,
    Options,
    Report,
    Spread,
    alternate,
    check_ratio,
    ratios,
    scratch_folder,
)
from benchmarks.volumes import CROP, MARGIN, SIDE, make_volumes

NAME = "smart_cache"
QUESTION = (
    "Volumes with labels: how many steps/s does a Smart Cache give, and how much of what the device could do? Batches "
    "of 3, a window of 50, a tenth of it replaced per epoch by 1 fill process or thread."
)
TASK = {"batch": 3, "size": 50, "rate": 0.1}
STEPS = (0.020, 0.005)
"""Seconds that the device takes for a batch. The first is what is asked for, the other shows a faster device."""
BOUND = 0.95
"""Share of the device's rate that counts as reaching it."""
AGAINST_NONE, AGAINST_MONAI = 3.0, 1.5


@dataclass
class Steps(Contender):
    """A contender whose rates are steps/s."""

    def rates(self) -> list[float]:
        return self.of("steps")

    def of(self, key: str) -> list[float]:
        """The median of a figure in each round."""
        return [statistics.median(result[key]) for result in self.results]

    def shares(self) -> list[float]:
        """Of the device's rate, per round."""
        return [steps / device for steps, device in zip(self.rates(), self.of("device"), strict=True)]


def contenders() -> dict[str, Steps]:
    """Everyone, by a short name."""
    module = "benchmarks.contenders.smart_volumes"
    return {
        "none": Steps("no cache: torch DataLoader, 2 persistent workers", module, {"who": "torch", "workers": 2}),
        "ours": Steps(
            "stallfree SmartCacheDataset and DataLoader, 1 worker", module, {"who": "stallfree", "workers": 1}
        ),
        "monai": Steps("MONAI SmartCacheDataset", "benchmarks.peers.monai_smart", venv="monai", tunes=True),
    }


def run(options: Options) -> Report:
    rows, raw = [], {}
    checks: list[Check] = []
    notes: list[str] = []
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        folder, what = make_volumes(scratch / "volumes", options.data, 80 if options.quick else 260)
        for step in STEPS:
            found = contenders()
            common = TASK | {"volumes": str(folder), "step": step, "seconds": options.seconds}
            alternate(list(found.values()), common, options.rounds, scratch)
            rows += [_row(contender, found["ours"], step) for contender in found.values()]
            raw[f"{step * 1000:.0f} ms"] = {
                c.name: {"setting": c.params.get("setting"), "tried": c.tried, "rounds": c.results}
                for c in found.values()
            }
            notes += [
                f"{c.name}, steps of {step * 1000:.0f} ms: best of {len(c.tried)} settings tried before the rounds: "
                f"{c.params['setting']}."
                for c in found.values()
                if c.tried
            ]
            if step == STEPS[0]:
                checks = _checks(found)
            for contender in reversed(found.values()):
                versions |= contender.results[0]["versions"] if contender.results else {}
    return Report(
        columns=[
            "step",
            "contender",
            "steps/s",
            "share of the bound G",
            "stallfree is so many times as fast",
            "first batch of an epoch, ms",
            "processor time per step, ms",
        ],
        rows=rows,
        checks=checks,
        notes=[_about(what, options.rounds), *notes],
        versions=versions,
        raw=raw,
    )


def _about(what: str, rounds: int) -> str:
    return (
        f"{what}, read with nibabel (.nii.gz), scaled to 0..1, resampled to {SIDE}x{SIDE}x{SIDE} along "
        f"the patient's axes, padded by {MARGIN}; then a random crop of {CROP}x{CROP}x{CROP}, random flips, noise. All "
        "contenders run the same code for these. The device is a wait, which takes no processor time; G is the rate of "
        "these waits alone. Whole epochs after the first are timed, the move of the window included; without a cache "
        "an epoch is all volumes. The samples of every epoch are checked: both Smart Caches run over the volumes in "
        'their order (`shuffle=False`) and wait for replacements that are late (`on_late="wait"`), as MONAI\'s always '
        "does. Processor time is that of all processes, the filling included. "
        f"Median of {rounds} rounds of all contenders in turns (lowest to highest); ratios within a round."
    )


def _row(contender: Steps, ours: Steps, step: float) -> list[str]:
    start = [f"{step * 1000:.0f} ms", contender.name]
    if contender.missing:
        return [*start, contender.missing, "", "", "", ""]
    return [
        *start,
        Spread.of(contender.rates()).show(".1f"),
        Spread.of(contender.shares()).show(".3f"),
        "1" if contender is ours else ratios(ours, contender).show(".2f"),
        f"{statistics.median(contender.of('first')) * 1000:.1f}",
        f"{statistics.median(result['processor'] for result in contender.results) * 1000:.1f}",
    ]


def _checks(found: dict[str, Steps]) -> list[Check]:
    ours, share = found["ours"], Spread.of(found["ours"].shares())
    checks = [
        _nearer("no cache, 2 workers", ours, found["none"], AGAINST_NONE, share),
        _nearer("MONAI's", ours, found["monai"], AGAINST_MONAI, share),
    ]
    what = "share of epochs in which stallfree and MONAI trained on the same samples"
    if found["monai"].missing:
        return [*checks, Check(what, None, 1, "==", failed=found["monai"].missing)]
    same = [a == b for a, b in zip(_windows(ours), _windows(found["monai"]), strict=False)]
    return [*checks, Check(f"{what} ({len(same)} epochs)", sum(same) / len(same), 1, "==", "g")]


def _nearer(who: str, ours: Steps, theirs: Steps, wanted: float, share: Spread) -> Check:
    """The ratio that is wanted, or the share of the bound where the bound is nearer than that."""
    what = f"volumes, steps of {STEPS[0] * 1000:.0f} ms: stallfree's Smart Cache against {who}"
    if theirs.missing:
        return Check(what, None, wanted, failed=theirs.missing)
    room = statistics.median(g / rate for g, rate in zip(ours.of("device"), theirs.rates(), strict=True))
    if room >= wanted:
        return check_ratio(what, ours, theirs, wanted)
    ratio = ratios(ours, theirs).median
    what += f": {ratio:.2f} times, G allows {room:.2f}; share of G"
    return Check(what, share.median, BOUND, form=".3f", spread=(share.low, share.high))


def _windows(contender: Steps) -> list[Any]:
    if not contender.results:
        raise BenchmarkError(f"{contender.name} gave no figures")
    longest = max((result["windows"] for result in contender.results), key=len)
    return list(longest)
