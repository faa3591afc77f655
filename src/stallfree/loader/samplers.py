"""The samplers that a loader shows as `sampler` and `batch_sampler`, as torch's loader has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from stallfree.loader.order import Order
from stallfree.loader.ranks import rank_and_count

if TYPE_CHECKING:
    from stallfree.loader.dataloader import DataLoader


def shown_samplers(loader: DataLoader, order: Order, sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """`sampler` and `batch_sampler` of a loader that was given these two.

    Other libraries look at them, to see whether a loader is shuffled, and whether its samples are dealt out already.
    """
    dataset: Any = loader.dataset
    if sampler is None:
        if order.ranks is not None:
            sampler = DealtSampler(dataset, order)
        elif loader.shuffle:
            sampler = RandomSampler(dataset, generator=loader.generator)
        else:
            sampler = SequentialSampler(dataset)
    if batch_sampler is None and loader.batch_size is not None:
        batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return sampler, batch_sampler


class DealtSampler(DistributedSampler[Any]):
    """The part of this rank of a loader with `ranks=`.

    It is a `DistributedSampler`, so that Lightning does not deal the samples out again. The loader counts its own
    epochs; `set_epoch` here changes only what this object yields when it is iterated by itself.
    """

    def __init__(self, dataset: Any, order: Order) -> None:
        self.dataset, self.epoch = dataset, 0
        self._order = order

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Of this process."""
        return rank_and_count(self._order.ranks)[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """How many ranks there are."""
        return rank_and_count(self._order.ranks)[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.ids(self.epoch).tolist())

    def __len__(self) -> int:
        return self._order.samples
