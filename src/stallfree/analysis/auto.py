"""`DataLoader(cache="auto")`: decides once, before the first epoch, what of a data set is kept in memory.

The first process of a host that begins an epoch decides, in child processes that end with all that the data set opened.
The others wait for it at a kernel lock in a shared folder, and read its verdict there. In this order:

1. The samples as they are, if they are always the same up to a random step.
2. The samples of the data set that is cut at the attribute with its transform (`cut_any`).
3. The files that the data set opens.

The model (`choose`) compares the forms of the cache with none. A step that proves random later is moved behind the
cache by the reader; nothing is decided again.
"""

import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.analysis.measure import MOST_SAMPLES, measure_files, measure_samples
from stallfree.analysis.model import NOTHING, Costs, Option, choose, expect
from stallfree.cache.capacity import granted
from stallfree.datasets.cached_dataset import CachedDataset, cached_after, token
from stallfree.datasets.probe import LOOKS, FirstLook, Sample, look, reason_in
from stallfree.datasets.ranks import find_ranks
from stallfree.datasets.reader import IO_THREADS, Reader, reader_of
from stallfree.errors import InputError, StallfreeWarning, argument_conflict, text_of
from stallfree.ipc.folders import SharedFolder, default_root
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import call_in_child
from stallfree.loader.executors import WorkerSetup, prepare_process, problem_of_init
from stallfree.loader.pool import Options
from stallfree.pipeline.compose import Compose, Source, Transform
from stallfree.pipeline.fingerprint import fingerprint, tolerant
from stallfree.platform import cpu_count
from stallfree.raising import is_users, log, users_level
from stallfree.sources.cut import cut_any
from stallfree.sources.mapped import MapSource, as_source
from stallfree.units import format_seconds, format_size

_VERDICT = "verdict.json"
_WAIT = 300.0
"""Maximum seconds to wait for the process that decides."""

_SECONDS, _SHARE = 0.3, 0.03
"""A decision may take so many seconds or this share of the first epoch, whichever is longer."""

_LEAST, _MOST = 0.03, 2.0
"""Seconds that a measurement gets in any case, and the most that it is worth."""

_SHORT = 0.3
"""Seconds of work in an epoch up to which no workers are started, unless the user gave their number."""

_INDEX = 20
"""Approximate bytes of a cache's index per sample."""

_RANDOM = "its samples may be random, and no part of them can be kept"
"""Why no samples are kept if none of the ways is possible."""


@dataclass(frozen=True)
class Verdict:
    """A decision, which the processes of a host share.

    Attributes:
        form: of the cache; `NOTHING` for none.
        cut: whether the data set is cut.
        capacity: bytes of the cache.
        workers: worker processes.
        line: the decision in a sentence, as printed.
        reasons: why not other ways; empty if the first one was possible.
    """

    form: str
    cut: bool
    capacity: int
    workers: int
    line: str
    reasons: str = ""


@dataclass
class Trial:
    """What the process that decides has at hand: for its own cache the samples, or the cache itself.

    Attributes:
        began: when it began to look at the data set.
        reasons: why not other ways.
    """

    began: float = 0.0
    reasons: list[str] = field(default_factory=list)
    is_new: bool = False
    costs: Costs | None = None
    source: Any = None
    first: FirstLook | None = None
    files: CachedDataset[Any] | None = None

    def close(self) -> None:
        """Close a cache that is not used."""
        if self.files is not None:
            self.files.close()


