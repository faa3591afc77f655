"""Splits the transforms into those applied before and after the cache; the split may change during use.

A step before the cache that proves random moves behind the cache, with all steps that follow it. The
other processes that share the cache read the new split from its `uncached_steps`.
"""

import contextlib
import os
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import StallfreeWarning, WaitError, WorkerError
from stallfree.ipc.process import call_in_child
from stallfree.pipeline.classify import StepError, Trust, make_twice
from stallfree.pipeline.compose import Compose, Source, Transform, describe_step, note_drew
from stallfree.pipeline.randomness import States

_FIRST_LOOKS, _LOOK_EVERY = 64, 32
"""Samples that the processes of a loader make twice: so many first, and then one in so many."""

_FALSE_ALARMS = 8
"""After so many draws of other threads, a process leaves the states alone: samples made twice remain."""

_CONFIRM_SECONDS = 20.0


class Reclassified(Exception):
    """Raised when a cached step turns out to be random, so that the batch is built again."""


class TransformSplit:
    """The transforms of a data set before and after its cache.

    Args:
        source: source of the records.
        cache: cache of the outputs of `deterministic`; None if nothing is cached.
        origin: object whose random draws count as draws of the fetch: the user's data set, or `source`.
        deterministic: steps applied to a record before it is cached.
        later_steps: steps applied to a cached value each time it is read.

    Attributes:
        uncached: number of steps moved behind the cache, from the last cached one backwards. If it exceeds the number
            of cached steps, the source itself is random, and nothing is cached.
        quiet: suppress the warning, because another process issues it.
        fetches_twice: whether a sample that is made twice is also fetched twice: those of a plain data set.
    """

    def __init__(
        self, source: Source, cache: SampleCache | None, origin: Any, deterministic: Compose, later_steps: Compose
    ) -> None:
        self.source, self.origin, self._cache = source, origin, cache
        self._steps = deterministic.transforms + later_steps.transforms
        self._cached_steps = len(deterministic.transforms)
        self.quiet, self._home = False, os.getpid()
        self._looks = self._false_alarms = 0
        self._adopt(deterministic, later_steps, 0)

    def _adopt(self, deterministic: Compose, later_steps: Compose, uncached: int) -> None:
        """Use these steps before and after the cache, and determine which looks those before it need."""
        self.deterministic, self.later_steps = deterministic, later_steps
        self._trust = [] if self._cache is None else [Trust.of(self.origin), *map(Trust.of, deterministic)]
        self.fetches_twice = bool(self._trust) and self.origin is not self.source and not self._trust[0].outputs
        self._compares = self.fetches_twice or not all(known.outputs for known in self._trust[1:])
        self._watches = not all(known.draws for known in self._trust)
        self.uncached = uncached  # last: threads that gather read it first

    @property
    def caches(self) -> bool:
        """Whether samples are cached: False if the source is random."""
        return self.uncached <= self._cached_steps

    # -- looks while the cache is filled ------------------------------------------------------------------------------

    def takes_look(self) -> bool:
        """Return whether the next sample is made twice: the first 64 of a loader, then one in 32."""
        if not self._compares:
            return False
        self._looks += 1
        worker = get_worker_info()
        first = _FIRST_LOOKS if worker is None else -(-_FIRST_LOOKS // max(1, worker.num_workers))
        return self._looks <= first or self._looks % _LOOK_EVERY == 0

    def make_twice(self, record: Any, id: int, steps: Sequence[Transform]) -> Any:
        """Return the output of `steps` for the record of sample `id`, after they made it twice.

        Raises `Reclassified` if the outputs or the records differ, and the error of the first run.
        """
        problem: Exception | None = None
        again = partial(self.source.fetch, id) if self.fetches_twice else None
        try:
            value, difference = make_twice(lambda: record, again, steps, self._trust)
        except StepError as failed:
            problem = failed.error
        if problem is not None:  # outside of the handler, which would be its context
            raise problem
        if difference is not None:
            self._reclassify(difference.at, f"sample {id} came out different when it was made twice")
        return value

    def watch(self) -> States | None:
        """Return the states of the global generators before samples are made; None if draws do not matter."""
        return States() if self._watches and self._false_alarms < _FALSE_ALARMS else None

    def confirm(self, ids: Sequence[int]) -> None:
        """Find out what drew random numbers while `ids` were made: they are made again, in a process of one thread.

        Raises `Reclassified` if that is the source or a step, and not another thread of the program.
        """
        trial = partial(_find_draws, self.source, self.deterministic.transforms, self._trust, list(ids))
        try:
            draw = call_in_child(trial, "the search for what drew random numbers", seconds=_CONFIRM_SECONDS)
        except WorkerError:  # a forked process cannot make these samples
            draw = trial()
        if draw is None:
            self._false_alarms += 1
        else:
            id, at = draw
            self._reclassify(at, f"it drew random numbers when sample {id} was made")

    def _reclassify(self, at: int, why: str) -> NoReturn:
        """Move the step at `at`, and those behind it, behind the cache."""
        assert self._cache is not None
        if self._uncache(self._cached_steps - at) and not self.quiet:
            self._warn(why)
        raise Reclassified

    def follow(self) -> None:
        """Adopt the split that another process has stored in the cache, or store that of this process."""
        if self._cache is None:
            return
        stored = self._cache.uncached_steps
        if stored < self.uncached:
            with contextlib.suppress(WaitError):  # another process writes: the next batch tries again
                self._cache.uncache_steps(self.uncached)
        elif stored > self.uncached:
            new = self._uncache(stored)
            if new and os.getpid() == self._home and not self.quiet:
                self._warn("one of the samples showed it")

    def _uncache(self, count: int) -> bool:
        """Move the last `count` cached steps behind the cache; returns whether the draw is new to this process."""
        kept = self._cached_steps - count
        new = note_drew(self._steps[kept] if kept >= 0 else self.origin)
        kept = max(0, kept)
        self._adopt(Compose(self._steps[:kept]), Compose(self._steps[kept:]), count)
        return new

    def _warn(self, why: str) -> None:
        what, mark, then = f"the data set {type(self.origin).__name__}", "dataset", "nothing is cached"
        if self.caches:
            what, mark = f"the transform {describe_step(self.later_steps.transforms[0])}", "transform"
            then = "its output is not cached, but the samples before this transform"
        warnings.warn(
            f"{what} is random: {why}, though the first look showed nothing. From now on {then}. To classify it from "
            f"the start, mark it with stallfree.mark_random({mark}); if its output is always the same for the same "
            f"input, with stallfree.mark_deterministic({mark})",
            StallfreeWarning,
            stacklevel=2,
        )


def _find_draws(
    source: Source, steps: Sequence[Transform], trust: Sequence[Trust], ids: Sequence[int]
) -> tuple[int, int] | None:
    """Make samples again; return the first one that something drew for, and the place of that; None if nothing did."""
    states = States()
    for id in ids:
        with contextlib.suppress(StepError):
            _, draw = make_twice(partial(source.fetch, id), None, steps, trust, states)
            if draw is not None and draw.certain:
                return id, draw.at
    return None
