"""Makes the samples of a data set: fetched or read from the cache, prepared, with their randomness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.batch_buffer import BatchBuffer
from stallfree.batches.batch_state import BatchState, Samples
from stallfree.batches.direct import index_samples
from stallfree.batches.recorded_reads import RecordedReads
from stallfree.batches.sample_access import Pending, SampleAccess
from stallfree.batches.transform_split import Reclassified
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.randomness import Drew
from stallfree.sources.mapped import as_source


class Reader(SampleAccess):
    """Makes the samples of one data set. Only one thread of a process may be in `finish` at a time."""

    def finish(
        self,
        pending: Pending,
        seed: int,
        epoch: int | Sequence[int],
        *,
        skip: bool,
        buffer: BatchBuffer | None = None,
    ) -> Samples:
        """The samples of a batch that was started; `epoch` is that of all, or one for each.

        Raises `SampleError` for the first sample that cannot be had, unless `skip`: then it is left out. A sample that
        cannot be stored is an error in any case. The values belong to the caller; those of one batch may share one
        piece of memory, which lives as long as any of them.

        With `buffer`, only for a reader that is `in_place`, they go there, and there are no values, if all of them fit.
        """
        self.check()
        ids = pending.ids
        epochs = [epoch] * len(ids) if isinstance(epoch, int) else epoch
        while True:
            self.follow()
            try:
                with self.randomness:
                    if self.direct:
                        return index_samples(self, ids.tolist(), seed, epochs, skip=skip)
                    if self.tracker is not None:
                        return RecordedReads(self, self.tracker, pending, seed, epochs, skip=skip).make()
                    return BatchState(self, pending, seed, epochs, skip, buffer).make()
            except (Reclassified, Drew):  # the batch is made again: without that step's output, or with seeds
                if buffer is not None:
                    buffer.restart()
                    self.follow()
                    buffer = buffer if self.in_place else None
            finally:
                self._give_up(pending)
            pending = Pending(ids)

    def fill(self, ids: npt.NDArray[np.int64]) -> int:
        """Fetch, prepare and store those of `ids` that the cache lacks; how many could not be had."""
        self.check()
        while True:
            self.follow()
            pending = self.start(ids)
            try:
                return BatchState(self, pending, 0, [0] * len(ids), True, None).fill()
            except Reclassified:
                continue
            finally:
                self._give_up(pending)


def reader_of(dataset: Any) -> Reader:
    """The reader of a data set of stallfree; one without a cache for any other."""
    reader = getattr(dataset, "reader", None)
    if isinstance(reader, Reader):
        return reader
    source = as_source(dataset)
    return Reader(source, None, Compose([]), source.pipeline)
