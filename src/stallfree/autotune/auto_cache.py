"""`DataLoader(cache="auto")`: measures a data set in its first epoch, then chooses and creates its cache."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stallfree.autotune.choice import SAMPLES, Choice, Measured, choose, describe, expect, explain, what
from stallfree.autotune.measure import measure
from stallfree.autotune.subject import NotCachedError, Subject, callables, steps_of, subject_of
from stallfree.cache.capacity import granted
from stallfree.datasets.cached_dataset import CachedDataset, token
from stallfree.datasets.probe import look
from stallfree.datasets.reader import Reader
from stallfree.datasets.split import Reclassified
from stallfree.errors import (
    CapacityError,
    FingerprintError,
    PlatformError,
    StallfreeError,
    StorageError,
    argument_conflict,
    text_of,
)
from stallfree.ipc.folders import SharedFolder, default_root
from stallfree.ipc.forked import call_in_child
from stallfree.pipeline.compose import Compose, Transform
from stallfree.pipeline.fingerprint import fingerprint, tolerant
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import States
from stallfree.pipeline.values import private
from stallfree.platform import cpu_count
from stallfree.sources.cut import cut
from stallfree.sources.mapped import as_source

_FILE = "choice.json"
_INDEX = 20
"""Approximate bytes of a cache's index per sample."""

_SLOWER = 1.5
"""Slowdown of an epoch against the prediction from which the rates are measured again."""

_BETTER = 1.1
"""Minimum gain of a new cache, since it starts empty."""

_WAITS = 0.1
"""Share of an epoch spent waiting above which the loader is the bottleneck."""

_STEADY = 2
"""Number of the epoch that measures G: the first one compiles, tunes and fills caches."""

_SECONDS = 1.0

_SHORT = 1.0
"""Seconds of an epoch up to which the rates are not measured again, which takes as long."""

log = logging.getLogger("stallfree")


_FILES = "files cached that the data set reads", ""
"""What is cached of a data set whose samples are random."""

_CUTS = 4
"""Maximum attributes of a data set that are tried as its transform."""


@dataclass(frozen=True)
class _Decision:
    """A decision that processes share: bytes of the cache, rates, choice, and advice for the user."""

    room: int
    measured: Measured
    choice: Choice
    advice: str


@dataclass(frozen=True)
class _Epoch:
    """The statistics of an epoch: samples, seconds, and seconds that the training loop waited."""

    samples: int
    seconds: float
    waited: float

    @property
    def compute(self) -> float:
        """G: samples/s of the training loop without waits."""
        return self.samples / max(1e-9, self.seconds - self.waited)


