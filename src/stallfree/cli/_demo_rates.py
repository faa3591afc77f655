"""The rates S, C, P and G of the demo's job, each measured by itself, and the bound that follows from them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any

import torch

from stallfree.cli._demo_train import CROP, Trainer
from stallfree.errors import WaitError, WorkerError
from stallfree.pipeline import split
from stallfree.pipeline.protocol import Source
from stallfree.platform import cpu_count
from stallfree.sources import ThrottledSource

if TYPE_CHECKING:
    from stallfree.cli._demo_loaders import StallfreeJob

_SAMPLES = 256  # that the measurements look at, at most

START_SECONDS = 30.0
"""Longest wait for the processes that measure to be ready."""


@dataclass(frozen=True)
class Rates:
    """Samples per second of each part alone.

    Attributes:
        storage: S, fetches from storage.
        cache: C, reads from the cache.
        prep_miss: P of samples that come from storage, all workers together: the whole pipeline.
        prep_hit: P of samples that come out of the cache: what is left of the pipeline.
        compute: G, training on batches that are on the device already.
        workers: processes that prepared when P was measured.
        threads: CPU threads that trained when G was measured.
        cores: CPU cores that prep and training share; None if training has a device of its own.
    """

    storage: float
    cache: float
    prep_miss: float
    prep_hit: float
    compute: float
    workers: int
    threads: int
    cores: int | None

    def bound(self, hit_ratio: float) -> Bound:
        """What these rates allow when this share of the samples hits."""
        fetch = 1 / (hit_ratio / self.cache + (1 - hit_ratio) / self.storage)
        prep = 1 / (hit_ratio / self.prep_hit + (1 - hit_ratio) / self.prep_miss)
        return Bound(fetch, prep, self.compute)

    def cpu_limit(self, hit_ratio: float) -> float:
        """What the shared cores allow: their number over the core-seconds that prep and training of one sample take.

        Infinite if training has a device of its own.
        """
        if self.cores is None:
            return math.inf
        prep = min(self.workers, self.cores) / self.bound(hit_ratio).prep
        train = min(self.threads, self.cores) / self.compute
        return self.cores / (prep + train)


@dataclass(frozen=True)
class Bound:
    """The rates of an epoch: F, P and G."""

    fetch: float
    prep: float
    compute: float

    @property
    def rate(self) -> float:
        """min(F, P, G)."""
        return min(self.fetch, self.prep, self.compute)

    @property
    def limit(self) -> str:
        """Which of the three it is."""
        names = {self.fetch: "fetch", self.prep: "prep", self.compute: "compute"}
        return names[self.rate]


class Measurements:
    """Measures the parts of a job one after the other; `rates` has all of them at the end.

    Args:
        source: the pictures, on fast storage.
        classes: how many there are.
        device: where the network is.
        cores: CPU cores that prep and training share, or None.
        batch_size, workers: as in the job.
    """

    def __init__(
        self, source: Source, classes: int, device: torch.device, cores: int | None, *, batch_size: int, workers: int
    ) -> None:
        self._source, self._classes, self._device, self._cores = source, classes, device, cores
        self._batch_size, self._workers = batch_size, workers
        self._ids = range(0, len(source), -(-len(source) // _SAMPLES))
        self._records = [source.fetch(id) for id in self._ids]
        self._found: dict[str, float] = {}

    def prep(self) -> None:
        """P after a miss: the whole pipeline, out of memory."""
        try:
            self._found["prep_miss"] = prep_rate(self._source.pipeline, self._records, self._workers)
        except Exception:
            for id in self._ids:
                self._source[id]  # raises the same, and names the sample
            raise

    def storage(self, bandwidth: float) -> None:
        """S: fetches from storage of this bandwidth."""
        with contextlib.closing(ThrottledSource(self._source, bandwidth)) as slow:
            self._found["storage"] = fetch_rate(slow.fetch, self._ids)

    def compute(self) -> None:
        """G: training alone."""
        self._found["compute"] = compute_rate(Trainer(self._classes, self._device), self._classes, self._batch_size)

    def cache(self, job: StallfreeJob) -> None:
        """C, and P after a hit, from the cache that `job` has filled."""
        ids = [id for id in range(len(self._source)) if job.cached.cache.resident([id])[0]]
        if not ids:  # nothing hits, so neither plays a part
            self._found |= {"cache": math.inf, "prep_hit": math.inf}
            return
        batches = [ids[at : at + self._batch_size] for at in range(0, len(ids), self._batch_size)]
        start = time.perf_counter()
        for batch in batches:
            job.read_cache(batch)
        self._found["cache"] = len(ids) / (time.perf_counter() - start)
        if job.cached.form == "prepared":
            parts = split(self._source.pipeline)
            records = [parts.deterministic(record) for record in self._records]
            self._found["prep_hit"] = prep_rate(parts.random, records, self._workers)
        else:
            self._found["prep_hit"] = self._found["prep_miss"]

    def rates(self) -> Rates:
        """What was measured."""
        return Rates(**self._found, workers=self._workers, threads=torch.get_num_threads(), cores=self._cores)


def fetch_rate(fetch: Callable[[int], object], ids: Sequence[int], threads: int = 4) -> float:
    """Fetches per second of `ids` by several threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for _ in pool.map(fetch, ids):
            pass
        return len(ids) / (time.perf_counter() - start)


def compute_rate(trainer: Trainer, classes: int, batch_size: int, seconds: float = 1.0) -> float:
    """Samples per second of training on one batch that is on the device already, from the median step."""
    pictures = torch.randint(0, 255, (batch_size, 3, CROP, CROP), dtype=torch.uint8).to(trainer.device)
    labels = torch.randint(0, classes, (batch_size,)).to(trainer.device)
    for _ in range(3):
        trainer.step(pictures, labels)
    taken: list[float] = []
    while sum(taken) < seconds:
        start = time.perf_counter()
        trainer.step(pictures, labels)
        taken.append(time.perf_counter() - start)
    return batch_size / statistics.median(taken)


def prep_rate(prepare: Callable[[Any], object], records: Sequence[Any], workers: int, seconds: float = 1.0) -> float:
    """Calls of `prepare` per second by `workers` processes at once, on `records` that are in memory."""
    context = get_context("fork")
    ready = context.Barrier(workers)
    pipes, processes = [], []
    for _ in range(workers):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_prepare, args=(prepare, records, seconds, ready, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return sum(_receive(pipe) for pipe in pipes)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()


def cores_available() -> int:
    """CPU cores that this process may use."""
    return cpu_count()


def _prepare(
    prepare: Callable[[Any], object], records: Sequence[Any], seconds: float, ready: Barrier, pipe: Connection
) -> None:
    """In a process of its own: sends the rate, or the exception that came instead."""
    try:
        torch.set_num_threads(1)
        for record in records[:8]:
            prepare(record)
        ready.wait(START_SECONDS)
        calls = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            prepare(records[calls % len(records)])
            calls += 1
        pipe.send(calls / elapsed)
    except Exception as error:
        pipe.send(error)


def _receive(pipe: Connection) -> float:
    if not pipe.poll(2 * START_SECONDS):
        raise WaitError(
            f"a process that measures prep has not answered for {2 * START_SECONDS:.0f} s: try again "
            "when the machine is less busy"
        )
    try:
        answer: float | Exception = pipe.recv()
    except EOFError:
        raise WorkerError("a process that measures prep died: see that memory does not run short", ids=[]) from None
    if isinstance(answer, Exception):
        raise answer
    return answer
