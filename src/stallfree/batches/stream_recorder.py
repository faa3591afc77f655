"""Stores the samples of streams in a cache while they are read for the first time."""

from __future__ import annotations

import contextlib
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from stallfree.batches.batch_state import Samples
from stallfree.cache import SampleCache
from stallfree.errors import CodecError, StallfreeError
from stallfree.pipeline.classify.same import same
from stallfree.pipeline.generators import Handle, find_generators
from stallfree.pipeline.global_draws import GlobalDraws
from stallfree.pipeline.values import as_cached

FULL, UNSTORABLE, FAILED, DREW = 1, 2, 3, 4
"""Reasons why no samples are kept, stored as `uncached_steps` of the cache; a higher number replaces a lower one."""


class Recorder:
    """Stores samples of streams; stops in all processes if the samples cannot be stored or may be random.

        with recorder:
            samples = ...  # taken from the iterator
        recorder.store(samples, streams, end)

    The last ids of the cache, one per stream, hold the lengths of the streams that have ended.

    Args:
        cache: a cache for these samples only.
        dataset: the iterable data set.
        watches: whether a random draw stops the recording.
    """

    def __init__(self, cache: SampleCache, dataset: Any, *, watches: bool) -> None:
        self.cache, self._dataset, self._watches = cache, dataset, watches
        self._draws = GlobalDraws()
        self._own: list[tuple[Handle, Any]] | None = None  # generators of the data set, with their initial states
        self._over = False

    def __enter__(self) -> Recorder:
        if self._own is None:
            self._own = [(handle, handle.get()) for handle in find_generators(self._dataset)]
        self._draws.mark()
        return self

    def __exit__(self, kind: Any, error: object, _: object) -> None:
        if kind is not None:
            self._give_up(FAILED)
        elif self._watches and (
            self._draws.moved() or not all(same(handle.get(), state) for handle, state in self._own or ())
        ):
            self._give_up(DREW)

    def store(self, samples: Samples, streams: int, end: int | None) -> None:
        """Store samples; `end` is the id after the last sample if the stream has ended, otherwise None."""
        if samples.skipped:
            self._give_up(FAILED)
        if self._over:
            return
        ids, limit = np.array(samples.ids, np.int64), self.cache.num_ids - streams
        try:
            if self.cache.uncached_steps:
                self._stop()
            elif (ids >= limit).any() or not self.cache.put_many(ids, [as_cached(v) for v in samples.values]).all():
                self._give_up(FULL)
            elif end is not None:
                self.cache.put_many([limit + end % streams], [end // streams])
        except CodecError:
            self._give_up(UNSTORABLE)
        except StallfreeError:  # the cache was closed for another iteration
            self._stop()

    def _give_up(self, why: int) -> None:
        if not self._over:
            with contextlib.suppress(StallfreeError):  # closed
                self.cache.uncache_steps(why)
            self._stop()

    def _stop(self) -> None:
        self._over = True
        if get_worker_info() is not None:  # in the training process, the loader closes it
            self.cache.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "cache": bytes(ForkingPickler.dumps(self.cache))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self.cache = pickle.loads(state["cache"])
        except StallfreeError:  # it was closed, for another iteration, before this process attached to it
            self._over = True


def ids_of_streams(cache: SampleCache, streams: int) -> Any:
    """Return the ids of all samples by stream and position; None if the cache does not hold all streams."""
    lengths = cache.get_many(np.arange(cache.num_ids - streams, cache.num_ids))
    if not all(isinstance(length, int) for length in lengths):
        return None
    ids = np.concatenate(
        [np.arange(length, dtype=np.int64) * streams + number for number, length in enumerate(lengths)]
    )
    return ids if cache.resident(ids).all() else None
