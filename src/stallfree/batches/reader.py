"""Makes the samples of a data set: reads or fetches, prepares and seeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.batches.batch_buffer import BatchBuffer
from stallfree.batches.batch_state import BatchState, Samples
from stallfree.batches.direct import index_samples
from stallfree.batches.sample_access import Pending, SampleAccess
from stallfree.batches.transform_split import Reclassified
from stallfree.notes import raisable
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.randomness import Drew
from stallfree.sources.mapped import as_source


class Reader(SampleAccess):
    """Makes the samples of one data set. Only one thread of a process may call `finish` at a time."""

    def finish(
        self,
        pending: Pending,
        seed: int,
        epoch: int | Sequence[int],
        *,
        skip: bool,
        buffer: BatchBuffer | None = None,
    ) -> Samples:
        """Return the samples of a batch that was started.

        Args:
            pending: the started reads and fetches.
            seed: seed of the random draws.
            epoch: epoch of the random draws, or one per sample.
            skip: skip samples that fail to be fetched or prepared.
            buffer: buffer to prepare the samples in, only for a reader that is `in_place`. If all samples fit into it,
                `values` is empty.

        The caller owns the values; the values of one batch may share memory. Raises the error of the first
        sample that fails, unless `skip`, and `CodecError` for a sample that cannot be stored in any case.
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
                    return BatchState(self, pending, seed, epochs, skip, buffer).make()
            except StopIteration as error:
                raise raisable(error) from error
            except (Reclassified, Drew):  # repeat the batch without the random step's cached output, or with seeds
                if buffer is not None:
                    buffer.restart()
                    self.follow()
                    buffer = buffer if self.in_place else None
            finally:
                self._cancel(pending)
            pending = Pending(ids)

    def fill(self, ids: npt.NDArray[np.int64]) -> int:
        """Fetch, prepare and store the samples of `ids` that the cache lacks; returns how many failed."""
        self.check()
        while True:
            self.follow()
            pending = self.start(ids)
            try:
                return BatchState(self, pending, 0, [0] * len(ids), True, None).fill()
            except Reclassified:
                continue
            finally:
                self._cancel(pending)


def reader_of(dataset: Any, *, divide: bool = True) -> Reader:
    """Return the reader of a stallfree data set; for any other data set, a reader without a cache.

    Without `divide`, it indexes a data set of torchvision or Hugging Face instead of applying its transform itself.
    """
    reader = getattr(dataset, "reader", None)
    if isinstance(reader, Reader):
        return reader
    source = as_source(dataset, divide=divide)
    return Reader(source, None, Compose([]), source.pipeline)
