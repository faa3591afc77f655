"""Samples of a batch: out of the cache or the source, prepared, with their randomness. One per process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, SampleCache
from stallfree.errors import InputError, StallfreeError, WaitError
from stallfree.loader.filling import Filling, InPlace, Reclassified, Samples, is_prepared, private, raise_from
from stallfree.loader.rows import Rows
from stallfree.pipeline._objects import attributes
from stallfree.pipeline.compose import Compose, describe_step
from stallfree.pipeline.determinism import StallfreeWarning
from stallfree.pipeline.in_place import works_in_place
from stallfree.pipeline.libraries import may_draw
from stallfree.pipeline.marks import mark_of, note_drew
from stallfree.pipeline.protocol import Source, sample_error
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.scan import scan
from stallfree.pipeline.watch import Watch, find_draw
from stallfree.sources.mapped import MapSource, SubsetSource, as_source
from stallfree.sources.throttle import ThrottledSource, payload_bytes
from stallfree.stores import AnyCache, SpreadCache

IO_THREADS = 8
"""Fetches under way at once in one process. They wait for storage, so there may be more of them than cores."""

_NOTHING = Compose([])
_FORMS = 0x666F726D
_UNCHANGING = frozenset({bytes, str, int, float, bool, complex, type(None)})


@dataclass
class Pending:
    """A batch whose fetches have been started.

    Attributes:
        ids: of its samples.
        fetches: from the source, by id.
        asked: ids that other nodes were asked for, and what they will answer; what they lack is then in `fetches`.
        settled: done when what this node lacks is in `fetches`.
    """

    ids: npt.NDArray[np.int64]
    fetches: dict[int, Future[Any]]
    asked: list[tuple[npt.NDArray[np.int64], Future[list[Any]]]] = field(default_factory=list)
    settled: Future[None] | None = None


class Reader:
    """How samples of one data set come to be. Only one thread of a process may be in `finish` at a time.

    Args:
        source: where records come from.
        cache: holds what `deterministic` gave for a record (or the record, when `deterministic` is in `rest`); or None.
        deterministic: applied to a record before it is cached.
        rest: applied to what is cached, each time anew.
        share: of the samples that this holds for; the others are cached as they are fetched. See `is_prepared`.
        whole: what is applied to those, each time anew.
        steps: all that is applied to a record, as the user gave it: the seeds of generators go by their places there.
            `deterministic` and `rest` if None.

    Attributes:
        uncached: how many steps turned out to be random while the cache was filled, with those after them. They are in
            `rest` then. If it is more than there were, the source itself is random, and nothing is cached.
        quiet: whether another process warns of that.
    """

    def __init__(
        self,
        source: Source,
        cache: AnyCache | None,
        deterministic: Compose,
        rest: Compose,
        *,
        share: float = 1.0,
        whole: Compose = _NOTHING,
        steps: Compose | None = None,
    ) -> None:
        self.source = source
        self.cache = cache
        self.deterministic = deterministic
        self.rest = rest
        self.share = share
        self.whole = whole
        self.io_threads = IO_THREADS
        self.uncached, self.quiet, self.looks_at_each = 0, False, False
        self._steps, self._cached_steps = (*deterministic, *rest), len(deterministic)
        self._pipeline = self._steps if steps is None else (*steps,)
        self._home = os.getpid()
        self._see_randomness()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = -1
        self._ended = ""
        self._values = self._settings()

    def _see_randomness(self) -> None:
        """Which generators are seeded, and watched."""
        # Without a cache, a plain data set may augment its samples itself: they are drawn in the thread that is seeded.
        beneath = plain_beneath(self.source, 0)
        plain = None if self.caches else beneath
        self.threads = plain is None and bool(getattr(self.source, "threads", True))
        self.drawn = plain is not None
        steps = Compose([*self.rest, *self.whole])
        drawing: Callable[[Any], Any] | None = steps if len(steps) else None
        if plain is not None:
            drawing = _Drawing(plain[0].dataset, self.rest)
        self.fresh = drawing is not None
        dataset = None if beneath is None else beneath[0].dataset
        self.randomness = Randomness(drawing, [dataset, *self._pipeline])
        self.marked = list(map(may_draw, self.deterministic))
        self.origin: Any = self.source if beneath is None else beneath[0].dataset
        self.watches_source = mark_of(self.origin) is not False
        self._watch: Watch | None = None

    @property
    def caches(self) -> bool:
        """Whether samples are stored."""
        return self.cache is not None and self.uncached <= self._cached_steps

    @property
    def plain(self) -> bool:
        """Whether a hit is the sample, with nothing left to do."""
        return self.caches and len(self.rest) == 0 and self.share == 1

    @property
    def current(self) -> bool:
        """Whether what the cache holds was made by the steps that are in `deterministic` here."""
        return self.caches and self.cache is not None and self.cache.uncached_steps == self.uncached

    @property
    def in_place(self) -> bool:
        """Whether samples are made by steps that write into rows of a batch: see `finish`."""
        steps = [*self.rest, *self.whole]
        return len(self.rest) > 0 and (self.share == 1 or len(self.whole) > 0) and all(map(works_in_place, steps))

    def start(self, ids: npt.NDArray[np.int64]) -> Pending:
        """Start fetching what `ids` miss. Returns at once. Raises `InputError` after `end`."""
        self.check()
        pending = Pending(ids, {})
        missing = ids if self.cache is None or not self.caches else ids[~self.cache.resident(ids)]
        if isinstance(self.cache, SpreadCache) and self.caches:
            for away in self.cache.parts(np.unique(missing)):
                pool = self._executor()
                pending.asked.append((away, pool.submit(self._ask, away, pending.fetches, pool)))
            missing = np.setdiff1d(missing, np.concatenate([missing[:0], *(away for away, _ in pending.asked)]))
            if len(missing) and self.threads:
                pool = self._executor()
                pending.settled = pool.submit(self._settle, missing, pending.fetches, pool)
                return pending
        if self.threads:
            self.submit(missing.tolist(), pending.fetches)
        return pending

    def _settle(self, ids: npt.NDArray[np.int64], fetches: dict[int, Future[Any]], pool: ThreadPoolExecutor) -> None:
        """Start fetching those of `ids` that are not on their way into this node's cache."""
        assert isinstance(self.cache, SpreadCache)
        missing = ids[self.cache.settle(ids)]
        with contextlib.suppress(RuntimeError):  # the pool is being closed: nobody wants them any more
            for id in missing.tolist():
                fetches[id] = pool.submit(self.source.fetch, id)

    def _ask(self, ids: npt.NDArray[np.int64], fetches: dict[int, Future[Any]], pool: ThreadPoolExecutor) -> list[Any]:
        """Ask the node that owns `ids` for them, and start fetching what it has not."""
        assert isinstance(self.cache, SpreadCache)
        found = self.cache.read(ids)
        if self.threads:
            with contextlib.suppress(RuntimeError):  # the pool is being closed: nobody wants them any more
                for id, value in zip(ids.tolist(), found, strict=True):
                    if value is MISS:
                        fetches[id] = pool.submit(self.source.fetch, id)
        return found

    def finish(
        self, pending: Pending, seed: int, epoch: int | Sequence[int], *, skip: bool, rows: Rows | None = None
    ) -> Samples:
        """The samples of a batch that was started; `epoch` is that of all, or one for each.

        Raises `SampleError` for the first sample that cannot be had, unless `skip`: then it is left out. A sample that
        cannot be stored is an error in any case. The values belong to the caller; those of one batch may share one
        piece of memory, which lives as long as any of them.

        With `rows`, only for a reader that is `in_place`, they go there, and there are no values, if all of them fit.
        """
        self.check()
        while True:
            self.follow()
            try:
                return self._finish(pending, seed, epoch, skip=skip, rows=rows)
            except Reclassified:  # a step turned out to be random: the batch is made again without that step's output
                if rows is not None:
                    rows.restart()

    def _finish(
        self, pending: Pending, seed: int, epoch: int | Sequence[int], *, skip: bool, rows: Rows | None
    ) -> Samples:
        ids = pending.ids.tolist()
        borrowed = None
        if rows is not None and isinstance(self.cache, SampleCache) and self.current:
            borrowed = self.cache.borrow(pending.ids)
            if not self.current:  # what was borrowed may have been made by other steps
                raise Reclassified
        found = self._found(pending) if borrowed is None else borrowed.values
        missing = [at for at, value in enumerate(found) if value is MISS]
        samples = Samples([], [], hits=len(ids) - len(missing), misses=len(missing))
        epochs = [epoch] * len(ids) if isinstance(epoch, int) else epoch
        try:
            with self.randomness:
                if missing:
                    Filling(self, ids, found, pending.fetches, samples, skip).run(missing, seed, epochs)
                if rows is None:
                    self._prepare(ids, found, samples, seed, epochs, skip)
                else:
                    InPlace(self, ids, found, rows, borrowed, set(missing), samples, skip).run(seed, epochs)
        finally:
            self._give_up(pending.fetches)
        return samples

    def _found(self, pending: Pending) -> list[Any]:
        """What those that were asked have, and what is in the cache; `MISS` for the rest."""
        if self.cache is None or not self.current:
            return [MISS] * len(pending.ids)
        values = self._read(pending, self.cache)
        if self.cache.uncached_steps != self.uncached:
            raise Reclassified
        return values

    def _read(self, pending: Pending, cache: AnyCache) -> list[Any]:
        if not isinstance(cache, SpreadCache):
            return cache.get_many(pending.ids)
        if pending.settled is not None:
            with contextlib.suppress(CancelledError):
                pending.settled.result()
        answers: dict[int, Any] = {}
        for away, answer in pending.asked:
            with contextlib.suppress(CancelledError):  # by another loader of this process, which ended
                answers.update(zip(away.tolist(), answer.result(), strict=True))
        found, given = [MISS] * len(pending.ids), set()
        for at, id in enumerate(pending.ids.tolist()):
            if (value := answers.get(id, MISS)) is not MISS:
                found[at] = private(value) if id in given else value
                given.add(id)
        left = [at for at, value in enumerate(found) if value is MISS]
        for at, value in zip(left, cache.get_here(pending.ids[left]), strict=True):
            found[at] = value
        return found

    def fill(self, ids: npt.NDArray[np.int64]) -> int:
        """Fetch, prepare and store those of `ids` that the cache lacks; how many could not be had."""
        self.check()
        while True:
            self.follow()
            pending, samples = self.start(ids), Samples([], [])
            found = self._found(pending)
            missing = [at for at, value in enumerate(found) if value is MISS]
            try:
                Filling(self, ids.tolist(), found, pending.fetches, samples, True).run(missing, 0, [0] * len(ids))
            except Reclassified:
                continue
            finally:
                self._give_up(pending.fetches)
            return len(samples.skipped)

    def store(self, ids: list[int], values: list[Any]) -> None:
        """Put what `deterministic` made into the cache. Raises `CodecError`."""
        if self.cache is None or not self.caches or not ids:
            return
        if isinstance(self.cache, SampleCache):
            self.cache.put_many(ids, values, uncached=self.uncached)
        elif self.current:
            self.cache.put_many(ids, values)

    # -- steps that turn out to be random -----------------------------------------------------------------------------

    def follow(self) -> bool:
        """Do as the processes that share the cache have found: apply steps afresh that are random. Whether some are."""
        if self.cache is None or self.cache.uncached_steps <= self.uncached:
            return False
        new = self._uncache(self.cache.uncached_steps)
        if new and os.getpid() == self._home and not self.quiet:
            self._warn("one of the samples was fetched or prepared")
        return True

    def _settings(self) -> dict[tuple[int, str], tuple[object, Any]]:
        """The plain attributes of what the cached samples are made by, by object and name."""
        things = () if self.cache is None else (self.origin, *self._steps[: self._cached_steps])
        return {
            (id(thing), name): (thing, value)
            for thing in things
            for name, value in (vars(type(thing)) | attributes(thing)).items()
            if isinstance(value, (bool, int, float, str)) and not name.startswith("__")
        }

    def check_settings(self) -> None:
        """Warn of attributes that have changed since samples were cached, if the code reads them."""
        now = self._settings()
        for key, (thing, value) in now.items():
            _, before = self._values.get(key, (thing, value))
            if before != value and key[1] in scan(thing).read:
                warnings.warn(
                    f"the attribute {key[1]!r} of {type(thing).__name__} was {before!r} when samples were cached, and "
                    f"is {value!r} now: samples in the cache stay as they are. Make a new CachedDataset for the new "
                    "value, or give what changes as a step marked with stallfree.mark_random",
                    StallfreeWarning,
                    stacklevel=3,
                )
        self._values = now

    def watch(self) -> Watch:
        """Sees whether the source or a step in `deterministic` draws."""
        if self._watch is None:
            self._watch = Watch(*self.deterministic, self.origin)
        return self._watch

    def find_made(self, ids: list[int]) -> None:
        """A step or the source that made a generator while `ids` were made is random: see `find_draw`."""
        for thing in self.watch().made():
            place = next((at for at, step in enumerate(self.deterministic) if step is thing), None)
            if place is None and self.origin is self.source:
                continue  # of a source that has steps of its own, only what it draws while it fetches counts
            if self.watches_source if place is None else not self.marked[place]:
                self._leave_out_steps(self._cached_steps + 1 if place is None else self._cached_steps - place, ids[-1])

    def find_draw(self, ids: list[int]) -> None:
        """Leave out of the cache what drew random numbers while the samples `ids` were made.

        Raises `Reclassified`, for the batch to be made again, unless none of what is cached drew them.
        """
        for id in ids:
            count = self._random_steps(id)
            if count is not None:
                self._leave_out_steps(count, id)
        if not self.threads:
            self._leave_out_steps(self._cached_steps + 1, ids[-1])
        # It did not happen again: a thread that fetches may have drawn, such as a client before it tries once more.
        # From now on one sample is made again then, and not a whole batch.
        self.looks_at_each = True

    def _leave_out_steps(self, count: int, id: int) -> None:
        assert self.cache is not None
        with contextlib.suppress(WaitError):
            self.cache.uncache_steps(count)
        if self._uncache(count) and not self.quiet:
            self._warn(f"sample {id} was fetched or prepared")
        raise Reclassified

    def _random_steps(self, id: int) -> int | None:
        """How many of the steps, counted from the last cached one, may not be cached; None if `id` draws nothing."""
        with contextlib.suppress(Exception), Watch(self.origin) as watch:
            record = private(self.source.fetch(id))
            if watch.moved() and self.watches_source:
                return self._cached_steps + 1
            place = find_draw(self.deterministic, record, self.marked)
            if place is not None:
                return self._cached_steps - place
        return None

    def _uncache(self, count: int) -> bool:
        """Leave out the last `count` of the cached steps; whether this process did not know that yet."""
        kept = self._cached_steps - count
        new = note_drew(self._steps[kept] if kept >= 0 else self.origin)
        self.uncached = count
        self.deterministic, self.rest = Compose(self._steps[: max(0, kept)]), Compose(self._steps[max(0, kept) :])
        self._see_randomness()
        return new

    def _warn(self, when: str) -> None:
        if self.caches:
            what, mark = f"the transform {describe_step(self.rest.transforms[0])}", "transform"
            then = "its output is dropped from the cache, which holds samples as they are before it from now on"
        else:
            what, mark = f"the data set {type(self.origin).__name__}", "dataset"
            then = "what was cached is dropped, and nothing is cached from now on"
        warnings.warn(
            f"{what} drew random numbers when {when}, though it did not for the first one. It counts as random: "
            f"{then}. To have that from the start, mark it with stallfree.mark_random({mark}); if its output does not "
            f"depend on what it draws, with stallfree.mark_deterministic({mark})",
            StallfreeWarning,
            stacklevel=2,
        )

    # -----------------------------------------------------------------------------------------------------------------

    def _prepare(
        self, ids: list[int], found: list[Any], samples: Samples, seed: int, epochs: Sequence[int], skip: bool
    ) -> None:
        """Apply what is left to do to all values that are there."""
        if not len(self.rest) and self.share == 1 and not samples.skipped:
            samples.ids, samples.values = ids, found
            return
        for id, value, epoch, rest in zip(ids, found, epochs, self.rests(ids), strict=True):
            if value is MISS:
                continue
            try:
                self.reseed(seed, epoch, id)
                samples.values.append(rest(value))
                samples.ids.append(id)
            except Exception as error:
                self.leave_out(samples, id, error, skip)

    def rests(self, ids: list[int]) -> list[Compose]:
        """What is left to do for each."""
        if self.share == 1:
            return [self.rest] * len(ids)
        return [self.rest if short else self.whole for short in is_prepared(ids, self.share).tolist()]

    def reseed(self, seed: int, epoch: int, id: int) -> None:
        """Have what is drawn next follow from these three."""
        if self.fresh:
            self.randomness.seed(seed, epoch, id)

    def leave_out(self, samples: Samples, id: int, error: Exception, skip: bool) -> None:
        """Preparing it has failed: it is left out, with `skip`, or else the error of the batch."""
        problem = sample_error(error, self.source, id, "preparing")
        if not skip:
            raise_from(problem, error)
        samples.skipped.append(problem)

    def submit(self, ids: list[int], fetches: dict[int, Future[Any]]) -> None:
        """Have `ids` fetched, unless they are in `fetches` already."""
        pool = self._executor() if ids else None
        for id in ids:
            if id not in fetches and pool is not None:
                fetches[id] = pool.submit(self.source.fetch, id)

    def _give_up(self, fetches: dict[int, Future[Any]]) -> None:
        """Nobody needs these any more; those that run already are reads all the same."""
        for future in fetches.values():
            if not future.cancel() and self.cache is not None:
                future.add_done_callback(self._count_unused)
        fetches.clear()

    def _count_unused(self, future: Future[Any]) -> None:
        if self.cache is not None and not future.cancelled() and future.exception() is None:
            with contextlib.suppress(StallfreeError, ValueError):  # the cache may have been closed meanwhile
                self.cache.count_fetch(1, payload_bytes(future.result()))

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(self.io_threads, thread_name_prefix="stallfree-fetch")
            self._pid = os.getpid()
        return self._pool

    def check(self) -> None:
        """Raise `InputError` after `end`."""
        if self._ended:
            raise InputError(self._ended)

    def close(self) -> None:
        """End the threads that fetch, once they are through. They start anew when they are needed again."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True, cancel_futures=True)

    def end(self, why: str) -> None:
        """Close for good: from now on `start` and `finish` raise `InputError(why)`."""
        self._ended = why
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pid": -1, "_watch": None, "_values": {}}


class _Drawing:
    """A plain data set and the steps after it: whatever may hold generators of random numbers."""

    def __init__(self, dataset: Any, rest: Compose) -> None:
        self.dataset = dataset
        self.rest = rest

    def __call__(self, id: int) -> Any:
        return self.rest(self.dataset[id])


def plain_beneath(source: Source, id: int) -> tuple[MapSource, int] | None:
    """The plain data set that `source` reads sample `id` from, and the id there; None when there is none."""
    inner: Any = source
    while isinstance(inner, (SubsetSource, ThrottledSource)):
        if isinstance(inner, SubsetSource):
            id = int(inner.indices[id])
        inner = inner.source
    return (inner, id) if isinstance(inner, MapSource) else None


def reader_of(dataset: Any) -> Reader:
    """The reader of a data set of stallfree; one without a cache for any other."""
    reader = getattr(dataset, "reader", None)
    if isinstance(reader, Reader):
        return reader
    source = as_source(dataset)
    return Reader(source, None, Compose([]), source.pipeline)
