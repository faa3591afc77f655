"""`analyze`: measures the rates G, P, S and C of a job and its real speed, and creates a report.

The differential runs are those of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021, section 3): with data on the device, with data in memory, with cold files. None needs root.
"""

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np
import torch

from stallfree import errors
from stallfree.analysis import jobs, measure, model, render
from stallfree.analysis.auto import AutoCache, Trial
from stallfree.analysis.report import Report, make_report
from stallfree.cache.capacity import free_memory, granted
from stallfree.datasets.cached_dataset import CachedDataset, cached_after
from stallfree.datasets.probe import look
from stallfree.datasets.reader import IO_THREADS
from stallfree.ipc.folders import default_root
from stallfree.ipc.process import call_in_child
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose, OnItem
from stallfree.pytree import take_apart
from stallfree.units import parse_number, parse_room

_RUNS = 5
"""The runs of a round: G, copy, samples, cold, warm."""

_SOME = 2048
"""Maximum samples that the job with all data in memory uses."""

_MOST_CACHE = 4 << 30
"""Maximum bytes of the cache for them; only the necessary bytes are used."""

_MOST_ROUNDS = 5
_COLD_RESIDENT = 0.05
"""Maximum share of a cold file's pages in memory."""

_NO_WAIT = "no wait for storage was seen, or the source allows no threads: P of misses includes the fetch"
_NO_FILES = "no file was seen to be opened, so storage cannot be separated from prep; a Source keeps them apart"


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

    Five runs alternate in five rounds, whose spread gives 95% intervals:

    - G, steps on batches that are already on the device, and copies of batches to a device.
    - P, S and C: single samples, fetched with cold files, read from memory and prepared, each part timed, in as many
      processes at once as the loader has workers. It is the measurement of `DataLoader(cache="auto")`.
    - The job itself, with cold files, and with all data in memory.

    Files are dropped from memory with `posix_fadvise` and verified with `mincore`; the report notes where that was not
    possible.

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
        seconds: time for each of the five runs, over all rounds; a round takes at least a second of it.
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
    job = jobs.Job(dataset, step, batch_size, num_workers, device, loader_arguments)
    if isinstance(dataset, CachedDataset):
        if cache is not None:
            raise errors.argument_conflict(f"cache={cache!r}: a CachedDataset has a cache; leave `cache` out")
        cache = dataset.cache.capacity
    elif cache is not None:
        parse_room(cache, "cache")
    parse_number(seconds, "seconds")
    with render.progress_bar(progress) as shown, closing(Analysis(job, seconds, shown)) as analysis:
        for _ in range(analysis.rounds):
            analysis.round()
        return analysis.report(cache)


