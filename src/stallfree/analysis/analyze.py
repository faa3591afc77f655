"""`analyze`: measures the rates G, P, S and C of a job and its real speed, and creates a report.

The differential runs are those of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021, section 3): with data on the device, with data in memory, with cold files. None needs root.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from stallfree.analysis.auto import AutoCache, Trial
from stallfree.analysis.job import (
    CpuClock,
    CyclingSampler,
    Job,
    PartSource,
    make_job,
    read_file,
    read_some,
    resident_share,
)
from stallfree.analysis.measure import ROUNDS_FOR_INTERVAL, Limits, Rate, combined, steady_rate
from stallfree.analysis.model import choose
from stallfree.analysis.predict import Remedy
from stallfree.analysis.render import progress_bar
from stallfree.analysis.report import Report, make_report
from stallfree.cache.capacity import free_memory, free_space
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.errors import InputError, argument_conflict, job_failed, text_of
from stallfree.ipc.folders import default_root
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose, OnItem
from stallfree.pytree import take_apart
from stallfree.units import parse_room

RUNS = {
    "G": "G: batches on the device",
    "copy": "copies to the device",
    "P": "P: records in memory, no device",
    "P_hit": "P of hits: out of the cache",
    "S": "S: cold files, no prep",
    "C": "C: out of the cache, no prep",
    "cold": "the job, cold",
    "warm": "the job, all in memory",
}
"""The runs of a round, in their order."""

_MOST_CACHE = 4 << 30
"""Maximum bytes of the cache for the samples; only the necessary bytes are used."""

_MOST_ROUNDS = 5
_NARROW = 0.02
"""Half width of all intervals, as a share of the rate, at which the rounds end."""

_COLD_RESIDENT = 0.05
"""Maximum share of a cold file's pages in memory."""

_NO_STEPS = Compose([])


def analyze(
    dataset: Any,
    step: Callable[[Any], Any],
    *,
    batch_size: int,
    num_workers: int,
    cache: int | str | None = None,
    device: str | torch.device | None = None,
    seconds: float = 10.0,
    progress: bool = True,
    **loader_arguments: Any,
) -> Report:
    """Measure where a training job waits.

    Eight runs alternate in up to five rounds, until all 95% intervals are within 2%. They are G, batches already on the
    device; P, fetch from memory and no device, without and with a cache; S, cold files and no prep; C, reads from the
    cache; the job itself with cold files, and with all data in memory. Files are dropped from memory with
    `posix_fadvise` and verified with `mincore`; the report notes where that was not possible.

    A data set of stallfree (`CachedDataset`, `ImageFolder`, any `Source`) runs under `stallfree.DataLoader`, any other
    under `torch.utils.data.DataLoader`, where fetch and prep of a sample cannot be separated. P is then measured with
    the files in memory, and S by reading the files that the samples opened. Each step is synchronized before the next
    batch is requested, also on asynchronous devices.

    Args:
        dataset: a map-style data set or source.
        step: trains on one batch, and moves it to the device itself if necessary.
        batch_size: samples per batch.
        num_workers: worker processes of the loader.
        cache: cache size of the job, as bytes, "4GiB" or a share such as "50%"; a `CachedDataset` has its own.
        device: device of `step`; the CPU if None.
        seconds: maximum time for each of the eight runs, over all rounds.
        progress: show a progress bar on standard error, if that is a terminal.
        loader_arguments: other arguments of the loader, such as `collate_fn`.

    Raises `InputError` for invalid arguments, a data set smaller than a batch, and a step that raises.

    Example:
        ```python
        report = sf.analyze(dataset, step, batch_size=4, num_workers=1, seconds=10)
        print(report)
        report.save("report.json")
        ```
    """
    job = make_job(dataset, step, batch_size, num_workers, device, loader_arguments)
    if isinstance(dataset, CachedDataset):
        if cache is not None:
            raise argument_conflict(f"cache={cache!r}: the CachedDataset that was given has a cache; leave `cache` out")
        cache = dataset.cache.capacity
    elif cache is not None:
        parse_room(cache, "cache")
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise InputError(f"seconds={seconds!r}: give the longest time for one run, above 0")
    with progress_bar(progress) as shown, Analysis(job, seconds, shown) as analysis:
        while analysis.wants_round():
            analysis.round()
        return analysis.report(cache)


