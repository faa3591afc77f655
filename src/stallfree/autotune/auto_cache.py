"""`DataLoader(cache="auto")`: measures a data set in its first epoch, then chooses and creates its cache."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stallfree.autotune.choice import Choice, Measured, choose, expect, explain
from stallfree.autotune.measure import measure
from stallfree.batches.reader import Reader
from stallfree.batches.transform_split import is_prepared
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.dataset_probe import FirstLook, look, untouched
from stallfree.datasets.private_names import token
from stallfree.errors import InputError, SampleError, StallfreeError
from stallfree.ipc.folders import SharedFolder
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.fingerprint import fingerprint, tolerant
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.values import private
from stallfree.platform import cpu_count
from stallfree.sources import as_source
from stallfree.stores import DiskTier
from stallfree.workers.worker_pool import Options

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

log = logging.getLogger("stallfree")


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

    Args:
        dataset: a source or any map-style data set, without a cache.
        room: bytes of the cache.
        workers: number of worker processes; None: chosen automatically.
        tier: a disk to use below memory if that is faster.

    Attributes:
        cached: the data set with the cache; None before the first iteration, and if no cache is faster.
        decision: one line with the decision and its reason; "" before the first iteration.
        num_workers: worker processes.
    """

    def __init__(self, dataset: Any, room: int, workers: int | None, tier: DiskTier | None = None) -> None:
        if isinstance(getattr(dataset, "reader", None), Reader):
            raise InputError(
                f"cache='auto' with a {type(dataset).__name__}, which has a cache: give the data set without it, or "
                "leave cache and capacity out"
            )
        self.cached: CachedDataset | None = None
        self.decision = ""
        self._dataset, self._room, self._workers, self._tier = dataset, room, workers, tier
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

    def tuned(self, options: Options) -> Options:
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

    def _decide(self) -> None:
        source = as_source(self._dataset)
        try:
            first = look(source, source.pipeline)
        except SampleError:
            raise
        except InputError as error:  # samples are random, and inseparable from their prep
            self._reader = _without(source)
            self._say(f"no cache, {self._count()}: {error}")
            return
        with tolerant() as unknown:
            key = fingerprint(source.fingerprint(), source.pipeline, f"{self._room} {self._workers} {self._tier!r}")
        folder = self._attach(f"auto-{token() if unknown else key[:20]}", source, first)
        measured, choice = _load(folder.path)
        if measured.samples != len(source):
            raise StallfreeError(
                f"{folder.path} holds a decision for {measured.samples} samples, the data set has {len(source)}: "
                "remove it"
            )
        self._adopt(source, measured, choice)

    def _decide_afresh(self) -> None:
        """Decide again after a step or the data set proved random."""
        self.close()
        self._last, self._epochs = None, 0
        self._decide()

    def _attach(self, name: str, source: Source, first: FirstLook) -> SharedFolder:
        """The folder with the decision; created here, with a new decision, if missing."""
        self._folder = SharedFolder(name, initialize=lambda folder: self._publish(folder, source, first))
        weakref.finalize(self, self._folder.close)
        return self._folder

    def _publish(self, folder: Path, source: Source, first: FirstLook) -> None:
        disk = None if self._tier is None else self._tier.folder
        with untouched(source):
            probe = measure(source, source.pipeline, first, seed=self._seed, disk=disk)
        self._records = probe.records
        compute = math.inf if self._measured is None else self._measured.compute
        measured = replace(probe.measured, compute=compute)
        choice = self._choose(measured)
        text = json.dumps({"measured": asdict(measured), "choice": asdict(choice)})
        (folder / _FILE).write_text(text)

    def _choose(self, measured: Measured) -> Choice:
        return choose(measured, self._bytes, workers=self._workers, cpus=self._cpus, disk=self._disk)

    @property
    def _disk(self) -> int:
        return 0 if self._tier is None else max(0, self._tier.capacity - _INDEX * len(self._dataset))

    @property
    def _bytes(self) -> int:
        return max(0, self._room - _INDEX * len(self._dataset))

    def _adopt(self, source: Source, measured: Measured, choice: Choice, why: str = "") -> None:
        """Apply a choice."""
        self._measured, self._choice = measured, choice
        self.num_workers, self._expected = choice.workers, choice.rate
        if choice.share is None:
            self._reader = _without(source)
        else:
            form = {0.0: "fetched", 1.0: "prepared"}.get(choice.share, choice.share)
            store = self._tier if self._tier is not None and choice.on_disk else "memory"
            self.cached = CachedDataset(source, capacity=self._room, form=form, store=store, seed=self._seed)
            self._reader = self.cached.reader
        self._reader.io_threads = max(1, math.ceil(choice.threads / max(1, self.num_workers)))
        self._keep_records()
        self._say(f"{why}{explain(measured, choice, self._bytes)}")

    def _keep_records(self) -> None:
        """Cache the records that were fetched for the measurement."""
        records, self._records = self._records, {}
        if self.cached is None:
            return
        reader, began = self.cached.reader, time.monotonic()
        prepare = [True] * len(records) if reader.split.share == 1 else is_prepared(list(records), reader.split.share)
        with reader.split.watch() as watch:
            for (id, record), wanted in zip(records.items(), prepare, strict=True):
                if time.monotonic() - began > _SECONDS:
                    break
                try:
                    value = reader.deterministic(private(record)) if wanted else record
                    if watch.moved() or watch.made():
                        return  # the random step is detected when the sample is requested
                    reader.store([id], [value])
                except Exception:  # raised again, and reported, when the sample is requested
                    return

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
        fine = not limits or rate * _SLOWER >= min(self._expected, epoch.compute)
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
            self._say(f"G={measured.compute:,.0f}/s: {self._count()} from now on")

    def _decide_again(self, folder: SharedFolder, measured: Measured, old: Choice) -> None:
        """Measure again, and change the cache if the gain is large and no other process uses the old decision."""
        self._measured = measured
        source = as_source(self._dataset)
        folder.close()  # the last process to detach decides again
        try:
            first = look(source, source.pipeline)
            folder = self._attach(folder.path.name, source, first)
        except StallfreeError as error:
            log.warning("the rates could not be measured again, so the cache stays as it is: %s", error)
            self._folder = None
            return
        self._measured, new = _load(folder.path)
        there = expect(self._measured, old.share, self._bytes, max(1, old.workers), self._disk if old.on_disk else 0)
        if not folder.created or new.rate <= _BETTER * there.rate:
            self._records = {}
            self._choice = replace(there, workers=old.workers)
            return
        if self.cached is not None:
            self.cached.close()
            self.cached = None
        self._adopt(source, self._measured, new, "the rates have changed: ")

    def _count(self) -> str:
        return f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"

    def _say(self, text: str) -> None:
        self.decision = text
        log.info("%s", text)
        print(f"stallfree: {text}", file=sys.stderr)

    def close(self) -> None:
        """Detach from the cache and the decision. A further iteration decides again."""
        if self.cached is not None:
            self.cached.close()
        if self._folder is not None:
            self._folder.close()
        self.cached = self._folder = self._reader = None
        self._records = {}


def _without(source: Source) -> Reader:
    return Reader(source, None, Compose([]), source.pipeline)


def _load(folder: Path) -> tuple[Measured, Choice]:
    data = json.loads((folder / _FILE).read_text())
    measured = data["measured"]
    measured["storage"] = {int(count): rate for count, rate in measured["storage"].items()}
    for name in ("sizes", "reading", "disk"):
        measured[name] = tuple(measured[name])
    return Measured(**measured), Choice(**data["choice"])
