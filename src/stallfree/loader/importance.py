"""How a loader serves the plans of an `ImportanceSampler`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from stallfree.loader.messages import Ids
from stallfree.plans import ImportanceSampler
from stallfree.plans.draws import generator
from stallfree.plans.serving import Serving


class Importance:
    """An `ImportanceSampler` in a loader.

    Args:
        sampler: draws.
        batch_size: samples per batch.
        drop_last: leave out a last batch that is not full.
    """

    def __init__(self, sampler: ImportanceSampler, batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self._batch_size, self._drop_last = batch_size, drop_last

    def steps(self, epoch: int) -> int:
        """Number of batches of an epoch. Draws its plan if need be."""
        return len(self.sampler.batches(epoch, self._batch_size, drop_last=self._drop_last))

    def batches(self, epoch: int) -> Iterator[Ids]:
        """The ids of each batch of an epoch, as they are served."""
        sampler, draw = self.sampler, self.sampler.begin(epoch)
        batches = sampler.batches(epoch, self._batch_size, drop_last=self._drop_last)
        if sampler.cache is None or sampler.on_miss == "fetch":
            yield from batches
            return
        serving = Serving(batches, draw.low, sampler.cache, sampler.on_miss, generator(sampler.seed, epoch, 3))
        for ids in serving:
            yield ids
            if serving.left_out:
                sampler.left_out(np.array(serving.left_out))
                serving.left_out.clear()

    def served(self, ids: Ids) -> torch.Tensor:
        """A batch of `ids` is handed out; its weights."""
        return self.sampler.served(ids)
