"""Splits the transforms into those applied before and after the cache; the split may change during use.

A step before the cache that turns out to draw random numbers moves behind the cache, with all steps that follow it. The
other processes that share the cache read the new split from its `uncached_steps`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import Cache
from stallfree.cache.policies import mixed
from stallfree.errors import WaitError
from stallfree.pipeline._objects import attributes
from stallfree.pipeline.classify.determinism import StallfreeWarning
from stallfree.pipeline.classify.libraries import may_draw
from stallfree.pipeline.classify.scan import scan
from stallfree.pipeline.classify.watch import Watch, find_draw
from stallfree.pipeline.compose import Compose, describe_step
from stallfree.pipeline.marks import mark_of, note_drew
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.values import private

_FORMS = 0x666F726D


class Reclassified(Exception):
    """Raised when a cached step turns out to be random, so that the batch is built again."""


class TransformSplit:
    """The transforms of a data set before and after its cache.

    Args:
        source: source of the records.
        cache: cache of the samples, or None.
        origin: object whose random draws count as draws of the fetch: the user's data set, or `source`.
        deterministic: steps applied to a record before it is cached.
        rest: steps applied to a cached value each time it is read.
        share: share of the samples that are cached prepared; the others are cached as fetched (`is_prepared`).
        whole: steps applied to a sample that is cached as fetched, each time it is read.

    Attributes:
        uncached: number of steps moved behind the cache, from the last cached one backwards. If it exceeds the number
            of cached steps, the source itself is random, and nothing is cached.
        quiet: suppress the warning, because another process issues it.
        checks_each: check for draws after each sample, not after each batch, because a step may draw that stays cached.
        marked: for each deterministic step, whether its mark or its library allows it to draw.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        origin: Any,
        deterministic: Compose,
        rest: Compose,
        share: float,
        whole: Compose,
    ) -> None:
        self.source, self.origin, self.share, self.whole = source, origin, share, whole
        self._cache = cache
        self.deterministic, self.rest = deterministic, rest
        self.uncached, self.quiet, self.checks_each = 0, False, False
        self.watches_source = mark_of(origin) is not False
        self._steps, self._cached_steps = (*deterministic, *rest), len(deterministic)
        self._home = os.getpid()
        self._values: dict[tuple[int, str], tuple[object, Any]] = {}
        self._begin()

    def _begin(self) -> None:
        self.marked = list(map(may_draw, self.deterministic))
        self._watch: Watch | None = None

    @property
    def caches(self) -> bool:
        """Whether samples are cached: False if the source is random."""
        return self.uncached <= self._cached_steps

    def rests(self, ids: Sequence[int]) -> list[Compose]:
        """Return the transforms to apply after the cache for each of `ids`."""
        if self.share == 1:
            return [self.rest] * len(ids)
        return [self.rest if prepared else self.whole for prepared in is_prepared(ids, self.share).tolist()]

    # -- draws while the cache is filled ------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Return the watch that detects draws of the source and of the deterministic steps."""
        if self._watch is None:
            self._watch = Watch(*self.deterministic, self.origin)
        return self._watch

    def find_made(self, ids: list[int]) -> None:
        """Reclassify a step or the source if it created a generator while `ids` were made. See `find_draw`."""
        for thing in self.watch().made():
            place = next((at for at, step in enumerate(self.deterministic) if step is thing), None)
            if place is None and self.origin is self.source:
                continue  # the source has separate steps: only its draws during a fetch count
            if self.watches_source if place is None else not self.marked[place]:
                count = self._cached_steps + 1 if place is None else self._cached_steps - place
                self._reclassify(count, ids[-1])

    def find_draw(self, ids: list[int], *, in_this_thread: bool) -> None:
        """Reclassify the step or source that drew random numbers while the samples `ids` were made.

        Raises `Reclassified`, so that the batch is built again, unless the draw came from elsewhere.

        Args:
            ids: ids of the samples.
            in_this_thread: the source was read in this thread, so a draw that no step made is a draw of the source.
        """
        for id in ids:
            count = self._random_steps(id)
            if count is not None:
                self._reclassify(count, id)
        if any(self.marked) and not self.checks_each:  # a marked step may have drawn: build again, step by step
            self.checks_each = True
            raise Reclassified
        if in_this_thread:
            self._reclassify(self._cached_steps + 1, ids[-1])
        # The draw is not reproducible: a fetching thread may have drawn, such as a client before a retry. From now on
        # only one sample is made again after a draw, not a whole batch.
        self.checks_each = True

    def _reclassify(self, count: int, id: int) -> None:
        assert self._cache is not None
        with contextlib.suppress(WaitError):
            self._cache.uncache_steps(count)
        if self._uncache(count) and not self.quiet:
            self._warn(f"sample {id} was fetched or prepared")
        raise Reclassified

    def _random_steps(self, id: int) -> int | None:
        """Return how many steps must move behind the cache, counted from the last; None if `id` draws nothing."""
        with contextlib.suppress(Exception), Watch(self.origin) as watch:
            record = private(self.source.fetch(id))
            if watch.moved() and self.watches_source:
                return self._cached_steps + 1
            place = find_draw(self.deterministic, record, self.marked)
            if place is not None:
                return self._cached_steps - place
        return None

    def follow(self) -> None:
        """Adopt the split that another process has stored in the cache."""
        if self._cache is not None and self._cache.uncached_steps > self.uncached:
            new = self._uncache(self._cache.uncached_steps)
            if new and os.getpid() == self._home and not self.quiet:
                self._warn("one of the samples was fetched or prepared")

    def _uncache(self, count: int) -> bool:
        """Move the last `count` cached steps behind the cache; returns whether the draw is new to this process."""
        kept = self._cached_steps - count
        new = note_drew(self._steps[kept] if kept >= 0 else self.origin)
        self.uncached = count
        self.deterministic, self.rest = Compose(self._steps[: max(0, kept)]), Compose(self._steps[max(0, kept) :])
        self._begin()
        return new

    def _warn(self, when: str) -> None:
        if self.caches:
            what, mark = f"the transform {describe_step(self.rest.transforms[0])}", "transform"
            then = "its output is dropped from the cache, which holds the samples before this transform from now on"
        else:
            what, mark = f"the data set {type(self.origin).__name__}", "dataset"
            then = "the cached samples are dropped, and nothing is cached from now on"
        warnings.warn(
            f"{what} drew random numbers when {when}, though it did not for the first one. It counts as random: "
            f"{then}. To classify it from the start, mark it with stallfree.mark_random({mark}); if its output does "
            f"not depend on its draws, with stallfree.mark_deterministic({mark})",
            StallfreeWarning,
            stacklevel=2,
        )

    # -- attributes that change ---------------------------------------------------------------------------------------

    def note_settings(self) -> dict[tuple[int, str], tuple[object, Any]]:
        """Save the plain attributes of the data set and the cached steps. Returns those saved before."""
        before = self._values
        self._values = {
            (id(thing), name): (thing, value)
            for thing in (self.origin, *self._steps[: self._cached_steps])
            for name, value in (vars(type(thing)) | attributes(thing)).items()
            if isinstance(value, (bool, int, float, str)) and not name.startswith("__")
        }
        return before

    def check_settings(self) -> None:
        """Warn of attributes that changed after samples were cached, if the code reads them."""
        before = self.note_settings()
        for key, (thing, value) in self._values.items():
            _, old = before.get(key, (thing, value))
            if old != value and key[1] in scan(thing).read:
                warnings.warn(
                    f"the attribute {key[1]!r} of {type(thing).__name__} was {old!r} when samples were cached, and "
                    f"is {value!r} now: the cached samples do not change. Make a new CachedDataset for the new "
                    "value, or move the code that uses it to a step marked with stallfree.mark_random",
                    StallfreeWarning,
                    stacklevel=4,
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "_values": {}}


def is_prepared(ids: Sequence[int] | npt.NDArray[np.int64], share: float) -> npt.NDArray[Any]:
    """Return which of `ids` are cached prepared, if a `share` of all samples is. Depends only on the ids."""
    below: npt.NDArray[Any] = mixed(np.asarray(ids, np.uint64), _FORMS) < np.uint64(min(share * 2.0**64, 2**64 - 1))
    return below
