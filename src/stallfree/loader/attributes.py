"""Attributes of a loader that may be set after it was made, as those of torch's loader."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.utils.data import default_collate, default_convert

from stallfree.datasets.reader import reader_of
from stallfree.loader.arguments import WAIT_SECONDS, as_int, check_functions, check_numbers
from stallfree.loader.pool import Options
from stallfree.loader.shown import own_collate

SETTABLE = frozenset(
    {
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "pin_memory_device", "in_order"),
    }
)
"""Arguments whose attributes torch's loader allows to be set. They apply from the next iteration on."""

FIXED = frozenset(
    {
        *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "persistent_workers"),
        *("seed", "with_ids", "on_error", "staging", "device", "cache", "capacity", "transform", "event_log"),
        *("ranks", "workers"),
    }
)
"""All others."""

_ORDER = ("dataset", "sampler", "batch_sampler")
"""Those that it does not, but that subclasses replace nevertheless, to repeat a sampler."""

_NAMES = (*_ORDER, *sorted(SETTABLE))


class Attributes:
    """The attributes of a loader as they were when it was made or last iterated."""

    def __init__(self, loader: Any) -> None:
        self._values = [vars(loader).get(name) for name in _NAMES]

    def are_those_of(self, loader: Any) -> bool:
        """Whether none of them has been set since."""
        return all(map(operator.is_, self._values, map(vars(loader).get, _NAMES)))

    def order_changed(self, loader: Any) -> bool:
        """Whether the data set or a sampler has been replaced."""
        return any(vars(loader).get(name) is not old for name, old in zip(_ORDER, self._values, strict=False))


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


def changed_options(loader: Any, options: Options) -> Options:
    """`options` with the present attributes of `loader`."""
    changed = replace(options, **options_of(loader, single=options.single))
    workers, before = changed.workers, options.workers
    if changed.dataset is options.dataset and bool(workers) == bool(before):
        return changed
    return replace(changed, reader=reader_of(loader.dataset, divide=workers > 0 or options.remote is not None))
