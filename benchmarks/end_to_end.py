"""From a user's script to its last epoch: torch's loader, those of tf.data and FFCV, and stallfree's in its place."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkError, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.photos import jpeg_files, make_photos
from benchmarks.slow_disk import SlowDisk, slow_disk, why_not

NAME = "end_to_end"
QUESTION = (
    "A script trains a small residual network on photographs: how long does it take to the end of 5 epochs with "
    "torch's loader, with one line changed for stallfree, and rewritten for tf.data and FFCV?"
)
RATE = 60_000_000
EPOCHS = 5
CHILD = "benchmarks.contenders.end_to_end"
VENV = "training"
LOADERS = {
    "torch `DataLoader`": ("torch_loader", "-"),
    'stallfree `DataLoader(cache="auto")`': ("auto", "one line"),
    "stallfree `SharedLoader`": ("shared", "one line"),
    "tf.data": ("tfdata", "data set, transforms and loader"),
    "FFCV": ("ffcv", "data set, transforms and loader; data converted"),
}
WARM, SLOW, TWO = "warm files", "storage of 60 MB/s", "two jobs, warm files"
Times = dict[tuple[str, str], list[float]]


def run(options: Options) -> Report:
    if missing := why_not():
        raise BenchmarkError(missing)
    count, epochs, rounds = (100, 2, 1) if options.quick else (2000, EPOCHS, 3)
    absent = venvs.why_missing(VENV)
    times: Times = {}
    raw: Json = {}
    with scratch_folder() as scratch, slow_disk(scratch, 100 if options.quick else 800, RATE) as disk:
        photos = _photographs(disk.folder / "photos", options.data, count)
        common = {"photos": str(disk.folder / "photos"), "epochs": epochs}
        converted = None if absent else _child({**common, "who": "convert"}, scratch)["seconds"]
        os.sync()
        versions: dict[str, str] = {}
        for round_ in range(rounds):
            for setting in (WARM, SLOW, TWO):
                for name, (who, _) in LOADERS.items():
                    if (absent and who in ("tfdata", "ffcv")) or (who == "shared" and setting != TWO):
                        continue
                    found = _run({**common, "who": who, "group": f"training-{round_}"}, setting, disk, scratch)
                    taken = max(one["seconds"][-1] for one in found)
                    times.setdefault((name, setting), []).append(taken)
                    raw.setdefault(f"{name}, {setting}", []).append(found)
                    versions |= found[0]["versions"]
                    say(f"  round {round_ + 1}: {setting}: {name}: {taken:.1f} s, loss {found[0]['loss']:.2f}")
    return Report(
        columns=[
            "loader",
            "changed in the script",
            *(f"{setting}: s" for setting in (WARM, SLOW, TWO)),
            f"an epoch after the first, {WARM}: s",
        ],
        rows=[
            [
                name,
                what,
                *(_cell(times.get((name, setting)), who, absent) for setting in (WARM, SLOW, TWO)),
                _cell(_later(raw.get(f"{name}, {WARM}", [])), who, absent),
            ]
            for name, (who, what) in LOADERS.items()
        ],
        checks=[],
        notes=[
            f"{photos}. {epochs} epochs on the processor: a residual network of 78,042 weights on 3x64x64 with one "
            "thread, batches of 50, loaders of 2 processes or threads. Each picture is decoded, cut at random, resized "
            "and mirrored for each epoch. The time runs from before the data set is made, after the imports; it has "
            f'the start of workers, the measuring of `cache="auto"` and the compiling of FFCV and tf.data in it'
            + (f", not the {converted:.1f} s in which FFCV's file was written. " if converted else ". ")
            + "tf.data keeps the encoded files in memory. Slow storage is a disk image whose reads the kernel "
            "throttles; the page cache is emptied before each epoch, for files larger than memory. Of two jobs, the "
            f"slower counts. {rounds} rounds in turn; medians (lowest to highest).",
            _losses(raw),
        ],
        versions=versions,
        raw=raw,
    )


def _photographs(folder: Path, data: Path | None, count: int) -> str:
    """Fill `folder`/CLASS with `count` photographs: copies of those in `data`, or made-up ones."""
    if data is None:
        return make_photos(folder, None, count)
    found, size = jpeg_files(data), 0
    for number in range(count):
        source = found[number % len(found)]
        (folder / source.parent.name).mkdir(parents=True, exist_ok=True)
        copy = folder / source.parent.name / f"{number:05}.jpg"
        size += copy.write_bytes(source.read_bytes())
    return f"{count:,} files, copies of {len(found)} photographs of {size / count / 1000:.0f} KB on average"


def _child(params: Json, scratch: Path) -> Json:
    python = venvs.python_of(VENV)
    return run_child(CHILD, params, scratch=scratch, **({"python": python} if python.exists() else {}))


def _run(params: Json, setting: str, disk: SlowDisk, scratch: Path) -> list[Json]:
    """What each job of a setting found."""
    if setting == SLOW:
        params = params | {"slow": str(disk.slow)}
    jobs = 2 if setting == TWO else 1
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda _: _child(params, scratch), range(jobs)))


def _cell(found: list[float] | None, who: str, absent: str | None) -> str:
    if not found:
        return absent if absent and who in ("tfdata", "ffcv") else "-"
    return Spread.of(found).show(".1f")


def _later(rounds: list[list[Json]]) -> list[float]:
    """Seconds per epoch after the first, of each round."""
    ends = [jobs[0]["seconds"] for jobs in rounds]
    return [(times[-1] - times[0]) / (len(times) - 1) for times in ends]


def _losses(raw: Json) -> str:
    """The mean losses of the last epoch, which show that all train alike."""
    found: dict[str, Any] = {}
    for what, rounds in raw.items():
        found.setdefault(what.rsplit(", ", 1)[0].split(",")[0], []).extend(
            one["loss"] for jobs in rounds for one in jobs
        )
    return (
        "Mean loss of the last epoch: "
        + ", ".join(f"{name} {Spread.of(losses).show('.2f')}" for name, losses in found.items())
        + "."
    )
