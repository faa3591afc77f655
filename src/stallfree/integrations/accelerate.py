"""Hugging Face's `accelerate`: partitions the samples of a loader among the processes.

    from stallfree.integrations.accelerate import prepare

    model, optimizer = accelerator.prepare(model, optimizer)
    loader = prepare(accelerator, sf.DataLoader(dataset, batch_size=16, shuffle=True))

`Accelerator.prepare` itself leaves a stallfree loader unchanged, and raises `InputError` if there are several
processes.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from stallfree.errors import argument_conflict, iterable_unsupported, ranks_conflict
from stallfree.importance.sampler import ImportanceSampler
from stallfree.loader.dataloader import DataLoader
from stallfree.loader.order import ShuffledSampler
from stallfree.sources.mapped import is_iterable

_REPLACED = {"batch_size": 1, "shuffle": None, "sampler": None, "drop_last": False, "ranks": (0, 1)}
"""Arguments of the inner loader that Accelerate's batch sampler replaces."""


def prepare(accelerator: Any, loader: DataLoader) -> Any:
    """Wraps `loader` for Accelerate, as `accelerator.prepare` does with torch's loader.

    Each process gets the same samples as from torch's loader with the same arguments. The batches are moved to the
    device of the process, and `accumulate` and `gather_for_metrics` detect the end of each epoch. The order depends on
    the same settings as for torch's loader: `generator`, `seed`, or the settings of the accelerator.

    Use and close the returned object instead of `loader`. `skip_first_batches` converts it to torch's loader for one
    epoch.

    Args:
        accelerator: Accelerate's `Accelerator`.
        loader: the loader of this process, without `ranks`.

    Returns:
        A loader of Accelerate's.

    Raises `InputError` for another loader, and for one whose samples are already partitioned.

    Example:
        ```python
        # needs accelerate
        from accelerate import Accelerator
        from stallfree.integrations.accelerate import prepare

        loader = prepare(Accelerator(), sf.DataLoader(dataset, batch_size=4))
        batches = list(loader)
        ```
    """
    _check(accelerator, loader)
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(sampler, ShuffledSampler):  # the order under Accelerate is that of torch's sampler
        sampler = RandomSampler(sampler.data_source, generator=loader.generator)
        batches = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    if isinstance(sampler, RandomSampler) and sampler.generator is None and loader.seed is not None:
        sampler.generator = torch.Generator().manual_seed(loader.seed)
    twin = torch.utils.data.DataLoader(loader.dataset, batch_sampler=batches)
    prepared = accelerator.prepare_data_loader(twin)
    arguments = {name: getattr(loader, name) for name in signature(DataLoader).parameters}
    changed = {**_REPLACED, "batch_sampler": prepared.base_dataloader.batch_sampler}
    prepared.base_dataloader = _Prepared(**{**arguments, **changed})
    return prepared


class _Prepared(DataLoader):
    """A loader without `state_dict`: Accelerate would call it per batch, and a call reads the whole sampler."""

    @property
    def state_dict(self) -> Any:
        raise AttributeError("a loader that Accelerate has prepared has no state_dict()")


def _check(accelerator: Any, loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ranks_conflict(f"prepare was given a {type(loader).__name__}: give it a stallfree.DataLoader")
    if is_iterable(loader.dataset):
        raise iterable_unsupported(
            "prepare was given a loader of an IterableDataset, whose samples cannot be partitioned by id: let __iter__ "
            "yield the samples of its process, and use the loader unchanged"
        )
    if loader.ranks is not None or isinstance(loader.sampler, (DistributedSampler, ImportanceSampler)):
        raise ranks_conflict(
            "prepare was given a loader whose samples are already partitioned, by ranks= or its sampler: use the "
            "loader unchanged, or leave out ranks= and the sampler"
        )
    if loader.batch_sampler is None:
        raise argument_conflict(
            "prepare was given a loader with batch_size=None: give a batch_size, which Accelerate requires"
        )
    if accelerator.use_stateful_dataloader:
        raise argument_conflict("prepare was given an Accelerator with use_stateful_dataloader=True: leave it out")
