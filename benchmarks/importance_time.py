"""Seconds per epoch of plans by importance and of their rivals, with real pictures behind slow storage."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder, table
from benchmarks.made_pictures import make_pictures
from benchmarks.photos import jpeg_files

NAME = "importance_time"
QUESTION = (
    "Pictures behind storage of 800 requests/s, a cache for 20% of them, and a device that is a sleep: how long is "
    "an epoch with each plan and cache, from I/O-bound to compute-bound?"
)
MODULE = "benchmarks.contenders.importance_time"

SIDE = 144
QUALITY = 96
"""About 16 KB per picture: 64 of them make a package, as in the paper; one is decoded in a quarter of a millisecond."""
STORAGES = {
    "disk": {"iops": 800.0, "latency": 0.002, "bandwidth": 100e6},
    "far": {"latency": 0.006},
}
IOPS = STORAGES["disk"]["iops"]

NAMES = {
    "default": "Default: all, LRU",
    "base": "Base: all fetched, important ones trained, LRU",
    "quiver": "Quiver: all, residents first, two half-cache packages",
    "coordl": "CoorDL: all, MinIO",
    "ilfu": "iLFU: drawn by loss, LFU",
    "iis": "Base + drawn before fetching (IIS), LRU",
    "hcache": "Base + IIS + H-cache",
    "substitute": "Base + IIS + H-cache + substitutes",
    "icache": "`icache`: Base + IIS + H-cache + swaps",
    "packages": "`icache` + packages",
    "unbiased": "`unbiased`",
    "unbiased_minio": "`unbiased`, MinIO",
}
"""The contenders, in the order of the table."""

PAPER = {"default": 2.3, "base": 2.3, "quiver": 2.0, "coordl": 1.9, "ilfu": 1.6}
"""What `icache` gains over each, at least."""
ABLATION = {"iis": 1.4, "hcache": 1.7}
L_CACHE = 2.3
DEVICES = (10.0, 2.0, 1.0, 0.5)
"""G over S, the requests/s of the storage: from I/O-bound to compute-bound."""
BOUND = DEVICES[0]
SWEPT = ("default", "base", "quiver", "coordl", "ilfu", "icache", "unbiased")
FEW = ("default", "coordl", "ilfu", "icache", "unbiased")
"""Who is in the tables of threads and of cache sizes; up to `icache` slowest first, as the paper has them."""
THREADS = {2: (1, 2), 4: (2, 2), 8: (4, 2), 16: (4, 4)}
"""Fetches under way at once: workers, and threads of each."""
SIZES = (0.2, 0.4, 0.6, 0.8)
TOGETHER = (1.1, 1.2)
JOBS = (4.0, 2.0)
"""G over S of the two jobs."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        samples: pictures.
        warm_up: epochs before those that are timed, from storage without a limit; `max_age` has come by then.
        epochs: timed epochs of the main table.
        fewer: those of the other tables.
        seconds: of the two jobs.
    """

    samples: int = 1600
    warm_up: int = 12
    epochs: int = 5
    fewer: int = 3
    seconds: float = 10.0


QUICK = Scale(samples=300, warm_up=2, epochs=1, fewer=1, seconds=0.5)


class Runs:
    """The runs of one benchmark.

    Args:
        photos: folder of the pictures.
        scratch: folder for what processes leave.
        scale: how much is measured.
    """

    def __init__(self, photos: Path, scratch: Path, scale: Scale) -> None:
        self._common = {"photos": str(photos), "storages": STORAGES, "warm_up": scale.warm_up, "jobs": 1}
        self._scratch, self.scale = scratch, scale
        self.versions: dict[str, str] = {}

    def run(self, who: Any, what: str, **params: Any) -> Json:
        """What each of `who` found."""
        result = run_child(MODULE, self._common | {"who": who} | params, scratch=self._scratch)
        self.versions = result["versions"]
        found: Json = result["found"]
        for name, each in found.items():
            say(f"  {what}: {name}: {_short(each)}")
        return found

    def phase(self, device: float, **more: Any) -> Json:
        """A few epochs with a device of so many times the requests/s of the storage."""
        usual = {"storage": "disk", "workers": 2, "threads": 8, "epochs": self.scale.fewer}
        return usual | {"device": device * IOPS} | more


def _short(each: Json) -> str:
    found = each.get("phases") or each["jobs"]
    return ", ".join(f"{Spread.of(phase['seconds']).median:.2f} s" for phase in found)


def run(options: Options) -> Report:
    scale, quick = QUICK if options.quick else Scale(), options.quick
    devices = DEVICES[-1:] if quick else DEVICES[1:]
    threads = list(THREADS)[-1:] if quick else list(THREADS)
    sizes = SIZES[-1:] if quick else SIZES[1:]
    few = ("default", "icache") if quick else FEW
    with scratch_folder() as scratch:
        what = make_thumbs(scratch / "photos", options.data, scale.samples)
        runs = Runs(scratch / "photos", scratch, scale)
        first = [runs.phase(BOUND, epochs=scale.epochs)]
        slower = [runs.phase(device) for device in devices]
        fetches = [
            runs.phase(BOUND, storage="far", workers=THREADS[number][0], threads=THREADS[number][1])
            for number in threads
        ]
        plan = {name: first + slower * (name in SWEPT) + fetches * (name in few) for name in NAMES}
        main = runs.run(plan, "cache of 20%", share=0.2)
        by_size = [
            runs.run({name: [runs.phase(BOUND)] for name in few}, f"cache of {size:.0%}", share=size) for size in sizes
        ]
        devices_of_jobs = [device * IOPS for device in JOBS]
        pair = {"share": 0.2, "storage": "disk", "devices": devices_of_jobs, "seconds": scale.seconds, "jobs": 2}
        jobs = runs.run(["apart", "icache"], "two jobs", **pair)
    swept = len(devices) + 1
    tables = {
        "device": {name: main[name]["phases"][:swept] for name in SWEPT},
        "threads": {name: main[name]["phases"][swept:] for name in few},
        "size": {name: [each[name]["phases"][0] for each in (main, *by_size)] for name in few},
    }
    words = {
        "device": [f"G = {device:g} S" for device in (BOUND, *devices)],
        "threads": [f"{number} threads" for number in threads],
        "size": [f"cache of {size:.0%}" for size in (SIZES[0], *sizes)],
    }
    return _report(what, scale, main, tables, words, jobs, runs.versions)


# -- figures ----------------------------------------------------------------------------------------------------------


def seconds(phase: Json) -> Spread:
    return Spread.of(phase["seconds"])


def gain(slow: Json, quick: Json) -> Spread:
    """How many times as long the epochs of `slow` are, epoch by epoch."""
    return Spread.of([a / b for a, b in zip(slow["seconds"], quick["seconds"], strict=False)])


def limit(phase: Json, device: float) -> float:
    """Seconds per epoch that storage and device take, whichever is slower."""
    return max(float(np.median(phase["reads"])) / IOPS, float(np.median(phase["trained"])) / (device * IOPS))


def _report(
    what: str,
    scale: Scale,
    main: Json,
    tables: dict[str, dict[str, list[Json]]],
    words: dict[str, list[str]],
    jobs: Json,
    versions: dict[str, str],
) -> Report:
    first = {name: each["phases"][0] for name, each in main.items()}
    rows = [_row(NAMES[name], first[name], first, scale.samples) for name in NAMES]
    titles = {
        "device": "Seconds per epoch, and in brackets how many times as fast as Default, with slower devices (S: "
        "requests/s of the storage):",
        "threads": "The same with storage whose requests take 6 ms each and do not wait for each other, by the number "
        "of fetches under way at once (workers times threads), G = 10 S:",
        "size": "The same at G = 10 S with larger caches:",
    }
    notes = [_note(what, scale, main)]
    for key, title in titles.items():
        notes.append(f"{title}\n\n{_speed_ups(tables[key], words[key])}")
    notes.append(_jobs_note(jobs))
    return Report(
        columns=["plan and cache", "trained / N", "read / N", "s per epoch", "bound, s", "against Default", "Base"],
        rows=rows,
        checks=[*_checks(first), *(_order(tables[key], words[key]) for key in ("threads", "size")), *_jobs(jobs)],
        notes=notes,
        versions=versions,
        raw={"main": main, "tables": tables, "jobs": jobs},
    )


def _row(name: str, phase: Json, first: Json, samples: int) -> list[str]:
    return [
        name,
        f"{np.median(phase['trained']) / samples:.2f}",
        f"{np.median(phase['reads']) / samples:.3f}",
        seconds(phase).show(".2f"),
        f"{limit(phase, BOUND):.2f}",
        f"{gain(first['default'], phase).median:.2f}",
        f"{gain(first['base'], phase).median:.2f}",
    ]


def _speed_ups(found: dict[str, list[Json]], columns: list[str]) -> str:
    rows = []
    for name, phases in found.items():
        cells = [
            f"{seconds(phase).median:.2f} ({gain(slow, phase).median:.2f})"
            for slow, phase in zip(found["default"], phases, strict=True)
        ]
        rows.append([NAMES[name].split(":")[0], *cells])
    return table(["", *columns], rows)


def _checks(first: Json) -> list[Check]:
    checks = []
    where = "most I/O-bound, 20% cache: s per epoch"
    for name, wanted in PAPER.items():
        ratio = gain(first[name], first["icache"])
        text = f"{where}, {NAMES[name].split(':')[0]} over `icache`"
        checks.append(Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high)))
    ratio = gain(first["icache"], first["unbiased"])
    checks.append(Check(f"{where}, `icache` over `unbiased`", ratio.median, 1.0, spread=(ratio.low, ratio.high)))
    for name, wanted in ABLATION.items():
        ratio = gain(first["base"], first[name])
        text = f"{where}, Base over {NAMES[name].removeprefix('Base ')}"
        checks.append(Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high)))
    for name in ("substitute", "icache", "packages"):
        text = f"{where}, Base over + IIS + H-cache + L-cache ({'swap' if name == 'icache' else name})"
        ratio = gain(first["base"], first[name])
        checks.append(Check(text, ratio.median, L_CACHE, spread=(ratio.low, ratio.high)))
    return checks


def _order(found: dict[str, list[Json]], columns: list[str]) -> Check:
    """In how many columns the contenders of the paper stand in its order, none more than 5% slower than the next."""
    names = [name for name in found if name != "unbiased"]
    met = 0
    for at in range(len(columns)):
        times = [seconds(found[name][at]).median for name in names]
        met += all(after <= before * 1.05 for before, after in pairwise(times))
    words = " < ".join(NAMES[name].split(":")[0] for name in names)
    return Check(f"{', '.join(columns)}: columns in which the speeds are {words}", met, len(columns), "==", "d")


# -- two jobs ---------------------------------------------------------------------------------------------------------


def _jobs(jobs: Json) -> list[Check]:
    checks = []
    for number, wanted in enumerate(TOGETHER):
        text = f"two jobs on one cache: s per epoch of job {number + 1}, own importance over that of both"
        ratio = gain(jobs["apart"]["jobs"][number], jobs["icache"]["jobs"][number])
        checks.append(Check(text, ratio.median, wanted, spread=(ratio.low, ratio.high)))
    return checks


def _jobs_note(jobs: Json) -> str:
    rows = []
    for name, words in (("apart", "its own"), ("icache", "that of both")):
        each = [seconds(job).show(".2f") for job in jobs[name]["jobs"]]
        rows.append([words, *each, f"{jobs[name]['reads']:.3f}"])
    columns = ["importance that counts", *(f"job {at + 1}, G = {g:g} S" for at, g in enumerate(JOBS)), "read / served"]
    return f"Two jobs with different losses and devices on one cache of 20%, s per epoch:\n\n{table(columns, rows)}"


def _note(what: str, scale: Scale, main: Json) -> str:
    resident = [each["resident"] for each in main.values()]
    disk = STORAGES["disk"]
    return (
        f"{what}, behind a `ThrottledSource`: {disk['iops']:,.0f} requests/s, {disk['latency'] * 1000:g} ms each, "
        f"{disk['bandwidth'] / 1e6:.0f} MB/s. Decoded and mirrored by 2 workers with 8 threads each, batches of 25. "
        "The device is a sleep, 1 / G per sample that is trained; above, G = 10 S. Losses are made up: log-normal "
        "levels that stay with a sample and fall by a tenth each time it is trained, with noise. The cache, pictures "
        f"as fetched, holds {min(resident):.3f} to {max(resident):.3f} of the samples. {scale.warm_up} epochs without "
        f"a limit come first; then {scale.epochs} are timed ({scale.fewer} in the other tables), median, lowest and "
        "highest. Bound: reads over S, or trained samples over G if that is longer. An epoch of a plan by importance "
        "has fewer samples, which is how it saves; whether they are enough to learn from is another benchmark. "
        "Quiver is its idea, on single files: what is resident stands for what is not, and what comes next replaces "
        "what was used up. Packages lie in the memory of this host; reading them is no request to the storage, filling "
        "them is."
    )


# -- pictures ---------------------------------------------------------------------------------------------------------


def make_thumbs(folder: Path, data: Path | None, count: int) -> str:
    """Write `count` small JPEG files, pieces of the photographs below `data` (or of made-up ones). What they are."""
    if data is None:
        data = folder.with_name("large")
        make_pictures(data, 40)
    paths = sorted(path for path in jpeg_files(data) if min(Image.open(path).size) >= SIDE)
    if not paths:
        raise FileNotFoundError(f"no JPEG file of {SIDE} pixels or more on each side lies below {data}")
    rng = np.random.default_rng(7)
    size = 0
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            picture = image.convert("RGB")
        for at in range(number, count, len(paths)):
            side = int(min(picture.size) * rng.uniform(0.4, 1))
            left, top = (int(rng.integers(0, full - side + 1)) for full in picture.size)
            piece = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
            encoded = io.BytesIO()
            piece.save(encoded, "JPEG", quality=QUALITY, subsampling=0)
            target = folder / f"class-{number % 10}" / f"{at:05d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            size += target.write_bytes(encoded.getbuffer())
    return (
        f"{count:,} JPEG files of {SIDE}x{SIDE} pixels and {size / count / 1000:.1f} KB on average, pieces of "
        f"{len(paths)} {'photographs' if folder.with_name('large') != data else 'made-up pictures'}"
    )
