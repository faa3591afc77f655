"""The arguments of a loader: their checks, and its `repr`."""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch

from stallfree.datasets.epoch_source import plans_epochs
from stallfree.datasets.ranks import check_ranks
from stallfree.datasets.reader import Reader
from stallfree.errors import InputError, argument_conflict, iterable_unsupported, ranks_conflict
from stallfree.units import parse_number, parse_room, parse_whole

WAIT_SECONDS = 300.0
"""Default maximum wait for a batch."""

FREE_SHARE = 0.5
"""Default capacity of `cache="auto"`: half of the free memory."""

_NOT_OF_ITERABLES = (
    *("shuffle", "sampler", "batch_sampler", "ranks", "cache", "capacity", "transform"),
    *("workers", "with_ids", "staging", "on_error", "event_log"),
)
"""Arguments that a loader of an iterable data set does not have: its samples have no ids."""


def check_arguments(loader: Any) -> int | float | None:
    """Return the capacity of the cache of `cache="auto"`, see `_auto_capacity`; None without it.

    Raises `InputError` if arguments of a `DataLoader`, which are its attributes, are invalid or contradict each other.
    """
    if loader._dataset_kind:
        for name in _NOT_OF_ITERABLES:
            value = getattr(loader, name)
            if not (value is None or value is False or (name == "on_error" and value == "raise")):
                raise iterable_unsupported(
                    f"{name}={value!r:.80} and an IterableDataset, which decides itself which samples come, without "
                    f"ids, and whose batches torch's own loader makes: leave out {name}, or give a map-style data set, "
                    "such as stallfree.TarDataset for tar shards"
                )
    capacity = None
    if (loader.cache, loader.capacity, loader.transform) != (None, None, None):
        capacity = _auto_capacity(loader.cache, loader.capacity, loader.transform, loader.sampler)
    _check_remote(loader.workers, loader.cache, loader.num_workers)
    workers = int(capacity is not None) if loader.num_workers is None else loader.num_workers  # "auto" chooses them
    check_numbers(workers, loader.batch_size, loader.timeout, loader.prefetch_factor)
    if loader.persistent_workers and loader.workers is None and workers == 0:
        raise argument_conflict("persistent_workers=True needs num_workers of 1 or more")
    check_functions(loader.collate_fn, loader.worker_init_fn, loader.on_error)
    _check_sampling(loader.sampler, loader.batch_sampler, loader.ranks, loader)
    return capacity


def check_settings(loader: Any) -> None:
    """Raise `InputError` for attributes of a loader that were set to invalid values."""
    check_numbers(loader.num_workers, None, loader.timeout, loader.prefetch_factor)
    check_functions(loader.collate_fn, loader.worker_init_fn, "raise")


def check_numbers(num_workers: Any, batch_size: Any, timeout: Any, prefetch_factor: Any) -> None:
    """Raise `InputError` for an invalid number."""
    parse_whole(num_workers, "num_workers", 0)
    for name, value in (("batch_size", batch_size), ("prefetch_factor", prefetch_factor)):
        if value is not None:
            parse_whole(value, name, 1)
    parse_number(timeout, "timeout", zero=True)


def check_functions(collate_fn: Any, worker_init_fn: Any, on_error: Any) -> None:
    """Raise `InputError` for functions that are not callable, and for an unknown `on_error`."""
    for name, value in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if value is not None and not callable(value):
            raise InputError(f"{name}={value!r} cannot be called: give a function, or None")
    if on_error not in ("raise", "skip"):
        raise InputError(f"on_error={on_error!r}: use 'raise' or 'skip'")


def _check_remote(workers: Any, cache: Any, num_workers: Any) -> None:
    """Raise `InputError` unless `workers` are None, or make an executor, as `RayWorkers` do."""
    if workers is None:
        return
    if not callable(getattr(type(workers), "executor", None)):
        raise InputError(f"workers={workers!r:.80}: give RayWorkers(...), or num_workers=... for local workers")
    if cache is not None:
        raise argument_conflict("workers=RayWorkers(...) and cache='auto': give a CachedDataset in its place")
    if num_workers:
        raise argument_conflict(f"workers=RayWorkers(...) and num_workers={num_workers}: give one of them")