class Analysis:
    """The runs of an analysis, all repeated in each of several rounds.

    Its inputs are prepared at once: batches, and a cache with as many samples as fit, or the samples' files.
    Alternating the runs prevents a change of the machine's speed from affecting only one rate, and the spread over the
    rounds gives intervals that include such changes.

    Args:
        job: the analysed job.
        seconds: for one kind of run, over all rounds.
        progress: shows the progress.

    Attributes:
        rounds: their number: one per second, at most five.
    """

    def __init__(self, job: jobs.Job, seconds: float, progress: Any) -> None:
        self._job, self.rounds = job, int(max(1, min(_MOST_ROUNDS, seconds)))
        self._seconds, self._progress = seconds / self.rounds, progress
        self._task = progress.add_task("reading some samples", total=self.rounds * _RUNS)
        self._measured: list[dict[str, float | None]] = []
        self._notes: list[str] = []
        self._machine: list[float] = []
        self._source = jobs.PartSource(job.source, job.steps)
        self._cold = job.dataset if job.loader == "torch" else self._source
        self._known = np.random.default_rng(0).permutation(len(job.source))
        self._some = self._known[: max(_SOME, 2 * job.batch_size)].tolist()
        self._files: dict[int, list[str]] = {}
        self._sample_bytes = 0.0
        self._placement: dict[str, Any] | None = None
        self._first = self._full = None
        with jobs.users_code("the analysis", "Leave this sample out, or correct it"):
            if job.parted:
                self._first = look(self._source, job.steps)
            else:
                self._files = call_in_child(lambda: jobs.find_files(job.source, self._some, self._seconds), "reading")
                self._known = np.array(list(self._files))
        ids, advice = np.resize(self._known, 4 * job.batch_size).tolist(), "Iterate the loader to see where"
        with jobs.users_code("making a batch", advice), self._loaded(self._cold, ids) as batches:
            self._few = [_moved(batch) for batch in batches]
        decodes = any(getattr(_inner(step), "on_device", False) for step in job.steps)
        self._ready = self._few if decodes else [_moved(batch, job.device) for batch in self._few]
        for batch in self._ready[:3]:
            job.train(batch)
        if job.parted:
            form = "prepared" if job.cached and job.dataset.form == "prepared" else "fetched"
            self._full = self._filled(self._source, form, self._first)

    def close(self) -> None:
        """Remove the cache of the analysis."""
        if self._full is not None:
            self._full.close()

    def round(self) -> None:
        """Perform each run once."""
        job = self._job
        self._measured.append({})
        self._machine.append(_machine_speed())
        self._time("G", self._on_device(self._ready, job.train), 2)
        if job.device.type != "cpu":
            self._time("copy", self._on_device(self._few, self._copy), 2)
        self._samples()
        cold = jobs.CyclingSampler(self._known, self._files_of)
        self._time("cold", self._trained(self._cold, cold), self._warm_up)
        if not cold.resident:
            self._notes.append("the samples are no local files: what storage keeps in memory could not be dropped")
        elif (share := sum(cold.resident) / len(cold.resident)) > _COLD_RESIDENT:
            self._notes.append(f"{share:.0%} of the files stayed in memory: the cold job is too fast")
        jobs.read_files([path for paths in self._files.values() for path in paths])
        warm, ids = (self._cold, self._known) if self._full is None else (self._full, _resident(self._full))
        self._time("warm", self._trained(warm, jobs.CyclingSampler(ids)), self._warm_up)
        if len(self._measured) == 1:
            self._placement = self._place()

    def report(self, cache: int | str | None = None) -> Report:
        """The report of the rounds; with a `cache` size, of the job with that cache."""
        job, record_bytes = self._job, self._sample_bytes
        no_storage = _NO_WAIT if job.parted else _NO_FILES
        reasons = {"S": no_storage, "C": no_storage, "copy": "nothing to copy: the device is the CPU"}
        rates = {
            name: measure.combined([one.get(name) for one in self._measured], reasons.get(name, "no batch was timed"))
            for name in ("G", "P", "P_miss", "P_hit", "S", "C", "copy", "cold", "warm")
        }
        if self._full is not None and (stats := self._full.cache.stats()).resident_items:
            record_bytes = stats.resident_bytes / stats.resident_items
        described = {
            "dataset": type(job.dataset).__name__,
            "samples": len(job.source),
            "batch_size": job.batch_size,
            "num_workers": job.num_workers,
            "loader": job.loader,
            "parted": job.parted,
            "sample_bytes": self._sample_bytes or None,
            "record_bytes": record_bytes or None,
        }
        drift = (max(self._machine) - min(self._machine)) / max(self._machine, default=1.0)
        remedy = None if job.cached else self._remedy(rates, cache, record_bytes)
        notes = list(dict.fromkeys(self._notes))  # each round gives the same
        return make_report(
            described, job.device, rates, cache, notes, drift=drift, remedy=remedy, placement=self._placement
        )

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _filled(self, source: Any, form: str, first: Any = None) -> CachedDataset[Any]:
        """A cache with some samples of a source."""
        capacity = min(granted(0.5, default_root()), _MOST_CACHE)
        name = f"analyze-{os.getpid()}-{os.urandom(4).hex()}"
        cached, end = cached_after(first, source, capacity=capacity, form=form, name=name), time.monotonic() + 5
        with self._loaded(cached, self._some) as batches:
            for number, _ in enumerate(batches):
                if number and time.monotonic() > end:
                    break
        return cached

    def _samples(self) -> None:
        """Measure single samples, in as many processes as the job has workers, each with others."""
        job, number, processes = self._job, len(self._measured) - 1, max(1, self._job.num_workers)
        self._begin("samples")
        ids = np.random.default_rng(number).permutation(self._known)[: measure.MOST_SAMPLES * processes].tolist()

        def costs_in(process: int) -> model.Costs:
            some = ids[process::processes] or ids
            files = {id: self._files_of(id) for id in some}
            if self._first is None:
                return jobs.measure_reads(job.source, files, seconds=self._seconds)
            jobs.drop_pages([path for paths in files.values() for path in paths])
            options: dict[str, Any] = {"seconds": self._seconds, "threads": IO_THREADS}
            return measure.measure_samples(self._source, self._first, some, **options)[0]

        costs = measure.at_once(costs_in, processes, "the measurement of samples")
        form = "fetched" if self._full is None else self._full.form
        has_files = job.parted or any(self._files.values())
        parts = {
            "P": [one.hit["fetched"] for one in costs],
            "P_miss": [one.miss for one in costs],
            "P_hit": [one.hit[form] for one in costs],
            "C": [one.read["fetched"] for one in costs],
            "S": [1 / one.storage for one in costs],
        }
        for name, times in parts.items():
            rate = sum(1 / max(1e-9, seconds) for seconds in times)
            unknown = (name == "S" and rate >= 1e9) or (name in "SC" and not has_files)
            self._measured[-1][name] = None if unknown else rate
        self._sample_bytes = sum(one.fetched for one in costs) / processes

    def _on_device(self, batches: list[Any], use: Callable[[Any], None]) -> Iterator[int]:
        for batch in cycle(batches):
            use(batch)
            yield self._job.batch_size

    def _copy(self, batch: Any) -> None:
        _moved(batch, self._job.device)
        self._job.wait()

    def _remedy(self, rates: dict[str, measure.Rate], cache: Any, record_bytes: float) -> model.Option | None:
        """The choice of `DataLoader(cache="auto")`, with the S measured here; None if nothing is cached."""
        job, trial = self._job, Trial()
        size = free_memory() // 2 if cache is None else parse_room(cache, "cache")
        capacity = int(size * len(job.source) * record_bytes) if isinstance(size, float) else size
        try:
            verdict = AutoCache(job.dataset, capacity, max(1, job.num_workers)).judge(trial)
        except Exception as error:  # also one of the data set
            self._notes.append(f"cache='auto' would cache nothing: {errors.text_of(error)}")
            return None
        finally:
            trial.close()
        self._notes.append("; ".join(filter(None, (verdict.line, verdict.reasons))))
        if trial.costs is None:
            return None
        costs = replace(trial.costs, storage=float(rates["S"])) if job.parted else trial.costs
        return model.choose(costs, capacity, max(1, job.num_workers))

    def _place(self) -> dict[str, Any] | None:
        """The job in memory with a step on the CPUs and on the device, if there is one that can run on both."""
        job = self._job
        places = {step.on_device for step in map(_inner, job.steps) if hasattr(step, "on_device")}
        if not job.parted or not places or not can_decode(job.device):
            return None
        on_device = any(places)
        other = jobs.PartSource(job.source, Compose([_placed(step, not on_device) for step in job.steps]))
        with self._filled(other, "fetched") as cached:
            self._time("moved", self._trained(cached, jobs.CyclingSampler(_resident(cached))), self._warm_up)
        rates = {not on_device: self._measured[0]["moved"] or 0.0, on_device: self._measured[0]["warm"]}
        return {"on_device": on_device, "CPUs": rates[False], "device": rates[True]}

    # -- tools --------------------------------------------------------------------------------------------------------

    @property
    def _warm_up(self) -> int:
        """Twice the batches in flight, and one for each worker."""
        return max(1, self._job.num_workers) * (2 * int(self._job.arguments.get("prefetch_factor") or 2) + 1)

    def _time(self, name: str, batches: Iterator[int], warm_up: int) -> None:
        self._begin(name)
        with closing(batches):  # type: ignore[type-var]
            self._measured[-1][name] = measure.measure_rate(batches, warm_up, self._seconds)

    def _begin(self, name: str) -> None:
        """Show which run begins."""
        self._progress.update(self._task, description=f"measuring {name}", advance=1)

    @contextmanager
    def _loaded(self, dataset: Any, ids: Iterable[int]) -> Iterator[Iterator[Any]]:
        """The batches of the job's loader, whose workers stop at the end of the block."""
        loader = self._job.load(dataset, ids)
        try:
            yield iter(loader)
        finally:
            if isinstance(loader, DataLoader):
                loader.close()

    def _trained(self, dataset: Any, ids: Iterable[int]) -> Iterator[int]:
        """Batch sizes from the job's loader, with the job's steps."""
        with self._loaded(dataset, ids) as batches:
            for batch in batches:
                self._job.train(batch)
                yield self._job.batch_size

    def _files_of(self, id: int) -> list[str]:
        return list(filter(os.path.isfile, [self._job.source.where(id)])) if self._job.parted else self._files[id]


def _machine_speed() -> float:
    """The speed of one core now, in rounds of an empty loop per second, over 20 ms."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.02:
        count += 1
    return count / (time.perf_counter() - began)


def can_decode(device: torch.device) -> bool:
    """Whether pictures can be decoded on it."""
    return device.type == "cuda" and find_spec("torchvision") is not None


def _resident(cached: CachedDataset[Any]) -> list[int]:
    """The ids of the samples in a cache."""
    return np.flatnonzero(cached.cache.resident(np.arange(len(cached)))).tolist()


def _inner(step: Any) -> Any:
    """The transform in a step for one item of a sample."""
    return step.transform if isinstance(step, OnItem) else step


def _placed(step: Any, on_device: bool) -> Any:
    """`step` with its work on the device, or on the CPUs."""
    moved = copy.copy(_inner(step))
    if hasattr(moved, "on_device"):
        moved.on_device = on_device
    return OnItem(step.key, moved) if isinstance(step, OnItem) else moved


def _moved(batch: Any, device: torch.device | None = None) -> Any:
    """`batch` on `device`, or its tensors in memory of their own."""
    leaves, rebuild = take_apart(batch)
    if device is not None:
        return rebuild([leaf.to(device) for leaf in leaves])
    return rebuild([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
