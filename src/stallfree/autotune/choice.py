"""Chooses what to cache, and the numbers of workers and threads, by a throughput model of measured rates.

    F = 1 / (x / C + (1 - x) / S)      fetch rate, for a share x of hits
    throughput = min(F, P, G)          if fetch, prep and compute overlap

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021,
section 3.4 and appendix). Here P depends on what is cached: a hit on a prepared sample needs only its random steps, a
hit on a fetched sample needs all steps, and a miss also costs the CPU work of fetching.
A share y of the samples is stored prepared and the others as fetched. Prepared records are usually larger, so y trades
hits for prep, and the best y is where F equals P, or 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stallfree.units import format_size

WORTH = 1.02
"""Minimum gain (2%) for using memory or one more process."""

LEAST_SAVED = 50e-6
"""Minimum seconds that a cache saves per sample. Costs of about that size are not in the model."""

FEWEST = 2
"""Minimum workers if there are enough cores: a single worker was 7 to 8% slower than the model predicts."""

SAMPLES = "samples cached as fetched", "samples cached prepared"
"""What is cached of a data set whose samples can be cached, with y = 0 and y = 1."""

SPARE = 2.0
"""Required surplus of the workers' rate, because the number of misses varies randomly between batches."""


@dataclass(frozen=True)
class Measured:
    """The measured rates of a data set, its pipeline and its storage. Times are CPU seconds per sample on one core.

    Attributes:
        samples: of the data set.
        storage: S in samples/s by the number of concurrent fetches; infinite if no wait was observed.
        fetching: CPU seconds for a fetch.
        whole: seconds for all steps, on a record as fetched.
        deterministic: seconds for the deterministic steps.
        random: seconds for the following steps, on a prepared record.
        reading: seconds to read a record from the cache, as fetched and prepared.
        sizes: bytes of a record in the cache, as fetched and prepared; infinite for a form that cannot be stored.
        compute: G in samples/s; infinite until it is known.
    """

    samples: int
    storage: Mapping[int, float]
    fetching: float
    whole: float
    deterministic: float
    random: float
    reading: tuple[float, float]
    sizes: tuple[float, float]
    compute: float = math.inf


@dataclass(frozen=True)
class Choice:
    """A configuration, and its predicted rates.

    Attributes:
        share: y, the share of the samples stored prepared; the others are stored as fetched. None: no cache.
        hits: x, the share of the samples that the cache holds in memory.
        workers: number of worker processes.
        threads: concurrent fetches in all workers together.
        fetch: F in samples/s.
        prep: P in samples/s.
    """

    share: float | None
    hits: float
    workers: int
    threads: int
    fetch: float
    prep: float

    @property
    def rate(self) -> float:
        """Samples/s of the loader: min(F, P)."""
        return min(self.fetch, self.prep)


def choose(measured: Measured, room: int, *, workers: int | None, cpus: int) -> Choice:
    """The choice with the highest throughput; within 2%, the one with the least cache, workers and threads.

    Args:
        measured: the rates.
        room: bytes for records.
        workers: number of worker processes, if given; None: the best number, at most `cpus`.
        cpus: number of cores.
    """
    most = max(1, cpus if workers is None else workers)
    best = _form(measured, room, most)
    if workers is None:
        wanted = min(best.rate, measured.compute)
        fewer = (expect(measured, best.share, room, few) for few in range(FEWEST, most))
        able = (choice for choice in fewer if choice.rate * WORTH >= wanted and choice.prep >= SPARE * wanted)
        best = next(able, best)
    else:
        best = replace(best, workers=workers)
    return _threads(measured, best, room)


