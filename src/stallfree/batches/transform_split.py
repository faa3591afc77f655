"""Which transforms are applied before a sample is cached, and which after: a split that may change while it is used.

A step before the cache that turns out to draw random numbers moves behind it, with the steps that follow it. All
processes that share the cache learn of that through `uncached_steps` of the cache.
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
from stallfree.stores.partitioning import mixed

_FORMS = 0x666F726D


class Reclassified(Exception):
    """A step that was cached is random: what is under way has to be made again without its output."""


class TransformSplit:
    """The transforms of a data set before and after its cache.

    Args:
        source: of the records.
        cache: what holds the samples, or None.
        origin: the object whose draws count as those of the fetch: the user's data set, or `source`.
        deterministic: applied to a record before it is cached.
        rest: applied to what is cached, each time it is read.
        share: of the samples that this holds for; the others are cached as they are fetched (`is_prepared`).
        whole: applied to those, each time they are read.

    Attributes:
        uncached: how many steps turned out to be random, counted from the last cached one. If it is more than there
            were, the source itself is random, and nothing is cached.
        quiet: whether another process warns of that.
        looks_at_each: whether each sample is looked at by itself: something drew that is not to be reclassified.
        marked: which of the deterministic steps may draw, as the user or their library says.
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
        self.uncached, self.quiet, self.looks_at_each = 0, False, False
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
        """Whether anything is cached: the source is not random."""
        return self.uncached <= self._cached_steps

    def rests(self, ids: Sequence[int]) -> list[Compose]:
        """The transforms after the cache for each of `ids`."""
        if self.share == 1:
            return [self.rest] * len(ids)
        return [self.rest if short else self.whole for short in is_prepared(ids, self.share).tolist()]

    # -- draws while the cache is filled ------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Sees whether the source or a step in `deterministic` draws."""
        if self._watch is None:
            self._watch = Watch(*self.deterministic, self.origin)
        return self._watch

    def find_made(self, ids: list[int]) -> None:
        """Reclassify a step or the source that made a generator while `ids` were made. See `find_draw`."""
        for thing in self.watch().made():
            place = next((at for at, step in enumerate(self.deterministic) if step is thing), None)
            if place is None and self.origin is self.source:
                continue  # of a source that has steps of its own, only what it draws while it fetches counts
            if self.watches_source if place is None else not self.marked[place]:
                count = self._cached_steps + 1 if place is None else self._cached_steps - place
                self._reclassify(count, ids[-1])

    def find_draw(self, ids: list[int], *, in_this_thread: bool) -> None:
        """Reclassify what drew random numbers while the samples `ids` were made.

        Raises `Reclassified`, for the batch to be made again, unless none of what is cached drew them. With
        `in_this_thread`, the source was read here, so what no step drew, it has drawn.
        """
        for id in ids:
            count = self._random_steps(id)
            if count is not None:
                self._reclassify(count, id)
        if any(self.marked) and not self.looks_at_each:  # perhaps one that may draw did: made again, step by step
            self.looks_at_each = True
            raise Reclassified
        if in_this_thread:
            self._reclassify(self._cached_steps + 1, ids[-1])
        # It did not happen again: a thread that fetches may have drawn, such as a client before it tries once more.
        # From now on one sample is made again then, and not a whole batch.
        self.looks_at_each = True

    def _reclassify(self, count: int, id: int) -> None:
        assert self._cache is not None
        with contextlib.suppress(WaitError):
            self._cache.uncache_steps(count)
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

    def follow(self) -> None:
        """Do as the processes that share the cache have found."""
        if self._cache is not None and self._cache.uncached_steps > self.uncached:
            new = self._uncache(self._cache.uncached_steps)
            if new and os.getpid() == self._home and not self.quiet:
                self._warn("one of the samples was fetched or prepared")

    def _uncache(self, count: int) -> bool:
        """Move the last `count` of the cached steps behind the cache. Returns whether this process finds that first."""
        kept = self._cached_steps - count
        new = note_drew(self._steps[kept] if kept >= 0 else self.origin)
        self.uncached = count
        self.deterministic, self.rest = Compose(self._steps[: max(0, kept)]), Compose(self._steps[max(0, kept) :])
        self._begin()
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

    # -- attributes that change ---------------------------------------------------------------------------------------

    def note_settings(self) -> dict[tuple[int, str], tuple[object, Any]]:
        """Remember the plain attributes of what the cached samples are made by. Returns those of before."""
        before = self._values
        self._values = {
            (id(thing), name): (thing, value)
            for thing in (self.origin, *self._steps[: self._cached_steps])
            for name, value in (vars(type(thing)) | attributes(thing)).items()
            if isinstance(value, (bool, int, float, str)) and not name.startswith("__")
        }
        return before

    def check_settings(self) -> None:
        """Warn of attributes that have changed since samples were cached, if the code reads them."""
        before = self.note_settings()
        for key, (thing, value) in self._values.items():
            _, old = before.get(key, (thing, value))
            if old != value and key[1] in scan(thing).read:
                warnings.warn(
                    f"the attribute {key[1]!r} of {type(thing).__name__} was {old!r} when samples were cached, and "
                    f"is {value!r} now: samples in the cache stay as they are. Make a new CachedDataset for the new "
                    "value, or give what changes as a step marked with stallfree.mark_random",
                    StallfreeWarning,
                    stacklevel=4,
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "_values": {}}


def is_prepared(ids: Sequence[int] | npt.NDArray[np.int64], share: float) -> npt.NDArray[Any]:
    """Which of `ids` are cached prepared, where a `share` of the samples is: a function of the id alone."""
    below: npt.NDArray[Any] = mixed(np.asarray(ids, np.uint64), _FORMS) < np.uint64(min(share * 2.0**64, 2**64 - 1))
    return below
