"""What does slow storage cost, and what does a cache save?"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks import venvs
from benchmarks.data import capacity_for, make_records
from benchmarks.harness import Case, Condition, Contender, Figure, Options
from benchmarks.photos import make_photos, photos
from benchmarks.processes import fetch_rate, prep_rate
from benchmarks.programs import PROGRAMS
from benchmarks.questions.prep import CropAndFlip
from benchmarks.slow_disk import SlowDisk, forget_pages, join, make_slow_disk, why_not
from benchmarks.timing import MIN_EPOCHS, check_labels, epoch_rates

Figures = dict[str, Any]


# -- bytes from storage -----------------------------------------------------------------------------------------------


def cold_storage(photos: str, fraction: float, bandwidth: float) -> Figures:
    """Bytes and seconds of epochs with a cache for a part of the data; torch's loader without one."""
    source = sf.testing.ThrottledSource(sf.ImageFolder(photos, CropAndFlip()), bandwidth=bandwidth)
    sizes = np.array([len(source.source.fetch(id)[0]) for id in range(len(source))])
    options: Figures = {"batch_size": 64, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    cached, loader = None, torch.utils.data.DataLoader(source, **options)  # type: ignore[arg-type]
    if fraction:
        cached = sf.CachedDataset(source, capacity=int(sizes.sum() * fraction), form="fetched")
        loader = sf.DataLoader(cached, **options)  # type: ignore[assignment]
    seconds, read, absent = [], [], []
    for _ in range(4):
        resident = np.zeros(len(sizes), bool) if cached is None else cached.cache.resident(np.arange(len(sizes)))
        source.reset()
        begun = time.perf_counter()
        if (samples := sum(len(labels) for _, labels in loader)) != len(sizes):
            raise AssertionError(f"{samples} samples instead of {len(sizes)}")
        seconds.append(time.perf_counter() - begun)
        read.append(source.bytes / sizes.sum())
        absent.append(sizes[~resident].sum() / sizes.sum())
    if cached is not None:
        loader.close()  # type: ignore[attr-defined]
        cached.close()
    return {"seconds": seconds[1:], "first": seconds[0], "read": read[1:], "absent": absent[1:]}


# -- the bound of the model -------------------------------------------------------------------------------------------

BATCH = 32


class ListSampler:
    """A sampler that returns the ids of a list, which may be changed between epochs."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.ids))

    def __len__(self) -> int:
        return len(self.ids)


def bound(photos: str, bandwidth: float, fraction: float, device: float, workers: int = 2, passes: int = 3) -> Figures:
    """Samples/s behind slow storage, and the rates of the parts, each measured alone."""
    folder = sf.ImageFolder(photos, CropAndFlip())
    count, generator = len(folder), np.random.default_rng(0)
    records = [folder.fetch(id) for id in range(count)]
    source = sf.testing.ThrottledSource(folder, bandwidth=bandwidth)
    fetch = fetch_rate(source.fetch, generator.permutation(count)[: count // 2].tolist(), threads=8 * workers)
    prep = prep_rate(folder.pipeline, records[:200], workers, seconds=2.0)
    capacity = int(sum(len(record[0]) for record in records) * fraction)
    order = ListSampler()
    with (
        sf.CachedDataset(source, capacity=capacity, form="fetched") as cached,
        sf.DataLoader(cached, BATCH, sampler=order, num_workers=workers, persistent_workers=True) as loader,
    ):
        order.ids = generator.permutation(count).tolist()
        for _batch in loader:
            pass
        resident = np.flatnonzero(cached.cache.resident(np.arange(count)))
        hits = _hit_rate(cached.cache, resident, generator)
        order.ids = np.concatenate([generator.permutation(count) for _ in range(passes)]).tolist()
        before, busy, begun = loader.stats(), 0.0, time.perf_counter()
        for _batch in loader:
            stepped = time.perf_counter()
            time.sleep(BATCH / device)
            busy += time.perf_counter() - stepped
        rate, train = len(order) / (time.perf_counter() - begun), len(order) / busy
        after = loader.stats()
    hit, miss = after.hits - before.hits, after.misses - before.misses
    ratio = hit / (hit + miss)
    fetched = 1 / (ratio / hits + (1 - ratio) / fetch)
    limit = min(fetched, prep, train)
    return {"rate": rate, "reached": rate / limit, "limit": limit, "F": fetched, "P": prep, "G": train, "hits": ratio}


def _hit_rate(cache: Any, resident: Any, generator: np.random.Generator, seconds: float = 1.0) -> float:
    read, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds:
        cache.get_many(generator.choice(resident, BATCH))
        read += BATCH
    return read / taken


# -- a disk below memory ----------------------------------------------------------------------------------------------


def tiers(
    folder: str, samples: int, size: int, fraction: float, disk: bool, bandwidth: float, latency: float
) -> Figures:
    """Two epochs with memory for `fraction` of the data, and with `disk` a local disk for all of it."""
    source = sf.testing.ThrottledSource(make_records(folder, samples, size), bandwidth=bandwidth, latency=latency)
    below = Path(tempfile.mkdtemp(prefix="bench-tier-", dir="/var/tmp"))
    capacity = capacity_for(round(samples * fraction), size)
    store: Any = sf.DiskTier(below, capacity=2 * capacity_for(samples, size)) if disk else "memory"
    options: Figures = {"batch_size": 64, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    try:
        with (
            sf.CachedDataset(source, capacity=capacity, store=store, form="fetched") as cached,
            sf.DataLoader(cached, **options) as loader,
        ):
            seconds, reads = [], []
            for epoch in range(2):
                if epoch and disk:
                    time.sleep(3)  # the workers still write to the disk
                    forget_pages(below)
                before, begun = source.requests, time.perf_counter()
                ids = [ids for _, ids in loader]
                seconds.append(time.perf_counter() - begun)
                reads.append(source.requests - before)
                check_labels(ids, samples)
    finally:
        shutil.rmtree(below, ignore_errors=True)
    return {"rate": samples / seconds[1], "first": seconds[0], "reads": reads[1]}


# -- cache="auto" -----------------------------------------------------------------------------------------------------


@sf.mark_deterministic
class Resize:
    """To a square of `side` pixels, then `blurs` blurs, which stand for prep that costs."""

    def __init__(self, side: int, blurs: int) -> None:
        self.side, self.blurs = side, blurs

    def __call__(self, pixels: Any) -> Any:
        picture = torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)[None]
        small = torch.nn.functional.interpolate(picture, (self.side, self.side), mode="bilinear", antialias=True)[0]
        for _ in range(self.blurs):
            small = torch.nn.functional.avg_pool2d(small.float(), 5, 1, 2).to(torch.uint8)
        return small.permute(1, 2, 0).contiguous().numpy()


def auto_cache(
    photos: str, form: str, seconds: float, side: int, blurs: int, step: float, requests: float, capacity: float
) -> Figures:
    """Samples/s after two epochs, and seconds of the first, with a cache of `form`, "auto" or "none" (torch's loader).

    `requests` are those of the storage per second, None for no limit; `capacity` is relative to the prepared pictures.
    """
    source: Any = sf.ImageFolder(photos, sf.Compose([Resize(side, blurs), CropAndFlip()]))
    count = len(source)
    if requests:
        source = sf.testing.ThrottledSource(source, iops=requests, latency=0.002)
    room = int(capacity * count * (side * side * 3 + 512))
    options: Figures = {"batch_size": BATCH, "shuffle": True, "drop_last": True, "num_workers": 2}
    options |= {"persistent_workers": True}
    if form == "none":
        loader: Any = torch.utils.data.DataLoader(source, **options)
    elif form == "auto":
        loader = sf.DataLoader(source, cache="auto", capacity=room, **options)
    else:
        loader = sf.DataLoader(sf.CachedDataset(source, capacity=room, form=form), **options)
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        for _batch in loader:
            time.sleep(step * BATCH)
        taken.append(time.perf_counter() - begun)
    rates = epoch_rates(lambda: loader, count // BATCH * BATCH, seconds, step * BATCH)
    return {"rate": rates, "first": taken[0]}


# -- programs of users ------------------------------------------------------------------------------------------------

COUNTS = {"photos": 400, "volumes": 120, "words": 600, "features": 1000, "clips": 600}


def program_files(scratch: Path, options: Options) -> Figures:
    """Write the files of all programs to a disk image."""
    from benchmarks.programs import files
    from benchmarks.volumes import make_volumes

    counts = {name: count // 10 if options.quick else count for name, count in COUNTS.items()}
    disk = make_slow_disk(scratch, 300 if options.quick else 900, rate=20_000_000)
    root = disk.folder / "data"
    about = make_photos(root / "photos", options.data, counts["photos"])
    files.annotate(root)
    make_volumes(root / "volumes", None, counts["volumes"])
    for name, make in files.MAKERS.items():
        make(root, counts[name])
    os.sync()  # the page cache forgets only what has been written
    return {"root": str(root), "slow": str(disk.slow), "device": disk.device, "about": about}


def user_program(root: str, slow: str, device: str, program: str, cached: bool, seconds: float) -> Figures:
    """Samples/s after the first epoch: torch's loader on warm files, or stallfree's on slow storage, files cached."""
    module = importlib.import_module(f"benchmarks.programs.{program}")
    dataset, options = (
        module.make(root),
        module.OPTIONS | {"num_workers": 2, "persistent_workers": True, "shuffle": True},
    )
    disk = SlowDisk(Path(), Path(slow), device)
    if not cached:
        loader: Any = torch.utils.data.DataLoader(dataset, **options)
    else:
        join(disk.slow)
        loader = sf.DataLoader(sf.CachedDataset(dataset, capacity="1GiB", form="files"), **options)
    rates, read = [], []
    end = time.perf_counter() + seconds
    while len(rates) <= MIN_EPOCHS or time.perf_counter() < end:
        if cached:
            forget_pages(Path(root))
        before, begun = disk.bytes_read(), time.perf_counter()
        for _batch in loader:
            pass
        rates.append(len(dataset) / (time.perf_counter() - begun))
        read.append((disk.bytes_read() - before) / 1e6)
    return {"rate": rates[1:], "read": max(read[1:])}


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.storage"
WORKLOADS: dict[str, tuple[str, Figures]] = {
    "io": ("storage is the limit", {"requests": 150, "capacity": 0.14}),
    "prep": ("prep is the limit", {"blurs": 3}),
    "compute": ("compute is the limit", {"step": 0.004}),
    "fits": ("slow storage, decoded samples fit", {"requests": 900}),
    "half": ("slow storage and prep, decoded samples do not fit", {"requests": 300, "blurs": 1, "capacity": 0.5}),
}

CASES = {
    "cold_storage": Case(
        question="With storage of 60 MB/s and a cache for a part of the data, how many bytes come from storage in "
        "each epoch after the first?",
        setup="Behind a `ThrottledSource` that counts; random order, batches of 64, 2 workers, policy `minio`.",
        contenders=[
            Contender("torch", "torch DataLoader, no cache", f"{HERE}:cold_storage", {"fraction": 0}),
            Contender("35", "stallfree, 35% cache", f"{HERE}:cold_storage", {"fraction": 0.35}),
            Contender("65", "stallfree, 65% cache", f"{HERE}:cold_storage", {"fraction": 0.65}),
        ],
        figures={
            "seconds": Figure("s, later epochs", ".1f", less=True),
            "first": Figure("s, first epoch", ".1f", less=True),
            "read": Figure("read from storage / data", ".4f", less=True),
            "absent": Figure("not in the cache / data", ".4f", less=True),
        },
        ours="65",
        subject="a 65% cache",
        params={"bandwidth": 60e6},
        rounds=3,
        prepare=photos(2000),
    ),
    "bound": Case(
        question="Behind slow storage, how much of the bound min(F, P, G) is reached?",
        setup="Decode, random crop, flip; batches of 32, 2 workers; 3 passes in random order after the first. F: 1 / "
        "(x/C + (1-x)/S) with the hit ratio x, the rate S of fetches from the `ThrottledSource` by as many threads "
        "as the workers use, and the rate C of hits; P: 2 processes that run the pipeline on records in memory; G: "
        "the device, a wait.",
        contenders=[Contender("stallfree", "stallfree", f"{HERE}:bound")],
        figures={
            "rate": Figure("samples/s"),
            "reached": Figure("fraction of the bound", ".2f"),
            "limit": Figure("min(F, P, G)"),
            "F": Figure("F"),
            "P": Figure("P"),
            "G": Figure("G"),
            "hits": Figure("hit ratio", ".3f"),
        },
        conditions=[
            Condition(
                f"{bandwidth} {fraction} {device}",
                f"{bandwidth} MB/s, {fraction:.0%} cache, device of {device:,}/s",
                {"bandwidth": bandwidth * 1e6, "fraction": fraction, "device": device},
            )
            for bandwidth, fraction, device in (
                (60, 0.35, 10_000),
                (60, 0.65, 10_000),
                (20, 0.35, 10_000),
                (20, 0.65, 10_000),
                (20, 0.65, 500),
            )
        ],
        rounds=3,
        prepare=photos(2000),
    ),
    "tiers": Case(
        question="Storage of 30 MB/s and 2 ms, memory for 25% of the data, a local disk for all of it: how fast is "
        "the second epoch, and what does the first one cost more than with memory only?",
        setup="2,048 samples of 110 KB, random order, batches of 64, 2 workers, no device. Before the second epoch "
        "the disk's file is dropped from the page cache.",
        contenders=[
            Contender("memory", "stallfree, memory for 25%", f"{HERE}:tiers", {"fraction": 0.25, "disk": False}),
            Contender(
                "disk", "stallfree, memory for 25%, over a disk", f"{HERE}:tiers", {"fraction": 0.25, "disk": True}
            ),
            Contender("all", "stallfree, memory for all", f"{HERE}:tiers", {"fraction": 1.0, "disk": False}),
        ],
        figures={
            "rate": Figure("samples/s, second epoch"),
            "first": Figure("s, first epoch", ".2f", less=True),
            "reads": Figure("read from storage", less=True),
        },
        ours="disk",
        subject="memory over a disk",
        params={"samples": 2048, "size": 110_000, "bandwidth": 30e6, "latency": 0.002},
        quick={"samples": 256, "size": 110_000, "bandwidth": 30e6, "latency": 0.002},
    ),
    "auto_cache": Case(
        question='What does the one line `cache="auto"` give against the loader of torch and against fixed settings?',
        setup="JPEG files, resized to 256x256; then a random square, mirrored half the time. 2 workers, batches of "
        "32. Epochs from the third on.",
        contenders=[
            Contender("none", "torch DataLoader", f"{HERE}:auto_cache", {"form": "none"}),
            Contender("fetched", 'stallfree, form="fetched"', f"{HERE}:auto_cache", {"form": "fetched"}),
            Contender("prepared", 'stallfree, form="prepared"', f"{HERE}:auto_cache", {"form": "prepared"}),
            Contender("auto", 'stallfree, cache="auto"', f"{HERE}:auto_cache", {"form": "auto"}),
        ],
        figures={"rate": Figure("samples/s"), "first": Figure("s, first epoch", ".1f", less=True)},
        conditions=[Condition(key, title, params) for key, (title, params) in WORKLOADS.items()],
        ours="auto",
        subject='`cache="auto"`',
        params={"side": 256, "blurs": 0, "step": 0.0, "requests": 0, "capacity": 1.2},
        rounds=5,
        prepare=photos(400),
    ),
    "real_programs": Case(
        question="Data sets as users of public libraries write them, with nothing changed but the line of the "
        "loader: how fast are later epochs if the storage gives 20 MB/s?",
        setup="2 workers. torch's loader reads files from the page cache; stallfree's reads a disk image whose reads "
        "the kernel throttles, with the page cache emptied before each epoch. That the batches are those of torch's "
        "loader is tested in `tests/datasets/test_real_programs.py`.",
        contenders=[
            Contender("torch", "torch, warm files", f"{HERE}:user_program", {"cached": False}, venv="programs"),
            Contender("stallfree", "stallfree, 20 MB/s", f"{HERE}:user_program", {"cached": True}, venv="programs"),
        ],
        figures={
            "rate": Figure("samples/s, later epochs"),
            "read": Figure("MB read from storage per epoch", ".1f", less=True),
        },
        conditions=[Condition(name, name, {"program": name}) for name in PROGRAMS],
        rounds=5,
        prepare=program_files,
        needs=lambda: venvs.why_missing("programs") or why_not(),
    ),
}
