"""The pipeline of a training job as an event-based simulation: loaders, queue, copy, model.

Loader processes prepare batches and put them into a queue; the training loop takes one, copies it to the device and
computes. With a prefetcher the next batch is copied while the device computes. The model is that of articles on device
prefetching; its law for the steady state is min(W / l, 1 / (t + m)) without and min(W / l, 1 / max(t, m)) with a
prefetcher, for W loaders that take l seconds per batch, a copy of t and a step of m seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stallfree.errors import InputError, missing_extra
from stallfree.events import Event

_STEADY_SECONDS = 20.0
_WARM_SECONDS = 5.0
_Z95 = 1.96

Steps = Generator[Any, Any, None]


@dataclass(frozen=True)
class Pipeline:
    """What is simulated. Times are means in seconds per batch.

    Attributes:
        loaders: loader processes.
        load: a loader's time for a batch.
        transfer: the copy to the device.
        compute: the step.
        prefetch: copy the next batch while the device computes.
        depth: batches on the device beside the one in use, with `prefetch`.
        queue: ready batches that the queue holds; two per loader if None.
        variation: coefficient of variation of all three times, which are gamma distributed; 0: constant.

    Raises `InputError` for what is no pipeline.
    """

    loaders: int
    load: float
    transfer: float
    compute: float
    prefetch: bool = False
    depth: int = 1
    queue: int | None = None
    variation: float = 0.1

    def __post_init__(self) -> None:
        for name in ("loaders", "depth", "queue"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name}={value!r}: give an int of 1 or more")
        for name in ("load", "transfer", "compute", "variation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InputError(f"{name}={value!r}: give a number of 0 or more")
        if self.compute + self.transfer <= 0 or self.load <= 0:
            raise InputError("load, and transfer or compute, must be above 0 seconds")

    @property
    def law(self) -> float:
        """Batches per second in the steady state, if times were constant."""
        step = max(self.transfer, self.compute) if self.prefetch else self.transfer + self.compute
        return min(self.loaders / self.load, 1 / step)


@dataclass(frozen=True)
class Run:
    """One run of a simulation.

    Attributes:
        pipeline: what was simulated.
        seconds: how long.
        events: in the order of their ends; those that had not ended are left out.
    """

    pipeline: Pipeline
    seconds: float
    events: tuple[Event, ...]

    def batches(self, start: float = 0.0) -> int:
        """Steps that ended after `start`."""
        return sum(event.actor == "device" and event.end > start for event in self.events)


def simulate(pipeline: Pipeline, *, seconds: float = 1.0, seed: int = 0) -> Run:
    """Run the pipeline for so many seconds. The same seed gives the same run.

    Raises `MissingExtraError` if `simpy` is not installed.
    """
    try:
        import simpy
    except ImportError as error:
        raise missing_extra("simpy", "simulate", "The simulation") from error
    clock = simpy.Environment()
    world = _World(clock, pipeline, seed, simpy.Store)
    for number in range(pipeline.loaders):
        clock.process(world.loader(number))
    if pipeline.prefetch:
        clock.process(world.prefetcher())
    clock.process(world.trainer())
    clock.run(until=seconds)
    return Run(pipeline, seconds, tuple(world.events))


class _World:
    """The processes of one run."""

    def __init__(self, clock: Any, pipeline: Pipeline, seed: int, store: Callable[..., Any]) -> None:
        self._clock, self._pipeline = clock, pipeline
        self._random = np.random.default_rng(seed)
        self._queue = store(clock, capacity=pipeline.queue or 2 * pipeline.loaders)
        self._device = store(clock, capacity=pipeline.depth)
        self._begun = 0
        self.events: list[Event] = []

    def _take(self, actor: str, what: str, batch: int, mean: float) -> Steps:
        variation, start = self._pipeline.variation, self._clock.now
        shape = variation**-2 if variation else 0.0
        yield self._clock.timeout(self._random.gamma(shape, mean / shape) if variation and mean else mean)
        self.events.append(Event(start, self._clock.now, actor, what, batch))

    def loader(self, number: int) -> Steps:
        while True:
            batch = self._begun
            self._begun += 1
            yield from self._take(f"loader {number}", "load", batch, self._pipeline.load)
            yield self._queue.put(batch)

    def prefetcher(self) -> Steps:
        while True:
            batch = yield self._queue.get()
            yield from self._take("copy", "copy", batch, self._pipeline.transfer)
            yield self._device.put(batch)

    def trainer(self) -> Steps:
        while True:
            if self._pipeline.prefetch:
                batch = yield self._device.get()
            else:
                batch = yield self._queue.get()
                yield from self._take("copy", "copy", batch, self._pipeline.transfer)
            yield from self._take("device", "compute", batch, self._pipeline.compute)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95% interval of confidence (normal)."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(figures: list[float]) -> Interval:
        """That of some figures."""
        mean = statistics.fmean(figures)
        half = _Z95 * statistics.stdev(figures) / math.sqrt(len(figures)) if len(figures) > 1 else 0.0
        return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Comparison:
    """A pipeline without and with a prefetcher.

    Attributes:
        first_second: batches in the first second, without and with.
        steady: batches per second after that, without and with.
        law: what the law gives for these.
        advice: what follows, in a sentence.
    """

    first_second: tuple[Interval, Interval]
    steady: tuple[Interval, Interval]
    law: tuple[float, float]
    advice: str


def compare(pipeline: Pipeline, *, seeds: int = 30) -> Comparison:
    """Simulate `pipeline` without and with a prefetcher, each with the seeds 0 to `seeds` - 1."""
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds={seeds!r}: give an int of 1 or more")
    first: list[Interval] = []
    steady: list[Interval] = []
    laws: list[float] = []
    for prefetch in (False, True):
        one = replace(pipeline, prefetch=prefetch)
        runs = [simulate(one, seconds=_WARM_SECONDS + _STEADY_SECONDS, seed=seed) for seed in range(seeds)]
        first.append(Interval.of([float(run.batches() - run.batches(1.0)) for run in runs]))
        steady.append(Interval.of([run.batches(_WARM_SECONDS) / _STEADY_SECONDS for run in runs]))
        laws.append(one.law)
    return Comparison((first[0], first[1]), (steady[0], steady[1]), (laws[0], laws[1]), _advice(pipeline, laws))


def _advice(pipeline: Pipeline, laws: list[float]) -> str:
    gain = laws[1] / laws[0] - 1
    loaders = pipeline.loaders / pipeline.load
    if gain < 0.01:
        if loaders <= laws[0] * 1.0001:
            need = math.ceil(pipeline.load / max(pipeline.transfer, pipeline.compute))
            return f"prefetch gains nothing here: add loaders ({need} would keep the device busy)"
        return "prefetch gains nothing here: the copy takes no time beside the step"
    if laws[1] >= loaders * 0.9999:
        return f"prefetch gains {gain:.0%}; after that the loaders are the limit"
    return f"prefetch gains {gain:.0%}: copy and step overlap"
