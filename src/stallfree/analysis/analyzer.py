"""`analyze`: measures the rates G, P, S and C of a job and its real speed, and creates a report.

The differential runs are those of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021, section 3): with data on the device, with data in memory, with cold files. None needs root.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from stallfree.analysis.job import Bare, Cold, Endless, Held, Job, Records, make_job, read_some
from stallfree.analysis.placement import Placement, both_places, is_on_device, steps_beside_prep
from stallfree.analysis.progress import bar
from stallfree.analysis.report import Remedy, Report, Sizes, make_report
from stallfree.analysis.residency import read_file, resident_share
from stallfree.analysis.stopwatch import ROUNDS_FOR_INTERVAL, ChildTime, Limits, Rate, combined, steady_rate
from stallfree.autotune.choice import SAMPLES, choose, explain
from stallfree.autotune.measure import measure
from stallfree.cache.capacity import free_memory, free_space
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.probe import look
from stallfree.datasets.reader import IO_THREADS
from stallfree.errors import InputError, argument_conflict, job_failed, text_of
from stallfree.ipc.folders import default_root
from stallfree.ipc.forked import call_in_child
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose
from stallfree.platform import cpu_count
from stallfree.pytree import take_apart
from stallfree.sources.mapped import as_source
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

MOST_ROUNDS = 5
"""Maximum number of rounds of all runs."""

_NARROW = 0.02
"""Half width of all intervals, as a share of the rate, at which the rounds end."""

_COLD_RESIDENT = 0.05
"""Maximum share of a cold file's pages in memory."""


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
    the files in memory, and S by reading the files that the samples opened. Each step is
    synchronized before the next batch is requested, also on asynchronous devices.

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
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not seconds > 0:
        raise InputError(f"seconds={seconds!r}: give the longest time for one run, above 0")
    rounds = rounds_in(seconds)
    with bar(progress) as shown, Analysis(job, seconds, rounds, shown) as analysis:
        while analysis.wants_round():
            analysis.round()
        return analysis.report(cache)


def rounds_in(seconds: float) -> int:
    """Number of rounds for `seconds` of each run: at most five, of at least one second each."""
    return int(max(1, min(MOST_ROUNDS, seconds)))