class AutoCache:
    """The cache that a loader creates automatically.

    The first iteration measures and decides, before it starts any worker. After the second epoch G is also known, and
    determines the number of workers if that is not given. The rates are measured again before the next epoch if the
    loader limits the training and an epoch is 1.5 times as slow as the second one, or the second one as the model
    predicts.

    Processes of a host with the same data set, pipeline and capacity share one decision and one cache: the first
    process decides, and a new decision waits until the others have exited.

    Samples are cached, in the form that is fastest. If they are random and cannot be separated from their prep, the
    files are cached that the data set reads (`form="files"`).

    Args:
        dataset: a source or any map-style data set, without a cache.
        capacity: bytes of the cache, or a share of the memory that is free when the decision is made.
        workers: number of worker processes; None: chosen automatically.
        transform: applied to the samples of `dataset` after its own steps.

    Attributes:
        cached: the data set with the cache; None before the first iteration, and if no cache is faster.
        decision: one line with the decision and its figures; "" before the first iteration.
        num_workers: worker processes.
    """

    def __init__(
        self,
        dataset: Any,
        capacity: int | float,
        workers: int | None,
        transform: Transform | None = None,
    ) -> None:
        if isinstance(getattr(dataset, "reader", None), Reader):
            raise argument_conflict(
                f"cache='auto' with a {type(dataset).__name__}, which has a cache: give the data set without it, or "
                "leave cache and capacity out"
            )
        self.cached: CachedDataset | None = None
        self.decision = ""
        self._dataset, self._capacity, self._workers, self._transform = dataset, capacity, workers, transform
        self._room = 0  # once the decision is made, the bytes of it
        self._seed = 0
        self._cpus = cpu_count()
        self.num_workers = self._cpus if workers is None else workers
        self._folder: SharedFolder | None = None
        self._records: dict[int, Any] = {}  # fetched for the measurement, until they are cached
        self._measured: Measured | None = None
        self._choice: Choice | None = None
        self._expected = math.inf
        self._last: _Epoch | None = None
        self._epochs = 0
        self._reader: Reader | None = None

    def tuned(self, options: Any) -> Any:
        """The options of a loader's next epoch, which reads from this cache. Decides if a decision is due."""
        reader = self.begin(options.seed)
        if reader is options.reader and self.num_workers == options.workers:
            return options
        each = options.ahead // max(1, options.workers)
        return replace(options, reader=reader, workers=self.num_workers, ahead=each * max(1, self.num_workers))

    def begin(self, seed: int) -> Reader:
        """Return the reader of the next iteration. Decides if a decision is due.

        Args:
            seed: of the loader.
        """
        self._seed = seed
        if self._reader is None:
            self._decide()
        elif self._reader.split.uncached:
            self._decide_afresh()
        elif self._reader.cache is None and self._reader.settings.changes():
            source = as_source(self._dataset)
            self._reader = _without(source, steps_of(source, self._transform))
        elif self._last is not None:
            self._learn(self._last)
            self._last = None
        assert self._reader is not None
        return self._reader

    def end(self, samples: int, seconds: float, waited: float) -> None:
        """Record a finished epoch."""
        if samples:
            self._last = _Epoch(samples, seconds, waited)
            self._epochs += 1
            if self._epochs == _STEADY:
                _show(
                    f"the second epoch gave {samples / seconds:,.0f} samples/s; the training loop waited for data "
                    f"{waited / seconds:.0%} of the time"
                )

    def forecast(self, compute: float) -> tuple[Choice, str]:
        """What would be chosen for a training loop of `compute` samples/s, and what would be cached. Creates nothing.

        Raises `StallfreeError` if nothing can be cached, or all samples fail.
        """
        self._set_room()
        subject = subject_of(self._dataset, self._transform)
        probe = call_in_child(partial(subject.measure, self._seed, brief=False), "the forecast of cache='auto'")
        measured = replace(probe.measured, compute=compute)
        choice = self._choose(measured)
        return choice, what(choice, _FILES if subject.why else SAMPLES)

    def _keep_to_this_process(self) -> None:
        """Use no workers, unless asked for, if the data set holds an open file, whose position they would share."""
        if self._workers is not None:
            return
        with tolerant() as unknown:
            fingerprint(as_source(self._dataset).fingerprint())
        if unknown:
            self._workers = self.num_workers = 0
            _show(f"no workers, as they would share {unknown[0]} in the data set: give num_workers to start some")

    def _set_room(self) -> None:
        if not self._room:
            self._room = granted(self._capacity, default_root())

    def _decide(self) -> None:
        self._set_room()
        self._keep_to_this_process()
        try:
            subject = subject_of(self._dataset, self._transform)
        except NotCachedError as reason:
            source = as_source(self._dataset)
            self._reader = _without(source, steps_of(source, self._transform))
            advice = self._advice_to_cut(0.0)
            short, full = (f"no cache; {self._count()}; {text_of(why)}{advice}" for why in (reason, reason.__cause__))
            self._say(short, full)
            return
        with tolerant() as unknown:
            key = fingerprint(
                subject.source.fingerprint(),
                subject.steps,
                f"{self._capacity} {self._workers} {bool(subject.why)}",
            )
        try:
            folder = self._attach(f"auto-{token() if unknown else key[:20]}", subject)
        except (CapacityError, PlatformError, OSError) as error:
            self._go_without(subject, error)
            return
        found = _load(folder.path)
        if found.measured.samples != len(subject.source):
            raise FingerprintError(
                f"{folder.path} holds a decision for {found.measured.samples} samples, the data set has "
                f"{len(subject.source)}: remove it"
            )
        self._room = found.room
        self._adopt(subject, found)

    def _decide_afresh(self) -> None:
        """Decide again after a step or the data set proved random."""
        self.close()
        self._last, self._epochs = None, 0
        self._decide()

    def _attach(self, name: str, subject: Subject) -> SharedFolder:
        """The folder with the decision; created here, with a new decision, if missing."""
        self._folder = SharedFolder(name, initialize=lambda folder: self._publish(folder, subject))
        weakref.finalize(self, self._folder.close)
        return self._folder

    def _publish(self, folder: Path, subject: Subject) -> None:
        probe = call_in_child(partial(subject.measure, self._seed), "the measurement for cache='auto'")
        self._records = probe.records
        compute = math.inf if self._measured is None else self._measured.compute
        measured = replace(probe.measured, compute=compute)
        choice = self._choose(measured)
        advice = self._advice_to_cut(choice.rate) if subject.why else ""
        found = _Decision(self._room, measured, choice, advice)
        (folder / _FILE).write_text(json.dumps(asdict(found)))

    def _advice_to_cut(self, rate: float) -> str:
        """What `cut` would gain at one of the data set's attributes, against `rate`; 0: without a cache."""
        for name in callables(self._dataset)[:_CUTS]:
            with suppress(StallfreeError):
                source = cut(self._dataset, name)
                steps = steps_of(source, self._transform)
                call = partial(measure, source, steps, look(source, steps), seed=self._seed)
                measured = call_in_child(call, "the measurement of a cut data set").measured
                choice = self._choose(measured)
                before = rate or expect(measured, None, self._bytes, max(1, choice.workers)).rate
                if choice.share is not None and choice.rate > _BETTER * before:
                    return (
                        f". stallfree.cut(dataset, {name!r}) in place of the data set separates its transform, so that "
                        f"what comes before is cached: {choice.rate / before:.1f} times as many samples/s"
                    )
        return ""

    def _choose(self, measured: Measured) -> Choice:
        return choose(measured, self._bytes, workers=self._workers, cpus=self._cpus)

    @property
    def _bytes(self) -> int:
        return max(0, self._room - _INDEX * len(self._dataset))

    def _adopt(self, subject: Subject, found: _Decision, why: str = "") -> None:
        """Apply a choice."""
        measured, choice = found.measured, found.choice
        self._measured, self._choice = measured, choice
        self.num_workers, self._expected = choice.workers, choice.rate
        if choice.share is None:
            self._reader = _without(as_source(self._dataset), subject.steps)
        else:
            try:
                self.cached = self._create(choice)
            except (CapacityError, StorageError) as error:
                self._go_without(subject, error)
                return
            self._reader = self.cached.reader
        self._reader.io_threads = max(1, math.ceil(choice.threads / max(1, self.num_workers)))
        self._keep_records()
        forms = _FILES if subject.why else SAMPLES
        short, full = describe(measured, choice, forms), explain(measured, choice, self._bytes, forms)
        because = f"; {subject.why}" if subject.why else ""
        self._say(f"{why}{short}{found.advice}", f"{why}{full}{because}{found.advice}")

    def _create(self, choice: Choice) -> CachedDataset:
        return CachedDataset(
            self._dataset,
            capacity=self._room,
            form="prepared" if choice.share else "fetched",
            transform=self._transform,
            seed=self._seed,
        )

    def _go_without(self, subject: Subject, error: Exception) -> None:
        """Use no cache, as there is no room for one."""
        self._reader = _without(as_source(self._dataset), subject.steps)
        self._records = {}
        self._say(f"no cache; {self._count()}; {text_of(error)}")

    def _keep_records(self) -> None:
        """Cache the records that were fetched for the measurement."""
        records, self._records = self._records, {}
        if self.cached is None:
            return
        reader = self.cached.reader
        with suppress(StallfreeError):  # raised again when the samples are requested
            values = call_in_child(partial(_prepared, reader, records), "the preparation of measured samples")
            for id, value in values.items():
                reader.store([id], [value])

    def _learn(self, epoch: _Epoch) -> None:
        """Evaluate a finished epoch."""
        if self._measured is None or self._choice is None or self._folder is None:
            return
        if self._epochs == _STEADY:
            self._measured = replace(self._measured, compute=epoch.compute)
            if self._workers is None:
                self._set_workers(self._measured, self._choice)
        limits = epoch.waited > _WAITS * epoch.seconds
        rate = epoch.samples / epoch.seconds
        if self._epochs < _STEADY:
            return
        fine = not limits or epoch.seconds < _SHORT or rate * _SLOWER >= min(self._expected, epoch.compute)
        if not fine or self._epochs == _STEADY:
            self._expected = rate  # the model is approximate; kept if no better choice is found
        if fine:
            return
        self._decide_again(self._folder, replace(self._measured, compute=epoch.compute), self._choice)

    def _set_workers(self, measured: Measured, choice: Choice) -> None:
        best = self._choose(measured)
        if best.share == choice.share and best.workers != self.num_workers:
            self.num_workers = best.workers
            if self._reader is not None:
                self._reader.io_threads = max(1, math.ceil(best.threads / best.workers))
            self._choice = best
            self._say(f"the training step takes {measured.compute:,.0f} samples/s: {self._count()} from now on")

    def _decide_again(self, folder: SharedFolder, measured: Measured, old: Choice) -> None:
        """Measure again, and change the cache if the gain is large and no other process uses the old decision."""
        self._measured = measured
        folder.close()  # the last process to detach decides again
        try:
            subject = subject_of(self._dataset, self._transform)
            folder = self._attach(folder.path.name, subject)
        except Exception as error:  # also one of the data set
            log.info("the rates could not be measured again, so the cache stays as it is: %s", text_of(error))
            self._folder = None
            return
        found = _load(folder.path)
        self._measured, new = found.measured, found.choice
        there = expect(self._measured, old.share, self._bytes, max(1, old.workers))
        if not folder.created or new.rate <= _BETTER * there.rate:
            self._records = {}
            self._choice = replace(there, workers=old.workers)
            return
        if self.cached is not None:
            self.cached.close()
            self.cached = None
        self._adopt(subject, found, "the rates have changed: ")

    def _count(self) -> str:
        return f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"

    def _say(self, text: str, full: str | None = None) -> None:
        """Print a decision; `full` has its figures."""
        self.decision = full or text
        log.info("%s", self.decision)
        _show(text)

    def close(self) -> None:
        """Detach from the cache and the decision. A further iteration decides again."""
        if self.cached is not None:
            self.cached.close()
        if self._folder is not None:
            self._folder.close()
        self.cached = self._folder = self._reader = None
        self._records = {}


