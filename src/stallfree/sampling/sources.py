"""Creates the epoch source of a loader."""

from __future__ import annotations

from typing import Any

from stallfree.sampling.epoch_source import EpochSource, SourceSetup, plans_epochs
from stallfree.sampling.importance_source import ImportanceSource
from stallfree.sampling.order import Order, SamplerOrder


def source_of(dataset: Any, setup: SourceSetup) -> EpochSource:
    """The source that `dataset.epoch_source(setup)` returns; without this method, see `order_of`."""
    own = callable(getattr(type(dataset), "epoch_source", None))
    found: EpochSource = dataset.epoch_source(setup) if own else order_of(setup)
    return found


def order_of(setup: SourceSetup) -> EpochSource:
    """The source of the sampler or batch sampler; without them, the loader's own order."""
    if plans_epochs(setup.sampler):
        return ImportanceSource(setup)
    return Order(setup) if setup.sampler is None and setup.batch_sampler is None else SamplerOrder(setup)