class Analysis:
    """The runs of an analysis, all repeated in each of several rounds.

    Alternating the runs prevents a change of the machine's speed from affecting only one rate, and the spread over the
    rounds gives intervals that include such changes.

    Args:
        job: the analysed job.
        seconds: maximum time for one kind of run, over all rounds, of which there are at most five.
        progress: shows the progress.
    """

    def __init__(self, job: Job, seconds: float, progress: Progress | None = None) -> None:
        self._job, self._most = job, int(max(1, min(_MOST_ROUNDS, seconds)))
        self._progress = progress or progress_bar(False)
        self._task = self._progress.add_task("reading some samples", total=self._most * len(RUNS))
        self._limits = Limits(min(1.0, seconds / 2) / self._most, seconds / self._most, seconds / 2)
        self._budget = len(RUNS) * seconds
        self._rounds: list[dict[str, Rate]] = []
        self._notes: list[str] = []
        self._machine: list[float] = []
        self._clock = CpuClock(job.num_workers)
        self._spent = 0.0
        self._full: CachedDataset[Any] | None = None
        self._placement: dict[str, Any] | None = None

    def __enter__(self) -> Analysis:
        return self

    def __exit__(self, *_: object) -> None:
        if self._full is not None:
            self._full.close()

    def wants_round(self) -> bool:
        """Whether another round is due: not all intervals are within 2%, and there is enough time."""
        done = len(self._rounds)
        if done == 0:
            return True
        if done >= self._most or self._spent * (done + 1) / done > self._budget:
            return False
        measured = [rate for rate in self._rates().values() if rate.value is not None]
        return done < ROUNDS_FOR_INTERVAL or not all(rate.within(_NARROW) for rate in measured)

    def round(self) -> None:
        """Perform each run once."""
        started = time.perf_counter()
        if not self._rounds:
            self._prepare()
        self._rounds.append({})
        self._machine.append(_machine_speed())
        self._compute()
        if self._job.parted:
            self._parts()
        else:
            self._inseparable()
        if len(self._rounds) == 1:
            self._placement = self._place()
        self._machine.append(_machine_speed())
        self._spent += time.perf_counter() - started

    def report(self, cache: int | str | None = None) -> Report:
        """The report of the rounds; with a `cache` size, of the job with that cache."""
        rates, some, job = self._rates(), self._some, self._job
        record_bytes = some.sample_bytes
        if self._full is not None and (stats := self._full.cache.stats()).resident_items:
            record_bytes = stats.resident_bytes / stats.resident_items
        described = {
            "dataset": type(job.dataset).__name__,
            "samples": len(job.source),
            "batch_size": job.batch_size,
            "num_workers": job.num_workers,
            "ahead": job.ahead,
            "loader": job.loader,
            "parted": job.parted,
            "device": str(job.device),
            "sample_bytes": some.sample_bytes,
            "record_bytes": record_bytes,
            "prepared_bytes": self._prepared_bytes,
            "fetch_share": self._clock.share,
        }
        drift = (max(self._machine) - min(self._machine)) / max(self._machine) if self._machine else 0.0
        remedy = self._remedy(rates, cache, record_bytes or 0.0)
        return make_report(
            described, job.device, rates, cache, self._notes, drift=drift, remedy=remedy, placement=self._placement
        )

    def _rates(self) -> dict[str, Rate]:
        return {name: combined([rates[name] for rates in self._rounds]) for name in self._rounds[0]}

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare the inputs of all rounds: some samples, batches of them, and a cache with as many as fit."""
        job = self._job
        self._some = some = read_some(job)
        self._cold = job.dataset
        if job.loader == "stallfree":
            threads, clock = bool(getattr(job.source, "threads", True)), self._clock if job.parted else None
            self._cold = PartSource(job.source.fetch, len(job.source), job.steps, threads, clock)
        ids = (some.ids * 4)[: 4 * job.batch_size]
        self._few = _batches_of(job, self._cold, ids)
        leaves = [leaf for leaf in take_apart(self._few[0])[0] if isinstance(leaf, torch.Tensor)]
        self._prepared_bytes = sum(leaf.nbytes for leaf in leaves) / job.batch_size
        self._on_device = [_sent(batch, job.device) for batch in self._few]
        for batch in self._on_device[:3]:
            job.train(batch)
        if job.parted:
            capacity = min(free_memory() // 4, free_space(default_root().parent) * 3 // 4, _MOST_CACHE)
            form = "prepared" if job.cached and job.dataset.form == "prepared" else "fetched"
            name = f"analyze-{os.getpid()}-{secrets.token_hex(4)}"
            self._held = PartSource(some.values.__getitem__, len(some.values), job.steps, True)
            self._full = CachedDataset(self._held, capacity=capacity, form=form, name=name)
            for _ in self._batches(self._full, range(len(some.ids))):
                pass
            self._resident = np.flatnonzero(self._full.cache.resident(np.arange(len(self._full)))).tolist()

    def _compute(self) -> None:
        job = self._job

        def steps() -> Iterator[int]:
            for batch in cycle(self._on_device):
                job.train(batch)
                yield job.batch_size

        def copies() -> Iterator[int]:
            for batch in cycle(self._few):
                _sent(batch, job.device)
                job.wait()
                yield job.batch_size

        self._time("G", steps(), 2)
        if job.device.type == "cpu":
            self._rounds[-1]["copy"] = Rate(None, note="nothing to copy: the device is the CPU")
        else:
            self._time("copy", copies(), 2)

    def _parts(self) -> None:
        """The runs of a job whose fetch and prep are separate."""
        job, some, full = self._job, self._some, self._full
        assert full is not None
        self._time("P", self._batches(self._held, CyclingSampler(range(len(some.ids)))), self._warm_up)
        self._time("P_hit", self._batches(full, CyclingSampler(self._resident)), self._warm_up)
        cold = CyclingSampler(range(len(job.source)), self._file_of, 1)
        fetches = PartSource(job.source.fetch, len(job.source), _NO_STEPS, bool(getattr(job.source, "threads", True)))
        self._time("S", self._batches(fetches, cold, collate_fn=_count), self._warm_up)
        self._check_dropped(cold)
        self._time("C", _cache_reads(full, self._resident, job.batch_size), 2)
        cold = CyclingSampler(range(len(job.source)), self._file_of, 2)
        self._time("cold", self._batches(self._cold, cold, train=True), self._warm_up)
        self._time("warm", self._batches(full, CyclingSampler(self._resident), train=True), self._warm_up)

    def _inseparable(self) -> None:
        """The runs of a job whose samples are made in one piece: P contains reading from memory."""
        job, some, rates = self._job, self._some, self._rounds[-1]
        files = some.all_files
        for path in files:
            read_file(path)
        self._time("P", self._batches(self._cold, CyclingSampler(some.ids)), self._warm_up)
        rates["P_hit"] = rates["P"]
        self._check_resident(files, "P")
        if files:
            cold = CyclingSampler(some.ids, some.files.__getitem__, 1)
            self._time("S", _file_reads(cold, some.files, job), 1)
            self._check_dropped(cold)
            for path in files:
                read_file(path)
            self._time("C", _file_reads(CyclingSampler(some.ids), some.files, job), 1)
        else:
            why = "no file was seen to be opened, so storage cannot be separated from prep; a Source keeps them apart"
            rates["S"] = rates["C"] = Rate(None, note=why)
        cold = CyclingSampler(some.ids, some.files.__getitem__, 2)
        self._time("cold", self._batches(self._cold, cold, train=True), self._warm_up)
        for path in files:
            read_file(path)
        self._time("warm", self._batches(self._cold, CyclingSampler(some.ids), train=True), self._warm_up)
        self._check_resident(files, "the warm job")

    def _remedy(self, rates: dict[str, Rate], cache: int | str | None, record_bytes: float) -> Remedy | None:
        """The choice of `DataLoader(cache="auto")`, with the S and the G measured here; None if nothing is cached."""
        job, trial = self._job, Trial()
        if job.cached:
            return None
        size = free_memory() // 2 if cache is None else parse_room(cache, "cache")
        capacity = int(size * len(job.source) * record_bytes) if isinstance(size, float) else size
        try:
            verdict = AutoCache(job.dataset, capacity, max(1, job.num_workers)).judge(trial)
        except Exception as error:  # also one of the data set
            self._note(f"cache='auto' would cache nothing: {text_of(error)}")
            return None
        finally:
            trial.close()
        self._note("; ".join(filter(None, (verdict.line, verdict.reasons))))
        if trial.costs is None:
            return None
        costs = replace(trial.costs, compute=float(rates["G"]))
        if job.parted:
            costs = replace(costs, storage=float(rates["S"]))
        return Remedy(costs, choose(costs, capacity, max(1, job.num_workers)))

    def _place(self) -> dict[str, Any] | None:
        """The rates with prep on the CPUs and on the device, for a step that can run on either; else None."""
        job, values = self._job, self._some.values
        movable = job.parted and any(hasattr(_inner(step), "on_device") for step in job.steps)
        if not movable or not _decodes(job.device):
            return None

        def part(on_device: bool) -> PartSource:
            steps = Compose([_placed(step, on_device) for step in job.steps])
            return PartSource(values.__getitem__, len(values), steps, True)

        def prep(on_device: bool) -> float:
            with closing(self._batches(part(on_device), CyclingSampler(range(len(values))))) as batches:  # type: ignore[type-var]
                return float(steady_rate(batches, self._warm_up, self._limits))

        def beside() -> Iterator[int]:
            for batch in DevicePrefetcher(cycle(few), job.device):
                job.train(batch)
                yield job.batch_size

        few = _batches_of(job, part(True), (list(range(len(values))) * 4)[: 4 * job.batch_size])
        for batch in few:
            _sent(batch, job.device)  # makes the decoder
        with closing(beside()) as batches:  # type: ignore[type-var]
            both = float(steady_rate(batches, 4, self._limits))
        step, on_device = (
            float(self._rounds[0]["G"]),
            any(getattr(_inner(step), "on_device", False) for step in job.steps),
        )
        rates = {"cpu_prep": prep(False), "device_prep": prep(True), "step": step, "step_and_prep": min(step, both)}
        return {"on_device": on_device, **rates}

    # -- tools --------------------------------------------------------------------------------------------------------

    @property
    def _warm_up(self) -> int:
        return 2 * self._job.ahead + max(1, self._job.num_workers)

    def _time(self, name: str, batches: Iterator[int], warm_up: int) -> None:
        before = (len(self._rounds) - 1) * len(RUNS) + list(RUNS).index(name)

        def show(share: float) -> None:
            self._progress.update(self._task, description=RUNS[name], completed=before + share)

        with closing(batches):  # type: ignore[type-var]
            self._rounds[-1][name] = steady_rate(batches, warm_up, self._limits, show)

    def _batches(self, dataset: Any, ids: Any, *, train: bool = False, **changed: Any) -> Iterator[int]:
        """Batch sizes from the job's loader; without a device, or with the job's steps."""
        with _iterated(self._job.load(dataset, ids, **changed)) as batches:
            for batch in batches:
                if train:
                    self._job.train(batch)
                yield self._job.batch_size

    def _file_of(self, id: int) -> list[str]:
        return list(filter(os.path.isfile, [self._job.source.where(id)]))

    def _check_dropped(self, cold: CyclingSampler) -> None:
        if not cold.resident:
            self._note("the samples are no local files: what their storage keeps in memory could not be dropped")
        elif (share := sum(cold.resident) / len(cold.resident)) > _COLD_RESIDENT:
            self._note(
                f"{share:.0%} of the files stayed in memory after posix_fadvise: S and the cold job are too fast"
            )

    def _check_resident(self, files: list[str], what: str) -> None:
        share = resident_share(files)
        if share is not None and share < 1 - _COLD_RESIDENT:
            self._note(f"only {share:.0%} of the files stayed in memory during the run of {what}, which is too slow")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _machine_speed() -> float:
    """The speed of one core now, in checksums of 1 MiB per second, over 20 ms."""
    data, began, count = bytes(1 << 20), time.perf_counter(), 0
    while time.perf_counter() - began < 0.02:
        zlib.crc32(data)
        count += 1
    return count / (time.perf_counter() - began)


@contextmanager
def _iterated(loader: Any) -> Iterator[Iterator[Any]]:
    """An iterator over a loader, whose workers stop at the end of the block."""
    batches: Any = iter(loader)
    try:
        yield batches
    finally:
        if isinstance(loader, DataLoader):
            loader.close()
        elif hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def _count(samples: list[Any]) -> torch.Tensor:
    """A collate function that does nothing."""
    return torch.tensor(len(samples))


def _file_reads(ids: Iterable[int], files: dict[int, list[str]], job: Job) -> Iterator[int]:
    """Read the files of samples, with one concurrent read per worker."""

    def read(id: int) -> None:
        for path in files[id]:
            read_file(path)

    order = iter(ids)
    with ThreadPoolExecutor(max(1, job.num_workers)) as pool:
        while True:
            for _ in pool.map(read, list(islice(order, job.batch_size))):
                pass
            yield job.batch_size


def _cache_reads(full: CachedDataset[Any], ids: list[int], batch_size: int) -> Iterator[int]:
    order = iter(CyclingSampler(ids))
    while True:
        full.cache.get_many(list(islice(order, batch_size)))
        yield batch_size


def _batches_of(job: Job, dataset: Any, ids: list[int]) -> list[Any]:
    """The batches of the job's loader over these samples, copied."""
    with _iterated(job.load(dataset, ids)) as batches:
        try:
            return [_copied(batch) for batch in batches]
        except Exception as error:
            first = text_of(error).strip().split("\n")[-1] or type(error).__name__
            raise job_failed(
                f"the loader of the job cannot make a batch: {type(error).__name__}: {first}. Iterate it once to see "
                "where"
            ) from error


def _decodes(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("torchvision") is not None


def _inner(step: Any) -> Any:
    return step.transform if isinstance(step, OnItem) else step


def _placed(step: Any, on_device: bool) -> Any:
    """`step` with its work on the device, or on the CPUs."""
    inner = copy.copy(_inner(step))
    if hasattr(inner, "on_device"):
        inner.on_device = on_device
    return OnItem(step.key, inner) if isinstance(step, OnItem) else inner


def _sent(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`."""
    leaves, rebuild = take_apart(batch)
    return rebuild([leaf.to(device) for leaf in leaves])


def _copied(batch: Any) -> Any:
    """`batch` in memory of its own."""
    leaves, rebuild = take_apart(batch)
    return rebuild([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