def expect(measured: Measured, share: float | None, room: int, workers: int) -> Choice:
    """The model's prediction for one configuration, with the best number of threads for the storage."""
    threads = max(measured.storage, key=lambda count: measured.storage[count])
    storage = measured.storage[threads]
    y = share or 0.0
    size = y * measured.sizes[1] + (1 - y) * measured.sizes[0] if y not in (0.0, 1.0) else measured.sizes[int(y)]
    x = 0.0 if share is None or math.isinf(size) else min(1.0, room / (measured.samples * size))
    reading = y * measured.reading[1] + (1 - y) * measured.reading[0]
    hit = reading + y * measured.random + (1 - y) * measured.whole
    miss = measured.fetching + y * (measured.deterministic + measured.random) + (1 - y) * measured.whole
    waits = x * reading / workers + (1 - x) / storage
    works = x * hit + (1 - x) * miss
    return Choice(
        share=share,
        hits=x,
        workers=workers,
        threads=threads,
        fetch=1 / waits if waits else math.inf,
        prep=workers / works if works else math.inf,
    )


def _form(measured: Measured, room: int, workers: int) -> Choice:
    """The form with the highest rate; within 2%, the one with the least CPU load.

    A cache must gain 2% in rate or CPU load over none, and 50 µs per sample; a mixture must gain 2% over a single form.
    """
    enough = _enough(measured)
    shares = [None, 0.0, 1.0]
    tried = [expect(measured, share, room, workers) for share in shares]
    choices = [choice for choice in tried if choice.hits or choice.share is None]
    best = min(enough, max(choice.rate for choice in choices))
    near = [choice for choice in choices if choice.rate * WORTH >= best]
    chosen = near[0]
    for choice in near[1:]:
        if choice.prep > WORTH * chosen.prep:
            chosen = choice
    none = tried[0]
    saved = max(1 / none.rate - 1 / chosen.rate, workers / none.prep - workers / chosen.prep)
    return chosen if saved >= LEAST_SAVED else none


def _enough(measured: Measured) -> float:
    """The rate beyond which there is no gain: a loader exactly as fast as the device stalls occasionally."""
    return 1.25 * measured.compute


def _threads(measured: Measured, choice: Choice, room: int) -> Choice:
    """`choice` with the least number of concurrent fetches that keeps its rate."""
    for threads in sorted(measured.storage):
        fewer = replace(measured, storage={threads: measured.storage[threads]})
        there = expect(fewer, choice.share, room, max(1, choice.workers))
        if there.rate * WORTH >= choice.rate:
            return replace(choice, threads=threads, fetch=there.fetch)
    return choice


def describe(measured: Measured, choice: Choice, forms: tuple[str, str]) -> str:
    """One line for people: what is cached, how many workers, and what limits the training.

    It has no rates: those of the model leave out the cost of a batch, and nothing reaches them.

    Args:
        measured, choice: as of `choose`.
        forms: what is cached with y = 0 and with y = 1, such as `SAMPLES`.
    """
    part = "fetching" if choice.fetch < choice.prep else "prep"
    limit = "the training step is the limit" if measured.compute < choice.rate else f"{part} limits the loader"
    nothing = "" if choice.share is not None else ", and a cache would gain too little"
    return f"{what(choice, forms)}{_held(choice)}; {_workers(choice)}; {limit}{nothing}"


def explain(measured: Measured, choice: Choice, room: int, forms: tuple[str, str]) -> str:
    """`describe` with sizes.

    Args:
        measured, choice, room: as of `choose`.
        forms: as of `describe`.
    """
    fetched, prepared = (("-" if math.isinf(size) else format_size(int(size))) for size in measured.sizes)
    return (
        f"{describe(measured, choice, forms)}; {choice.threads} fetches at once; a sample takes {fetched} as fetched "
        f"and {prepared} prepared, and {format_size(room)} are granted"
    )


def what(choice: Choice, forms: tuple[str, str]) -> str:
    """What is cached, in words; `forms` as of `describe`."""
    mixture = f"{choice.share or 0:.0%} of the samples cached prepared, the others as fetched"
    return {None: "no cache", 0.0: forms[0], 1.0: forms[1]}.get(choice.share, mixture)


def _held(choice: Choice) -> str:
    return "" if choice.share is None else f", {choice.hits:.0%} of them fit"


def _workers(choice: Choice) -> str:
    return f"{choice.workers} {'worker' if choice.workers == 1 else 'workers'}"