class Analysis:
    """The runs of an analysis, all repeated in each of several rounds.

    Alternating the runs prevents a change of the machine's speed from affecting only one rate, and the spread over the
    rounds gives intervals that include such changes.

    Args:
        job: the analysed job.
        seconds: maximum time for one kind of run, over all rounds.
        rounds: maximum number of rounds.
        progress: shows the progress.
    """

    def __init__(self, job: Job, seconds: float, rounds: int, progress: Progress | None = None) -> None:
        self._job, self._most = job, rounds
        self._progress = progress or bar(False)
        self._task = self._progress.add_task("reading some samples", total=rounds * len(RUNS))
        self._limits = Limits(min(1.0, seconds / 2) / rounds, seconds / rounds, seconds / 2)
        self._budget = len(RUNS) * seconds
        self._rounds: list[dict[str, Rate]] = []
        self._notes: list[str] = []
        self._there: list[int] = []
        self._fetch_seconds: list[float] = []
        self._spent = 0.0
        self._full: CachedDataset | None = None
        self._placement: Placement | None = None

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
        self._rounds.append({})
        if len(self._rounds) == 1:
            self._prepare()
        self._compute()
        self._prep()
        self._fetch()
        self._real()
        if len(self._rounds) == 1:
            self._placement = self._place()
        self._spent += time.perf_counter() - started

    def report(self, cache: int | str | None = None) -> Report:
        """The report of the rounds; with a `cache` size, including a trial of `cache="auto"`."""
        rates = self._rates()
        record_bytes = self._some.sample_bytes
        if self._full is not None and (stats := self._full.cache.stats()).resident_items:
            record_bytes = stats.resident_bytes / stats.resident_items
        sizes = Sizes(self._some.sample_bytes, record_bytes, self._prepared_bytes)
        remedy = self._remedy(rates, cache, record_bytes or 0.0)
        fetching = sum(self._fetch_seconds) / max(1, len(self._fetch_seconds))
        return make_report(self._job, rates, sizes, fetching, cache, self._notes, remedy, self._placement)

    def _rates(self) -> dict[str, Rate]:
        return {name: combined([found[name] for found in self._rounds]) for name in self._rounds[0]}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare the inputs of all rounds: some samples, batches of them, and a cache with as many as fit."""
        job = self._job
        self._some = some = read_some(job)
        self._few = _first_batches(job, some, 4)
        tensors = [leaf for leaf in take_apart(self._few[0])[0] if isinstance(leaf, torch.Tensor)]
        self._prepared_bytes = sum(tensor.nbytes for tensor in tensors) / job.batch_size
        self._on_device = [_sent(batch, job.device) for batch in self._few]
        for batch in self._on_device[:3]:
            job.train(batch)
        if job.parted:
            room = min(free_memory() // 4, free_space(default_root().parent) * 3 // 4, _MOST_CACHE)
            name = f"analyze-{os.getpid()}-{secrets.token_hex(4)}"
            self._held = Held(some.values, job.steps)
            self._full = CachedDataset(self._held, capacity=room, form=job.form, name=name)
            for _ in self._batches(self._full, range(len(some.ids))):
                pass
            self._there = np.flatnonzero(self._full.cache.resident(np.arange(len(self._full)))).tolist()

    def _compute(self) -> None:
        job = self._job

        def steps() -> Iterator[int]:
            while True:
                for batch in self._on_device:
                    job.train(batch)
                    yield job.batch_size

        self._time("G", steps(), 2)
        if job.device.type == "cpu":
            self._rounds[-1]["copy"] = Rate(None, note="nothing to copy: the device is the CPU")
            return

        def copies() -> Iterator[int]:
            while True:
                for batch in self._few:
                    _sent(batch, job.device)
                    job.wait()
                    yield job.batch_size

        self._time("copy", copies(), 2)

    def _prep(self) -> None:
        job, some, rates = self._job, self._some, self._rounds[-1]
        if self._full is not None:
            if job.parted:
                self._time("P", self._batches(self._held, Endless(range(len(some.ids)))), self._warm_up)
            self._time("P_hit", self._batches(self._full, Endless(self._there)), self._warm_up)
            rates.setdefault("P", rates["P_hit"])
            return
        self._bring_in(some)
        self._time("P", self._batches(job.dataset, Endless(some.ids)), self._warm_up)
        rates["P_hit"] = rates["P"]
        self._check_in(some, "P")

    def _fetch(self) -> None:
        job, some, full, rates = self._job, self._some, self._full, self._rounds[-1]
        if full is not None and job.parted:
            cold = self._cold(some)
            with ChildTime() as slow:
                self._time(
                    "S",
                    self._batches(Bare(job.source, Compose([])), slow.count(cold), collate_fn=_count),
                    self._warm_up,
                )
            self._check_out(cold)
            self._fetch_seconds.append(self._fetch_cost(some, slow))
            self._time("C", _cache_reads(full, self._there, job.batch_size), 2)
        elif some.files:
            cold = self._cold(some)
            self._time("S", _file_reads(cold, some, job), 1)
            self._check_out(cold)
            self._bring_in(some)
            self._time("C", _file_reads(Endless(some.ids), some, job), 1)
        else:
            why = "no file was seen to be opened, so storage cannot be separated from prep; a Source keeps them apart"
            rates["S"] = rates["C"] = Rate(None, note=why)

    def _fetch_cost(self, some: Records, slow: ChildTime) -> float:
        """CPU seconds per fetch: those of the run of S, minus those of process start and loader."""
        held, job = Held(some.values, Compose([])), self._job
        with ChildTime() as start:
            for _ in self._batches(held, range(min(len(held), job.batch_size)), collate_fn=_count):
                pass
        limits = Limits(self._limits.least / 2, self._limits.least)
        with (
            ChildTime() as fast,
            closing(
                self._batches(held, fast.count(Endless(range(len(held)))), collate_fn=_count)  # type: ignore[type-var]
            ) as batches,
        ):
            steady_rate(batches, job.ahead, limits)
        return max(0.0, slow.each(start) - fast.each(start))

    def _real(self) -> None:
        job, some, full = self._job, self._some, self._full
        cold = self._cold(some)
        self._time("cold", self._batches(job.uncached, cold, train=True), self._warm_up)
        if full is not None:
            self._time("warm", self._batches(full, Endless(self._there), train=True), self._warm_up)
            return
        self._bring_in(some)
        self._time("warm", self._batches(job.dataset, Endless(some.ids), train=True), self._warm_up)
        self._check_in(some, "the warm job")

    def _remedy(self, rates: dict[str, Rate], cache: int | str | None, record_bytes: float) -> Remedy | None:
        """The choice of `DataLoader(cache="auto")`, with the S and the G measured here.

        None for a data set with random samples and inseparable fetch and prep.
        """
        job = self._job
        given = free_memory() // 2 if cache is None else parse_room(cache, "cache")
        room = int(given * len(job.source) * record_bytes) if isinstance(given, float) else given
        source = job.source if job.parted else as_source(job.dataset)
        steps = job.steps if job.parted else source.pipeline
        try:
            measured = call_in_child(
                partial(measure, source, steps, look(source, steps), seed=0), "the measurement"
            ).measured
        except Exception as error:  # also one of the data set
            self._note(
                f"sf.DataLoader(..., cache='auto') would cache no samples, at most the files that they are read from: "
                f"{text_of(error)}"
            )
            return None
        if job.parted:
            storage = {IO_THREADS * max(1, job.num_workers): float(rates["S"])}
            fetching = sum(self._fetch_seconds) / len(self._fetch_seconds)
            measured = replace(measured, storage=storage, fetching=fetching)
        measured = replace(measured, compute=float(rates["G"]))
        chosen = choose(measured, room, workers=None, cpus=cpu_count())
        self._note(f"sf.DataLoader(..., cache='auto', capacity={room}): {explain(measured, chosen, room, SAMPLES)}")
        return Remedy(measured, chosen, room)

    def _place(self) -> Placement | None:
        """The rates with prep on the CPUs and on the device; None if it has only one place."""
        job, values = self._job, self._some.values
        places = both_places(job.steps, job.device) if job.parted else None
        if places is None:
            return None

        def prep(steps: Compose) -> float:
            batches = self._batches(Held(values, steps), Endless(range(len(values))))
            with closing(batches):  # type: ignore[type-var]
                return float(steady_rate(batches, self._warm_up, self._limits))

        cpu_prep, device_prep = map(prep, places)
        few = _first_batches(job, self._some, 4, Held(values, places[1]))
        for batch in few:
            _sent(batch, job.device)  # makes the decoder
        both = steps_beside_prep(few, job.device, job.train, job.batch_size)
        with closing(both):  # type: ignore[type-var]
            beside = float(steady_rate(both, 4, self._limits))
        step = float(self._rounds[0]["G"])
        return Placement(is_on_device(job.steps), cpu_prep, device_prep, step, min(step, beside))

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

    def _cold(self, some: Records) -> Cold:
        """Ids whose files are not in memory."""
        job = self._job
        if job.parted:
            return Cold(range(len(job.source)), lambda id: list(filter(os.path.isfile, [job.source.where(id)])), 1)
        return Cold(some.ids, some.paths, 1)

    def _check_out(self, cold: Cold) -> None:
        if not cold.looked:
            self._note("the samples are no local files: what their storage keeps in memory could not be put out")
        elif (there := sum(cold.looked) / len(cold.looked)) > _COLD_RESIDENT:
            self._note(
                f"{there:.0%} of the files stayed in memory after posix_fadvise: S and the cold job are too fast"
            )

    def _bring_in(self, some: Records) -> None:
        for path in some.files:
            read_file(path)

    def _check_in(self, some: Records, what: str) -> None:
        there = resident_share(some.files)
        if there is not None and there < 1 - _COLD_RESIDENT:
            self._note(f"only {there:.0%} of the files stayed in memory during the run of {what}, which is too slow")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


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


def _file_reads(ids: Iterable[int], some: Records, job: Job) -> Iterator[int]:
    """Read what `ids` were read from, with one concurrent read per worker."""

    def read(id: int) -> None:
        for part in some.parts[id]:
            read_file(*part)

    order = iter(ids)
    with ThreadPoolExecutor(max(1, job.num_workers)) as pool:
        while True:
            for _ in pool.map(read, list(islice(order, job.batch_size))):
                pass
            yield job.batch_size


def _cache_reads(full: CachedDataset, ids: list[int], batch_size: int, threads: int = 1) -> Iterator[int]:
    order = iter(Endless(ids))
    with ThreadPoolExecutor(threads) as pool:
        while True:
            batches = [list(islice(order, batch_size)) for _ in range(threads)]
            for _ in (map if threads == 1 else pool.map)(full.cache.get_many, batches):
                pass
            yield threads * batch_size


def _first_batches(job: Job, some: Records, count: int, held: Held | None = None) -> list[Any]:
    """The first `count` batches of the loader, of the job's data set or of `held`."""
    ids = some.ids if held is None else list(range(len(held)))
    ids = (ids * count)[: count * job.batch_size]
    with _iterated(job.load(job.uncached if held is None else held, ids)) as batches:
        try:
            return [_each(batch, torch.clone) for batch in batches]
        except Exception as error:
            first = text_of(error).strip().split("\n")[-1] or type(error).__name__
            raise job_failed(
                f"the loader of the job cannot make a batch: {type(error).__name__}: {first}. Iterate it once to see "
                "where"
            ) from error


def _sent(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`."""
    leaves, rebuild = take_apart(batch)
    return rebuild([leaf.to(device) for leaf in leaves])


def _each(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`batch` with `change` applied to its tensors."""
    leaves, rebuild = take_apart(batch)
    return rebuild([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
