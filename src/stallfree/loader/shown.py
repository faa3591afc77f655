"""The attributes of a loader that other code reads or sets: its samplers, its arguments, and its `repr`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from stallfree.datasets.epoch_source import Ids
from stallfree.datasets.ranks import rank_and_count
from stallfree.loader.arguments import WAIT_SECONDS, as_int, check_functions, check_numbers
from stallfree.loader.order import Order

FIXED = frozenset(
    {
        *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "persistent_workers"),
        *("seed", "with_ids", "on_error", "staging", "device", "cache", "capacity", "transform", "event_log"),
        *("ranks", "workers"),
    }
)
"""Arguments whose attributes may not be set."""

SETTABLE = (
    *("dataset", "sampler", "batch_sampler"),  # in subclasses that repeat a sampler
    *("collate_fn", "generator", "multiprocessing_context", "num_workers", "pin_memory", "prefetch_factor", "timeout"),
    "worker_init_fn",
)
"""Attributes that apply from the next iteration on if they are set."""


def options_of(loader: Any, *, single: bool) -> dict[str, Any]:
    """The arguments of `Options` that follow from attributes of `loader` which may be set."""
    workers, context = loader.num_workers, loader.multiprocessing_context
    return {
        "dataset": loader.dataset,
        "collate": own_collate(loader.collate_fn, single=single),
        "workers": workers,
        "ahead": (loader.prefetch_factor or 2) * max(1, workers),
        "worker_init": loader.worker_init_fn,
        "seconds": loader.timeout or WAIT_SECONDS,
        **({} if context is None else {"context": context}),
    }


def check_settable(loader: Any, *, single: bool) -> None:
    """Raise `InputError` for invalid attributes of `loader`, and replace None by defaults."""
    check_numbers(loader.num_workers, None, loader.timeout, loader.prefetch_factor, False)
    check_functions(loader.collate_fn, loader.worker_init_fn, "raise")
    if loader.collate_fn is None:
        vars(loader)["collate_fn"] = default_convert if single else default_collate
    vars(loader)["num_workers"] = as_int(loader.num_workers)


def own_collate(collate_fn: Callable[[Any], Any], *, single: bool) -> Callable[[Any], Any] | None:
    """The user's function; None if `collate_fn` is the default of torch's loader."""
    return None if collate_fn is (default_convert if single else default_collate) else collate_fn


def shown_by(*names: str) -> Callable[[Any], str]:
    """A `__repr__` of loaders: the data set, and those attributes of `names` that were set."""

    def shown(loader: Any) -> str:
        dataset = loader.dataset
        kind = type(dataset)
        ours = kind.__module__.split(".")[0] == "stallfree"  # other classes may have all their data in their `repr`
        data = repr(dataset) if ours else f"<{kind.__name__}{_size(dataset)}>"
        values = {name: getattr(loader, name) for name in names}
        shown_values = [
            f"{name}={value!r}" for name, value in values.items() if value is not None and value is not False
        ]
        return f"{type(loader).__name__}({', '.join([data, *shown_values])})"

    return shown


NextIds = Callable[[Order, int | None], Ids]
"""Begins an epoch of an order, by default the next one, and returns its ids."""


def shown_samplers(loader: Any, epochs: Any, sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """The public `sampler` and `batch_sampler` of a loader with these arguments.

    Other libraries inspect them to determine whether a loader is shuffled, and whether its samples are partitioned.
    They also iterate over them, to skip the first batches of an epoch.
    """
    if sampler is None:
        order: Any = getattr(epochs.source, "order", epochs.source)  # of a window
        if getattr(order, "ranks", None) is not None:
            sampler = DealtSampler(loader.dataset, order, epochs.next_ids)
        elif isinstance(order, Order) and loader.shuffle:
            sampler = ShuffledSampler(loader.dataset, loader.generator, order, epochs.next_ids)
        elif loader.shuffle:
            sampler = RandomSampler(loader.dataset, generator=loader.generator)
        else:
            sampler = SequentialSampler(loader.dataset)
    if batch_sampler is None and loader.batch_size is not None:
        batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return sampler, batch_sampler


def _size(dataset: Any) -> str:
    """The size of a data set for its `repr`; "" if it has none, as an iterable one may."""
    try:
        return f" of {len(dataset)} samples"
    except TypeError:
        return ""


class ShuffledSampler(RandomSampler):
    """The order of a loader with `shuffle=True`. Each iteration over it is the loader's next epoch."""

    same_on_all_ranks = True

    def __init__(self, dataset: Any, generator: Any, order: Order, next_ids: NextIds) -> None:
        super().__init__(dataset, generator=generator)
        self._order, self._next_ids = order, next_ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._next_ids(self._order, None).tolist())


class DealtSampler(DistributedSampler[Any]):
    """The part of this rank of a loader with `ranks=`. Each iteration over it is the loader's next epoch.

    It is a `DistributedSampler`, so that Lightning does not partition the samples again. The loader counts its own
    epochs; `set_epoch` here affects only direct iteration over this object.
    """

    def __init__(self, dataset: Any, order: Order, next_ids: NextIds) -> None:
        self.dataset, self.epoch = dataset, 0
        self._order, self._next_ids = order, next_ids
        self._given: int | None = None

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of this process."""
        return rank_and_count(self._order.ranks)[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return rank_and_count(self._order.ranks)[1]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self._given = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._next_ids(self._order, self._given).tolist())

    def __len__(self) -> int:
        return self._order.samples