class AutoCache:
    """The cache that a loader creates by itself.

    Args:
        dataset: a source or any map-style data set, without a cache.
        capacity: bytes of the cache, or a share of the memory that is free when it is created.
        workers: number of worker processes; None: chosen here.
        transform: applied to the samples of `dataset` after its own steps.

    Attributes:
        cached: the data set with the cache; None before the first epoch, and if nothing is cached.
        decision: the printed line and its reasons; "" before the first epoch.
        num_workers: worker processes.
    """

    def __init__(self, dataset: Any, capacity: float, workers: int | None, transform: Transform | None = None) -> None:
        if isinstance(getattr(dataset, "reader", None), Reader):
            kind = type(dataset).__name__
            raise argument_conflict(f"cache='auto' with a {kind}, which has a cache: leave cache and capacity out")
        self.cached: CachedDataset[Any] | None = None
        self.decision = ""
        self._dataset, self._capacity, self._workers, self._transform = dataset, capacity, workers, transform
        self.num_workers = max(1, cpu_count() // max(1, find_ranks().here)) if workers is None else workers
        self._seed, self._pid = 0, os.getpid()
        self._init: Callable[[int], None] | None = None
        self._folder: SharedFolder | None = None
        self._reader: Reader | None = None

    def tuned(self, options: Options) -> Options:
        """The options of the next epoch, which reads from this cache. Decides before the first epoch."""
        self._seed, self._init = options.seed, options.worker_init
        self.follow()
        if self._reader is None:
            self._reader = self._decide()
        if self._reader is options.reader and self.num_workers == options.workers:
            return options
        each = options.ahead // max(1, options.workers)
        return replace(options, reader=self._reader, workers=self.num_workers, ahead=each * max(1, self.num_workers))

    def follow(self, change: str = "") -> Reader | None:
        """Keep no samples from now on if the data set has changed, by its attributes or by `change`."""
        if self._reader is not None and (changes := self._reader.settings.changes() or [change] * bool(change)):
            cached, self._reader = self.cached is not None, self._without()
            self.cached = None  # closed with the last iteration that reads from it
            if cached:
                words = f"{changes[0]}: cache='auto' keeps no samples from now on, since the kept ones may differ"
                warnings.warn(words, StallfreeWarning, stacklevel=users_level())
        return self._reader

    def use_workers(self, workers: int) -> None:
        """Use so many worker processes from the next epoch on."""
        self._workers = self.num_workers = workers

    def close(self) -> None:
        """Detach from cache and verdict. A further epoch decides again."""
        if self.cached is not None:
            self.cached.close()
        if self._folder is not None:
            self._folder.close()
        self.cached = self._folder = self._reader = None

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self) -> Reader:
        trial = Trial()
        try:
            with tolerant() as unknown:
                data, options = as_source(self._dataset).fingerprint(), f"{self._capacity} {self._workers}"
                key = fingerprint(data, self._transform, options)
            if unknown and self._workers is None:  # workers would share an open file and its position
                self._workers = self.num_workers = 0
            self._folder = SharedFolder(f"auto-{token() if unknown else key[:20]}", initialize=lambda folder: None)
            weakref.finalize(self, self._folder.close)
            verdict = self._shared_verdict(self._folder.path, trial)
            reader = self._without() if verdict.form == NOTHING else self._adopt(verdict, trial)
        except Exception as error:  # no room, no shared memory, a data set that fails: training shows its error
            trial.close()
            trial.is_new = True
            line = _line(None, None, self.num_workers, because=text_of(error))
            verdict = Verdict(NOTHING, False, 0, self.num_workers, line)
            reader = self._without()
        self.num_workers = verdict.workers
        self.decision = "; ".join(filter(None, (verdict.line, verdict.reasons)))
        log.info("%s", self.decision)
        if trial.is_new and len(self._dataset):
            print(f"stallfree: {verdict.line}", file=sys.stderr)
        return reader

    def _shared_verdict(self, folder: Path, trial: Trial) -> Verdict:
        """The verdict of the process of this host that decides first, which may be this one."""
        with closing(FileLock(folder / "lock")) as lock, lock.hold(_WAIT, "the decision of cache='auto'"):
            with suppress(OSError):
                return Verdict(**json.loads((folder / _VERDICT).read_text()))
            verdict = self.judge(trial)
            new = folder / f".{_VERDICT}"
            new.write_text(json.dumps(asdict(verdict)))
            new.rename(folder / _VERDICT)  # complete, whenever this process dies
            return verdict

    def judge(self, trial: Trial) -> Verdict:
        """Look at the data set, measure it, and choose; keeps in `trial` what the cache can start with."""
        trial.is_new, trial.began, fits, self._pid = True, time.monotonic(), False, os.getpid()
        source, capacity = as_source(self._dataset), granted(self._capacity, default_root())
        available, choice, workers = max(0, capacity - _INDEX * len(source)), None, self.num_workers
        is_cut = not self._try_samples(trial, source)
        if is_cut:
            self._try_cut(trial)
        if trial.costs is not None:
            choice = choose(trial.costs, available, workers)
            fits = any(expect(trial.costs, form, available, workers).hits == 1 for form in trial.costs.size)
        if choice is None or (not fits and isinstance(source, MapSource)):
            choice = self._try_files(trial, capacity, choice)
        costs = trial.costs
        if self._workers is None and self._init is None and costs is not None and costs.samples * costs.miss < _SHORT:
            workers = 0
        form = NOTHING if choice is None else choice.form
        is_cut = is_cut and form != "files"
        line = _line(choice, costs, workers, is_cut=is_cut)
        return Verdict(form, is_cut, capacity, workers, line, "; ".join(trial.reasons))

    def _try_samples(self, trial: Trial, source: Source) -> bool:
        """Look at samples of `source` and measure them; return whether they can be cached."""
        try:
            seen = call_in_child(lambda: self._look_and_measure(source, trial.began), "the first look for cache='auto'")
            self._take(trial, source, seen)
        except InputError as error:
            if is_users(error):
                raise
            trial.reasons.append(reason_in(error) or text_of(error))
        return trial.costs is not None

    def _try_cut(self, trial: Trial) -> None:
        """Cut the data set, and look at its samples and measure them in the process that verified the cut."""
        results = list[Any]()

        def run(cut: Callable[[], Any], build: Callable[[Any], Source]) -> Any:
            def cut_and_measure() -> tuple[Any, Any]:
                self._as_worker()
                made = cut()
                return made, self._look_and_measure(build(made), trial.began)

            made, result = call_in_child(cut_and_measure, "the cut for cache='auto'")
            results.append(result)
            return made

        source, words = cut_any(self._dataset, run)
        trial.reasons.append(words)
        if source is not None:
            self._take(trial, source, results[0])

    def _look_and_measure(self, source: Source, began: float) -> tuple[Any, Costs, list[Sample]]:
        """The result of a look, the costs of samples, and more samples. Raises `InputError` if they are random."""
        kept = list[Any]()
        self._as_worker()

        def run(call: Callable[[], Any], what: str) -> Any:
            kept.append(call())
            return kept[0]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of a look are given by the process that decides
            first = look(source, self._steps(source), run)
        used = {sample.id for sample in first.samples}
        ids = np.random.default_rng(0).permutation(len(source))[: MOST_SAMPLES + len(used)].tolist()
        ids = [id for id in ids if id not in used] or list(used)
        seconds = self._seconds_left(began, len(source), len(used))
        threads = IO_THREADS * max(1, self.num_workers)
        return kept[0], *measure_samples(source, first, ids, seconds=seconds, threads=threads)

    def _as_worker(self) -> None:
        """Prepare this child process like the worker process that would make the samples."""
        if self.num_workers and os.getpid() != self._pid:
            setup = WorkerSetup(0, self.num_workers, None, self._dataset, self._seed, self._init)  # type: ignore[arg-type]
            prepare_process(setup)
            if (problem := problem_of_init(setup)) is not None:
                raise problem

    def _take(self, trial: Trial, source: Source, result: tuple[Any, Costs, list[Sample]]) -> None:
        looked, costs, samples = result
        first = look(source, self._steps(source), lambda *_: looked)
        trial.source, trial.first, trial.costs = source, replace(first, samples=[*first.samples, *samples]), costs

    def _seconds_left(self, began: float, samples: int, looked: int) -> float:
        """Seconds for a measurement, after a look that made `looked` samples twice; as much goes to processes."""
        spent = time.monotonic() - began
        epoch = samples * spent / (2 * looked) / max(1, self.num_workers)
        return min(_MOST, max(_LEAST, (max(_SECONDS, _SHARE * epoch) - spent) / 2))

    def _try_files(self, trial: Trial, capacity: int, best: Option | None) -> Option | None:
        """Try a cache of the files that the data set reads; return its option if it gains more than `best`."""
        cached = None
        try:
            cached = self._create(self._dataset, "files", capacity)
            seconds = self._seconds_left(trial.began, len(cached), LOOKS)
            costs = call_in_child(lambda: measure_files(cached, seconds=seconds), "the measurement for cache='auto'")
        except Exception as error:
            trial.reasons.append(text_of(error))
        else:
            option = choose(costs, max(0, capacity - _INDEX * len(cached)), self.num_workers)
            if best is None or (option.form != NOTHING and option.rate > best.rate):
                best, trial.costs = option, costs
                trial.files = cached if option.form != NOTHING else None
        if cached is not None and trial.files is None:
            cached.close()
        return best

    # -- applying -----------------------------------------------------------------------------------------------------

    def _adopt(self, verdict: Verdict, trial: Trial) -> Reader:
        """Create the cache of a verdict, with the samples that were made for it, or attach to it."""
        source, files = trial.source, verdict.form == "files"
        if source is None or files:
            source = cut_any(self._dataset)[0] if verdict.cut else self._dataset if files else as_source(self._dataset)
        self.cached = trial.files
        if self.cached is None:
            first = None if files else trial.first or look(source, self._steps(source), self._run)
            self.cached = self._create(source, verdict.form, verdict.capacity, first)
        return self.cached.reader

    def _run(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of a call in a child process."""
        return call_in_child(lambda: (self._as_worker(), call())[1], what)  # type: ignore[func-returns-value]

    def _create(self, source: Any, form: str, capacity: int, first: FirstLook | None = None) -> CachedDataset[Any]:
        return cached_after(first, source, capacity=capacity, form=form, transform=self._transform, seed=self._seed)

    def _without(self) -> Reader:
        """A reader without a cache, the same as a loader has that was not given `cache="auto"`."""
        if self._transform is None:
            return reader_of(self._dataset, divide=self.num_workers > 0, empty=True)
        source = as_source(self._dataset, empty=True)
        return Reader(source, None, Compose([]), self._steps(source))

    def _steps(self, source: Source) -> Compose:
        return Compose([source.pipeline, *([] if self._transform is None else [self._transform])])


def _line(
    choice: Option | None, costs: Costs | None, workers: int, *, is_cut: bool = False, because: str = _RANDOM
) -> str:
    """The decision in words for people."""
    processes = f"{workers or 'no'} worker process{'' if workers == 1 else 'es'}"
    if choice is None or costs is None or choice.form == NOTHING:
        why = because if choice is None else "it would save less than a tenth of the time for loading"
        return f"cache='auto' keeps no samples in memory: {why}; {processes}"
    number = round(choice.hits * costs.samples)
    samples = f"all {number:,} samples" if choice.hits == 1 else f"{number:,} of {costs.samples:,} samples"
    as_of = {
        "files": f"the files of {samples}",
        "fetched": f"{samples}, as they are before the transform" if is_cut else f"{samples}, as they are read",
        "prepared": f"{samples}, as they are after the transforms that are not random",
    }[choice.form]
    saved = costs.samples * (1 / replace(choice, hits=0.0).rate - 1 / choice.rate)
    return (
        f"cache='auto' keeps {as_of}, in {format_size(choice.memory)} of memory; from the second epoch on this "
        f"saves up to {format_seconds(saved)} of loading per epoch; {processes}"
    )
