"""The loader of unchanged scripts under `stallfree run --cache`.

A loader that cannot be replaced stays torch's, and is named on standard error.
"""

import sys
from functools import cache
from itertools import chain
from typing import Any, Generic

import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from stallfree import errors
from stallfree.loader import dataloader
from stallfree.typevars import BatchT_co

_Torchs: Any = torch.utils.data.DataLoader


class DataLoader(dataloader.DataLoader[BatchT_co], Generic[BatchT_co]):
    """stallfree's loader with a cache that it chooses itself; torch's for data sets that cannot be cached."""

    _theirs: Any = None
    _checked = False

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        dataset = arguments[0] if arguments else options.get("dataset")
        if cls is DataLoader and dataset is not None and (reason := _reason_against(dataset)):
            _name(type(dataset).__name__, reason)
            return _Torchs(*arguments, **options)
        return super().__new__(cls)

    def __init__(self, dataset: Any, *arguments: Any, **options: Any) -> None:
        self._given = (dataset, *arguments), dict(options)
        if not _reason_against(dataset) and not hasattr(dataset, "reader"):
            options.setdefault("cache", "auto")
        super().__init__(dataset, *arguments, **options)
        samplers = self.sampler, getattr(self.batch_sampler, "sampler", self.sampler)
        known = all(isinstance(sampler, (RandomSampler, SequentialSampler)) for sampler in samplers)
        self._checked = known and isinstance(self.batch_sampler, (BatchSampler, type(None)))

    def __iter__(self) -> Any:
        if self._theirs is not None:
            return iter(self._theirs)
        batches = super().__iter__()
        if self._checked:
            return batches
        self._checked = True
        try:
            return chain([next(batches)], batches)
        except StopIteration:
            return iter(())
        except errors.InputError as error:
            if error.page != "sampler-output":
                raise
        _name(type(self.dataset).__name__, "its sampler gives other keys than whole numbers")
        arguments, options = self._given
        self._theirs = _Torchs(*arguments, **options)
        return iter(self._theirs)


def _reason_against(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return "its data set is a stream"
    try:
        return "" if len(dataset) else "its data set is empty"
    except (TypeError, NotImplementedError):
        return "its data set has no length"


@cache
def _name(kind: str, reason: str) -> None:
    """Print once that a loader stays torch's, and why."""
    print(f"stallfree: the loader of {kind} stays PyTorch's: {reason}", file=sys.stderr)