def _check_sampling(sampler: Any, batch_sampler: Any, ranks: Any, loader: Any) -> None:
    """Raise `InputError` for samplers, batch sizes and ranks that contradict each other."""
    if sampler is not None and loader.shuffle:
        raise argument_conflict(
            "shuffle=True and a sampler were given: the sampler decides the order, so leave out shuffle"
        )
    decides_batches = loader.batch_size != 1 or loader.shuffle or sampler is not None or loader.drop_last
    if batch_sampler is not None and decides_batches:
        raise argument_conflict(
            "batch_sampler decides the batches: leave out batch_size, shuffle, sampler and drop_last"
        )
    if loader.batch_size is None and loader.drop_last:
        raise argument_conflict("drop_last=True needs a batch_size")
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        iterable = not isinstance(value, type) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))
        if value is not None and not iterable:
            raise InputError(f"{name}={value!r} cannot be iterated: give one that yields ids")
    check_ranks(ranks)
    if plans_epochs(getattr(getattr(sampler, "dataset", None), "_sampler", None)):
        raise ranks_conflict(
            f"a {type(sampler).__name__} was put around the ImportanceSampler, which deals out its samples itself: "
            "give Lightning's Trainer use_distributed_sampler=False"
        )
    partitions = ranks is not None and (ranks == "auto" or ranks[1] != 1)
    if partitions and (sampler is not None or batch_sampler is not None):
        raise ranks_conflict(
            f"ranks={ranks!r} and a sampler were given: ranks deals out the loader's own order, so leave out one of "
            "them"
        )


def _auto_capacity(cache: Any, capacity: Any, transform: Any, sampler: Any) -> int | float:
    """Return the capacity of the cache of `cache="auto"` in bytes, or as a share of the free memory.

    Raises `InputError` for invalid arguments.
    """
    if cache != "auto":
        raise argument_conflict(
            f"cache={cache!r}, capacity={capacity!r}, transform={transform!r:.80}: give cache='auto', or leave them "
            "out and give a CachedDataset"
        )
    if transform is not None and not callable(transform):
        raise InputError(f"transform={transform!r:.80} cannot be called: give a function or step, or None")
    if plans_epochs(sampler):
        raise argument_conflict(
            "an ImportanceSampler goes by what its cache holds: give it a CachedDataset, not cache='auto'"
        )
    size = FREE_SHARE if capacity is None else parse_room(capacity, "capacity")
    if size == 0:
        raise InputError(f"capacity={capacity!r} with cache='auto': give a size such as '16GiB', or a share above 0%")
    return size


def seed_of(dataset: Any, seed: Any, generator: Any) -> int | None:
    """Return the seed argument, else that of the cached data set; None if the first iteration draws it."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator={generator!r}: give a torch.Generator, or None")
    if seed is not None:
        return parse_whole(seed, "seed")
    own = generator is None and isinstance(getattr(dataset, "reader", None), Reader)
    return dataset.seed if own else None


def as_int(value: Any) -> int | None:
    """Return a whole number, such as one of NumPy, as an int; None stays None."""
    return None if value is None else operator.index(value)


def shown_by(*names: str) -> Callable[[Any], str]:
    """A `__repr__` of loaders: the data set, and those attributes of `names` that were set."""

    def shown(loader: Any) -> str:
        dataset = loader.dataset
        kind = type(dataset)
        ours = kind.__module__.split(".")[0] == "stallfree"  # other classes may have all their data in their `repr`
        size = ""
        with contextlib.suppress(TypeError):  # an iterable data set may have none
            size = f" of {len(dataset)} samples"
        data = repr(dataset) if ours else f"<{kind.__name__}{size}>"
        values = [(name, getattr(loader, name)) for name in names]
        texts = [f"{name}={value!r}" for name, value in values if value is not None and value is not False]
        return f"{type(loader).__name__}({', '.join([data, *texts])})"

    return shown
