"""`cache="auto"` against the best of all fixed settings, on six workloads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Check, Contender, Options, Report, Spread, alternate, ratios, say, scratch_folder
from benchmarks.photos import make_photos

NAME = "auto_cache"
QUESTION = (
    'Does `sf.DataLoader(cache="auto")` find what the best of all fixed settings gives? Forms: no cache, as fetched, '
    "prepared, and 1/4, 1/2 and 3/4 of the samples prepared; 1 and 2 workers."
)

FORMS: tuple[Any, ...] = (None, "fetched", "prepared", 0.25, 0.5, 0.75)
WORKERS = (1, 2)
ROUNDS = 5

MODULE = "benchmarks.contenders.auto_cache"

SMALL = "small"


def run(options: Options) -> Report:
    rows, checks, raw, versions = [], [], {}, {}
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 120 if options.quick else 400)
        size = sum(path.stat().st_size for path in (scratch / "photos").rglob("*.jpg"))
        _make_small(scratch / SMALL, 400 if options.quick else 6000)
        for name, task in _workloads(size, 120 if options.quick else 400).items():
            say(f" {name}")
            folder = scratch / (SMALL if name.startswith("small") else "photos")
            common = {"batch": 32, "seconds": 0.5 if options.quick else 2.0, "photos": str(folder), **task}
            best, tried = _best(common, options, scratch)
            auto = Contender('cache="auto"', MODULE, {"form": "auto", "workers": 0})
            nothing = Contender("no cache, 2 workers", MODULE, {"form": None, "workers": 2})
            alternate([auto, best, nothing], common, 1 if options.quick else ROUNDS, scratch)
            found, gain = ratios(auto, best), ratios(auto, nothing)
            rows.append(
                [
                    name,
                    f"{best.name}: {Spread.of(best.rates()).show()}",
                    Spread.of(auto.rates()).show(),
                    found.show(".2f"),
                    gain.show(".2f"),
                    auto.results[-1]["chosen"].split(";")[0],
                ]
            )
            checks.append(
                Check(f"{name}: of the best fixed setting", found.median, 0.95, spread=(found.low, found.high))
            )
            checks.append(Check(f"{name}: of no cache", gain.median, 1.0, spread=(gain.low, gain.high)))
            raw[name] = {"tried": tried, **{each.name: each.results for each in (auto, best, nothing)}}
            versions = auto.results[0]["versions"]
    return Report(
        columns=[
            "workload",
            "best fixed setting, samples/s",
            "auto, samples/s",
            "of the best",
            "of no cache",
            "chosen",
        ],
        rows=rows,
        checks=checks,
        notes=[
            f"{what}; made small for the last workload. The best fixed setting is the fastest of 12, one run each; "
            f"then it, no cache and auto run in turns, {ROUNDS} rounds. Epochs from the third on.",
        ],
        versions=versions,
        raw=raw,
    )


def _workloads(size: int, count: int) -> dict[str, dict[str, Any]]:
    """What is asked of the loader. Sizes are bytes of all samples, rates those of storage."""
    prepared = count * (256 * 256 * 3 + 512)
    rate = size / count  # bytes per sample
    usual: dict[str, Any] = {"side": 256, "blurs": 0, "step": 0.0, "bandwidth": None}
    return {
        "I/O-bound": usual | {"bandwidth": 150 * rate, "capacity": int(0.6 * size)},
        "prep-bound": usual | {"blurs": 3, "capacity": int(1.2 * prepared)},
        "compute-bound": usual | {"step": 0.004, "capacity": int(1.2 * prepared)},
        "decoded fits": usual | {"bandwidth": 900 * rate, "capacity": int(1.2 * prepared)},
        "decoded does not fit": usual | {"bandwidth": 300 * rate, "blurs": 1, "capacity": int(0.5 * prepared)},
        "small samples": usual | {"side": 32, "capacity": 200 << 20},
    }


def _best(common: dict[str, Any], options: Options, scratch: Path) -> tuple[Contender, dict[str, float]]:
    """The fastest fixed setting, and samples/s of all."""
    forms = FORMS[:3] if options.quick else FORMS
    tried: dict[str, float] = {}
    contenders = {}
    for form in forms:
        for workers in WORKERS:
            called = "no cache" if form is None else form if isinstance(form, str) else f"{form:.0%} prepared"
            name = f"{called}, {workers} worker{'s' * (workers > 1)}"
            contender = contenders[name] = Contender(name, MODULE, {"form": form, "workers": workers})
            rates = sorted(contender.run(common | {"seconds": 1.0}, scratch)["rates"])
            tried[name] = rates[len(rates) // 2]
            say(f"  {name}: {tried[name]:,.0f}")
    return contenders[max(tried, key=lambda name: tried[name])], tried


def _make_small(folder: Path, count: int) -> None:
    """JPEG files of 32 x 32 pixels."""
    rng = np.random.default_rng(5)
    for number in range(count):
        path = folder / f"class-{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        low = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        encoded = io.BytesIO()
        low.resize((32, 32), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
        path.write_bytes(encoded.getvalue())