def _prepared(reader: Reader, records: dict[int, Any]) -> dict[int, Any]:
    """Return the cached values of `records`, as far as they can be made and compared in a second.

    As while a cache is filled, the first ones and some of the others are made twice.
    """
    began, values, split, states = time.monotonic(), dict[int, Any](), reader.split, States()
    for id, record in records.items():
        if time.monotonic() - began > _SECONDS:
            break
        steps = split.deterministic
        try:
            if split.takes_look():
                value = split.make_twice(private(record), id, steps.transforms)
            else:
                value = steps(private(record))
        except Reclassified:
            return {}
        except Exception:  # raised again when the sample is requested
            continue
        if states.moved():
            break  # the random step is detected when the sample is requested
        values[id] = value
    return values


def _show(text: str) -> None:
    print(f"stallfree: {text}", file=sys.stderr)


def _without(source: Source, steps: Compose) -> Reader:
    return Reader(source, None, Compose([]), steps)


def _load(folder: Path) -> _Decision:
    data = json.loads((folder / _FILE).read_text())
    measured = data["measured"]
    measured["storage"] = {int(count): rate for count, rate in measured["storage"].items()}
    for name in ("sizes", "reading"):
        measured[name] = tuple(measured[name])
    return _Decision(data["room"], Measured(**measured), Choice(**data["choice"]), data["advice"])
