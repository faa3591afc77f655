"""Hugging Face's `accelerate`: `Accelerator.prepare` does for stallfree's loader what it does for torch's.

    loader = accelerator.prepare(sf.DataLoader(dataset, batch_size=16, shuffle=True))

`Accelerator.prepare` reads `_is_accelerate_prepared` of a loader, and then calls the function `prepare_data_loader` of
its module. A stallfree loader answers with `is_prepared`, which replaces that function once: the result is Accelerate's
for torch's loader with the same arguments, but takes its batches from stallfree's.
"""

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from stallfree.errors import argument_conflict
from stallfree.loader.order import ShuffledSampler
from stallfree.sources.mapped import is_iterable

_REPLACED = {"batch_size": 1, "shuffle": None, "sampler": None, "drop_last": False, "ranks": (0, 1)}
"""Arguments of a loader that the batch sampler of Accelerate replaces."""


def is_prepared(kind: type[Any], *, partitioned: bool) -> bool:
    """Return whether `Accelerator.prepare` leaves a loader as it is, since its samples are `partitioned` already.

    Otherwise it will prepare the loader, and all others of `kind`, `stallfree.DataLoader`.
    """
    module: Any = sys.modules.get("accelerate.accelerator")
    if partitioned or module is None:
        return True
    if getattr(module.prepare_data_loader, "func", None) is not _prepare:
        module.prepare_data_loader = partial(_prepare, kind, module.prepare_data_loader)
    return False


def _prepare(kind: type[Any], theirs: Callable[..., Any], loader: Any, *arguments: Any, **options: Any) -> Any:
    """Return what `theirs`, the function of Accelerate, returns for torch's loader, with the batches of `loader`.

    Each process gets the samples that it gets from torch's loader with the same arguments, on its device. A loader of
    an iterable data set or without batches becomes torch's.
    """
    if not isinstance(loader, kind) or is_iterable(loader.dataset) or loader.batch_sampler is None:
        return theirs(loader, *arguments, **options)
    if options.get("use_stateful_dataloader"):
        raise argument_conflict("a stallfree.DataLoader under use_stateful_dataloader=True: leave that out")
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(sampler, ShuffledSampler):  # the order under Accelerate is that of torch's sampler
        sampler = RandomSampler(sampler.data_source, generator=loader.generator)
        batches = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    if isinstance(sampler, RandomSampler) and sampler.generator is None and loader.seed is not None:
        sampler.generator = torch.Generator().manual_seed(loader.seed)
    prepared = theirs(DataLoader(loader.dataset, batch_sampler=batches), *arguments, **options)
    values = {name: getattr(loader, name) for name in signature(kind).parameters}
    changed = {**_REPLACED, "batch_sampler": prepared.base_dataloader.batch_sampler}
    prepared.base_dataloader = _prepared(kind)(**{**values, **changed})
    return prepared


def _prepared(kind: type[Any]) -> Callable[..., Any]:
    """Return a subclass of `kind` without `state_dict`, which Accelerate would call for each batch."""

    def state_dict(self: Any) -> Any:
        raise AttributeError("a loader that Accelerate has prepared has no state_dict()")

    return type(f"Prepared{kind.__name__}", (kind,), {"state_dict": property(state_dict)})
