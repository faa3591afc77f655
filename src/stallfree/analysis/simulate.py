"""The pipeline of a training job as an event-based simulation: loaders, queue, copy, model.

Loader processes prepare batches and put them into a queue; the training loop takes one, copies it to the device and
computes. With a prefetcher the next batch is copied while the device computes. The model is that of articles on device
prefetching. Its law for the steady state is min(W / l, 1 / (t + m)) without and min(W / l, 1 / max(t, m)) with a
prefetcher, for W loaders that take l seconds per batch, a copy of t and a step of m seconds.

The event log of a real loader (`DataLoader(event_log=...)`) has the same events, and the same page.
"""

import heapq
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stallfree import errors
from stallfree.analysis import render
from stallfree.units import format_seconds, parse_number, parse_whole

_WARM_BATCHES = 150
_STEADY_BATCHES = 600
_ROUNDS = 10  # minimum loads per loader in the warm-up and in the measurement
_MOST_BATCHES = 2_000_000
_Z95 = 1.96

Json = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Something that took time, in a simulation or in the log of a loader.

    Attributes:
        start: seconds since the beginning of the log.
        end: the same.
        actor: who: "loader 0" and so on, "gather" (batches straight from the cache), "copy", "device".
        what: "load" (simulated loaders), "fetch", "prep", "gather", "copy" or "compute".
        batch: its number in the order of the plan.
        epoch: its epoch; 0 in a simulation.
    """

    start: float
    end: float
    actor: str
    what: str
    batch: int
    epoch: int = 0


def read_events(path: str | Path) -> list[Event]:
    """Read the event log of a loader: JSON, an object per line.

    Raises `InputError` for a file that cannot be read or holds something else.
    """
    events = list[Event]()
    try:
        for line in Path(path).read_text().splitlines():
            events.append(Event(**json.loads(line)))
            if not -math.inf < events[-1].start <= events[-1].end < math.inf:
                raise ValueError("start and end must be numbers, start not after end")
    except (OSError, ValueError, TypeError) as error:
        raise errors.file_unreadable(f"{path} cannot be read as a log: {error} (after {len(events)} events)") from error
    return events


@dataclass(frozen=True)
class Pipeline:
    """The simulated pipeline. Times are means in seconds per batch.

    Attributes:
        loaders: loader processes.
        load: a loader's time for a batch.
        transfer: the copy to the device.
        compute: the step.
        prefetch: copy the next batch while the device computes; one waits on the device at most.
        variation: coefficient of variation of all three times, which are gamma distributed; 0: constant.

    Raises `InputError` for invalid values.
    """

    loaders: int
    load: float
    transfer: float
    compute: float
    prefetch: bool = False
    variation: float = 0.1

    def __post_init__(self) -> None:
        parse_whole(self.loaders, "loaders", 1)
        for name in ("load", "transfer", "compute", "variation"):
            parse_number(getattr(self, name), name, zero=name != "load")
        if self.compute + self.transfer <= 0:
            raise errors.InputError("transfer or compute must be above 0 seconds")

    @property
    def queue(self) -> int:
        """Capacity of the queue in ready batches."""
        return 2 * self.loaders

    @property
    def law(self) -> float:
        """Batches per second in the steady state with constant times."""
        step = max(self.transfer, self.compute) if self.prefetch else self.transfer + self.compute
        return min(self.loaders / self.load, 1 / step)


@dataclass(frozen=True)
class Run:
    """One run of a simulation.

    Attributes:
        pipeline: the simulated pipeline.
        seconds: simulated time.
        events: in the order of their ends; those that began in this time and end after it are the last.
    """

    pipeline: Pipeline
    seconds: float
    events: tuple[Event, ...]

    def batches(self, start: float = 0.0) -> int:
        """Steps that ended after `start`."""
        return sum(event.actor == "device" and start < event.end < self.seconds for event in self.events)


def simulate(pipeline: Pipeline, *, seconds: float = 1.0, seed: int = 0) -> Run:
    """Run the pipeline for `seconds`. The same seed gives the same run.

    Batches pass the queue in the order in which their loads end, so one pass over them computes all times.

    Raises `InputError` for an invalid time.
    """
    parse_number(seconds, "seconds")
    random, variation, events = np.random.default_rng(seed), pipeline.variation, list[Event]()

    def work(actor: str, what: str, batch: int, start: float, mean: float) -> float:
        """The end of a step."""
        drawn = float(random.gamma(variation**-2, mean * variation**2)) if variation and mean else mean
        if start < seconds:
            events.append(Event(start, start + drawn, actor, what, batch))
        return start + drawn

    loading = [(work(f"loader {n}", "load", n, 0.0, pipeline.load), n, n) for n in range(pipeline.loaders)]
    heapq.heapify(loading)
    taken = deque([0.0] * pipeline.queue, pipeline.queue)  # when the last batches left the queue
    copier = device = used = 0.0  # when each is free, and when the last batch was used
    begun = pipeline.loaders
    while loading[0][0] < seconds:
        loaded, batch, loader = heapq.heappop(loading)
        queued = max(loaded, taken[0])
        heapq.heappush(loading, (work(f"loader {loader}", "load", begun, queued, pipeline.load), begun, loader))
        begun += 1
        taken.append(max(queued, copier))
        copied = work("copy", "copy", batch, taken[-1], pipeline.transfer)
        copier = max(copied, used) if pipeline.prefetch else copied
        used = max(copier, device)
        device = work("device", "compute", batch, used, pipeline.compute)
        if not pipeline.prefetch:
            copier = device
    return Run(pipeline, seconds, tuple(sorted(events, key=lambda event: (event.end, event.start, event.actor))))


def compare(pipeline: Pipeline, *, seeds: int = 30, seconds: float = 1.0) -> dict[str, Any]:
    """Simulate `pipeline` without and with a prefetcher, each with the seeds 0 to `seeds` - 1.

    The first `seconds` are counted as in the articles. The steady state is counted after them, and after a warm-up.

    Returns:
        The comparison as a page contains it: "seeds" and "seconds" as given; "advice", the conclusion in a sentence;
        and pairs of which the first is without a prefetcher: batches in the "first" seconds, and per second in the
        "steady" state, as mean with a 95% interval; the least and most of "singles", the seeds; the rates of the "law".

    Raises `InputError` for no seeds, for no time, and for a time with over 2,000,000 batches.
    """
    parse_number(seconds, "seconds")
    seeds, both = parse_whole(seeds, "seeds", 1), [replace(pipeline, prefetch=prefetch) for prefetch in (False, True)]
    batches = seeds * seconds * sum(one.law for one in both)
    if batches > _MOST_BATCHES:
        raise errors.run_too_large(f"seconds={seconds:g} are {batches:,.0f} batches: give fewer seconds or seeds")
    first, steady = zip(*(_counts(one, seeds, seconds) for one in both), strict=True)
    return {
        "seeds": seeds,
        "seconds": seconds,
        "first": list(map(_interval, first)),
        "singles": [(min(counts), max(counts)) for counts in first],
        "steady": list(map(_interval, steady)),
        "law": [one.law for one in both],
        "advice": _advice(pipeline, both[0].law, both[1].law),
    }


def _interval(figures: Sequence[float]) -> dict[str, float]:
    """The mean of some figures and its 95% confidence interval (normal)."""
    mean = statistics.fmean(figures)
    half = _Z95 * statistics.stdev(figures) / math.sqrt(len(figures)) if len(figures) > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _counts(pipeline: Pipeline, seeds: int, seconds: float) -> tuple[list[int], list[float]]:
    """Per seed, batches in the first `seconds`, and per second in the steady state.

    The steady state is measured over whole rounds of the loaders: with constant times these deliver in bursts.
    """
    rounds = max(_ROUNDS, math.ceil(_STEADY_BATCHES / (pipeline.law * pipeline.load)))
    length = rounds * pipeline.load
    warm = max(seconds, _WARM_BATCHES / pipeline.law, _ROUNDS * pipeline.load)
    runs = [simulate(pipeline, seconds=warm + length, seed=seed) for seed in range(seeds)]
    return [run.batches() - run.batches(seconds) for run in runs], [run.batches(warm) / length for run in runs]


def _advice(pipeline: Pipeline, without: float, prefetching: float) -> str:
    gain, loaders = prefetching / without - 1, pipeline.loaders / pipeline.load
    if gain >= 0.01:
        after = "after that the loaders are the limit" if prefetching >= loaders * 0.9999 else ""
        return f"prefetch gains {gain:.0%}" + (f"; {after}" if after else ": copy and step overlap")
    if loaders <= without * 1.0001:
        need = math.ceil(pipeline.load / max(pipeline.transfer, pipeline.compute))
        return f"prefetch gains nothing here: add loaders ({need} would keep the device busy)"
    return "prefetch gains nothing here: the copy takes no time beside the step"


# -- the page and the text --------------------------------------------------------------------------------------------

MOST_EVENTS = 20_000
_KINDS = ("without prefetch", "with prefetch")
_CAUTION = "One run is one draw, and seeds differ. Go by the steady state."
_LAW = "The law: min(W/l, 1/(t+m)) without, min(W/l, 1/max(t,m)) with prefetch: W loaders, l load, t copy, m compute."


def simulation_data(pipeline: Pipeline, *, seeds: int = 30, seconds: float = 1.0) -> Json:
    """Both runs of a pipeline, of seed 0, and their comparison, in the format of `simulation_page`."""
    comparison, runs = compare(pipeline, seeds=seeds, seconds=seconds), []
    for prefetch, name in enumerate(_KINDS):
        run = simulate(replace(pipeline, prefetch=bool(prefetch)), seconds=seconds)
        runs.append(run_data(name, run.events, seconds, queue=pipeline.queue, depth=prefetch))
    load, transfer, compute = map(format_seconds, (pipeline.load, pipeline.transfer, pipeline.compute))
    title = (
        f"{render.plural(pipeline.loaders, 'loader')}, {load} to load a batch, {transfer} to copy it, {compute} to "
        f"compute; variation {pipeline.variation:g}"
    )
    return page_data(title, runs, int(pipeline.prefetch), asdict(pipeline), comparison)


def page_data(title: str, runs: Sequence[Any], shown: int = 0, pipeline: Any = None, comparison: Any = None) -> Json:
    """Runs in the format of `simulation_page`. The log of a real loader has no pipeline and no comparison."""
    data = {"title": title, "runs": runs, "shown": shown, "pipeline": pipeline, "comparison": comparison}
    return {"format": "stallfree-simulation", "version": 1, **data}


def run_data(
    name: str, events: Iterable[Event], seconds: float | None = None, queue: int | None = None, depth: int | None = None
) -> Json:
    """A run, in the format of `simulation_page`. Times are relative to the first event.

    Args:
        name: title of the run on the page.
        events: in any order. Only the first 20,000 by start time are kept; `left_out` counts the others.
        seconds: length of the shown part; up to the last kept end if None.
        queue: capacity of the queue in batches; None if unknown.
        depth: batches on the device in addition to the one in use; None if unknown.

    Raises `InputError` if there are no events, or if they take no time.
    """
    ordered = sorted(events, key=lambda event: (event.start, event.end))
    if seconds is not None:
        parse_number(seconds, "seconds")
    if not ordered:
        raise errors.file_unreadable(f"{name}: there are no events: give a log of at least one batch")
    first, limit = ordered[0].start, math.inf if seconds is None else seconds
    ordered = [event for event in ordered if event.start - first < limit]
    kept, others = ordered[:MOST_EVENTS], ordered[MOST_EVENTS:]
    if others:
        seconds = others[0].start - first
    elif seconds is None:
        seconds = max(event.end for event in kept) - first
    if not seconds > 0:
        raise errors.file_unreadable(f"{name}: all events are at one instant: give a log of something that took time")
    rows = [[each.start - first, each.end - first, each.actor, each.what, each.batch, each.epoch] for each in kept]
    shown = {"seconds": seconds, "left_out": len(others), "events": rows}
    return {"name": name, "queue": queue, "depth": depth, **shown}


def simulation_page(data: Mapping[str, Any]) -> str:
    """One or more runs as an animated page with a Gantt chart. The page makes no network requests.

    Args:
        data: of `simulation_data` or `page_data`.

    Raises `MissingExtraError` if `plotly` is not installed.
    """
    kicker = "recording" if data["comparison"] is None else "simulation"
    return render.as_page("simulation", kicker, str(data["title"]), simulation_blocks(data), data)


def simulation_blocks(data: Mapping[str, Any]) -> list[render.Block]:
    """What a simulation shows, as text; or the number and duration of the events in the log of a real loader."""
    comparison = data["comparison"]
    if comparison is None:
        (run,) = data["runs"]
        spent: dict[str, list[float]] = {}
        for start, end, actor, what, *_ in run["events"]:
            spent.setdefault(f"{actor}: {what}", []).append(end - start)
        rows = [
            [step, f"{len(times):,}", format_seconds(statistics.fmean(times)), f"{sum(times) / run['seconds']:.0%}"]
            for step, times in sorted(spent.items())
        ]
        return [
            render.Heading(f"{run['name']}: {format_seconds(run['seconds'])}"),
            render.Table("Events", ["process and step", "batches", "mean", "share of the time"], rows),
        ]
    first, advice = f"first {comparison['seconds']:g} s", comparison["advice"]
    rows = [
        [f"{first}: mean of {render.plural(comparison['seeds'], 'seed')}", *map(_with_ends, comparison["first"])],
        [f"{first}: single seeds", *(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in comparison["singles"])],
        ["steady state, per second", *map(_with_ends, comparison["steady"])],
        ["law, per second", *map(render.number, comparison["law"])],
    ]
    return [
        render.Text(f"{advice[:1].upper()}{advice[1:]}.", "verdict"),
        render.Heading("Batches trained, with intervals of 95%"),
        render.Table("Without and with prefetch", ["", *_KINDS], rows),
        render.Text(_CAUTION, "small"),
        render.Text(_LAW, "small"),
    ]


def _with_ends(part: Mapping[str, float]) -> str:
    return f"{render.number(part['mean'])} ({render.interval(part['low'], part['high'])})"
